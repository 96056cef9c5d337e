"""The ``nodepool`` command (CLI-3 to CLI-5)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nodepool.cmd import audit
from nodepool.cmd.commands import (
    agents,
    aliens,
    configuration,
    data,
    dev,
    images,
    lease,
    login,
    nodes,
    observe,
    providers,
    recover,
    requests,
    simulate,
    token,
)
from nodepool.cmd.commands.context import Context
from nodepool.process.program import (
    arguments,
    make_parser,
    run_console,
    seconds,
    setup_command_logging,
)

COMMANDS = (
    nodes,
    login,
    images,
    aliens,
    providers,
    data,
    configuration,
    requests,
    lease,
    token,
    observe,
    recover,
    dev,
    simulate,
    agents,
)
EPILOG = (
    "See `nodepool SUBCOMMAND --help` for details; the manual is in doc/operation/ of the "
    "source, also as rendered pages."
)
WITHOUT_CONFIGURATION = frozenset({"config-validate", "config-schema", "dev", "simulate", "mcp"})


def create_parser() -> argparse.ArgumentParser:
    parser = make_parser("nodepool", "Inspect and manage nodes, images and requests.")
    parser.epilog = EPILOG
    parser.add_argument(
        "--debug", action="store_true", help="debug logging, and tracebacks of errors"
    )
    parser.add_argument(
        "--connect-timeout",
        metavar="SECONDS",
        type=seconds,
        default=None,
        help="how long to try to reach ZooKeeper (default: no limit)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with status 1 if something is not found or refused (default: 0 for commands "
        "that did so in 11.0.0)",
    )
    # Of subcommands without these options.
    parser.set_defaults(command=None, watch=False, filters=(), layout=None, detail=False)
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    for module in COMMANDS:
        module.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    Exceptions are passed to the caller.
    """
    parser = create_parser()
    given = arguments(argv)
    args = parser.parse_args(given)
    if args.command:
        # argparse removes every "--", even those that belong to the command.
        args.command = given[given.index("--") + 1 :] if "--" in given else args.command
    if args.subcommand is None:
        parser.print_help()
        return 1
    setup_command_logging(args.debug, args.logconfig)
    context = Context(args)
    try:
        if args.subcommand not in WITHOUT_CONFIGURATION:
            # Both before any work: errors in the configuration and a missing ZooKeeper are reported
            # alike by all commands.
            _ = context.config
            _ = context.zk
        if args.watch:
            return observe.watch(context, args.function)
        return audit.run(context)
    finally:
        context.close()


def console() -> int:
    """Run :func:`main` with errors in one line (and tracebacks with ``--debug``)."""
    return run_console("nodepool", main, "--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(console())
