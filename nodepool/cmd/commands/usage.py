"""``usage``: who has used the pool, for how long, how much of it, and at which cost."""

from __future__ import annotations

import time

from nodepool.cmd.commands.context import Context, Subparsers, add_listing, note
from nodepool.process.program import duration
from nodepool.status import usage
from nodepool.status.results import format_duration
from nodepool.zk.history import HistoryReader


def register(subparsers: Subparsers) -> None:
    parser = add_listing(
        subparsers,
        "usage",
        show,
        "show hours, waiting times, memory, CPU, kills and cost of nodes in the last day",
    )
    parser.add_argument(
        "--by",
        choices=usage.GROUPS,
        default="label",
        help="group nodes by this (default: %(default)s)",
    )
    parser.add_argument(
        "--since", metavar="TIME", type=duration, help="only nodes that existed then, such as 4h"
    )
    parser.add_argument(
        "--csv",
        action="store_const",
        const="csv",
        dest="format",
        default="table",
        help="the same as --format csv",
    )
    parser.add_argument(
        "--advise",
        action="store_true",
        help="show for each job the smallest label whose memory would have sufficed",
    )


def show(context: Context) -> None:
    args, now = context.args, time.time()
    events = HistoryReader().read_all(context.kazoo)
    since = now - args.since if args.since is not None else 0.0
    found = [use for use in usage.uses(events) if use.removed is None or use.removed >= since]
    config = context.whole_config
    if args.advise:
        context.show(usage.advice(found, usage.sizes(config)))
    else:
        context.show(usage.table(found, args.by, now, lambda use: usage.price_of(config, use)))
    if events:
        note(f"The history reaches back {format_duration(now - events[0]['time'])}.")
