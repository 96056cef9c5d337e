"""``lease``: nodes for people and scripts, with an owner and an end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kazoo.exceptions import KazooException

from nodepool.cmd.commands import login
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_json,
    add_listing,
    note,
    user,
)
from nodepool.cmd.commands.foreground import Foreground, Kills
from nodepool.cmd.commands.nodes import limited
from nodepool.cmd.commands.requests import reasons
from nodepool.cmd.commands.requests.follow import FINISHED, Follower
from nodepool.cmd.commands.requests.use import describe, environment, inventory
from nodepool.lease import Lease, LeaseError, Leases, LeaseState, Reason, Terms, ssh
from nodepool.process.program import duration, seconds
from nodepool.ssh import Lost, remote, run
from nodepool.ssh import Node as Machine
from nodepool.status.explain import places
from nodepool.status.results import Results, format_duration, to_json
from nodepool.texts import one_line, print_text
from nodepool.zk.records import FAILED, FULFILLED

#: Seconds that an attached lease outlives its holder, and between two renewals.
ATTACHED, RENEW_EVERY = 120.0, 40.0
#: Seconds between two attempts to renew after a failure.
RETRY = 5.0
#: Exit statuses besides 0 and that of the command.
NOT_IN_TIME, FAILED_STATUS, ENDED = 3, 4, 6
#: Chosen if there is no other: the environment of a shell that holds a lease.
VARIABLE = "NODEPOOL_LEASE"
DEFAULT = "get"
COLUMNS = {
    "id": "ID",
    "state": "State",
    "owner": "Owner",
    "labels": "Labels",
    "nodes": "Nodes",
    "ends": "Ends in",
    "purpose": "Purpose",
}


def register(subparsers: Subparsers) -> None:
    group = subparsers.add_parser(
        "lease",
        help="lease nodes to work on, for a time",
        description="Lease nodes: `nodepool lease LABEL...` waits for them and keeps them until "
        "Ctrl-C.",
    )
    commands = group.add_subparsers(metavar="COMMAND or LABEL...", required=True)
    _register_get(commands)
    filters = {"owner": "owner", "state": "state", "labels": "label"}
    add_listing(commands, "list", show_all, "list leases and held nodes", filters)
    for name, function, text in (
        ("show", show, "show a lease with its nodes"),
        ("return", give_back, "return the nodes of leases"),
        ("ssh-config", ssh_config, "print a configuration for ssh"),
        ("inventory", show_inventory, "print Ansible's inventory"),
    ):
        parser = add_command(commands, name, function, text)
        parser.add_argument(
            "id", metavar="ID", nargs="?", help=f"default: ${VARIABLE}, or your only lease"
        )
        add_json(parser.add_argument, "print JSON")
        parser.add_argument(
            "--insecure", action="store_true", help="connect to nodes without host keys"
        )
    parser = add_command(commands, "renew", renew, "let a lease end later")
    parser.add_argument(
        "id", metavar="ID", nargs="?", help=f"default: ${VARIABLE}, or your only lease"
    )
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        type=duration,
        required=True,
        help="from now, such as 90m, 4h or 2d",
    )
    for name, function, text in (
        ("ssh", log_in, "log in to a node"),
        ("exec", execute, "run a command on a node"),
    ):
        parser = add_command(commands, name, function, text)
        parser.add_argument(
            "id", metavar="ID[/N]", nargs="?", help="lease, and number of the node (default: 1)"
        )
        parser.add_argument(
            "--insecure", action="store_true", help="connect to nodes without host keys"
        )
        parser.add_argument("command", metavar="COMMAND", nargs="*", help="after --")
    known = set(commands.choices)
    parse = group.parse_known_args

    def with_default(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        head, command = given[:end], given[end + 1 :]
        if head and head[0] not in known and head[0] not in ("-h", "--help"):
            head = [DEFAULT, *head]
        found, unknown = parse(head, namespace)
        found.command = command or vars(found).get("command")
        return found, unknown

    group.parse_known_args = with_default


def _register_get(commands: Subparsers) -> None:
    parser = add_command(commands, DEFAULT, get, "lease nodes (the default)")
    parser.add_argument(
        "labels", metavar="LABEL", nargs="+", help="label of a node; repeat it for several nodes"
    )
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        type=duration,
        help="such as 90m, 4h or 2d; the command ends immediately",
    )
    parser.add_argument("--purpose", default="", help="shown to others")
    parser.add_argument("--key", help="the same key gives the same lease")
    parser.add_argument("--tenant", metavar="T", help="count against the limits of this tenant")
    parser.add_argument(
        "--provider", metavar="P", help="preferred provider, used if it offers the labels"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        help="wait for the nodes at most this long (status 3)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="connect to nodes without host keys"
    )
    output = parser.add_mutually_exclusive_group()
    add_json(output.add_argument, "print the lease as JSON, with connection data")
    output.add_argument("--shell", action="store_true", help=f"print `export {VARIABLE}=...`")


# -- get


def get(context: Context) -> int:
    args = context.args
    labels, command = args.labels, args.command or []
    refused = context.config.why_not_leased(labels)
    if refused is not None:
        raise CommandError(refused)
    leases = Leases(context.zk, most=context.config.max_hold_age)
    why = reasons.not_offered(context.zk, labels) or reasons.other_provider(
        context.zk, labels, args.provider
    )
    if why is not None:
        note(why)
    terms = Terms(user(), f"unix:{os.getuid()}", args.purpose, key=args.key)
    with _reported(), Foreground() as foreground:
        lease = leases.ask(labels, terms, args.tenant, args.provider)
        try:
            if lease.state is not LeaseState.HELD:
                if outcome := _wait(context, lease.id):
                    leases.give_back(lease.id)
                    return outcome
                lease = leases.hand_over(lease.id, args.time or ATTACHED)
            if lease.terms.limit:
                note(limited(lease))
            foreground.using = True
            ssh.write(leases, lease, args.insecure)
            _print(args, lease)
            if args.time is not None and not command:
                return 0
            kills = Kills(context.kazoo, lease.nodes)
            result = _use(leases, lease, command, foreground, renew=args.time is None)
            kills.show(0 if foreground.ended else result)
        except BaseException:
            with contextlib.suppress(LeaseError, KazooException):
                leases.give_back(lease.id)
            ssh.remove(lease.id)
            raise
        leases.give_back(lease.id)
        ssh.remove(lease.id)
        return result


def _use(
    leases: Leases, lease: Lease, command: Sequence[str], foreground: Foreground, renew: bool
) -> int:
    """Run the command, or wait for a signal; return the exit status.

    :raises LeaseError: it has ended.
    """
    renewal = _Renewal(leases, lease, foreground)
    result = 0
    with renewal if renew else contextlib.nullcontext():
        if command:
            result = foreground.run(command, {VARIABLE: lease.id, **environment(lease.nodes)})
        else:
            foreground.wait()
    if renewal.lost is not None:
        raise renewal.lost
    return result


def _wait(context: Context, request_id: str) -> int:
    """Wait until the request is fulfilled; return the exit status if it is not."""
    told: set[str] = set()

    def quiet(_ids: list[str]) -> None:
        request = context.zk.getNodeRequest(request_id)
        if request is None:
            return
        place = places(context.zk.readRequests()).get(request_id)
        where = f"position {place} in the queue, " if place else ""
        text = f"{where}{reasons.waits_for(context.zk, request)}"
        if text not in told:
            told.add(text)
            note(f"{request_id} waits: {text}")

    state = Follower(context.kazoo).follow([request_id], context.args.wait, lambda *_: None, quiet)[
        request_id
    ]
    if state == FULFILLED:
        return 0
    if state not in FINISHED:
        note(f"the nodes were not ready within {context.args.wait:g} s; the request is canceled")
        return NOT_IN_TIME
    request = context.zk.getNodeRequest(request_id) if state == FAILED else None
    note(
        f"{request_id} failed: {reasons.waits_for(context.zk, request)}"
        if request
        else f"{request_id} was canceled by somebody"
    )
    return FAILED_STATUS


def _print(args: argparse.Namespace, lease: Lease) -> None:
    if args.json:
        print(to_json(as_json(lease)), flush=True)
        return
    if args.shell:
        print_text(f"export {VARIABLE}={lease.id}")
        return
    end = "until this command ends" if args.time is None else f"for {_span(lease)}"
    print_text(f"Lease {lease.id} {end}")
    for name, node in ssh.names(lease.nodes):
        why = ssh.unreachable(node)
        how = why if why is not None else f"nodepool lease ssh {lease.id}/{name[1:]}"
        print_text(f"  {describe(node)}\n      {how}")


class _Renewal:
    """Renews an attached lease on a separate thread."""

    def __init__(self, leases: Leases, lease: Lease, foreground: Foreground) -> None:
        self._leases = leases
        self._lease = lease
        self._foreground = foreground
        self._done = threading.Event()
        self.lost: LeaseError | None = None

    def __enter__(self) -> _Renewal:
        threading.Thread(target=self._run, name=f"renew-{self._lease.id}", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()

    def _run(self) -> None:
        pause, warned = RENEW_EVERY, bool(self._lease.terms.limit)
        while not self._done.wait(pause):
            pause = RETRY
            try:
                lease = self._leases.renew(self._lease.id, ATTACHED)
                pause = RENEW_EVERY
                if lease.terms.limit and not warned:
                    warned = True
                    note(limited(lease))
            except LeaseError as error:
                if error.reason in (Reason.ENDED, Reason.TOO_LATE):
                    self.lost = error
                    self._foreground.end()
                    return
            except (KazooException, TimeoutError):
                pass


# -- show and change


def as_json(lease: Lease) -> dict[str, Any]:
    """Return a lease for programs, with the connection data of its nodes."""
    terms = lease.terms
    return {
        "id": lease.id,
        "state": lease.state.value,
        "owner": terms.owner,
        "purpose": terms.purpose,
        "tenant": lease.tenant,
        "labels": list(lease.labels),
        "created": terms.created,
        "ends": lease.ends,
        "renewed": terms.renewed,
        "notes": dict(terms.notes),
        "lost": lease.lost,
        "limited_by": terms.limit,
        "nodes": [inventory(node) for node in lease.nodes],
    }


def _span(lease: Lease) -> str:
    """Return the time to the end, and what has decided it unless that is the holder."""
    if lease.ends is None:
        return "-"
    return format_duration(lease.ends - time.time()) + (
        f" ({lease.terms.limit})" if lease.terms.limit else ""
    )


def lease_list(leases: Sequence[Lease]) -> Results:
    rows = [
        {
            "id": lease.id,
            "state": lease.state.value,
            "owner": lease.terms.owner,
            "labels": ",".join(lease.labels),
            "nodes": ",".join(node.id or "" for node in lease.nodes)
            + (f" ({lease.lost} lost)" if lease.lost else ""),
            "ends": "no end" if lease.ends is None and lease.nodes else _span(lease),
            "purpose": lease.terms.purpose,
        }
        for lease in leases
    ]
    return Results(rows, COLUMNS)


def show_all(context: Context) -> None:
    context.show(lease_list(Leases(context.zk).all()))


def _chosen(context: Context, leases: Leases, name: str | None) -> Lease:
    """Return the lease of this id, that of the environment, or the only one of this user."""
    wanted = os.environ.get(VARIABLE) if name is None else name
    if wanted == "":
        raise CommandError(f"the name of the lease is empty; name one, or unset {VARIABLE}")
    if wanted is not None:
        lease = leases.get(wanted)
        if lease is None:
            raise LeaseError(Reason.ENDED, f"Lease {wanted} does not exist, or has ended")
        return lease
    mine = [lease for lease in leases.all() if lease.terms.owner == user()]
    if len(mine) != 1:
        raise CommandError(
            f"you have {len(mine)} leases; name one "
            f"({', '.join(lease.id for lease in mine) or '`nodepool lease LABEL`'})"
        )
    return mine[0]


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Let errors of leases end the command with their text."""
    try:
        yield
    except LeaseError as error:
        if error.reason in (Reason.ENDED, Reason.TOO_LATE, Reason.NOT_FOUND):
            print(f"nodepool: {error}", file=sys.stderr)
            raise SystemExit(ENDED) from error
        raise CommandError(str(error)) from error


def _of_lease(
    function: Callable[[Context, Leases, Lease], int | None],
) -> Callable[[Context], int | None]:
    def command(context: Context) -> int | None:
        leases = Leases(context.zk, most=context.config.max_hold_age)
        with _reported():
            lease = _chosen(context, leases, context.args.id)
            context.args.id = lease.id  # for the audit log
            return function(context, leases, lease)

    return command


@_of_lease
def show(context: Context, _leases: Leases, lease: Lease) -> None:
    if context.args.json:
        print(to_json(as_json(lease)))
        return
    print_text(f"Lease {lease.id}")
    created = (
        time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(lease.terms.created))
        if lease.terms.created
        else None
    )
    for title, value in (
        ("State", lease.state.value),
        ("Owner", lease.terms.owner),
        ("Purpose", lease.terms.purpose),
        ("Tenant", lease.tenant),
        ("Labels", ", ".join(lease.labels)),
        ("Created", created),
        ("Ends in", _span(lease)),
        ("Lost nodes", lease.lost or None),
    ):
        if value not in (None, ""):
            print_text(f"  {title}: {one_line(value)}")
    for node in lease.nodes:
        print_text(f"  Node {describe(node)}")


@_of_lease
def give_back(_context: Context, leases: Leases, lease: Lease) -> None:
    leases.give_back(lease.id)
    ssh.remove(lease.id)


@_of_lease
def renew(context: Context, leases: Leases, lease: Lease) -> None:
    print_text(f"Lease {lease.id} ends in {_span(leases.renew(lease.id, context.args.time))}")


@_of_lease
def ssh_config(context: Context, leases: Leases, lease: Lease) -> None:
    print(Path(ssh.write(leases, lease, context.args.insecure)).read_text(), end="")


@_of_lease
def show_inventory(context: Context, leases: Leases, lease: Lease) -> None:
    ssh.write(leases, lease, context.args.insecure)
    print(json.dumps(ssh.inventory(lease, ssh.directory_of(lease.id)), indent=2))


def log_in(context: Context) -> int:
    if context.args.command:
        return execute(context)
    path, node = _reached(context)
    return subprocess.run(
        ["ssh", "-F", path, *(["-t"] if sys.stdin.isatty() else []), f"np{node.id}"], check=False
    ).returncode


def execute(context: Context) -> int:
    if not context.args.command:
        raise CommandError("name the command to run, after --")
    path, node = _reached(context)
    called, outputs = (
        remote(path, node, " ".join(context.args.command), batch=False),
        (sys.stdout.buffer, sys.stderr.buffer),
    )
    try:
        with Foreground():  # a signal ends the command on the node, too
            return run(*called, outputs, None, None, set())
    except Lost as error:
        raise CommandError(f"node {node.id}: {error}") from error


def _reached(context: Context) -> tuple[str, Machine]:
    """Return the configuration for a node of a lease, and the node."""
    name, _, number = (context.args.id or "").partition("/")
    leases = Leases(context.zk)
    with _reported():
        lease = _chosen(context, leases, None if context.args.id is None else name)
    hosts = dict(ssh.names(lease.nodes))
    host = f"n{number or 1}"
    if host not in hosts:
        raise CommandError(
            f"lease {lease.id} has {len(hosts)} nodes; there is no node {number or 1}"
        )
    if context.args.insecure:
        why = ssh.unreachable(hosts[host])
    else:
        why = login.why_not(hosts[host], "--insecure connects without checking them")
    if why is not None:
        raise CommandError(why)
    path = ssh.write(leases, lease, context.args.insecure)
    context.close()
    return path, ssh.machine(hosts[host])
