"""Stand-ins for the servers from which elements of images download programs."""

from __future__ import annotations

import hashlib
import io
import pathlib
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

SCRIPT = b"#!/bin/sh\necho it works\n"
#: Programs of the archive of GitHub's runner.
GITHUB = ("./bin/Runner.Listener", "./bin/installdependencies.sh", "./run.sh")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Mirror:
    """A server with made-up programs."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, name="mirror")
        self.thread.start()

    def put(self, path: str, content: bytes) -> str:
        """Serve a file; return its checksum."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


def archive(*names: str, script: bytes = SCRIPT) -> bytes:
    """Return an archive in which each of these programs is the script.

    They belong to somebody else, as those of releases do.
    """
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uid, info.gid = len(script), 0o755, 1001, 127
            made.addfile(info, io.BytesIO(script))
    return data.getvalue()
