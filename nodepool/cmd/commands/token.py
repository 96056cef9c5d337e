"""``token``: tokens for the API."""

from __future__ import annotations

import time

from nodepool.access.identity import Role
from nodepool.access.tokens import Tokens
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_listing,
    user,
)
from nodepool.process.program import duration, whole_number
from nodepool.status.results import Results, format_duration

COLUMNS = {
    "id": "ID",
    "name": "Name",
    "role": "Role",
    "tenant": "Tenant",
    "labels": "Labels",
    "max": "Longest lease",
    "per_owner": "Leases",
    "expires": "Expires in",
    "created_by": "Created by",
}


def register(subparsers: Subparsers) -> None:
    group = subparsers.add_parser(
        "token", help="manage tokens for the API", description="Manage tokens for the API."
    )
    commands = group.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(
        commands, "create", create, "create a token, and print it: nobody can read it again"
    )
    parser.add_argument(
        "name", metavar="NAME", help="of a person or program; the owner of its leases"
    )
    parser.add_argument(
        "--role",
        choices=[role.name.lower() for role in Role],
        default="borrow",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--label",
        dest="labels",
        metavar="PATTERN",
        action="append",
        default=[],
        help="label that may be leased, such as 'small-*'; may be repeated (default: all)",
    )
    parser.add_argument("--tenant", metavar="T", help="the only tenant of its leases")
    parser.add_argument(
        "--max",
        metavar="TIME",
        type=duration,
        help="longest lease, such as 8h (default: as configured)",
    )
    parser.add_argument(
        "--leases",
        metavar="N",
        type=whole_number(1),
        help="leases at the same time (default: as configured)",
    )
    parser.add_argument(
        "--expires",
        metavar="TIME",
        type=duration,
        help="how long it is valid, such as 90d (default: forever)",
    )
    add_listing(commands, "list", show_all, "list tokens", {"name": "name", "role": "role"})
    parser = add_command(
        commands, "revoke", revoke, "revoke a token; it is accepted for one more second"
    )
    parser.add_argument("id", metavar="ID", help="see `nodepool token list`")


def create(context: Context) -> None:
    args = context.args
    expires = None if args.expires is None else time.time() + args.expires
    try:
        _token_id, text = Tokens(lambda: context.zk).create(
            args.name,
            Role.of(args.role),
            user(),
            tenant=args.tenant,
            labels=tuple(args.labels),
            longest=args.max,
            per_owner=args.leases,
            expires=expires,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    print(text)


def show_all(context: Context) -> None:
    now = time.time()
    rows = [
        {
            "id": token.id,
            "name": token.name,
            "role": token.role.name.lower(),
            "tenant": token.tenant or "",
            "labels": ",".join(token.labels) or "all",
            "max": "" if token.longest is None else format_duration(token.longest),
            "per_owner": token.per_owner or "",
            "created_by": token.created_by,
            "expires": _left(token.expires, now),
        }
        for token in Tokens(lambda: context.zk).all()
    ]
    context.show(Results(rows, COLUMNS))


def _left(expires: float | None, now: float) -> str:
    if expires is None:
        return "never"
    return format_duration(expires - now) if expires > now else "expired"


def revoke(context: Context) -> None:
    if not Tokens(lambda: context.zk).revoke(context.args.id):
        raise CommandError(f"there is no token {context.args.id}; see `nodepool token list`")
