"""``mcp``: machines for agents."""

from __future__ import annotations

from nodepool.base import optional
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers, "mcp", serve, "lease machines for an agent, by the Model Context Protocol"
    )
    parser.add_argument(
        "--url", help="of the API (default: $NODEPOOL_URL, or the socket of this machine)"
    )


def serve(context: Context) -> None:
    optional.require("nodepool mcp", "nodepool-adapters")
    absent = optional.missing(("mcp", "anyio"))
    if absent is not None:
        raise CommandError(f"mcp needs {absent}")
    from nodepool.adapters import mcp
    from nodepool.client import Pool

    try:
        mcp.serve(Pool(context.args.url))
    except ValueError as error:
        raise CommandError(str(error)) from error
