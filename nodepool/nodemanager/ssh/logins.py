"""Logins to slivers: by a port of the host, or by the sliver's own SSH server (NM-C.4)."""

from __future__ import annotations

from collections.abc import Callable

from nodepool.nodemanager.api.programs import Programs
from nodepool.nodemanager.backends.base import Backend, Handle
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.rootfs.ssh_files import SSHD_ARGV
from nodepool.nodemanager.slivers.process_watch import ProcessWatch
from nodepool.nodemanager.ssh import sshd
from nodepool.nodemanager.ssh.gate import Gate


class Logins:
    """Opens and closes slivers for logins, and counts the users.

    :param ended: called with the name of a sliver whose server has ended; must lead to another
        :meth:`open`.
    """

    def __init__(
        self,
        config: NodeManagerConfig,
        backend: Backend,
        watch: ProcessWatch,
        programs: Programs,
        ended: Callable[[str], None],
    ) -> None:
        self._address = config.ssh.address
        self._programs = programs
        self.gate = Gate(
            config.ssh.listen_address,
            *config.ssh.ports,
            lambda handle, connection: backend.serve(handle, SSHD_ARGV, connection),
            config.ssh.connections,
        )
        self._sshd = sshd.SshServers(backend, watch, ended) if config.ssh.mode == "sshd" else None

    def open(self, name: str, index: int, handle: Handle) -> float | None:
        """Let users in; see :meth:`SliverHost.attach` for result and errors."""
        again = None
        if self._sshd is not None and handle.get("veth"):
            again = self._sshd.ensure(name, handle)
        if self._sshd is None or not handle.get("address"):
            self.gate.open(name, index, handle)
        return again

    def close(self, name: str) -> None:
        """Accept no more logins; return when the port is free for another sliver."""
        if self._sshd is not None:
            self._sshd.forget(name)
        self.gate.close(name)

    def place(self, handle: Handle, index: int | None) -> tuple[str, int, bool]:
        """Return address and port for logins, and whether they are the sliver's own."""
        if self._sshd is not None and handle.get("veth"):
            address = handle.get("address") or sshd.own_address(
                int(handle["pid"]), sshd.bridge_networks(str(handle["veth"]["veth"]))
            )
            if address:
                return str(address), sshd.PORT, True
        return self._address, self.gate.port(index) if index else 0, False

    def sessions(self, name: str) -> int:
        """Return the number of logins and of programs of callers."""
        return (
            self.gate.sessions(name)
            + self._programs.sessions(name)
            + (0 if self._sshd is None else self._sshd.sessions(name))
        )
