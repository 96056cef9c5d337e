"""Runs the node manager on a machine that a launcher uses for a while (NM-C.8).

This is the remote end of ``backing-label``.
A launcher logs in by SSH, stores the node manager as one zip file, and runs this module from it.
Input and output are one JSON object per line. Everything is below one directory; each daemon has
its own directory (*place*), deleted with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from nodepool.base.files import lock_file, replace_file
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault
from nodepool.nodemanager.kernel.descriptors import held, readable
from nodepool.nodemanager.pushed import service
from nodepool.process import background

#: Prefix of each line for the launcher: shells may print other lines.
MARK = "nodepool:"
#: Seconds.
LOCK_TIMEOUT, ANSWER_TIMEOUT, CLEAR_TIMEOUT, STOP_TIMEOUT = 120.0, 30.0, 60.0, 20.0
#: Seconds without a heartbeat after which the connection counts as broken; launchers send one every
#: 20 s.
SILENCE = 90.0
#: Seconds until a daemon that has ended is restarted: initially, and maximum.
RESTART_WAIT, RESTART_WAIT_MAX = 1.0, 30.0


class PushError(Exception):
    """The daemon cannot be run here; the text contains the reason."""


class Busy(Exception):
    """The daemon still has slivers; the text has their names."""


def report(**message: object) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


class Place:
    """The directory of one daemon, which one process at a time changes."""

    def __init__(self, base: Path, name: str) -> None:
        self.base = base
        self.name = name
        self.directory = base / name
        self.socket = self.directory / "run" / "nodemanager.api"
        self.pid_file = self.directory / "pid"
        self.contact_file = self.directory / "contact"
        self.client = Client(f"unix:{self.socket}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the place. Raises PushError: another process keeps it for too long."""
        # Next to the directory, which may be deleted meanwhile.
        with open(self.base / f".{self.name}.lock", "w") as file:
            try:
                lock_file(file.fileno(), LOCK_TIMEOUT)
            except BlockingIOError:
                raise PushError(
                    f"another launcher has locked {self.directory} for more than {LOCK_TIMEOUT:g} s"
                ) from None
            yield

    # -- state

    def pid(self) -> int | None:
        """Return the daemon's process id while it runs."""
        try:
            with open(self.pid_file) as file:
                try:
                    lock_file(file.fileno(), shared=True)
                except BlockingIOError:
                    text = file.read().strip()
                    return int(text) if text.isdecimal() else None
        except FileNotFoundError:
            pass
        return None

    def answers(self, timeout: float) -> bool:
        """Return whether the daemon answers within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while True:
            try:
                self.client.call("GetCapacity", timeout=5)
                return True
            except (RpcError, RpcFault):
                if time.monotonic() > deadline or self.pid() is None:
                    return False
            pause.wait(0.05)

    def read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str, mode: int = 0o600) -> None:
        replace_file(str(self.directory / name), text, mode, sync=False)

    def touch(self) -> None:
        """Record that the launcher was connected just now."""
        with contextlib.suppress(OSError):
            self.contact_file.touch(0o600)

    # -- actions; locked

    def ensure(self, job: dict[str, Any], code: str) -> None:
        """Ensure that the daemon of this owner runs from this zip file with these options.

        :raises PushError: it cannot be started.
        """
        since = float(job.get("since") or 0)
        if self.directory.exists() and self.read("owner") != job["owner"]:
            if since < float(self.read("since") or 0):
                # A launcher that does not know of its loss must not take the machine from its new
                # owner.
                raise PushError(f"the machine belongs to backing node {self.read('owner')} now")
            self.clear()  # of an earlier launcher that ended without cleaning up
        self.directory.mkdir(mode=0o711, exist_ok=True)
        self.write("since", str(since))
        self.write("owner", job["owner"])
        self.touch()
        text = yaml.safe_dump(self._options(job))
        running = self.pid() is not None
        if (
            running
            and self.read("code") == code
            and self.read("nodemanager.yaml") == text
            and self.answers(ANSWER_TIMEOUT)
        ):
            return
        if running:
            self.stop()
        self.write("nodemanager.yaml", text)
        self.write(
            "logging.yaml", yaml.safe_dump(service.logging_config(str(self.directory / "log")))
        )
        self.write("idle", str(job.get("idle") or 0))
        self.write("code", code)
        self.start(code)

    def _options(self, job: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {**(job.get("config") or {})}
        # A cloud's machine does not always know its external address.
        address = str(job["address"])
        ssh = {
            "address": address,
            "listen-address": service.listen_address(address),
            **(options.get("ssh") or {}),
        }
        api: dict[str, Any] = {"tcp": False}
        login = os.environ.get("SUDO_UID", "")
        if os.geteuid() == 0 and login.isdecimal() and login != "0":
            # The SSH server connects to our socket as the login user; that account is equal to root
            # already.
            api["controller-uids"] = [int(login)]
        return {
            **options,
            "ssh": ssh,
            "api": api,
            "host-name": job["owner"],
            "state-dir": str(self.directory / "state"),
            "run-dir": str(self.directory / "run"),
        }

    def start(self, code: str) -> None:
        """Start the daemon. Raises PushError."""
        try:
            service.start(self.name, self.directory, code)
        except service.ServiceError as error:
            raise PushError(str(error)) from None
        if not self.answers(ANSWER_TIMEOUT):
            raise PushError(
                "the node manager does not answer; the end of its log: "
                f"{self.read('log')[-600:].strip()}"
            )

    def stop(self) -> None:
        """End the daemon; slivers live on.

        :raises PushError: it does not stop.
        """
        service.stop(self.name)
        pid = self.pid()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            with held(os.pidfd_open(pid)) as process:
                if self.pid() != pid:
                    return
                for number in (signal.SIGTERM, signal.SIGKILL):
                    signal.pidfd_send_signal(process, number)
                    if readable([process], STOP_TIMEOUT):
                        return
            raise PushError(f"process {pid} of the node manager does not end")

    def slivers(self) -> list[str]:
        """Return the slivers. Raises PushError: the daemon does not answer."""
        try:
            return [str(s["name"]) for s in self.client.call("ListSlivers")]
        except (RpcError, RpcFault) as error:
            raise PushError(str(error)) from None

    def clear(self, force: bool = True) -> None:
        """Remove slivers, daemon and directory.

        :raises Busy: there are slivers that must not be deleted.
        :raises PushError: something cannot be removed.
        """
        if not self.directory.exists():
            return
        if self.pid() is None and self.read("code") and (self.directory / "state").exists():
            # The daemon has the authoritative list of its slivers.
            self.start(self.read("code"))
        if self.pid() is not None:
            names = self.slivers()
            if names and not force:
                raise Busy(", ".join(names))
            try:
                for name in names:
                    self.client.call("DeleteSliver", name)
                for name in names:
                    self.client.call(
                        "WaitSliver", name, "gone", CLEAR_TIMEOUT, timeout=CLEAR_TIMEOUT + 5
                    )
            except (RpcError, RpcFault) as error:
                raise PushError(f"slivers of the last user cannot be removed: {error}") from None
            self.stop()
        try:
            service.remove_tree(self.directory)
        except OSError as error:
            raise PushError(f"{self.directory} cannot be removed: {error}") from None

    def remove_shared(self) -> None:
        """Remove the shared files if this was the last daemon here."""
        with contextlib.suppress(OSError), open(self.base / ".lock", "w") as file:
            # Shared by all processes at work here, including this one, which may make its own lock
            # exclusive.
            inherited = os.environ.get(service.LOCK_VARIABLE, "")
            lock_file(int(inherited) if inherited.isdecimal() else file.fileno())
            if not [
                entry
                for entry in os.listdir(self.base)
                if not entry.startswith(".") and entry != "code"
            ]:
                service.remove_tree(self.base)


def hold(place: Place, job: dict[str, Any], code: str) -> None:
    """Keep the daemon running until the launcher closes the connection."""
    pause = RESTART_WAIT
    again = False
    while True:
        with place.locked():
            # Two launchers may have different releases: the last one to start the daemon wins, or
            # they would restart it forever.
            if not (
                again
                and place.pid() is not None
                and place.read("owner") == job["owner"]
                and place.answers(ANSWER_TIMEOUT)
            ):
                place.ensure(job, code)
            pid = place.pid()
        again = True
        if pid is None:
            raise PushError("the node manager has ended")
        report(state="ready", socket=str(place.socket), root=os.geteuid() == 0)
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            process = -1
        try:
            started = time.monotonic()
            while process >= 0:
                place.touch()
                found = readable([0, process], SILENCE)
                if not found or (0 in found and not os.read(0, 4096)):
                    return
                if process in found:
                    break
        finally:
            if process >= 0:
                os.close(process)
        report(state="ended")
        pause = (
            RESTART_WAIT if time.monotonic() - started > 60 else min(2 * pause, RESTART_WAIT_MAX)
        )
        if readable([0], pause) and not os.read(0, 4096):
            return


def serve(argv: list[str]) -> int:
    """Run the daemon; exit for good after the ``idle`` time without slivers and launchers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    place = Place(directory.parent, directory.name)
    lonely, status = service.run(directory, lambda: not place.slivers())
    if lonely:
        with contextlib.suppress(PushError, OSError), place.locked():
            if place.pid() is None:  # else a launcher came back in the last moment
                service.remove_tree(place.directory)
                place.remove_shared()
                service.forget(place.name)
    return status


def main() -> int:
    """Do what the first line of standard input says."""
    if len(sys.argv) > 1:
        return serve(sys.argv[1:])
    os.umask(0o022)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with open(os.dup(0), "rb", 0) as stream:  # raw: what follows is for others
        job = json.loads(stream.readline())
    code = os.environ["PYTHONPATH"]
    place = Place(Path(code).parent.parent, job["place"])
    try:
        if job["action"] == "hold":
            hold(place, job, code)
        else:
            with place.locked():
                if place.read("owner") in ("", job["owner"]):
                    place.clear(force=False)
                    service.forget(place.name)
                place.remove_shared()
            report(state="removed")
    except Busy as busy:
        report(state="busy", text=str(busy))
    except (PushError, background.PidFileError, OSError) as error:
        report(state="failed", text=str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
