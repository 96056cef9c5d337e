"""Process 1 of a sliver, for all backends: waits for its tree, then sleeps and reaps."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool.nodemanager.helper import inside
from nodepool.nodemanager.helper.frames import receive_frame, send_frame
from nodepool.nodemanager.helper.operations import finish, join_cgroups, run_child
from nodepool.nodemanager.kernel import syscalls

INIT = ("sleep", "infinity")
_FAILURE = "process 1 cannot start"


@dataclass
class First:
    """A started process 1, as seen by the worker that creates the sliver."""

    pid: int
    pidfd: int
    gate: socket.socket
    outcome: int
    """Read end of the pipe on which it reports failures."""

    def join(self, cgroups: Mapping[str, int]) -> None:
        """Let it join its cgroups; closes their files, which root of the host has opened."""
        with contextlib.suppress(BrokenPipeError):
            send_frame(self.gate, {"paths": list(cgroups)}, list(cgroups.values()))
        for descriptor in cgroups.values():
            os.close(descriptor)

    def failed(self) -> None:
        """Raise StepError if process 1 has already reported a failure."""
        poller = select.poll()
        poller.register(self.outcome, select.POLLIN)
        if poller.poll(0):
            finish(self.outcome, self.pid, _FAILURE)

    def go(self) -> None:
        """Release process 1 and wait until it sleeps. Raises StepError with its failure."""
        with contextlib.suppress(BrokenPipeError), self.gate:
            send_frame(self.gate, {})
        finish(self.outcome, self.pid, _FAILURE)


def begin(
    flags: int,
    request: Mapping[str, Any],
    before: Callable[[], None],
    after: Callable[[], None],
    environment: Mapping[str, str] | None = None,
) -> First:
    """Clone a process 1 that runs `before`, joins its cgroups, runs `after` and sleeps.

    `after` runs when the gate is opened; process 1 ends when the gate is closed. Raises OSError.
    """
    gate, gate_inside = socket.socketpair()
    outcome, outcome_write = os.pipe2(os.O_CLOEXEC)

    def life(pipe: int) -> None:
        before()
        # Moving between cgroups may wait for all processors of the host, up to 15 ms; meanwhile the
        # tree is built.
        message, opened = _wait(gate_inside)
        join_cgroups(dict(zip(message["paths"], opened, strict=True)))
        _wait(gate_inside)
        gate_inside.close()
        after()
        null = os.open("/dev/null", os.O_RDWR)
        for target in range(3):
            os.dup2(null, target)
        syscalls.close_from(3, (pipe,))
        inside.reset_signals(ignore_children=True)
        inside.confine(request["privileges"])
        inside.execute(INIT, {"PATH": inside.PATH, **(environment or {})})

    try:
        pid, pidfd = syscalls.clone(flags)
    except OSError:
        gate.close()
        gate_inside.close()
        os.close(outcome)
        os.close(outcome_write)
        raise
    if pid == 0:
        gate.close()
        for descriptor in (*request["keep"], outcome):
            os.close(descriptor)
        run_child(life, outcome_write)
    gate_inside.close()
    os.close(outcome_write)
    return First(pid, pidfd, gate, outcome)


def _wait(gate: socket.socket) -> tuple[dict[str, Any], list[int]]:
    frame = receive_frame(gate)
    if frame is None:
        os._exit(1)  # the worker failed or was killed
    return frame


def settle(request: Mapping[str, Any]) -> None:
    """Set name, loopback and files of the sliver, by its process 1. Raises OSError."""
    os.setsid()
    socket.sethostname(request["hostname"])
    syscalls.loopback_up()
    inside.furnish(request)


@contextlib.contextmanager
def held_namespaces(flags: int) -> Iterator[int]:
    """Yield the pid of a process that holds new namespaces during the block. Raises OSError."""
    hold, release = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = syscalls.clone(flags)
    if pid == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    try:
        yield pid
    finally:
        os.close(release)
        os.waitpid(pid, 0)
        os.close(pidfd)
