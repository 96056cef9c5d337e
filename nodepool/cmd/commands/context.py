"""What a subcommand works with, and how it is declared."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nodepool import status
from nodepool.process.program import load_config
from nodepool.zk.zookeeper import ZooKeeper

if TYPE_CHECKING:
    from nodepool.zk.connection.client import ZooKeeperClient

Subparsers = Any
Command = Callable[["Context"], "int | None"]


class CommandError(Exception):
    """The command cannot be done; the text is for the operator."""


@dataclass
class Context:
    """Arguments, and what is made when first used: configuration, connection."""

    args: argparse.Namespace
    _config: object = field(default=None, repr=False)
    _client: ZooKeeperClient | None = field(default=None, repr=False)
    _zk: ZooKeeper | None = field(default=None, repr=False)

    @property
    def config(self) -> Any:
        if self._config is None:
            self._config = load_config(self.args.config, self.args.secure)
        return self._config

    @property
    def zk(self) -> Any:
        """The facade, connected."""
        if self._zk is None:
            from nodepool.zk.connection.client import ZooKeeperClient
            from nodepool.zk.zookeeper import ZooKeeper

            self.config.require(self.args.config, "zookeeper-servers")
            self._client = ZooKeeperClient.from_config(self.config)
            self._client.connect(self.args.connect_timeout)
            self._zk = ZooKeeper(self._client, enable_cache=False)
        return self._zk

    @property
    def kazoo(self) -> Any:
        return self.zk.kazoo_client

    def show(self, results: status.Results) -> None:
        print(status.output(results, self.args.format))

    def refuse(self, text: str, said: bool = False) -> None:
        """Something is unknown or cannot be done: status 0, as in 11.0.0, on which scripts rely.

        :param said: the text is on standard output already, where 11.0.0 has it.
        :raises CommandError: ``--strict`` was given.
        """
        if self.args.strict:
            raise CommandError(text)
        if not said:
            print(f"nodepool: {text}", file=sys.stderr, flush=True)

    def check_provider(self, name: str, has_records: bool = False) -> None:
        """Say so when the provider is unknown: nothing will be found of it.

        :raises CommandError: ``--strict`` was given.
        """
        known = {*self.config.providers, *self.config.provider_errors}
        if has_records or name in known:
            return
        close = difflib.get_close_matches(name, sorted(known), n=1)
        self.refuse(
            f"provider {name} is neither in {self.args.config} nor in ZooKeeper"
            + (f"; did you mean {close[0]}?" if close else "")
        )

    def close(self) -> None:
        zk, self._zk = self._zk, None
        client, self._client = self._client, None
        if zk is not None:
            zk.disconnect()
        elif client is not None:
            client.disconnect()


def add_command(subparsers: Subparsers, name: str, function: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
    parser.set_defaults(function=function)
    return parser


def add_listing(subparsers: Subparsers, name: str, function: Command, text: str) -> argparse.ArgumentParser:
    parser = add_command(subparsers, name, function, text)
    parser.add_argument("--format", choices=status.FORMATS, default="table", help="representation (default: %(default)s)")
    return parser
