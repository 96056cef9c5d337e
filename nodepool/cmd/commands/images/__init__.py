"""Images, their builds and uploads; except for listings, builders do the work."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from nodepool import status
from nodepool.base.names import did_you_mean
from nodepool.base.problems import one_line
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_format,
    add_table,
    note,
    user,
)
from nodepool.cmd.commands.images import log as image_log
from nodepool.cmd.commands.images.follow import EXIT_INTERRUPTED, BuildFollower, Display, Outcome
from nodepool.process.program import seconds
from nodepool.zk import paths
from nodepool.zk.records import BUILDING, DELETING, READY, UPLOADING
from nodepool.zk.rollback import Result, RollbackRefused, Rollbacks, upload_path

#: How often a build request is submitted again if a builder removes it at the same time.
TRIES = 10
UPLOAD_FILTERS = {"state": "state", "provider": "provider", "image": "image", "id": "build"}
BUILD_FILTERS = {"state": "state", "image": "image", "builder": "builder"}


def register(subparsers: Subparsers) -> None:
    add_table(
        subparsers,
        "image-list",
        status.image_list,
        "list image uploads",
        UPLOAD_FILTERS,
        detail="include progress and reasons of failures",
    )
    add_table(
        subparsers,
        "dib-image-list",
        status.dib_image_list,
        "list image builds",
        BUILD_FILTERS,
        detail="include progress and failed builds with their reasons",
    )
    add_table(
        subparsers,
        "image-status",
        status.image_status,
        "list images with pause flag and build requests",
    )
    parser = _add_action(subparsers, "image-build", image_build, "request the build of an image")
    parser.add_argument("image", metavar="IMAGE", help="image name")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="follow the build; status 0: built, 1: failed, 3: not ended in time, 130: interrupted",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, help="how long to wait (default: no limit)"
    )
    for name, function, text in (
        ("image-pause", image_pause, "stop building an image"),
        ("image-unpause", image_unpause, "resume building a paused image"),
    ):
        parser = _add_action(subparsers, name, function, text)
        parser.add_argument("image", metavar="IMAGE", help="image name")
    parser = _add_action(
        subparsers, "image-rollback", image_rollback, "let launchers use the previous upload again"
    )
    _add_pair(parser)
    parser.add_argument(
        "--reason", metavar="TEXT", default="no reason given", help="shown to other operators"
    )
    parser = _add_action(
        subparsers, "image-rollforward", image_rollforward, "undo the last roll-back of an image"
    )
    _add_pair(parser)
    parser = _add_action(subparsers, "image-delete", image_delete, "delete an upload")
    parser.add_argument("--provider", metavar="P", required=True, help="provider name")
    parser.add_argument("--image", metavar="I", required=True, help="image name")
    parser.add_argument("--upload-id", metavar="U", required=True, help="upload id")
    parser.add_argument("--build-id", metavar="B", required=True, help="build id")
    parser = _add_action(
        subparsers, "dib-image-delete", dib_image_delete, "delete a build with its uploads"
    )
    parser.add_argument("id", metavar="ID", help="<image>-<build id>")
    image_log.register(subparsers)


def _add_action(
    subparsers: Subparsers, name: str, function: Callable[[Context], int | None], text: str
) -> argparse.ArgumentParser:
    parser = add_command(subparsers, name, function, text)
    add_format(parser, status.FORMATS, None, "print the result in this format")
    return parser


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="IMAGE", help="image name")
    parser.add_argument(
        "--provider", metavar="P", help="provider name (default: all that have the image)"
    )


def report(context: Context, row: dict[str, Any], message: str | None = None) -> None:
    """Print the message of 11.0.0, or the row in the requested format (JSON: one object)."""
    form = context.args.format
    if form is None:
        if message is not None:
            print(message)
        return
    if message is not None:
        row = {**row, "message": message}
    if form == "json":
        print(json.dumps(row))
    else:
        columns = {key: key.replace("_", " ").title() for key in row}
        print(status.output(status.Results([row], columns), form))


# -- building


def image_build(context: Context) -> int:
    args, name = context.args, context.args.image
    if args.timeout is not None and not args.wait:
        raise CommandError("--timeout requires --wait")
    image = context.config.diskimages.get(name)
    if image is None:
        raise CommandError(
            "Trying to build a non disk-image-builder image: "
            f"{name}{did_you_mean(name, context.config.diskimages)}"
        )
    if image.pause:
        raise CommandError(f"Skipping build request for image {name}; paused")
    if args.wait:
        return _build_and_wait(context, name)
    context.zk.submitBuildRequest(name)
    report(context, {"image": name, "result": "requested"})
    return 0


def _submit(context: Context, name: str) -> int:
    """Request a build; return the zxid of the request, since earlier builds do not count.

    :raises CommandError: the request is repeatedly deleted.
    """
    for _ in range(TRIES):
        # Read with the creation: a builder may have served it by a later read, and a second one
        # would build twice.
        after = context.zk.submitBuildRequest(name)
        if after is not None:
            return after
    raise CommandError(
        f"the request to build {name} is repeatedly deleted from ZooKeeper; try again"
    )


def _build_and_wait(context: Context, name: str) -> int:
    args = context.args
    # A result in JSON or another format is for programs: progress is printed elsewhere.
    display = Display(sys.stdout if args.format is None else sys.stderr)
    follower = BuildFollower(context.live, name, _submit(context, name), display)
    try:
        outcome = follower.follow(args.timeout)
    except KeyboardInterrupt:
        what = (
            f"the build {name}-{follower.build} continues"
            if follower.build
            else "the request remains"
        )
        print(f"Stopped waiting; {what}", file=sys.stderr)
        outcome = Outcome(EXIT_INTERRUPTED, "interrupted", name, follower.build, requested=True)
        if args.format is None:
            return outcome.status
    if args.format is None:
        print("\n".join(outcome.lines()))
    else:
        report(context, outcome.row())
    return outcome.status


# -- flags


def _unknown(context: Context, name: str) -> str | None:
    images = context.config.diskimages
    if name in images or name in context.zk.getImageNames():
        return None
    return (
        f"image {name} is neither in {context.args.config} nor in "
        f"ZooKeeper{did_you_mean(name, images)}"
    )


def image_pause(context: Context) -> None:
    name = context.args.image
    if unknown := _unknown(context, name):
        raise CommandError(unknown)
    context.zk.setImagePaused(name, True)
    report(context, {"image": name, "result": "paused"})


def image_unpause(context: Context) -> None:
    name = context.args.image
    if "/" in name:
        raise CommandError(f"{name} is not a valid image name")
    context.zk.setImagePaused(name, False)
    if unknown := _unknown(context, name):
        context.refuse(unknown)
    report(context, {"image": name, "result": "unpaused"})


# -- rolling back


def _switch(context: Context, change: Callable[[Rollbacks], Result]) -> Result:
    """Change the upload in use and report it.

    :raises CommandError: nothing was changed.
    """
    image = context.args.image
    if unknown := _unknown(context, image):
        raise CommandError(unknown)
    try:
        result = change(Rollbacks(context.zk, time.time))
        others = result.others(image)
    except RollbackRefused as error:
        raise CommandError(str(error)) from error
    for switch in result.changed:
        before = switch.before
        instead = f" instead of {before.id} of {before.build_id}" if before is not None else ""
        row = {
            "image": image,
            "provider": switch.provider,
            "build": switch.used.build_id,
            "upload": switch.used.id,
            "instead_of": None if before is None else before.build_id,
            "result": "used",
        }
        report(
            context,
            row,
            f"Provider {switch.provider} uses upload {switch.used.id} of build "
            f"{switch.used.build_id}{instead}",
        )
    for provider, why in others.items():
        note(f"provider {provider}: {why}")
    return result


def image_rollback(context: Context) -> int:
    args = context.args
    if not args.reason.strip():
        raise CommandError("--reason must not be empty")
    reason = one_line(args.reason)
    result = _switch(
        context, lambda rollbacks: rollbacks.back(args.image, args.provider, user(), reason)
    )
    wrong = {upload_path(switch.replaced) for switch in result.changed}
    free = sorted(
        str(node.id)
        for node in context.zk.readNodes()
        if node.image_id in wrong and node.state == READY and node.allocated_to is None
    )
    if free:
        note(
            f"free nodes of the replaced build remain until they are used; to replace them, run "
            f"`nodepool delete {' '.join(free)}`"
        )
    return 1 if result.impossible else 0


def image_rollforward(context: Context) -> int:
    args = context.args
    result = _switch(context, lambda rollbacks: rollbacks.forward(args.image, args.provider))
    return 1 if result.impossible else 0


# -- deleting


def _mark_deleting(
    context: Context,
    names: Sequence[str],
    path: str,
    row: dict[str, Any],
    missing: str,
    refused: str,
) -> None:
    """Set a record to ``deleting`` unless it is missing or a builder is working on it."""
    found = context.zk.markDeleting(*names)
    if found == DELETING:
        report(context, {**row, "result": DELETING})
        return
    if found not in (None, BUILDING, UPLOADING):
        raise CommandError(f"{path} keeps changing; try again")
    why = missing if found is None else refused
    report(context, {**row, "result": "not found" if found is None else "refused"}, why)
    context.refuse(f"{path}: {why}", said=True)


def image_delete(context: Context) -> None:
    args = context.args
    names = (args.image, args.build_id, args.provider, args.upload_id)
    _mark_deleting(
        context,
        names,
        paths.upload(*names),
        {
            "image": args.image,
            "build": args.build_id,
            "provider": args.provider,
            "upload": args.upload_id,
        },
        "Image upload not found",
        "Cannot delete because image upload in progress",
    )


def dib_image_delete(context: Context) -> None:
    image, dash, build_id = context.args.id.rpartition("-")
    if not (image and dash and build_id):
        raise CommandError(
            f"{context.args.id} is not <image>-<build id>; use the ID column of dib-image-list"
        )
    _mark_deleting(
        context,
        (image, build_id),
        paths.build(image, build_id),
        {"image": image, "build": build_id},
        f"Build {context.args.id} not found",
        "Cannot delete a build in progress",
    )
