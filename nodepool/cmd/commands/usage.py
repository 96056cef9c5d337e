"""``usage``: who has used the pool, for how long, how much of it, and at which cost."""

from __future__ import annotations

import os
import sqlite3
import time

from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_listing, note
from nodepool.process.program import absolute_path, duration
from nodepool.status import usage
from nodepool.status.results import format_duration
from nodepool.status.usage_file import UsageFile
from nodepool.zk.history import HistoryReader


def register(subparsers: Subparsers) -> None:
    parser = add_listing(
        subparsers, "usage", show, "show hours, waiting times, memory, CPU, kills and cost of nodes"
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
        "--log",
        metavar="FILE",
        type=absolute_path,
        help="read this file of a launcher (default: usage-log of the configuration, if this "
        "machine has it, or else the history of the last day)",
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
    since = now - args.since if args.since is not None else 0.0
    path = args.log or context.config.usage_log
    # An empty one was created this moment.
    if path and (args.log or (os.path.exists(path) and os.path.getsize(path))):
        try:
            with UsageFile(path) as file:
                _show_file(context, file, path, since, now)
        except (OSError, sqlite3.Error) as error:
            raise CommandError(
                f"{path} cannot be read: {error}; name a file that the option usage-log of a "
                "launcher has created, which this user may read"
            )
        return
    events = HistoryReader().read_all(context.kazoo)
    found = [use for use in usage.uses(events) if use.removed is None or use.removed >= since]
    config = context.whole_config
    if args.advise:
        context.show(usage.advice(found, usage.sizes(config)))
    else:
        context.show(usage.table(found, args.by, now, lambda use: usage.price_of(config, use)))
    if events:
        note(f"The history reaches back {format_duration(now - events[0]['time'])}.")


def _show_file(context: Context, file: UsageFile, path: str, since: float, now: float) -> None:
    if context.args.advise:
        context.show(usage.advice(file.uses(since), usage.sizes(context.whole_config)))
    else:
        context.show(file.table(context.args.by, since))
    if (oldest := file.oldest()) is not None:
        note(
            f"These nodes have ended, and are from {path}, which reaches back "
            f"{format_duration(now - oldest)}."
        )
