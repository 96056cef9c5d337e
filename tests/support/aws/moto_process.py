"""moto as a server process: prints its port, ends when its standard input does."""

from __future__ import annotations

import logging
import os
import sys
import threading


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True
    )
    print(server.server_port, flush=True)

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
