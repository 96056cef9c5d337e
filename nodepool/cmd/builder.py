"""The ``nodepool-builder`` daemon (CLI-2, BLD-2)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nodepool.process.parts import Group, Part
from nodepool.process.program import arguments, whole_number
from nodepool.process.service import Service, make_daemon_parser, run_daemon, session_file

PROG = "nodepool-builder"
PID_FILE = "/var/run/nodepool/nodepool-builder.pid"
#: Seconds for an orderly stop that ends running builds.
STOP_LIMIT = 19.0


def _listen(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{port!r} is not a valid port number")
    return address.strip("[]") or "127.0.0.1", int(port)


def create_parser() -> argparse.ArgumentParser:
    parser = make_daemon_parser(PROG, "Build disk images and upload them to providers.", PID_FILE)
    parser.add_argument(
        "--build-workers",
        metavar="N",
        type=whole_number(0),
        default=1,
        help="concurrent builds (default: %(default)s)",
    )
    parser.add_argument(
        "--upload-workers",
        metavar="N",
        type=whole_number(0),
        default=4,
        help="concurrent uploads (default: %(default)s)",
    )
    parser.add_argument(
        "--webapp",
        metavar="[ADDRESS:]PORT",
        type=_listen,
        default=None,
        help="serve metrics, readiness and lists of images over HTTP (default: no web server; "
        "address 127.0.0.1)",
    )
    parser.add_argument(
        "--finish-builds",
        action="store_true",
        help="on SIGTERM or SIGINT finish running builds first, as on SIGUSR1; a second signal "
        "ends them",
    )
    return parser


class BuilderService:
    def __init__(self, args: argparse.Namespace) -> None:
        from nodepool.builder import NodePoolBuilder

        self._args = args
        self._builder = NodePoolBuilder(
            args.config, args.secure, args.build_workers, args.upload_workers
        )
        self._builder.session_file = session_file(PROG, args)
        self.watchdog = self._builder.watchdog
        #: Servers alongside the builder.
        self._servers = Group(STOP_LIMIT)

    def start(self) -> None:
        if self._args.webapp:
            from nodepool.web.server import WebApp

            address, port = self._args.webapp
            self._add(WebApp(self._builder, port, address, pages="off"))
        if self._args.repl:
            from nodepool.process.repl import ReplServer

            self._add(ReplServer(self._builder))
        self._servers.start()
        self._builder.start()

    def _add(self, server: Service) -> None:
        self._servers.add(Part(type(server).__name__, server.start, server.stop))

    def cancel_start(self) -> None:
        """Stop waiting for ZooKeeper."""
        self._builder.cancel_start()

    def finish(self) -> None:
        """Stop when the running builds have ended."""
        self.stop(finish=True)

    def hurry(self) -> None:
        """End the builds that :meth:`finish` waits for."""
        self._builder.abort_builds()

    def stop(self, finish: bool = False) -> None:
        self._servers.stop()
        self._builder.stop(finish)


def main(argv: Sequence[str] | None = None) -> int:
    args = create_parser().parse_args(arguments(argv))
    return run_daemon(
        PROG,
        "nodepool-builder",
        args,
        lambda: BuilderService(args),
        STOP_LIMIT,
        finish_always=args.finish_builds,
    )


if __name__ == "__main__":
    sys.exit(main())
