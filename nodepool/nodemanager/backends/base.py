"""Interface between the node manager and its backends of slivers (NM-C.2)."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodepool.nodemanager.client.privileges import PRIVILEGES
from nodepool.nodemanager.outcomes import BackendError as BackendError
from nodepool.nodemanager.outcomes import Exit as Exit
from nodepool.nodemanager.outcomes import Problem as Problem
from nodepool.nodemanager.rootfs.ssh_files import SSHD_ARGV

if TYPE_CHECKING:  # of the services, a backend without root uses the helper only
    from nodepool.nodemanager.helper.zygote import Pending, Zygote
    from nodepool.nodemanager.limits.cgroups import Cgroups
    from nodepool.nodemanager.limits.disks import Disks
    from nodepool.nodemanager.network.veth import Network

Handle = dict[str, Any]
"""JSON-able; kept in the database: backend, name, index, pid, start_time, boot_id, cgroups, veth
(dict: veth, address, gateway), address, template, host_key, privileges, resolv_conf. Without pid it
is stopped.
"""

DEFAULT_ID_BASE = 2_000_000
IDS_PER_SLIVER = 65536


def missing_ssh_server() -> list[Problem]:
    """Return how to enable logins to slivers of image ``host``, which use this host's sshd."""
    if os.path.exists(SSHD_ARGV[0]):
        return []
    return [
        Problem(
            "sshd",
            False,
            "install openssh-server; without it, logins to slivers of image host are impossible",
        )
    ]


@dataclass(frozen=True)
class SliverSpec:
    """Everything that a backend needs to know about a sliver."""

    name: str
    index: int
    image: str
    """"host", "dir:/path", "tar:/path", "image:<name>" (uploaded: <state>/images/<name>.tar),
    "oci:<reference>" (podman).
    """
    rspec: Mapping[str, Any]
    """After defaults and loans."""
    ssh_keys: str | None = ""
    """Newline-joined public keys for `username` and root. None: keep the existing keys and the
    size of the disk.
    """
    initscript: bytes | None = None
    network: str = "none"
    """"none", "nat" or "bridge:<interface>"."""
    username: str = "root"
    hostname: str = ""
    api_socket: str | None = None
    """Path on the host. A directory is mounted at /run/nodepool inside: the socket of the next
    daemon is then visible immediately. A socket is mounted at /run/nodepool/nodemanager.api and
    goes stale when it is replaced.
    """
    privileges: tuple[str, ...] = ()
    """Names, see :mod:`nodepool.nodemanager.client.privileges`."""


@dataclass
class Services:
    """Services of the daemon for its backends."""

    zygote: Zygote
    cgroups: Cgroups | None = None
    """None: no limits by cgroup (ordinary user)."""
    disks: Disks | None = None
    """None: a plain directory, without quota."""
    net: Network | None = None
    """None: only network "none"."""
    id_base: int = DEFAULT_ID_BASE
    free_space: Callable[[], int] = lambda: sys.maxsize
    """Bytes of the disk that are not promised to slivers."""


class Backend(ABC):
    """Creates and controls slivers. Calls for one name are sequential, others run in parallel."""

    name: str
    default_username: str = "root"
    """Login user of records without one."""
    shares_socket: bool = True
    """Whether the kernel can distinguish callers inside from the daemon's own user: required for
    sharing its Unix socket.
    """

    #: Privileges that a label may ask for here.
    privileges: frozenset[str] = frozenset(PRIVILEGES) - {"systemd"}
    #: Whether the counters outlive the last process.
    counts_to_the_end: bool = True

    @property
    def freezes(self) -> bool:
        """Whether `freeze` works; otherwise disabled slivers are stopped."""
        return True

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        self.state_dir = Path(state_dir)
        self.services = services

    @abstractmethod
    def check(self) -> list[Problem]:
        """Return what this host lacks; empty when nothing is missing."""

    @abstractmethod
    def create(self, spec: SliverSpec) -> Handle:
        """Create root tree, disk, namespaces, cgroup and process 1. Idempotent. BackendError."""

    @abstractmethod
    def configure(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Apply changed keys, init script or limits immediately, without a restart."""

    def refresh(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Apply what has changed on the host since the sliver was started; nothing else."""
        return handle

    @abstractmethod
    def stop(self, spec: SliverSpec, handle: Handle) -> Handle:
        """End all processes; keep the tree."""

    @abstractmethod
    def start(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Start process 1 and run the init script again."""

    @abstractmethod
    def freeze(self, spec: SliverSpec, handle: Handle, frozen: bool) -> None:
        """Freeze the sliver: nm_enabled is 0."""

    @abstractmethod
    def adopt(self, spec: SliverSpec, handle: Handle) -> bool:
        """Return whether it is alive after a daemon restart (process, start time, id range)."""

    @abstractmethod
    def end(self, name: str, index: int, handle: Handle | None) -> None:
        """End all processes before the sliver is removed. Idempotent. Raises BackendError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove the sliver, whose processes have ended, in the order of C.7.

        Idempotent; continues after a crash.
        """

    def destroy(self, name: str, index: int, handle: Handle | None) -> None:
        self.end(name, index, handle)
        self.remove(name)

    @abstractmethod
    def usage(self, name: str, handle: Handle) -> dict[str, int]:
        """Return what :meth:`.Cgroups.usage` does, with disk_bytes and net_*_bytes, if known."""

    @abstractmethod
    def spawn(
        self,
        handle: Handle,
        argv: Sequence[str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        env: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> Pending:
        """Start a process inside all namespaces and the cgroup, as the leader of a session.

        Its streams are pipes, or None for the sliver's own /dev/null: nothing else of the host may
        be open inside. Raises BackendError.
        """

    @abstractmethod
    def serve(self, handle: Handle, argv: Sequence[str], connection: int) -> Pending:
        """Start a process as :meth:`spawn` does, with a connection as stdin and stdout (sshd -i).

        The connection itself must not be open inside, since root inside could reconnect it in the
        host's network: its bytes are relayed. The caller may close it immediately. Raises
        BackendError.
        """

    @abstractmethod
    def console(self, spec: SliverSpec) -> bytes:
        """Return the end of the init script's output."""

    @abstractmethod
    def found(self) -> list[str]:
        """Return names of slivers of which any part exists on this host."""

    @abstractmethod
    def number(self, name: str) -> int | None:
        """Return the number of a found sliver; None: it is not known."""
