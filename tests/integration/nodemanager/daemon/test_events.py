"""What node managers report of slivers: what they have used at their end, and kills for memory."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.host import group_name
from tests.conftest import wait_for
from tests.support import cgroups
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]
MIB = 1 << 20
#: Uses more memory than any limit here, a piece after the other.
LATER = 'exec python3 -c "x = [bytearray(1 << 20) for _ in range(4096)]"'


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def events(nm: NmDaemon, confirmed: int = 0, after: int = 0, timeout: int = 20) -> list[Any]:
    found: list[Any] = nm.client.call(
        "WaitEvents", "tests", confirmed, after, timeout, timeout=timeout + 10
    )
    return found


@pytest.mark.spec("issue 49, 1: usage of each sliver at its end, exact to the cgroup's figures")
def test_usage_at_the_end_is_that_of_the_cgroups(nm: NmDaemon) -> None:
    nm.put("alpha", metadata={"nodepool_node_id": "7"}, rspec={"nm_mem_limit": 256})
    nm.ssh("alpha", "python3 -c 'sum(range(3_000_000)); bytearray(100 << 20)'; head -c 8000000 "
           "/dev/zero > /root/data; sync")  # fmt: skip
    before = nm.client.call("GetUsage", "alpha")
    nm.delete("alpha")
    [found] = events(nm)
    assert (found["kind"], found["name"], found["complete"]) == ("ended", "alpha", True)
    assert found["metadata"] == {"nodepool_node_id": "7"}
    assert found["memory_limit"] == 256 * MIB
    assert before["cpu_usec"] <= found["cpu_usec"] < before["cpu_usec"] + 1_000_000
    assert found["memory_peak"] >= max(before["memory_peak"], 100 * MIB)
    assert found["pids_peak"] >= before["pids"]
    assert found["disk_peak"] >= found["disk_bytes"] >= 8_000_000
    assert found["oom_kills"] == 0
    assert 0 < found["seconds"] < 120 and abs(found["time"] - time.time()) < 120


@pytest.mark.spec("issue 49: a usage record also after kill -9 of the node manager, once")
def test_usage_survives_kills_of_the_daemon(nm: NmDaemon) -> None:
    nm.put("alpha")
    nm.ssh("alpha", "python3 -c 'sum(range(3_000_000))'")
    before = nm.client.call("GetUsage", "alpha")
    nm.stop(signal.SIGKILL)
    nm.start()
    nm.wait("alpha")
    nm.client.call("DeleteSliver", "alpha")
    nm.stop(signal.SIGKILL)  # in the middle of the removal, or after it
    nm.start()
    nm.wait("alpha", "gone")
    [found] = events(nm)
    assert found["cpu_usec"] >= before["cpu_usec"] and found["complete"]
    # Nothing is confirmed until a reader has stored it.
    assert events(nm) == [found]
    assert events(nm, confirmed=found["number"], timeout=0) == []
    nm.stop(signal.SIGKILL)
    nm.start()
    assert events(nm, timeout=0) == []
    assert nm.client.call("WaitEvents", "another", 0, 0, 0) == [found]


@pytest.mark.spec("issue 49, 2: a kill for memory is named within 1 s")
def test_process_that_was_killed_for_memory_is_named(nm: NmDaemon) -> None:
    nm.put("alpha", metadata={"nodepool_node_id": "7"}, rspec={"nm_mem_limit": 128})
    nm.ssh("alpha", LATER, check=False)
    ended = time.time()
    [found] = events(nm)
    assert (found["kind"], found["name"]) == ("killed", "alpha")
    assert found["program"].startswith("python3") and found["pid"] > 1
    assert found["memory_limit"] == 128 * MIB
    assert found["metadata"] == {"nodepool_node_id": "7"}
    assert abs(found["time"] - ended) < 5
    # The kernel's log is read again by the next daemon; it has no second one.
    nm.stop(signal.SIGKILL)
    nm.start()
    nm.put("beta")
    nm.delete("alpha")
    last = events(nm, after=found["number"])[0]
    assert (last["kind"], last["name"], last["oom_kills"]) == ("ended", "alpha", 1)
    # While it does not run, kills are found at the next start.
    nm.put("gamma", rspec={"nm_mem_limit": 128})
    nm.ssh("gamma", f"setsid sh -c 'sleep 2; {LATER}' > /dev/null 2>&1 < /dev/null & true")
    nm.stop(signal.SIGKILL)
    ours = group_name(str(nm.tmp / "state"))
    (file,) = [
        path
        for group in cgroups.named("gamma.sliver")
        for path in (group / "memory.oom_control", group / "memory.events")
        if ours in path.parts and path.exists()
    ]
    wait_for(lambda: "oom_kill 1" in file.read_text(), 30, "the kill")
    nm.start()
    found = events(nm, after=last["number"])[0]
    assert (found["kind"], found["name"]) == ("killed", "gamma")


@pytest.mark.spec("issue 49: a hostile job that writes fake messages")
def test_messages_of_programs_count_for_nothing(nm: NmDaemon) -> None:
    nm.put("alpha")
    base = int(nm.options["id-base"]) + 65536
    line = (
        "Memory cgroup out of memory: Killed process 1 (forged) total-vm:1kB, anon-rss:1kB, "
        f"file-rss:1kB, shmem-rss:1kB, UID:{base} pgtables:1kB oom_score_adj:0"
    )
    nm.ssh("alpha", f"echo '<2>{line}' > /dev/kmsg", check=False)
    # Root of this host may write it, but not in the name of the kernel.
    pathlib.Path("/dev/kmsg").write_text(f"<2>{line}\n")
    nm.ssh("alpha", "true")
    assert events(nm, timeout=1) == []
    nm.delete("alpha")
    assert [found["kind"] for found in events(nm)] == ["ended"]
