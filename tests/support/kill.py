"""Daemons that the fault proxy kills around calls to a cloud: before the call reaches it, or
when it is done and nobody knows.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from tests import REPOSITORY
from tests.support.fault_proxy import Action, Forward, Reply, Request

#: Seconds that a killed daemon may take to be started again.
RESTART = 60.0


class Revived:
    """A program that is started again whenever it was killed."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self.process = self._run()
        self.lives = 1

    def _run(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def kill(self) -> int:
        """The number of the life that has ended."""
        with self._changed:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
            return self.lives

    def again(self) -> None:
        with self._changed:
            if self.process.poll() is not None and not self._closed:
                self.process = self._run()
                self.lives += 1
                self._changed.notify_all()

    def wait_again(self, life: int) -> None:
        """Until the one after that life runs."""
        with self._changed:
            self._changed.wait_for(lambda: self.lives > life or self._closed, RESTART)

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


class Daemon(Revived):
    """One of the programs in tests/support/faults."""

    def __init__(self, tmp: pathlib.Path, script: str, config: str, **environment: str) -> None:
        self.log = tmp / "daemon.log"
        faults = REPOSITORY / "tests" / "support" / "faults"
        self._command = [
            sys.executable,
            str(faults / script),
            "-f",
            "-c",
            config,
            "-p",
            str(tmp / "daemon.pid"),
        ]
        if script == "serve.py":
            # Its port may be in use by whatever else runs on the machine, then the launcher ends.
            self._command.append("--no-webapp")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "NODEPOOL_FAULT_DRIVERS": str(faults / "drivers"),
            **environment,
        }
        super().__init__()

    def _run(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as out:
            return subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._environment, cwd="/"
            )


def killing(daemon: Sequence[Revived], when: str) -> Action:
    """Kill ``before`` the call reaches the cloud, ``after`` the cloud did it, or let it arrive
    ``late``: when the next life runs.

    :param daemon: has one item by the time the call comes.
    """

    def act(request: Request, forward: Forward) -> Reply | None:
        if when == "after":
            forward(request)
        life = daemon[0].kill()
        if when == "late":
            daemon[0].wait_again(life)
            forward(request)
        return None

    return act
