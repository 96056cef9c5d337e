"""Limits in cgroup files, cores and admission.

The hosts of these tests seldom have all controllers in version 2.  Its files are imitated here by a
plain directory tree: what is written is checked, what the kernel would do with it is not.  What a
real kernel does is in the integration tests.
"""

from __future__ import annotations

import errno
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nodepool.nodemanager.limits.cgroups import Cgroups, detect
from nodepool.nodemanager.limits.cgroups import files as cgroup_files
from nodepool.nodemanager.limits.cgroups import kill as cgroup_kill
from nodepool.nodemanager.limits.cgroups import tree as cgroup_tree
from nodepool.nodemanager.limits.cgroups import v1 as cgroup_v1
from nodepool.nodemanager.limits.cgroups import v2 as cgroup_v2
from nodepool.nodemanager.limits.cgroups.files import CgroupError, Place
from nodepool.nodemanager.limits.cgroups.weights import division
from nodepool.nodemanager.limits.cores import Cores

FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.controllers": "cpu cpuset memory pids io",
    "cgroup.freeze": "0",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cpu.weight": "100",
    "cpu.max": "max 100000",
    "cpu.stat": "usage_usec 42\n",
    "cpuset.cpus": "",
    "cpuset.mems": "",
    "cpuset.cpus.effective": "0-7",
    "cpuset.mems.effective": "0",
    "memory.max": "max",
    "memory.min": "0",
    "memory.high": "max",
    "memory.swap.max": "max",
    "memory.current": "1048576",
    "memory.peak": "2097152",
    "memory.events": "low 0\noom_kill 3\n",
    "pids.max": "max",
    "pids.current": "5",
    "io.max": "",
}


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    def populate(group: pathlib.Path) -> None:
        for name, content in FILES.items():
            if not (group / name).exists():
                (group / name).write_text(content)

    def write(path: pathlib.Path, value: object) -> None:
        assert path.exists(), f"no such file in the kernel: {path.name}"
        path.write_text(str(value))

    monkeypatch.setattr(cgroup_v2, "made", populate)
    monkeypatch.setattr(cgroup_v2, "write", write)
    monkeypatch.setattr(cgroup_files, "write", write)
    # Groups of the imitated tree go with their files, as the kernel's do.
    monkeypatch.setattr(cgroup_tree, "remove", lambda group, _deadline: shutil.rmtree(group))
    populate(tmp_path)
    return tmp_path


def service(
    tree: pathlib.Path, io_devices: Callable[[str], Sequence[str]] = lambda name: ()
) -> Cgroups:
    place = Place("v2", tree, frozenset({"cpu", "cpuset", "memory", "pids", "io", "freezer"}), tree)
    return Cgroups([place], "ours", processors=8, io_devices=io_devices)


def content(group: pathlib.Path, *names: str) -> list[str]:
    return [(group / name).read_text() for name in names]


@pytest.mark.spec(
    "NM-C.3: guarantee g is a child of our root with weight ~ g; besteffort weighs what is left"
)
def test_cpu_weights_follow_guarantees_and_shares(tree: pathlib.Path) -> None:
    groups = service(tree)
    groups.prepare(50)
    groups.create("alice", {"nm_cpu_guaranteed_share": 200})
    groups.create("bob", {"nm_cpu_share": 77})
    root = tree / "ours"
    assert content(root / "alice.sliver", "cpu.weight") == ["2000"]
    assert content(root / "besteffort" / "bob.sliver", "cpu.weight") == ["616"]
    assert content(root / "besteffort", "cpu.weight") == ["4000"]
    assert content(root, "cpu.weight") == ["150"]
    groups.apply("bob", {"nm_cpu_guaranteed_share": 300})
    assert not (root / "besteffort" / "bob.sliver").exists()
    assert content(root / "bob.sliver", "cpu.weight") + content(
        root / "besteffort", "cpu.weight"
    ) == ["3000", "2500"]
    groups.remove("alice")
    assert content(root / "besteffort", "cpu.weight") == ["3500"]
    assert groups.found() == ["bob"]
    groups.rebalance({"bob": {"nm_cpu_guaranteed_share": 100}})
    assert content(root / "besteffort", "cpu.weight") == ["4500"]


@pytest.mark.spec("NM-C.3: cpu.max, memory.max, memory.swap.max 0, memory.min, pids.max, io.max")
def test_limits_are_written_to_the_cgroup(tree: pathlib.Path) -> None:
    groups = service(tree, lambda name: ["7:3"])
    groups.create(
        "alice",
        {
            "nm_cpu_limit": 500,
            "nm_mem_limit": 64,
            "nm_mem_guaranteed": 16,
            "nm_pids_max": 99,
            "nm_io_write_bps": 1000,
        },
    )
    group = tree / "ours" / "besteffort" / "alice.sliver"
    assert content(
        group, "cpu.max", "memory.max", "memory.swap.max", "memory.min", "pids.max", "io.max"
    ) == ["400000 100000", str(64 << 20), "0", str(16 << 20), "99", "7:3 rbps=max wbps=1000"]
    groups.apply("alice", {})
    assert content(group, "cpu.max", "memory.max", "memory.swap.max", "memory.min", "pids.max") == [
        "max 100000",
        "max",
        "max",
        "0",
        "1024",
    ]
    assert groups.usage("alice") == {
        "cpu_usec": 42,
        "memory_bytes": 1 << 20,
        "memory_peak": 2 << 20,
        "pids": 5,
        "oom_kills": 3,
    }


@pytest.mark.spec("NM-C.3: lowering memory below use: reclaim, then refuse rather than kill")
def test_v2_memory_below_use_is_refused(tree: pathlib.Path) -> None:
    groups = service(tree)
    groups.create("alice", {"nm_mem_limit": 512, "nm_pids_max": 10})
    group = tree / "ours" / "besteffort" / "alice.sliver"
    (group / "memory.current").write_text(str(300 << 20))
    (group / "memory.reclaim").write_text("")
    with pytest.raises(CgroupError, match="300 MiB are in use"):
        groups.apply("alice", {"nm_mem_limit": 100, "nm_pids_max": 20})
    assert content(group, "memory.max", "memory.high", "pids.max") == [str(512 << 20), "max", "10"]


def test_refused_memory_limit_changes_no_other_limit(tree: pathlib.Path) -> None:
    places = [
        Place(
            "v2",
            tree / "other",
            frozenset({"cpu", "cpuset", "pids", "io", "freezer"}),
            tree / "other",
        ),
        Place("v2", tree / "memory", frozenset({"memory"}), tree / "memory"),
    ]
    for place in places:
        place.mount.mkdir()
        cgroup_v2.made(place.mount)
    groups = Cgroups(places, "ours", processors=8)
    groups.create("alice", {"nm_mem_limit": 512, "nm_pids_max": 10, "nm_cpu_cores": 2})
    memory, other = (
        next(tree.glob(f"{name}/ours/**/alice.sliver")) for name in ("memory", "other")
    )
    before = content(other, "pids.max", "cpuset.cpus")
    (memory / "memory.current").write_text(str(300 << 20))
    (memory / "memory.reclaim").write_text("")
    with pytest.raises(CgroupError, match="300 MiB are in use"):
        groups.apply("alice", {"nm_mem_limit": 100, "nm_pids_max": 20, "nm_cpu_cores": 6})
    assert content(other, "pids.max", "cpuset.cpus") == before
    groups.create("bob", {"nm_cpu_cores": 5})


def test_v1_memory_limit_is_restored_when_that_with_swap_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes")
    for name in names:
        (tmp_path / name).write_text(str(512 << 20))

    def write(path: pathlib.Path, value: object) -> None:
        if path.name == "memory.memsw.limit_in_bytes":
            raise OSError(errno.EBUSY, "busy")
        path.write_text(str(value))

    monkeypatch.setattr(cgroup_v1, "write", write)
    with pytest.raises(CgroupError, match="512 MiB are in use"):
        cgroup_v1.memory(tmp_path, 64, 0)
    assert content(tmp_path, names[0]) == [str(512 << 20)]


def test_reserve_of_the_host_holds_whatever_is_guaranteed() -> None:
    assert [division(guaranteed, 50)[0] for guaranteed in (0, 950, 1000)] == [500, 50, 50]


def test_tree_that_others_removed_is_created_again(tree: pathlib.Path) -> None:
    groups = service(tree)
    groups.create("alice", {})
    groups.remove("alice")
    shutil.rmtree(tree / "ours")
    groups.create("bob", {"nm_pids_max": 10})
    assert content(tree / "ours" / "besteffort" / "bob.sliver", "pids.max") == ["10"]


def test_processes_that_start_during_a_move_are_moved_too(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, write, moved = service(tree), cgroup_files.write, []
    groups.create("alice", {})
    old = tree / "ours" / "besteffort" / "alice.sliver" / "cgroup.procs"
    old.write_text("10\n11")
    later = ["12", "13"]

    def move(path: pathlib.Path, pid: int) -> None:
        moved.append(pid)
        left = [each for each in old.read_text().split() if each != str(pid)]
        old.write_text("\n".join(left + ([later.pop()] if later else [])))
        write(path, pid)

    monkeypatch.setattr(cgroup_files, "write", move)
    groups.apply("alice", {"nm_cpu_guaranteed_share": 200})
    assert sorted(moved) == [10, 11, 12, 13]


def test_frozen_sliver_is_frozen_after_a_move(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, write = service(tree), cgroup_v2.write
    groups.create("alice", {})
    (tree / "ours" / "besteffort" / "alice.sliver" / "cgroup.freeze").write_text("1")

    def freeze(path: pathlib.Path, value: object) -> None:
        write(path, value)
        if path.name == "cgroup.freeze":
            path.with_name("cgroup.events").write_text(f"populated 0\nfrozen {value}\n")

    monkeypatch.setattr(cgroup_v2, "write", freeze)
    groups.apply("alice", {"nm_cpu_guaranteed_share": 200})
    assert content(tree / "ours" / "alice.sliver", "cgroup.freeze") == ["1"]


def test_sliver_that_cannot_be_frozen_continues(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup_v2, "FREEZE_TIMEOUT", 0.05)
    groups = service(tree)
    groups.create("alice", {})
    with pytest.raises(CgroupError, match="not frozen after"):
        groups.freeze("alice", True)
    assert content(tree / "ours" / "besteffort" / "alice.sliver", "cgroup.freeze") == ["0"]


def test_process_that_the_kernel_did_not_kill_with_the_group_is_killed(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has joined the group of another hierarchy only."""
    newer, older = (
        (tree, Place("v2", tree, frozenset(), tree)),
        (tree / "older", Place("v1", tree, frozenset(), tree)),
    )
    monkeypatch.setattr(cgroup_v2, "kill", lambda _group: True)
    with subprocess.Popen(["sleep", "60"]) as late:
        monkeypatch.setattr(
            cgroup_kill,
            "processes",
            lambda group: [late.pid] if group == tree / "older" and late.poll() is None else [],
        )
        try:
            cgroup_kill.kill(lambda: [newer[::-1], older[::-1]], lambda: None, "alice", 1)
            assert late.wait(10) == -signal.SIGKILL
        finally:
            late.kill()


def test_frozen_processes_are_thawed_so_that_they_end(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = [1 << 22]  # no process has this number
    monkeypatch.setattr(cgroup_kill, "processes", lambda _group: list(frozen))
    cgroup_kill.kill(
        lambda: [(Place("v1", tree, frozenset(), tree), tree)], frozen.clear, "alice", 0.1
    )


def test_process_that_has_the_id_of_one_that_ended_is_not_killed(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        found = [[other.pid]]
        monkeypatch.setattr(cgroup_kill, "processes", lambda _group: found.pop() if found else [])
        group = (Place("v1", tree, frozenset(), tree), tree)
        cgroup_kill.kill(lambda: [group], lambda: None, "alice", 10)
        assert not found and other.poll() is None
        other.kill()


def test_v2_what_is_there_is_found_again(tree: pathlib.Path) -> None:
    first = service(tree)
    first.create("alice", {"nm_cpu_guaranteed_share": 200, "nm_cpu_cores": 2})
    second = service(tree)
    second.prepare(50)
    assert content(tree / "ours" / "besteffort", "cpu.weight") == ["4000"], (
        "what the guarantee leaves"
    )
    with pytest.raises(CgroupError, match="5 available"):
        second.create("bob", {"nm_cpu_cores": 6})


def test_v2_subtree_control_only_in_our_part(tree: pathlib.Path) -> None:
    service(tree).prepare(50)
    assert (tree / "ours" / "cgroup.subtree_control").read_text() == "+pids"


def eight(**more: Any) -> Cores:
    """Four cores of two threads (n and n+4) on two memory nodes."""
    return Cores(
        range(8),
        {n: {n % 4, n % 4 + 4} for n in range(8)},
        {n: (n % 4) // 2 for n in range(8)},
        **more,
    )


@pytest.mark.spec("NM-B.4: cores are taken preferring siblings, matching memory nodes follow")
def test_siblings_and_memory_nodes() -> None:
    cores = eight()
    cores.reserve("alice", 2, False)
    mine, nodes = cores.placement("alice")
    assert mine == {3, 7}
    assert nodes == {1}
    assert cores.placement("bob")[0] == {0, 1, 2, 4, 5, 6} == cores.placement(None)[0]


@pytest.mark.spec("NM-B.4: one core always stays for everybody else")
def test_one_core_stays() -> None:
    cores = eight()
    cores.reserve("alice", 5, False)
    with pytest.raises(CgroupError, match="2 available"):
        cores.reserve("bob", 3, False)
    cores.reserve("bob", 2, False)
    assert len(cores.placement(None)[0]) == 1
    # The refusal did not change what alice has, who may also change what she has.
    cores.reserve("alice", 4, False)
    assert len(cores.placement("alice")[0]) == 4


@pytest.mark.spec("NM-B.4: suffix b adds the shared cores to the reserved ones")
def test_suffix_b_adds_the_shared_cores(tree: pathlib.Path) -> None:
    cores = eight()
    cores.reserve("alice", 2, True)
    cores.reserve("bob", 2, False)
    assert cores.placement("alice")[0] == set(range(8)) - cores.placement("bob")[0]
    groups = service(tree)
    groups.create("alice", {"nm_cpu_cores": "1b"})
    groups.create("bob", {"nm_cpu_cores": 1})
    alice, bob = (
        cgroup_files.parse_list(
            (tree / "ours/besteffort" / f"{name}.sliver/cpuset.cpus").read_text()
        )
        for name in ("alice", "bob")
    )
    assert len(bob) == 1
    assert alice == set(range(8)) - bob


def test_caps_of_the_smallest_kind_get_a_longer_period() -> None:
    assert cgroup_files.quota(500, 2) == (100_000, 100_000)
    amount, period = cgroup_files.quota(1, 2)
    assert amount / period == pytest.approx(0.002)
    assert amount >= 1000


def test_lists_of_cpus() -> None:
    assert cgroup_files.parse_list("0-2,7\n") == {0, 1, 2, 7}
    assert cgroup_files.parse_list("") == set()


@pytest.mark.parametrize("name", ["../x", "a/b", "A", "", "a.sliver", "besteffort/x", "x\n"])
def test_names_that_are_none_make_no_path(tree: pathlib.Path, name: str) -> None:
    groups = service(tree)
    groups.prepare(50)
    for call in (
        groups.remove,
        groups.kill,
        groups.procs_files,
        lambda bad: groups.create(bad, {}),
    ):
        with pytest.raises(ValueError, match="is not a name"):
            call(name)


def test_names_of_kernel_files_are_fine_as_names(tree: pathlib.Path) -> None:
    groups = service(tree)
    groups.create("besteffort", {})
    groups.create("tasks", {})
    assert groups.found() == ["besteffort", "tasks"]


def test_gaps_of_version_1_are_reported() -> None:
    layout: dict[str, str | None] = dict.fromkeys(
        ("cpu", "cpuset", "memory", "pids", "io", "freezer"), "v1"
    )
    assert {problem.feature for problem in detect.problems(layout)} == {
        "memory guarantee",
        "network buffers",
        "I/O limits",
    }
    assert detect.problems(dict.fromkeys(layout, "v2")) == []
