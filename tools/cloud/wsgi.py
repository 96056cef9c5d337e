"""Serve one WSGI module of OpenStack with gunicorn: wsgi.py MODULE PORT [arguments for the
service].

Some of the services read the command line when they are imported, so gunicorn must not have one.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gunicorn.app.base import BaseApplication


class Server(BaseApplication):  # type: ignore[misc]
    def __init__(self, module: str, port: int) -> None:
        self.module = module
        self.port = port
        super().__init__()

    def load_config(self) -> None:
        for name, value in {
            "bind": f"127.0.0.1:{self.port}",
            "workers": 1,
            "threads": 16,
            "worker_class": "gthread",
            "timeout": 300,
            "keepalive": 30,
            "proc_name": self.module,
        }.items():
            self.cfg.set(name, value)
        # The services ask each other about a hundred servers in one line.
        self.cfg.set("limit_request_line", 0)

    def load(self) -> Any:
        return importlib.import_module(self.module).application


if __name__ == "__main__":
    module, port = sys.argv[1], int(sys.argv[2])
    sys.argv = [module, *sys.argv[3:]]
    Server(module, port).run()
