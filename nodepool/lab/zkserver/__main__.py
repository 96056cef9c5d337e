"""``python -m nodepool.lab.zkserver``: run the server as a separate process."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

from nodepool.lab.zkserver.journal import JournalError
from nodepool.lab.zkserver.serve import AddressError, ZooKeeperServer, tls_context


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nodepool.lab.zkserver",
        description="A small ZooKeeper server for development, tests and demonstrations. It has no "
        "quorum: not for production.",
    )
    for option, kind, text in (
        ("--directory", Path, "where data are kept (default: in memory only)"),
        ("--host", str, "address to listen on (default: 127.0.0.1)"),
        ("--port", int, "port without TLS; 0: any free one"),
        ("--unix", Path, "path of a Unix socket"),
        ("--tls-port", int, "port with TLS; 0: any free one"),
        ("--tls-cert", Path, "certificate of the server (PEM)"),
        ("--tls-key", Path, "its key (PEM)"),
        ("--tls-ca", Path, "authority of the clients' certificates (PEM)"),
    ):
        parser.add_argument(option, type=kind, help=text)
    parser.add_argument(
        "--anywhere", action="store_true", help="allow addresses that other machines can reach"
    )
    parser.set_defaults(host="127.0.0.1")
    args = parser.parse_args()
    if args.port is None and args.unix is None and args.tls_port is None:
        parser.error("no address to listen on; specify --port, --unix or --tls-port")
    if args.tls_port is not None and None in (args.tls_cert, args.tls_key, args.tls_ca):
        parser.error("--tls-port needs --tls-cert, --tls-key and --tls-ca")
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO
    )
    try:
        asyncio.run(_serve(args))
    except (JournalError, AddressError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(args: argparse.Namespace) -> None:
    server = ZooKeeperServer(args.directory)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    ports: dict[str, object] = {}
    if args.unix is not None:
        await server.listen_unix(args.unix)
    if args.port is not None:
        ports["port"] = await server.listen(args.host, args.port, None, args.anywhere)
    if args.tls_port is not None:
        context = tls_context(args.tls_cert, args.tls_key, args.tls_ca)
        ports["tls_port"] = await server.listen(args.host, args.tls_port, context, args.anywhere)
    logging.getLogger("nodepool.zkserver").info(
        "A ZooKeeper server for development listens; it has no quorum"
    )
    print(json.dumps(ports), flush=True)
    await server.run()


if __name__ == "__main__":
    sys.exit(main())
