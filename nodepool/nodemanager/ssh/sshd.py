"""An SSH server in each sliver that has its own address: ``ssh: {mode: sshd}`` (NM-C.4).

The state of servers is not stored: after a restart the daemon finds them among the sliver's
processes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nodepool.nodemanager.backends.base import Backend, Handle
from nodepool.nodemanager.kernel.descriptors import held, readable
from nodepool.nodemanager.kernel.syscalls import start_time
from nodepool.nodemanager.outcomes import BackendError
from nodepool.nodemanager.rootfs.ssh_files import CONFIG_PATH
from nodepool.nodemanager.slivers.process_watch import ProcessWatch

log = logging.getLogger("nodepool.nodemanager.sshd")

PORT = 22
ARGV = ("/usr/sbin/sshd", "-D", "-e", "-f", CONFIG_PATH)
#: Seconds for a server to listen.
START_TIMEOUT = 5.0
#: Seconds between two starts in one sliver: a server that ends immediately must not keep the host
#: busy.
RESTART_INTERVAL = 5.0
CLASS_NET = Path("/sys/class/net")
#: What a server is for :class:`ProcessWatch`.
_SERVER = "The SSH server"
_LISTENING = b"Server listening on "


def _addresses(process: int | str) -> list[str]:
    """Return the IPv4 addresses, except loopback, in a process's network namespace."""
    try:
        lines = Path(f"/proc/{process}/net/fib_trie").read_text().splitlines()
    except OSError:
        return []
    found: list[str] = []
    address = None
    for line in lines:
        words = line.split()
        if words[:1] == ["|--"] and len(words) == 2:
            address = words[1]
        elif (
            words[:3] == ["/32", "host", "LOCAL"]
            and address is not None
            and not address.startswith("127.")
        ):
            found.append(address)
    return found


def bridge_networks(veth: str) -> list[ipaddress.IPv4Network]:
    """Return the networks of the interface's bridge; none if the host has no address on it."""
    try:
        bridge = (CLASS_NET / veth / "master").readlink().name
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return []
    return [
        ipaddress.IPv4Network((_address(route[1]), _address(route[7])))
        for route in routes
        if route[0] == bridge and int(route[2], 16) == 0
    ]


def _address(text: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))


def own_address(pid: int, networks: Sequence[ipaddress.IPv4Network] = ()) -> str | None:
    """Return the address of a sliver on a bridge, which the sliver gives itself.

    Users are sent to this address: one outside of the bridge's networks, or of the host itself, is
    not accepted.

    :param networks: of the bridge; none: not known.
    """
    host = set(_addresses("self")) if networks else set()
    for address in _addresses(pid):
        if not networks or (
            address not in host
            and any(ipaddress.IPv4Address(address) in network for network in networks)
        ):
            return address
    return None


def sessions_of(server: int) -> int:
    """Return the number of connections of a server, including logins: it has a child for each.

    Connection tables have the same information, but the kernel needs milliseconds per sliver to
    produce one.
    """
    try:
        return len(Path(f"/proc/{server}/task/{server}/children").read_bytes().split())
    except OSError:  # it has ended, or this kernel does not list children
        return 0


class SshServers:
    """Keeps a server running in each sliver.

    :param ended: called with the name when a server has ended; must lead to another `ensure`.
    """

    def __init__(self, backend: Backend, watch: ProcessWatch, ended: Callable[[str], Any]) -> None:
        self._backend = backend
        self._watch = watch
        self._tell = ended
        self._lock = threading.Lock()
        #: Name -> process 1 of the sliver that the server is in.
        self._running: dict[str, int] = {}
        #: Name -> the server.
        self._servers: dict[str, int] = {}
        self._started: dict[str, float] = {}

    def ensure(self, name: str, handle: Handle) -> float | None:
        """Start the server if there is none, and wait until it listens.

        Returns the seconds until the next call; None: not before an event.
        """
        first = int(handle["pid"])
        with self._lock:
            if self._running.get(name) == first:
                return None
            wait = self._started.get(name, -RESTART_INTERVAL) + RESTART_INTERVAL - time.monotonic()
            other_life = name in self._running
        pid = self._find(name, handle)
        if pid is None:
            if wait > 0 and not other_life:
                return wait
            with self._lock:
                self._started[name] = time.monotonic()
            try:
                pid = self._spawn(handle)
            except BackendError as error:
                log.error("No SSH server in sliver %s: %s", name, error)
                return RESTART_INTERVAL
        with self._lock:
            self._running[name] = first
            self._servers[name] = pid
        self._watch.add(_SERVER, name, pid, start_time(pid), self._ended)
        return None

    def sessions(self, name: str) -> int:
        """Return the connections of the sliver's server, without those that outlive it."""
        with self._lock:
            server = self._servers.get(name)
        return 0 if server is None else sessions_of(server)

    def forget(self, name: str) -> None:
        """Forget the server of a stopped sliver."""
        self._watch.remove(_SERVER, name)
        with self._lock:
            self._running.pop(name, None)
            self._servers.pop(name, None)
            self._started.pop(name, None)

    def _ended(self, name: str) -> None:
        with self._lock:
            self._running.pop(name, None)
            self._servers.pop(name, None)
        self._tell(name)

    def _spawn(self, handle: Handle) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The server may keep writing after we have closed our end: it ignores SIGPIPE.
        with held(reading):
            with held(writing):
                process = self._backend.spawn(handle, ARGV, None, None, writing).process()
            with contextlib.closing(process):
                if (said := self._listening(reading)) is not None:
                    raise BackendError(f"sshd does not listen: {said}", retry=True)
                return process.pid

    @staticmethod
    def _listening(reading: int) -> str | None:
        """Wait until the server listens; return its output instead if it does not."""
        deadline = time.monotonic() + START_TIMEOUT
        text = b""
        while _LISTENING not in text:
            if not readable([reading], deadline - time.monotonic()):
                return f"no output within {START_TIMEOUT:g} s {text[-200:]!r}"
            data = os.read(reading, 4096)
            if not data or len(text) > 65536:
                return repr(text[-200:].decode(errors="replace"))
            text += data
        return None

    def _find(self, name: str, handle: Handle) -> int | None:
        """Return a server that an earlier daemon started."""
        for pid in self._processes(name, int(handle["pid"])):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if " ".join(ARGV).encode() in line and b"[accepted]" not in line:
                    return pid
        return None

    def _processes(self, name: str, first: int) -> Iterator[int]:
        if (cgroups := self._backend.services.cgroups) is not None:
            for path in cgroups.procs_files(name)[:1]:
                with contextlib.suppress(OSError):
                    yield from (int(line) for line in Path(path).read_text().split() if line != "0")
            return
        with contextlib.suppress(OSError):
            network = os.readlink(f"/proc/{first}/ns/net")
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{entry}/ns/net") == network:
                            yield int(entry)
