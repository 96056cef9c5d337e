"""``info`` and ``erase``: the records of one provider; ``problem-list``; ``retry``."""

from __future__ import annotations

import contextlib

from kazoo.exceptions import NoNodeError

from nodepool import status
from nodepool.base.names import did_you_mean
from nodepool.cmd.commands.context import Context, Subparsers, add_command, add_listing, add_table
from nodepool.zk import paths
from nodepool.zk.failures import Failures
from nodepool.zk.mirror import notes


def register(subparsers: Subparsers) -> None:
    parser = add_listing(subparsers, "info", info, "show a provider's records in ZooKeeper")
    parser.add_argument("provider", metavar="PROVIDER", help="provider name")
    parser = add_command(subparsers, "erase", erase, "remove a provider's records from ZooKeeper")
    parser.add_argument("provider", metavar="PROVIDER", help="provider name")
    parser.add_argument("--force", action="store_true", help="do not ask for confirmation")
    add_table(
        subparsers,
        "problem-list",
        status.problem_list,
        "list problems of providers, labels and images, with suggestions",
    )
    parser = add_command(
        subparsers, "retry", retry, "launch nodes of labels again whose launches kept failing"
    )
    parser.add_argument("labels", metavar="LABEL", nargs="+", help="label")
    parser.add_argument("--provider", metavar="PROVIDER", help="only in this provider")


def info(context: Context) -> None:
    provider = context.args.provider
    images = status.provider_images(context.zk, provider)
    nodes = status.provider_nodes(context.zk, provider)
    if context.args.format in ("json", "yaml"):
        both = [{"images": images.rows, "nodes": nodes.rows}]
        context.show(status.Results(both, {"images": "Image data", "nodes": "Nodes"}))
    else:
        titles = context.args.format == "table"
        if titles:
            print(f"ZooKeeper data for provider {provider}\n\nImage data:")
        context.show(images)
        print("\nNodes:" if titles else "")
        context.show(nodes)
    context.check_provider(provider, bool(images.rows or nodes.rows))


def erase(context: Context) -> None:
    provider, zk = context.args.provider, context.zk
    has_records = (
        status.provider_images(zk, provider).rows or status.provider_nodes(zk, provider).rows
    )
    context.check_provider(provider, bool(has_records))
    if not context.args.force:
        print("\nWARNING! This action is not reversible!")
        try:
            answer = input(f"Erase ZooKeeper data for provider {provider}? [N/y] ")
        except EOFError:
            answer = ""
        if answer.lower() != "y":
            print("Aborting. No data erased.")
            return
    print(f"Erasing build data for {provider}...")
    for (image, build), providers in zk.readImages().providers.items():
        if provider in providers:
            with contextlib.suppress(NoNodeError):
                context.kazoo.delete(
                    f"{paths.build_providers(image, build)}/{provider}", recursive=True
                )
    for failure in zk.readProgress().failures.values():
        if failure.provider == provider:
            zk.progress.delete(failure)
    print(f"Erasing node data for {provider}...")
    for node in zk.readNodes():
        if node.provider == provider:
            zk.deleteRawNode(node.id or "")


def retry(context: Context) -> None:
    known, provider = context.zk.readNotes(Failures), context.args.provider
    if provider:
        known = [record for record in known if record.provider == provider]
        context.check_provider(provider, bool(known))
    for label in dict.fromkeys(",".join(context.args.labels).split(",")):
        found = [record for record in known if record.label == label]
        for record in found:
            notes.remove(context.kazoo, record)
            print(f"Launches of label {label} in provider {record.provider} may start again.")
        if not found and label in context.config.labels:
            print(f"No launches of label {label} have failed.")
        elif not found:
            context.refuse(
                f"label {label} is not in {context.args.config}"
                f"{did_you_mean(label, context.config.labels)}"
            )
