"""What the host attaches to each sliver: logins, the API, and watches (NM-C.7)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nodepool.nodemanager.api.server import Servers
from nodepool.nodemanager.backends.base import Handle
from nodepool.nodemanager.host import Host
from nodepool.nodemanager.limits.free_space import FreeSpace
from nodepool.nodemanager.limits.netlink import NetlinkLimit
from nodepool.nodemanager.slivers.process_watch import ProcessWatch
from nodepool.nodemanager.slivers.reconciler import SliverHost
from nodepool.nodemanager.slivers.slivers import Slivers
from nodepool.nodemanager.ssh.logins import Logins

#: What process 1 of a sliver is for :class:`ProcessWatch`.
FIRST = "The first process"


@dataclass(eq=False)
class Attachments(SliverHost):
    """Connects slivers with the services of this host."""

    host: Host
    free_space: FreeSpace
    slivers: Slivers
    logins: Logins
    watch: ProcessWatch
    netlink: NetlinkLimit | None
    servers: Servers
    #: Sequential: the work on slivers does not wait for the API inside one.
    _listening: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="Thread-nm-listen"),
        init=False,
    )

    def start(self) -> None:
        """Start the threads."""
        # Now: it is then available whatever happens to the host.
        self._listening.submit(lambda: None)
        self.logins.gate.start()
        self.watch.start()
        if self.netlink is not None:
            self.netlink.start()

    def stop(self) -> None:
        """Stop the threads; sessions of users continue."""
        self._listening.shutdown(wait=True, cancel_futures=True)
        self.watch.stop()
        if self.netlink is not None:
            self.netlink.stop()
        self.logins.gate.stop()

    def _listen(self, name: str, handle: Handle | None) -> None:
        with contextlib.suppress(RuntimeError):  # stopping
            self._listening.submit(self.servers.sliver_changed, name, handle)

    # -- called by the reconciler

    def admit(
        self, name: str, rspec: Mapping[str, int], others: Mapping[str, Mapping[str, int]]
    ) -> None:
        self.host.admit(name, rspec, others)

    def usable(self, number: int) -> bool:
        return self.logins.gate.free(number)

    def api_socket(self, name: str, number: int) -> str | None:
        return self.servers.open_socket(name, number)

    def attach(self, name: str, handle: Handle) -> float | None:
        pid = int(handle["pid"])
        self.watch.add(FIRST, name, pid, handle.get("start_time"), self.slivers.check_soon)
        if self.netlink is not None:
            self.netlink.add(name, pid)
        again = self.logins.open(name, int(handle["index"]), handle)
        self._listen(name, handle)
        return again

    def detach(self, name: str) -> None:
        self.watch.remove(FIRST, name)
        if self.netlink is not None:
            self.netlink.remove(name)
        self.host.device_removed(name)
        self.logins.close(name)
        self.servers.cut_off(name)
        self._listen(name, None)

    def status_changed(self, name: str) -> None:
        self.servers.connections.recheck_now(name)

    def freed(self, name: str) -> None:
        self.servers.close_socket(name)
        self.free_space.keep()
