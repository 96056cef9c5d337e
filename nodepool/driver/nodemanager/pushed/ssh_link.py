"""SSH connection to a backing node: pushes the node manager and forwards its API (NM-C.8).

It uses OpenSSH's client: its multiplexing forwards the Unix socket of the API to a directory that
only we can read, so that the API of the other machine is accessible only to users who may log in
there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nodepool.base.backoff import Backoff
from nodepool.driver.nodemanager.pushed import zipapp
from nodepool.driver.nodemanager.pushed.target import Target
from nodepool.ssh import OPTIONS, quoted

MARK = "nodepool:"
#: Seconds for the push, and the start of the daemon (or, before, the removal of the last user's
#: remains).
PUSH_TIMEOUT, START_TIMEOUT = 120.0, 240.0
REMOVE_TIMEOUT, FORWARD_TIMEOUT, CLOSE_TIMEOUT = 120.0, 10.0, 5.0
#: Seconds between two attempts.
RETRY = Backoff(0.5, 15.0)
#: Seconds between two heartbeats: without them the other end considers the connection broken.
BEAT = 20.0
#: Maximum bytes of one line from the other end, and the bytes that are kept of its errors.
MAX_LINE, MAX_ERRORS = 1 << 16, 4096


class LinkError(Exception):
    """The machine cannot be used; the text has its name and the reason."""


class LinkBusy(Exception):
    """The machine still has slivers; the text has their names."""


def remote_command(python: str) -> str:
    """Return the remote shell command: the loader, as root if that needs no password."""
    # Raw: the bytes after the loader are for the loader.
    begin = (
        'import os;f=os.fdopen(os.dup(0),"rb",0);n=int(f.readline());d=b""\n'
        "while len(d)<n:d+=f.read(n-len(d)) or exit(1)\nexec(d)"
    )
    run = f"exec {{}}{shlex.quote(python)} -I -c {shlex.quote(begin)}"
    script = (
        f'if [ "$(id -u)" = 0 ] || ! sudo -n true >/dev/null 2>&1; then {run.format("")}; '
        f"else {run.format('sudo -n ')}; fi"
    )
    return f"exec sh -c {shlex.quote(script)}"


class Session:
    """One run of the SSH client."""

    def __init__(self, target: Target, directory: Path) -> None:
        self._target = target
        self._errors = b""
        self._buffer = b""
        self._beating = False
        self.control = directory / f"{target.owner}.ctl"
        known = directory / f"{target.owner}.keys"
        alias = f"backing-{target.owner}"
        known.write_text("".join(f"{alias} {key}\n" for key in target.host_keys))
        self.control.unlink(missing_ok=True)
        options = {
            **OPTIONS,
            "BatchMode": "yes",
            "HostKeyAlias": alias,
            "UserKnownHostsFile": quoted(str(known)),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "PreferredAuthentications": "publickey",
            "ControlMaster": "yes",
            "ControlPath": quoted(str(self.control)),
            "StreamLocalBindMask": "0177",
            "StreamLocalBindUnlink": "yes",
            "LogLevel": "ERROR",
            "User": target.username,
        }
        argv = ["ssh", "-F", "none", "-T", "-i", target.key_file, "-p", str(target.port)]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        try:
            self._process = subprocess.Popen(
                [*argv, "--", target.address, remote_command(target.python)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
            )
        except OSError as error:
            raise LinkError(
                f"ssh cannot be run: {error.strerror}; is the OpenSSH client installed here?"
            ) from None
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        self._stdin, self._stdout, self._stderr = (
            stream.fileno() for stream in streams if stream is not None
        )
        # They are read when something has arrived; what is written may not fit.
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stderr, False)

    def push(self, job: dict[str, Any]) -> None:
        """Give the job to the node manager there, which is stored first where needed.

        :raises LinkError: it cannot be done.
        """
        code = zipapp.build()
        loader = zipapp.LOADER.encode()
        head = json.dumps(
            {"sha256": code.digest, "size": len(code.content), "base": self._target.base}
        ).encode()
        deadline = time.monotonic() + PUSH_TIMEOUT
        self._send(b"%d\n%s%s\n" % (len(loader), loader, head), deadline)
        answer = self.read(deadline)
        if answer["state"] not in ("send", "have"):
            raise LinkError(f"unexpected answer {answer}")
        self._send(
            (code.content if answer["state"] == "send" else b"") + json.dumps(job).encode() + b"\n",
            deadline,
        )
        self._beating = True

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view[: 1 << 16]) :]
            except OSError:
                raise LinkError(self._reason()) from None

    def read(self, deadline: float | None) -> dict[str, Any]:
        """Return the next message of the other end.

        :param deadline: None: the connection is to last, and its end is an error, too.
        :raises LinkError: the connection ends, or the other end cannot continue.
        """
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                text = line.decode(errors="replace").strip()
                if not text.startswith(MARK):
                    continue  # of a login shell
                message: dict[str, Any] = json.loads(text.removeprefix(MARK))
                if message.get("state") == "failed":
                    raise LinkError(str(message.get("text")))
                return message
            if len(self._buffer) > MAX_LINE:
                raise LinkError("the other end does not answer like a node manager")
            self._wait(self._stdout, select.POLLIN, deadline)
            data = os.read(self._stdout, 65536)
            if not data:
                raise LinkError(self._reason())
            self._buffer += data

    def _wait(self, descriptor: int, event: int, deadline: float | None) -> None:
        """Wait for a descriptor, with heartbeats; keep what the SSH client complains about."""
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._stderr, select.POLLIN)
        while True:
            left = BEAT if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise LinkError("no answer in time")
            ready = {number for number, _ in poll.poll(min(left, BEAT) * 1000)}
            if not ready and self._beating:
                with contextlib.suppress(OSError):
                    os.write(self._stdin, b"\n")
            if self._stderr in ready and not self._collect():
                poll.unregister(self._stderr)
            if descriptor in ready:
                return

    def _collect(self) -> bool:
        """Read errors; False when there are no more."""
        try:
            data = os.read(self._stderr, 65536)
        except BlockingIOError:
            return False
        self._errors = (self._errors + data)[-MAX_ERRORS:]
        return bool(data)

    def _reason(self) -> str:
        """Return why the connection has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT)
        while self._collect() and self._process.poll() is not None:
            continue
        return (
            self._errors.decode(errors="replace").strip()
            or f"the connection has ended (status {self._process.poll()})"
        )

    def forward(self, local: Path, remote: str) -> None:
        """Forward a Unix socket of the other machine to a local path.

        :raises LinkError: the forwarding failed.
        """
        local.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                [
                    "ssh",
                    "-F",
                    "none",
                    "-o",
                    f"ControlPath={quoted(str(self.control))}",
                    "-O",
                    "forward",
                    "-L",
                    f"{local}:{remote}",
                    "--",
                    "x",
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=FORWARD_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LinkError(f"the API cannot be forwarded: {error}") from None
        if done.returncode != 0:
            raise LinkError(f"the API cannot be forwarded: {done.stderr.strip()}")

    def interrupt(self) -> None:
        """End the SSH client, from any thread: the thread that reads or writes gets a LinkError."""
        self._process.terminate()

    def close(self) -> None:
        """Close the connection; the daemon there keeps running."""
        with self._process as process:  # closes its streams in the end
            assert process.stdin is not None
            process.stdin.close()
            for seconds, end in ((1.0, process.terminate), (CLOSE_TIMEOUT, process.kill)):
                try:
                    process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    end()
        self.control.unlink(missing_ok=True)


class Link:
    """Keeps the connection to one backing node's node manager, on its own thread.

    :param changed: called with True when the API can be reached, with False after each failure; on
        that thread.
    """

    def __init__(
        self, target: Target, directory: Path, log: logging.Logger, changed: Callable[[bool], Any]
    ) -> None:
        self.target = target
        self.socket = directory / f"{target.owner}.api"
        self._directory = directory
        self._log = log
        self._changed = changed
        #: Why it cannot be used; empty when it can.
        self.problem = "it has not been reached yet"
        #: Since when it cannot be used (monotonic); None: it can.
        self.down_since: float | None = time.monotonic()
        self._session: Session | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"Thread-nm-link-{target.owner}", daemon=True
        )

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the connection; ``join`` waits for that."""
        self._stopped.set()
        if self._session is not None:
            self._session.interrupt()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(2 * CLOSE_TIMEOUT + FORWARD_TIMEOUT)

    def down_for(self) -> float:
        """Return the seconds without connection."""
        since = self.down_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopped.is_set():
                try:
                    self._keep()
                except LinkError as error:
                    self._failed(str(error))
                except Exception as error:
                    self._log.exception("Error about backing node %s:", self.target.owner)
                    self._failed(repr(error))
                failures = failures + 1 if self.down_for() >= 1 else 1
                self._stopped.wait(RETRY.pause(failures))
        finally:
            self.socket.unlink(missing_ok=True)
            (self._directory / f"{self.target.owner}.keys").unlink(missing_ok=True)

    def _failed(self, text: str) -> None:
        if self._stopped.is_set():
            return
        where = f"{self.target.username}@{self.target.address}:{self.target.port}"
        if text != self.problem:
            self._log.warning(
                "Backing node %s (%s) cannot be used: %s", self.target.owner, where, text
            )
        self.problem = text
        self.down_since = self.down_since or time.monotonic()
        self._changed(False)

    def _keep(self) -> None:
        """Connect, and return only by an error."""
        if self.target.unfit:
            raise LinkError(self.target.unfit)
        session = self._session = Session(self.target, self._directory)
        if self._stopped.is_set():
            session.interrupt()  # the session was not known yet
        try:
            session.push(self.target.job("hold"))
            deadline: float | None = time.monotonic() + START_TIMEOUT
            forwarded = False
            while True:
                message = session.read(deadline)
                if message["state"] == "ready":
                    if not forwarded:  # a restarted daemon has its socket at the same path
                        session.forward(self.socket, str(message["socket"]))
                        forwarded = True
                    deadline = None
                    self.problem = ""
                    self.down_since = None
                    self._changed(True)
                elif message["state"] == "ended":
                    deadline = time.monotonic() + START_TIMEOUT
                    self._failed("the node manager has ended; restarting it")
        finally:
            session.close()

    def remove(self) -> None:
        """Remove the node manager from the machine; after ``stop``.

        :raises LinkBusy: there are slivers.
        :raises LinkError: it cannot be reached or removed.
        """
        session = Session(self.target, self._directory)
        try:
            session.push(self.target.job("remove"))
            message = session.read(time.monotonic() + REMOVE_TIMEOUT)
        finally:
            session.close()
            (self._directory / f"{self.target.owner}.keys").unlink(missing_ok=True)
        if message["state"] == "busy":
            raise LinkBusy(str(message.get("text")))
