"""The context of a subcommand, and how subcommands are declared."""

from __future__ import annotations

import argparse
import contextlib
import functools
import getpass
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nodepool import status
from nodepool.base import hostnames
from nodepool.base.names import did_you_mean
from nodepool.process.program import absolute_path, load_config
from nodepool.status.filters import matching
from nodepool.texts import printable
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.records import FULFILLED, PENDING, REQUESTED, UPLOADING, Node
from nodepool.zk.zookeeper import ZooKeeper

if TYPE_CHECKING:
    from nodepool.config.model import Config
    from nodepool.driver.provider import Provider
    from nodepool.zk.connection.protocol import SessionClient

Subparsers = Any
Command = Callable[["Context"], "int | None"]


#: States of nodes, requests, builds and uploads, and of paused images in listings.
STATES = Node.VALID_STATES | {REQUESTED, PENDING, FULFILLED, UPLOADING, "paused"}
SYNC_TIMEOUT = 60.0
"""Seconds to read everything."""


class CommandError(Exception):
    """The command failed; the text is for the operator."""


def note(text: str) -> None:
    """Print a line to standard error, since scripts read standard output."""
    print(printable(f"nodepool: {text}"), file=sys.stderr, flush=True)


def user() -> str:
    """Return the user of this command and the host, as the owner of what it creates."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{hostnames.short()}"


@contextlib.contextmanager
def running(manager: Provider, zk: ZooKeeper) -> Iterator[None]:
    """Start a provider that only this command uses, and stop it at the end of the block."""
    manager.start(zk)
    try:
        yield
    finally:
        manager.stop()
        manager.join()


@dataclass
class Context:
    """The arguments, and lazily created configuration and connection."""

    args: argparse.Namespace
    _zk: ZooKeeper | None = field(default=None, repr=False)
    #: Number of things that were unknown or impossible.
    refused: int = 0

    @functools.cached_property
    def config(self) -> Config:
        """Return the configuration without providers; most commands need no cloud."""
        config: Config = load_config(self.args.config, self.args.secure, providers=False)
        return config

    @functools.cached_property
    def whole_config(self) -> Config:
        """Return the configuration with its providers, whose problems are logged."""
        log = logging.getLogger("nodepool.driver.Drivers")
        with contextlib.ExitStack() as stack:
            stack.callback(log.setLevel, log.level)
            # A driver that cannot be loaded is reported only for the providers that use it.
            log.setLevel(log.level if self.args.debug else logging.CRITICAL)
            config: Config = load_config(self.args.config, self.args.secure)
        return config

    @property
    def zk(self) -> ZooKeeper:
        if self._zk is None:
            self.config.require(self.args.config, "zookeeper-servers")
            client = ZooKeeperClient.from_config(self.config)
            client.connect(self.args.connect_timeout)
            self._zk = ZooKeeper(client, enable_cache=False)
        return self._zk

    @property
    def kazoo(self) -> SessionClient:
        return self.zk.kazoo_client

    def show(self, results: status.Results) -> None:
        """Print the filtered rows; on a terminal they are fitted unless ``-o wide`` is given."""
        args = self.args
        wanted = {
            key: [
                one
                for value in getattr(args, f"only_{key}", None) or ()
                for one in value.split(",")
            ]
            for key in args.filters
        }
        if unknown := sorted(set(wanted.get("state", ())) - STATES):
            self.refuse(
                f"there is no state {', '.join(unknown)}; known are {', '.join(sorted(STATES))}"
            )
        chosen = matching(results, wanted)
        fit = sys.stdout.isatty() and args.layout != "wide" and not args.detail
        print(
            status.output(
                chosen, args.format, width=shutil.get_terminal_size().columns if fit else None
            )
        )

    @property
    def live(self) -> ZooKeeper:
        """Yield a facade with a separate, complete mirror, for commands that follow changes.

        :raises CommandError: it cannot be read in time.
        """
        zk = self.zk
        if not zk.enable_cache:
            self._zk = zk = ZooKeeper(zk.client, enable_cache=True)
            if not zk.wait_synced(SYNC_TIMEOUT):
                raise CommandError(
                    f"the content of ZooKeeper cannot be read within {SYNC_TIMEOUT:g} s"
                )
        return zk

    def refuse(self, text: str, said: bool = False) -> None:
        """Report that something is unknown or impossible; status 0, as in 11.0.0.

        Scripts rely on this status.

        :param said: the text was already printed to standard output, as in 11.0.0.
        :raises CommandError: ``--strict`` was given.
        """
        self.refused += 1
        if self.args.strict:
            raise CommandError(text)
        if not said:
            note(text)

    def check_provider(self, name: str, has_records: bool = False) -> None:
        """Report an unknown provider, for which nothing can be found.

        :raises CommandError: ``--strict`` was given.
        """
        known = (
            set()
            if has_records
            else {*self.whole_config.providers, *self.whole_config.provider_errors}
        )
        if not has_records and name not in known:
            self.refuse(
                f"provider {name} is neither in {self.args.config} nor in "
                f"ZooKeeper{did_you_mean(name, known)}"
            )

    def close(self) -> None:
        if self._zk is not None:
            self._zk.disconnect()


def add_command(
    subparsers: Subparsers, name: str, function: Command, text: str
) -> argparse.ArgumentParser:
    # "resolve": `plan` has its own option -c.
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=text, conflict_handler="resolve"
    )
    # Without a default, which would replace that of the option before the subcommand.
    parser.add_argument(
        "-c",
        dest="config",
        metavar="FILE",
        type=absolute_path,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    parser.set_defaults(function=function, path=parser.prog.partition(" ")[2])
    return parser


def add_format(
    parser: argparse.ArgumentParser, choices: Sequence[str], default: str | None, text: str
) -> None:
    """Add ``--format``, and ``--json`` for ``--format json``."""
    parser.add_argument("--format", choices=choices, default=default, help=text)
    parser.add_argument(
        "--json",
        action="store_const",
        const="json",
        dest="format",
        default=argparse.SUPPRESS,
        help="the same as --format json",
    )


class _Form(argparse.Action):
    """Sets ``json`` by the name of a format."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, value: object, option: object = None
    ) -> None:
        namespace.json = value == "json"


def add_json(add: Callable[..., object], text: str) -> None:
    """Add ``--json``, and ``--format json`` for it.

    :param add: ``add_argument`` of a parser or a group.
    """
    add("--json", action="store_true", help=text)
    add(
        "--format",
        action=_Form,
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="json: the same as --json",
    )


def add_listing(
    subparsers: Subparsers,
    name: str,
    function: Command,
    text: str,
    filters: Mapping[str, str] | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand that lists rows.

    :param filters: key of a column -> option. Options may be repeated; a row must have one of the
        values.
    """
    parser = add_command(subparsers, name, function, text)
    add_format(parser, status.FORMATS, "table", "output format (default: %(default)s)")
    parser.add_argument(
        "-o",
        dest="layout",
        choices=("fit", "wide"),
        default="fit",
        help="wide: all columns, even on a terminal; files and pipes always get all columns",
    )
    if filters is not None:
        parser.add_argument("--watch", action="store_true", help="refresh after each change")
    for key, option in (filters or {}).items():
        parser.add_argument(
            f"--{option}",
            dest=f"only_{key}",
            metavar=option.upper(),
            action="append",
            help=f"filter by {option}; may be repeated or contain several, separated by commas",
        )
    parser.set_defaults(filters=tuple(filters or ()))
    return parser


def add_table(
    subparsers: Subparsers,
    name: str,
    read: Callable[..., status.Results],
    text: str,
    filters: Mapping[str, str] | None = None,
    detail: str | None = None,
) -> None:
    """Add a subcommand that only prints rows, see :func:`add_listing`.

    :param read: returns the rows.
    :param detail: help of the option ``--detail``, which the function gets as an argument.
    """

    def show(context: Context) -> None:
        more = {} if detail is None else {"detail": context.args.detail}
        context.show(read(context.zk, **more))

    parser = add_listing(subparsers, name, show, text, filters)
    if detail is not None:
        parser.add_argument("--detail", action="store_true", help=detail)
