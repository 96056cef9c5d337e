"""Machines for agents: a server of the Model Context Protocol on standard input.

Its leases live as long as the server: when the agent ends, its machines are returned.
"""

from __future__ import annotations

import contextvars
import functools
import shlex
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from nodepool.client import Lease, NodepoolError, Pool

#: Characters of output, and bytes of a file, that an answer has at most; of longer output the end
#: is kept.
MOST_OUTPUT, MOST_FILE = 50_000, 1_000_000
INSTRUCTIONS = (
    "Lease machines, run commands on them, and return them. A machine is deleted when it is "
    "returned, "
    "and all are returned when this session ends."
)


@contextmanager
def _reported() -> Iterator[None]:
    """Return expected errors as text that the agent can act on."""
    try:
        yield
    except (NodepoolError, OSError, ValueError) as error:
        raise ToolError(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(
            f"The command has not ended within {error.timeout:g} s, and was stopped"
        ) from error


class _Call:
    """A call of a tool: without an answer, the agent does not know its leases."""

    def __init__(self) -> None:
        self.canceled = False
        self.leases: dict[str, Lease] = {}

    def cancel(self) -> None:
        self.canceled = True
        _return(self.leases)


#: The call that runs in a thread.
_CALL: contextvars.ContextVar[_Call] = contextvars.ContextVar("call")


def _return(leases: dict[str, Lease]) -> list[threading.Thread]:
    """Return leases, each in its own thread.

    An answer may take long, and a signal handler must not wait for what it has interrupted.
    """

    def give_back(lease: Lease) -> None:
        # Otherwise it ends on its own within two minutes.
        with suppress(NodepoolError):
            lease.give_back()

    found = [
        threading.Thread(target=give_back, args=(lease,), name=f"return-{lease.id}", daemon=True)
        for lease in list(leases.values())
    ]
    for thread in found:
        thread.start()
    return found


class Machines:
    """The tools."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # A file that is too long is noticed.
        pool.most_output = 4 * MOST_FILE
        self._leases: dict[str, Lease] = {}
        self._closed = False

    def tools(self) -> list[Callable[..., Any]]:
        return [
            self.lease,
            self.run,
            self.read_file,
            self.write_file,
            self.renew,
            self.give_back,
            self.why,
        ]

    def _of(self, lease: str) -> Lease:
        if lease not in self._leases:
            known = ", ".join(self._leases) or "none"
            raise ToolError(f"This session has no lease {lease}; it has: {known}")
        return self._leases[lease]

    def lease(self, labels: list[str], purpose: str = "", wait: str = "10m") -> dict[str, Any]:
        """Lease one machine for each label, and wait for them.

        :param labels: types of machines, such as ["noble"].
        :param wait: longest time to wait, such as 90s or 10m.
        """
        call = _CALL.get()

        def remember(lease: Lease) -> None:
            # As soon as it exists: it may still wait when the session or the call ends.
            call.leases[lease.id] = self._leases[lease.id] = lease
            if self._closed or call.canceled:
                raise ToolError("The session or the call has ended")

        found = None
        with _reported():
            try:
                found = self._pool.lease(
                    *labels, purpose=purpose or "agent", wait=wait, on_change=remember
                )
                return _described(found)
            finally:
                for each in call.leases.values():
                    if each is not found or call.canceled:
                        self._leases.pop(each.id, None)

    def run(
        self, lease: str, command: str, machine: int = 1, timeout: str = "10m"
    ) -> dict[str, Any]:
        """Run a shell command on a machine; returns status, stdout and stderr.

        :param machine: its number, from 1, if the lease has several.
        """
        with _reported():
            done = self._of(lease).run(command, node=machine - 1, timeout=timeout)
            return {
                "status": done.status,
                "stdout": _shortened(done.stdout),
                "stderr": _shortened(done.stderr),
            }

    def read_file(self, lease: str, path: str, machine: int = 1) -> str:
        """Return the text of a file on a machine."""
        with _reported():
            # One byte more shows that the file is longer.
            done = self._of(lease).run(
                f"head -c {MOST_FILE + 1} -- {_quoted(path)}", node=machine - 1, timeout="60s"
            )
            if done.status:
                raise OSError(_shortened(done.stderr))
            if len(done.stdout) > MOST_FILE:
                raise ValueError(
                    f"{path} has more than {MOST_FILE} bytes; read a part of it with run"
                )
            return done.stdout.decode("utf-8", "replace")

    def write_file(self, lease: str, path: str, text: str, machine: int = 1) -> str:
        """Write a text to a file on a machine; its directory is created."""
        with _reported():
            quoted = _quoted(path)
            command = f'mkdir -p -- "$(dirname -- {quoted})" && cat > {quoted}'
            done = self._of(lease).run(
                command, node=machine - 1, input=text.encode(), timeout="60s"
            )
            if done.status:
                raise OSError(_shortened(done.stderr))
            return f"wrote {len(text.encode())} bytes to {path}"

    def renew(self, lease: str, time: str) -> dict[str, Any]:
        """Let a lease end at least that much later than now, such as 4h."""
        with _reported():
            return _described(self._of(lease).renew(time))

    def give_back(self, lease: str) -> str:
        """Return the machines of a lease; they are deleted."""
        with _reported():
            self._of(lease).give_back()
            self._leases.pop(lease, None)  # two calls may return it
            return f"lease {lease} is returned"

    def why(self, label: str = "") -> dict[str, Any]:
        """Return what waiting leases wait for: use this when a lease takes long or fails."""
        with _reported():
            found = [lease for lease in self._pool.leases() if not label or label in lease.labels]
            return {"waiting": [_described(lease) for lease in found if lease.state != "held"]}

    def close(self) -> None:
        """End all leases, and with them the calls that wait for them or use them."""
        self._closed = True
        for thread in _return(self._leases):
            thread.join()


def _described(lease: Lease) -> dict[str, Any]:
    machines = [
        {
            "machine": number,
            "labels": node.labels,
            "address": node.address,
            "username": node.username,
        }
        for number, node in enumerate(lease.nodes, 1)
    ]
    end = None if lease.ends is None else lease.ends.isoformat()
    return {
        "lease": lease.id,
        "state": lease.state,
        "labels": lease.labels,
        "ends": end,
        "why": lease.why,
        "machines": machines,
    }


def _quoted(path: str) -> str:
    """Return the path for a shell; commands start in the home directory, which ``~/`` names."""
    return shlex.quote(path.removeprefix("~/"))


def _shortened(output: bytes) -> str:
    text = output.decode("utf-8", "replace")
    return (
        text
        if len(text) <= MOST_OUTPUT
        else f"[{len(text) - MOST_OUTPUT} characters omitted]\n{text[-MOST_OUTPUT:]}"
    )


def _in_thread(tool: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a tool that the end of the session, or of its call, does not wait for."""

    @functools.wraps(tool)
    async def run(**arguments: Any) -> Any:
        call = _Call()
        _CALL.set(call)  # the thread gets a copy of this context
        try:
            return await anyio.to_thread.run_sync(
                functools.partial(tool, **arguments), abandon_on_cancel=True
            )
        except anyio.get_cancelled_exc_class():
            call.cancel()
            raise

    return run


def serve(pool: Pool) -> None:
    """Serve until standard input ends, or a signal arrives."""
    machines = Machines(pool)
    server: MCPServer[Any] = MCPServer("nodepool", instructions=INSTRUCTIONS)
    for tool in machines.tools():
        name = "return" if tool.__name__ == "give_back" else tool.__name__
        server.add_tool(_in_thread(tool), name=name)

    def end(number: int, _frame: object) -> None:
        machines.close()
        # Not in order: a thread that reads standard input would have to end first.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup
            signal.signal(number, end)
    try:
        server.run("stdio")
    finally:
        machines.close()
