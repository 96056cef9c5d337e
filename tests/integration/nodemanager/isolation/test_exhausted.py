"""Hosts without processes, descriptors or memory left: what runs continues, deletion works, and
the daemon recovers automatically.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
from collections.abc import Callable, Iterator, Sequence

import pytest

from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.nodemanager.kernel import syscalls
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.usefixtures("host_network"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def processes(nm: NmDaemon) -> list[int]:
    """The daemon, its helper, and the worker ahead; not those of slivers and sessions, which the
    helper adopts.
    """
    assert nm.process is not None
    (helper,) = syscalls.children(nm.process.pid)
    return [
        nm.process.pid,
        helper,
        *(child for child in syscalls.children(helper) if user(child) == 0),
    ]


def user(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])
    return None


class Tasks:
    """The daemon in a group that may be set to have no more processes and threads, as a host
    that is full of those of others.
    """

    def __init__(self, nm: NmDaemon) -> None:
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            self.mount = pathlib.Path(fields[4])
            if (kind == "cgroup" and "pids" in options) or (
                kind == "cgroup2"
                and "pids" in (self.mount / "cgroup.subtree_control").read_text().split()
            ):
                break
        else:
            pytest.skip("this host has no cgroup controller pids")
        self.group = self.mount / f"nodepool-nm-test-tasks-{os.getpid()}"
        self.group.mkdir()
        for pid in processes(nm):
            (self.group / "cgroup.procs").write_text(str(pid))

    def take(self) -> None:
        (self.group / "pids.max").write_text("1")

    def give_back(self) -> None:
        (self.group / "pids.max").write_text("max")

    def close(self) -> None:
        self.give_back()
        wait_for(self._removed, 10, "the group being empty")

    def _removed(self) -> bool:
        try:
            for pid in (self.group / "cgroup.procs").read_text().split():
                (self.mount / "cgroup.procs").write_text(pid)
            self.group.rmdir()
        except OSError:
            return False
        return True


@pytest.fixture
def tasks(nm: NmDaemon) -> Iterator[Tasks]:
    group = Tasks(nm)
    try:
        yield group
    finally:
        group.close()


class Job:
    """A session that has begun before; it ends well."""

    def __init__(self, nm: NmDaemon, name: str) -> None:
        self._nm = nm
        self.session = nm.session(name)

    def end(self) -> None:
        out, _ = self.session.communicate("hello\n", timeout=limit(20))
        assert out == "got hello\n", self._nm.log[-3000:]


def serves(nm: NmDaemon) -> None:
    """Creation, login and deletion, as ever."""
    nm.put("later", network="nat")
    assert nm.ssh("later", "echo in") == "in\n"
    nm.delete("later")


def failed(nm: NmDaemon, name: str) -> str:
    """Why this sliver cannot be made."""
    found = nm.client.call("WaitSliver", name, "ready", limit(30), timeout=limit(40))
    assert found["state"] == "failed", found
    return str(found["error"])


def made_after_all(nm: NmDaemon, name: str) -> None:
    """Immediately, not when it is tried again automatically."""
    nm.client.call("Start", name)
    wait_for(lambda: nm.client.call("GetRecord", name)["state"] == "ready", 20, "the sliver")


@pytest.mark.spec(
    "issue 10, point 5: without processes of the host deletion works, nobody else is harmed, the "
    "daemon recovers"
)
def test_deletion_works_without_processes_and_the_daemon_recovers(
    nm: NmDaemon, tasks: Tasks
) -> None:
    for name in ("busy", "gone"):
        nm.put(name, network="nat")
    job = Job(nm, "busy")
    tasks.take()
    nm.put("new", wait=False)
    assert "Resource temporarily unavailable" in failed(nm, "new")
    nm.put("newnat", wait=False, network="nat")
    assert "Resource temporarily unavailable" in failed(nm, "newnat")
    nm.delete("gone")
    nm.delete("newnat")
    tasks.give_back()
    serves(nm)
    assert nm.ssh("busy", "echo in") == "in\n"
    made_after_all(nm, "new")
    assert nm.ssh("new", "echo in") == "in\n"
    job.end()


class Limit:
    """A soft limit of processes of the daemon.

    :param used: what a process has of it.
    """

    def __init__(self, nm: NmDaemon, what: int, used: Callable[[int], int]) -> None:
        self.nm = nm
        self.what = what
        self.used = used

    def _set(self, pids: Sequence[int], left: int | None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                hard = resource.prlimit(pid, self.what)[1]
                resource.prlimit(
                    pid, self.what, (hard if left is None else self.used(pid) + left, hard)
                )

    @contextlib.contextmanager
    def only(self, left: int, chosen: slice = slice(None)) -> Iterator[None]:
        """So much more than they have meanwhile."""
        self._set(processes(self.nm)[chosen], left)
        try:
            yield
        finally:
            # Also a worker ahead that was made meanwhile: other than what a host lacks, limits are
            # inherited.
            self._set(processes(self.nm), None)


def descriptors(nm: NmDaemon) -> list[int]:
    """How many daemon and helper have."""
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in processes(nm)[:2]]


def nothing_held(nm: NmDaemon, before: list[int]) -> None:
    # Those for a session, a worker ahead, and the connection that is just being closed come and go.
    wait_for(
        lambda: all(now <= then + 3 for now, then in zip(descriptors(nm), before, strict=True)),
        10,
        "closed descriptors",
    )


def next_descriptor(pid: int) -> int:
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


def size(pid: int) -> int:
    """Bytes of its address space."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.spec(
    "issue 10, point 5: without descriptors of its own the helper goes on, and deletion works"
)
def test_no_descriptors_for_the_helper(nm: NmDaemon) -> None:
    nm.put("busy")
    job = Job(nm, "busy")
    helper = processes(nm)[1]
    before = descriptors(nm)
    shortage = Limit(nm, resource.RLIMIT_NOFILE, next_descriptor)
    # Where it fails depends on whether a worker ahead is just being made.
    reasons = ("no descriptors left for the helper", "Too many open files")
    for left in range(5):
        nm.put("gone", network="nat")
        with shortage.only(left, slice(1, None)):
            nm.put("new", wait=False)
            error = failed(nm, "new")
            assert any(reason in error for reason in reasons), error
            nm.delete("gone")
        serves(nm)
        made_after_all(nm, "new")
        nm.delete("new")
    assert processes(nm)[1] == helper
    nothing_held(nm, before)
    job.end()


@pytest.mark.spec("issue 10, point 5: a daemon without descriptors of its own recovers by itself")
def test_no_descriptors_for_the_daemon(nm: NmDaemon) -> None:
    """Others cannot take them: the limit is the daemon's own, and the host's does not hold for
    root.
    """
    for name in ("busy", "gone"):
        nm.put(name, network="nat")
    job = Job(nm, "busy")
    before = descriptors(nm)
    shortage = Limit(nm, resource.RLIMIT_NOFILE, next_descriptor)
    for left in (0, 1, 2, 4):
        with shortage.only(left, slice(0, 1)):
            for method, name in (("DeleteSliver", "gone"), ("Start", "busy")):
                with contextlib.suppress(RpcError, RpcFault):
                    nm.client.call(method, name, timeout=1)
        wait_for(nm.answers, 20, "the daemon to answer")
        with contextlib.suppress(RpcFault):  # it may be going already
            nm.client.call("DeleteSliver", "gone")
        nm.wait("gone", "gone")
        serves(nm)
        nm.put("gone", network="nat")
    assert nm.ssh("busy", "echo in") == "in\n"
    job.end()
    nothing_held(nm, before)


@pytest.mark.spec(
    "issue 10, point 5: without memory deletion works, nobody else is harmed, the daemon recovers"
)
def test_deletion_works_without_memory_and_the_daemon_recovers(nm: NmDaemon) -> None:
    """As many bytes as each process has, and a little: what it asks the kernel for is refused."""
    nm.put("busy", network="nat")
    job = Job(nm, "busy")
    pids = processes(nm)[:2]
    before = descriptors(nm)
    shortage = Limit(nm, resource.RLIMIT_AS, size)
    for left in (0, 1 << 16, 1 << 20):
        nm.put("gone", network="nat")
        with shortage.only(left):
            nm.put("new", wait=False)
            found = nm.client.call("WaitSliver", "new", "ready", limit(30), timeout=limit(40))
            assert found["state"] == "ready" or "emory" in found["error"], found
            nm.delete("gone")
            nm.delete("new")
        serves(nm)
    assert processes(nm)[:2] == pids
    assert nm.ssh("busy", "echo in") == "in\n"
    job.end()
    nothing_held(nm, before)
