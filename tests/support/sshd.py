"""A real sshd on a loopback port, for tests."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.ports import reserve

KEY_TYPES = {
    "ed25519": ["-t", "ed25519"],
    "ecdsa256": ["-t", "ecdsa", "-b", "256"],
    "ecdsa384": ["-t", "ecdsa", "-b", "384"],
    "ecdsa521": ["-t", "ecdsa", "-b", "521"],
    "rsa": ["-t", "rsa", "-b", "2048"],
}
CLIENT = "client"

_key_cache: dict[str, tuple[str, str]] = {}
_key_lock = threading.Lock()


def _make_key(kind: str) -> tuple[str, str]:
    """(private, public) key text; one of each kind per test process, as making RSA keys takes
    long.
    """
    with _key_lock:
        if kind not in _key_cache:
            with tempfile.TemporaryDirectory(prefix="sshd-key-") as folder:
                path = Path(folder, "key")
                options = KEY_TYPES.get(kind, KEY_TYPES["ed25519"])
                command = ["ssh-keygen", "-q", *options, "-N", "", "-C", kind, "-f", str(path)]
                subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
                _key_cache[kind] = path.read_text(), path.with_suffix(".pub").read_text()
        return _key_cache[kind]


@functools.cache
def version() -> tuple[int, int]:
    """Return the version of OpenSSH on this machine.

    From 9.8, sshd refuses an address for a while that has closed many connections without a login,
    as tests do.
    """
    text = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
    found = re.match(r"OpenSSH_(\d+)\.(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


class SSHServer:
    """Lets the current user log in with ``client_key``; ``stop`` removes everything again.

    ``host_keys`` is the list of ``"<type> <base64>"``; ``restart`` brings a stopped server back on
    the same port.
    """

    def __init__(
        self,
        kinds: Sequence[str] = tuple(KEY_TYPES),
        port: int | None = None,
        options: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nodepool-sshd-"))
        self.address = address
        self.port = port or reserve()
        self.client_key = self.folder / "client_key"
        self.log_file = self.folder / "log"
        self.host_keys: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        private, public = _make_key(CLIENT)
        self._write(self.client_key, private)
        self._write(self.folder / "authorized_keys", public)
        lines = [
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PrintMotd no",
            "UseDNS no",
            "MaxStartups 2000",
            "LogLevel VERBOSE",
            *(["PerSourcePenalties no"] if version() >= (9, 8) else []),
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            *options,
        ]
        for kind in kinds:
            private, public = _make_key(kind)
            self._write(self.folder / f"host_{kind}", private)
            lines.append(f"HostKey {self.folder}/host_{kind}")
            self.host_keys.append(" ".join(public.split()[:2]))
        self.config = self.folder / "sshd_config"
        self._write(self.config, "\n".join(lines) + "\n")
        try:
            self.restart()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o600)

    def restart(self) -> None:
        """Start, or start again after ``pause``."""
        # sshd wants an absolute path, and its privilege separation folder
        binary = shutil.which(
            "sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
        )
        if binary is None:
            raise RuntimeError("sshd is not installed (Debian package openssh-server)")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [binary, "-D", "-f", str(self.config), "-E", str(self.log_file)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"sshd ended: {self.log_file.read_text()}")
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.address, self.port), 2) as sock,
            ):
                if sock.recv(4) == b"SSH-":
                    return
            if time.monotonic() > deadline:
                raise RuntimeError("sshd does not answer")
            time.sleep(0.02)

    def pause(self) -> None:
        """Stop listening; the files stay."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None

    def stop(self) -> None:
        self.pause()
        shutil.rmtree(self.folder, ignore_errors=True)

    def connections(self) -> int:
        """Connections accepted so far."""
        return self.log_file.read_text().count("Connection from ")


@contextlib.contextmanager
def ssh_server(**kw: object) -> Iterator[SSHServer]:
    server = SSHServer(**kw)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()
