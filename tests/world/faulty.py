"""Processes that are killed and stopped, and a network whose connections break, lose answers or
stall.
"""

from __future__ import annotations

import errno
from typing import Any

from nodepool.lab.simulation.kernel import Kernel, Process
from nodepool.lab.simulation.network import Address, Network, SimulatedConnection, Socket

#: Seconds until the other side of a cut connection learns about it, if it does not send anything.
RESET_DELAY = 0.001


class FaultyKernel(Kernel):
    """A kernel that ends and stops processes."""

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: its tasks never run again, its connections break."""
        process.alive = False
        for task in [task for task in self.tasks if task.process is process]:
            del self.tasks[task]
            self._graveyard.append(task)
        self.ready = [task for task in self.ready if task.process is not process]
        process.held.clear()
        for end in list(process.at_exit):
            end()
        for task in self.tasks:
            if task.awaited is not None and task.awaited.abandoned:
                self.wake(task)
        if self.task is not None and self.task.process is process:
            self._switch_away()

    def pause(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.paused = True

    def resume(self, process: Process) -> None:
        process.paused = False
        held, process.held = process.held, []
        self.ready += held


class FaultyConnection(SimulatedConnection):
    """A connection that faults are injected into."""

    def __init__(self, network: Network, client: Process, address: Address) -> None:
        super().__init__(network, client, address)
        self.muted = False
        self._stalled: list[tuple[str, Any]] | None = None

    def _arrive(self, side: str, what: Any) -> None:
        if self._stalled is not None:
            if what is self._joined[side]:
                self._joined[side] = None
            self._stalled.append((side, what))
        elif side == "service" or not self.muted:
            super()._arrive(side, what)
        elif what is self._joined[side]:
            self._joined[side] = None

    def cut(self) -> None:
        """Break it: data under way are lost in both directions."""
        self.stall()
        kernel = self.network.kernel
        reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        kernel.call_at(kernel.now + RESET_DELAY, lambda: self.socket.end(reset))
        kernel.call_at(kernel.now + RESET_DELAY, self._service_lost)

    def mute(self) -> None:
        """Lose all answers from now on.

        The service executes requests of the client, and the client does not learn of it.
        """
        self.muted = True

    def stall(self) -> None:
        """Hold everything back."""
        self._stalled = [] if self._stalled is None else self._stalled

    def unstall(self) -> None:
        stalled, self._stalled = self._stalled or [], None
        for side, what in stalled:
            self._arrive(side, what)


class FaultyNetwork(Network):
    """A network that processes can lose."""

    connection_class = FaultyConnection

    def __init__(self, kernel: Kernel, shortest: float = 0.0002, mean: float = 0.001) -> None:
        super().__init__(kernel, shortest, mean)
        #: Processes without a network.
        self.isolated: dict[Process, None] = {}

    def isolate(self, process: Process) -> None:
        """Take a process off the network: nothing arrives, and connecting times out."""
        self.isolated[process] = None
        for connection in self.connections:
            if connection.client is process:
                connection.stall()

    def rejoin(self, process: Process) -> None:
        self.isolated.pop(process, None)
        for connection in list(self.connections):
            if connection.client is process:
                connection.unstall()

    def create_connection(
        self, address: Address, timeout: float | None = None, *_more: object, **_named: object
    ) -> Socket:
        if self.kernel.running_process in self.isolated:
            self.kernel.sleep(timeout if isinstance(timeout, (int, float)) else 60.0)
            raise TimeoutError("timed out")
        return super().create_connection(address, timeout)
