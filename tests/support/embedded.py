"""The embedded ZooKeeper server in a separate process."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from tests import REPOSITORY
from tests.conftest import load_tool


class Server:
    """The embedded server with TLS and its data on disk, which can be killed and started again
    at the same port.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        load_tool("zookeeper").make_certificates(directory)
        self.port = 0
        self.start()

    def start(self) -> None:
        files = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}
        keys = [f"--tls-{name}={self.directory / file}" for name, file in files.items()]
        command = [
            sys.executable,
            "-m",
            "nodepool.lab.zkserver",
            f"--tls-port={self.port}",
            f"--directory={self.directory / 'data'}",
        ]
        with open(self.directory / "zookeeper.log", "a") as log:
            self.process = subprocess.Popen(
                [*command, *keys], stdout=subprocess.PIPE, stderr=log, text=True, cwd=REPOSITORY
            )
        assert self.process.stdout is not None
        self.port = json.loads(self.process.stdout.readline())["tls_port"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def client_files(self) -> dict[str, str]:
        return {
            name: str(self.directory / file)
            for name, file in (("cert", "client.pem"), ("key", "client.key"), ("ca", "ca.pem"))
        }
