"""The ``nodepool`` command (CLI-3 to CLI-5)."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence

from nodepool.cmd import audit
from nodepool.cmd.commands.context import Context
from nodepool.process.program import (
    arguments,
    make_parser,
    run_console,
    seconds,
    setup_command_logging,
)

#: Modules of :mod:`nodepool.cmd.commands` in the order of the help, and their subcommands.
COMMANDS = {
    "nodes": ("list", "delete", "hold"),
    "login": ("ssh",),
    "images": (
        "image-list",
        "dib-image-list",
        "image-status",
        "image-build",
        "image-pause",
        "image-unpause",
        "image-rollback",
        "image-rollforward",
        "image-delete",
        "dib-image-delete",
        "image-log",
    ),
    "aliens": ("alien-image-list",),
    "providers": ("info", "erase", "problem-list", "retry"),
    "data": ("export-image-data", "import-image-data"),
    "configuration": ("config-validate", "plan", "config-schema"),
    "requests": ("request-list", "request"),
    "lease": ("lease",),
    "token": ("token",),
    "observe": ("status", "top", "explain", "hosts", "tenants", "pools", "events"),
    "drain": ("drain", "undrain"),
    "rotate": ("rotate",),
    "usage": ("usage",),
    "recover": ("recover",),
    "dev": ("dev",),
    "simulate": ("simulate",),
    "advise": ("advise",),
    "agents": ("mcp",),
}
#: Options before the subcommand that have a value.
VALUED = frozenset({"-c", "-s", "-l", "--connect-timeout"})
EPILOG = (
    "See `nodepool SUBCOMMAND --help` for details; the manual is in doc/operation/ of the "
    "source, also as rendered pages."
)
WITHOUT_CONFIGURATION = frozenset(
    {"usage", "config-validate", "config-schema", "dev", "simulate", "advise", "mcp"}
)


def modules_for(given: Sequence[str]) -> tuple[str, ...]:
    """Return the module of the subcommand in these arguments, or all if there is none.

    Importing a module takes longer than most subcommands.
    """
    first = next(
        (
            word
            for word, before in zip(given, ["", *given], strict=False)
            if word[:1] != "-" and before not in VALUED
        ),
        "",
    )
    return tuple(name for name, names in COMMANDS.items() if first in names) or tuple(COMMANDS)


def create_parser(modules: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
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
    for name in modules:
        importlib.import_module(f"nodepool.cmd.commands.{name}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    Exceptions are passed to the caller.
    """
    given = arguments(argv)
    parser = create_parser(modules_for(given))
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
            from nodepool.cmd.commands import observe

            return observe.watch(context, args.function)
        return audit.run(context)
    finally:
        context.close()


def console() -> int:
    """Run :func:`main` with errors in one line (and tracebacks with ``--debug``)."""
    return run_console("nodepool", main, "--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(console())
