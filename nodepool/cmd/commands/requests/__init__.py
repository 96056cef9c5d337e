"""``request-list`` and ``request create|wait|show|list|accept|return|cancel``.

These let users and scripts request nodes by the protocol that Zuul uses (ZK-5 and ZK-8).
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool import status
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_json,
    add_table,
    note,
)
from nodepool.cmd.commands.requests import reasons
from nodepool.cmd.commands.requests import use as requests_use
from nodepool.cmd.commands.requests.follow import FINISHED, Follower, exit_status
from nodepool.process.program import seconds, whole_number
from nodepool.status.results import format_duration, to_json
from nodepool.texts import one_line, print_text
from nodepool.zk import paths
from nodepool.zk.records import FAILED, FULFILLED, PENDING, REQUESTED

REQUESTOR = "nodepool-cli"
PRIORITIES = ("100", "200", "300")
MOST_CREATED, PORTION = 1000, 50
"""Requests of one command, and those that are created before their ids are printed."""


def register(subparsers: Subparsers) -> None:
    _add_list(subparsers, "request-list")
    group = subparsers.add_parser(
        "request",
        help="request and use nodes from the shell or scripts",
        description="Request and use nodes from the shell or scripts (same protocol as Zuul).",
    )
    commands = group.add_subparsers(metavar="COMMAND", required=True)
    _add_list(commands, "list")
    _register_create(commands)
    parser = add_command(commands, "wait", wait, "follow requests until they are finished")
    parser.add_argument("ids", metavar="ID", nargs="+", help="request id")
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, help="stop waiting after S seconds (status 3)"
    )
    add_json(parser.add_argument, "print the outcome as JSON")
    parser = add_command(commands, "show", show, "show a request and its nodes")
    parser.add_argument("id", metavar="ID", help="request id")
    add_json(parser.add_argument, "print JSON, including connection data")
    parser = add_command(commands, "cancel", cancel, "cancel requests")
    parser.add_argument("ids", metavar="ID", nargs="*", help="request id")
    parser.add_argument(
        "--failed", action="store_true", help=f"cancel all failed requests of requestor {REQUESTOR}"
    )
    requests_use.register(commands)


def _add_list(subparsers: Subparsers, name: str) -> None:
    filters = {"state": "state", "node_types": "label", "requestor": "requestor"}
    add_table(
        subparsers,
        name,
        status.request_list,
        "list node requests",
        filters,
        detail="include the reasons of pools that declined",
    )


def _register_create(commands: Subparsers) -> None:
    parser = add_command(
        commands, "create", create, "request one node per LABEL; prints the request id"
    )
    parser.add_argument(
        "labels", metavar="LABEL", nargs="+", help="label of a node; repeat it for several nodes"
    )
    parser.add_argument(
        "--priority",
        choices=PRIORITIES,
        default="100",
        help="the lowest number is served first (default: %(default)s)",
    )
    parser.add_argument(
        "--relative-priority", metavar="N", type=int, default=0, help="order within the priority"
    )
    parser.add_argument("--tenant", metavar="T", help="count against the limits of this tenant")
    parser.add_argument(
        "--provider", metavar="P", help="preferred provider, used if it offers the labels"
    )
    parser.add_argument(
        "--requestor", metavar="NAME", default=REQUESTOR, help="default: %(default)s"
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=whole_number(1, MOST_CREATED),
        default=1,
        help=f"create N identical requests, at most {MOST_CREATED}",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        nargs="?",
        const=float("inf"),
        default=None,
        help="follow the requests until they finish, or for SECONDS",
    )
    add_json(parser.add_argument, "print the outcome as JSON")


def new_request(args: argparse.Namespace) -> dict[str, Any]:
    """Return the initial record as Zuul writes it: other keys are set by launchers."""
    now = time.time()
    return {
        "requestor_data": None,
        "node_types": args.labels,
        "requestor": args.requestor,
        "created_time": now,
        "provider": args.provider,
        "state": REQUESTED,
        "state_time": now,
        "relative_priority": args.relative_priority,
        "event_id": uuid.uuid4().hex,
        "tenant_name": args.tenant,
    }


def create(context: Context) -> int:
    args, kazoo = context.args, context.kazoo
    start = time.monotonic()
    kazoo.ensure_path(paths.REQUESTS)
    # Persistent, as Zuul's: it remains when this command ends.
    prefix = f"{paths.REQUESTS}/{args.priority}-"
    ids: list[str] = []
    while (left := args.count - len(ids)) > 0:
        answers = [
            kazoo.create_async(prefix, json.dumps(new_request(args)).encode(), sequence=True)
            for _ in range(min(left, PORTION))
        ]
        ids += [answer.get(timeout=60).rpartition("/")[2] for answer in answers]
        if not args.json:  # a killed command leaves few requests that it has not named
            for request_id in ids[-len(answers) :]:
                print(request_id, flush=True)
    why = reasons.not_offered(context.zk, args.labels) or reasons.other_provider(
        context.zk, args.labels, args.provider
    )
    if why is not None:
        note(why)
    if args.wait is None:
        if args.json:
            print(json.dumps([{"id": request_id, "state": REQUESTED} for request_id in ids]))
        return 0
    timeout = None if args.wait == float("inf") else args.wait
    try:
        return _follow(context, ids, timeout, start)
    except KeyboardInterrupt:
        _withdraw(context, ids)
        raise


def _withdraw(context: Context, ids: list[str]) -> None:
    """Delete unfinished requests of a user who stopped waiting, and name finished ones."""
    for request_id in ids:
        request = context.zk.getNodeRequest(request_id)
        if request is None or request.state == FAILED:
            continue
        if request.state == FULFILLED:
            note(
                f"request {request_id} is fulfilled and keeps its nodes; see `nodepool request "
                f"accept {request_id}` or "
                f"`nodepool request cancel {request_id}`"
            )
            continue
        context.zk.deleteNodeRequest(request)
        note(f"request {request_id} has been withdrawn")


def wait(context: Context) -> int:
    ids = context.args.ids
    try:
        return _follow(context, ids, context.args.timeout, time.monotonic())
    except KeyboardInterrupt:
        note(f"the requests remain; withdraw them with `nodepool request cancel {' '.join(ids)}`")
        raise


def _follow(context: Context, ids: list[str], timeout: float | None, start: float) -> int:
    outcome: dict[str, dict[str, Any]] = {
        request_id: {
            "id": request_id,
            "state": None,
            "nodes": [],
            "declined_by": [],
            "reasons": [],
            "ms": None,
        }
        for request_id in ids
    }

    def report(request_id: str, state: str, record: dict[str, Any]) -> None:
        milliseconds = round((time.monotonic() - start) * 1000)
        nodes = record.get("nodes") or []
        declined = record.get("declined_by") or []
        said, texts = (
            reasons.declined(context.kazoo, request_id, declined) if state == FAILED else ([], [])
        )
        outcome[request_id] = {
            "id": request_id,
            "state": state,
            "nodes": nodes,
            "declined_by": declined,
            "reasons": said,
            "ms": milliseconds,
        }
        if not context.args.json:
            detail = f" nodes {','.join(nodes)}" if nodes else ""
            if texts:
                detail += f" declined by {'; '.join(texts)}"
            print_text(f"{milliseconds:>7} ms  {request_id}  {state}{detail}")
            request = context.zk.getNodeRequest(request_id) if state == FAILED else None
            if request is not None:
                note(f"{request_id}: {reasons.waits_for(context.zk, request)}")

    told: dict[str, str] = {}

    def quiet(open_ids: list[str]) -> None:
        for request_id in open_ids:
            request = context.zk.getNodeRequest(request_id)
            if request is None:
                continue
            text = reasons.waits_for(context.zk, request)
            if told.get(request_id) != text:
                told[request_id] = text
                note(f"{request_id}: {text}")

    states = Follower(context.kazoo).follow(ids, timeout, report, quiet)
    left = [request_id for request_id, state in states.items() if state not in FINISHED]
    if left:
        note(f"not finished in time; withdraw with `nodepool request cancel {' '.join(left)}`")
    if context.args.json:
        print(json.dumps(list(outcome.values())))
    return exit_status(states.values())


def show(context: Context) -> None:
    request = requests_use.find_request(context.zk, context.args.id)
    nodes = [node for node_id in request.nodes if (node := context.zk.getNode(node_id)) is not None]
    if context.args.json:
        record = {"id": request.id, **request.toDict()}
        record["nodes"] = [requests_use.inventory(node) for node in nodes]
        print(to_json(record))
        return
    _, declined = reasons.declined(context.kazoo, request.id, request.declined_by)
    cause = (
        reasons.waits_for(context.zk, request)
        if request.state in (REQUESTED, PENDING, FAILED)
        else None
    )
    now = time.time()
    print_text(f"Request {request.id}")
    for title, value in (
        ("State", f"{request.state} for {format_duration(now - (request.state_time or now))}"),
        ("Labels", ", ".join(request.node_types)),
        ("Relative priority", request.relative_priority),
        ("Requestor", request.requestor),
        ("Tenant", request.tenant_name),
        ("Provider", request.provider),
        ("Event", request.event_id),
        ("Why" if request.state == FAILED else "Waits", cause),
        *(("Declined by", text) for text in declined),
    ):
        if value not in (None, ""):
            print_text(f"  {title}: {one_line(value)}")
    for node in nodes:
        print_text(f"  Node {requests_use.describe(node)}")


def cancel(context: Context) -> int:
    result = 0
    ids = list(context.args.ids)
    if context.args.failed:
        ids += [
            r.id
            for r in context.zk.readRequests()
            if r.state == FAILED and r.requestor == REQUESTOR
        ]
    elif not ids:
        raise CommandError("no request id given; see `nodepool request cancel --help`")
    for request_id in ids:
        if not paths.are_names(request_id):
            raise CommandError(f"{request_id} is not a valid request id")
        try:
            context.kazoo.delete(paths.request(request_id))
        except NoNodeError:
            print_text(f"Request {request_id} not found")
            result = 1
    return result
