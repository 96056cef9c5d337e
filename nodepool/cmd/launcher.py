"""The ``nodepool-launcher`` daemon (CLI-2)."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from nodepool.metrics import tracing
from nodepool.process.log_writer import LogWriter
from nodepool.process.parts import Group, Part
from nodepool.process.program import arguments
from nodepool.process.service import (
    STOP_LIMIT,
    Service,
    make_daemon_parser,
    run_daemon,
    session_file,
)

PROG = "nodepool-launcher"
PID_FILE = "/var/run/nodepool/nodepool.pid"


def create_parser() -> argparse.ArgumentParser:
    parser = make_daemon_parser(PROG, "Turn node requests into nodes.", PID_FILE)
    parser.add_argument("--no-webapp", dest="webapp", action="store_false", help="no web server")
    return parser


class LauncherService:
    def __init__(self, args: argparse.Namespace) -> None:
        from nodepool.launcher import NodePool

        self._args = args
        # Records live long and contain no cycles: no garbage collection has to go through them.
        self._pool = NodePool(args.secure, args.config, all_read=gc.freeze)
        self._pool.session_file = session_file(PROG, args)
        self.watchdog = self._pool.watchdog
        self._parts = Group(STOP_LIMIT)

    def start(self) -> None:
        from nodepool.zk.connection.client import ZooKeeperClient

        # An invalid configuration ends the start; ZooKeeper may become available later.
        config = self._pool.loadConfig()
        # Only created to check the TLS files; the pool creates its own in its thread, where errors
        # end nothing.
        ZooKeeperClient.from_config(config)
        self._add(LogWriter())
        self._add(self._pool)
        if self._args.webapp:
            from nodepool.web.actions.actions import Actions
            from nodepool.web.server import WebApp

            webapp = WebApp(
                self._pool,
                **config.webapp,
                pages=config.web_pages,
                actions=Actions(self._pool, config.web_pages),
                unix=config.access.socket,
            )
            self._add(webapp)
        if self._args.repl:
            from nodepool.process.repl import ReplServer

            self._add(ReplServer(self._pool))
        tracing.start()
        self._parts.start()

    def _add(self, service: Service) -> None:
        # Now: it is stopped also if the next one cannot be made.
        name = type(service).__name__
        self._parts.add(Part(name, service.start, service.stop, least=STOP_LIMIT))

    def stop(self) -> None:
        self._parts.stop()
        tracing.stop()


def main(argv: Sequence[str] | None = None) -> int:
    args = create_parser().parse_args(arguments(argv))
    return run_daemon(PROG, "nodepool", args, lambda: LauncherService(args))


if __name__ == "__main__":
    sys.exit(main())
