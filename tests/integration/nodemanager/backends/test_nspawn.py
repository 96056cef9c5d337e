"""Slivers with systemd inside, under systemd: only on hosts that have it as process 1, such as
that of tools/vm.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends.base import IDS_PER_SLIVER, BackendError
from nodepool.nodemanager.backends.nspawn import CGROUP, NspawnBackend
from nodepool.nodemanager.kernel import syscalls
from tests.conftest import wait_for
from tests.support.nodemanager.machine import ID_BASE, Machine, machine_at
from tests.support.nodemanager.scene import NmDaemon

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="slivers of systemd-nspawn need root"),
    pytest.mark.skipif(not os.path.isdir("/run/systemd/system"), reason="process 1 is not systemd"),
    pytest.mark.skipif(
        shutil.which("systemd-nspawn") is None, reason="systemd-container is not installed"
    ),
]


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Iterator[Machine]:
    with machine_at(tmp_path / "state", cgroups=False, factory=NspawnBackend) as made:
        assert [p for p in made.backend.check() if p.fatal] == []
        yield made
    wait_for(
        lambda: not list(CGROUP.glob(f"system.slice/nm-{made.backend.label[:6]}-*")),
        30,
        "units to go",
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A root tree with systemd: that of this machine, without what it does at its start."""
    with_space = pathlib.Path("/var/tmp", f"nodepool-test-{os.getpid()}")
    target = with_space / "root"
    target.mkdir(parents=True)
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "home", "mnt"):
        (target / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (target / name).symlink_to(f"usr/{name}")
    try:
        subprocess.run(["cp", "-al", "/usr", str(target)], check=True, timeout=300)
        subprocess.run(["cp", "-a", "/etc", str(target)], check=True, timeout=300)
        for name in ("var/lib", "var/log", "var/cache", "var/tmp"):
            (target / name).mkdir(parents=True)
        for path in (target / "etc/systemd/system").glob("*.wants/*"):
            path.unlink()
        (target / "etc/fstab").write_text("")
        (target / "etc/machine-id").write_text("")
        (target / "marker").write_text("from the image\n")
        yield target
    finally:
        shutil.rmtree(with_space)


def cgroup(machine: Machine, name: str) -> pathlib.Path:
    return machine.backend.processes.cgroup(name)  # type: ignore[no-any-return]


@pytest.mark.spec(
    "NM-C.2: nspawn: full systemd, own ids and namespaces; stop keeps the tree; start, configure"
)
def test_container_has_its_own_systemd_ids_and_namespaces_and_keeps_its_tree(
    machine: Machine, tree: pathlib.Path
) -> None:
    sliver = machine.sliver(
        image=f"dir:{tree}",
        ssh_keys="ssh-ed25519 AAAA me",
        hostname="boxed",
        rspec={"nm_pids_max": 200},
    )
    assert sliver.shell(
        "cat /marker; id -u; hostname; cat /proc/1/comm; echo kept > /file"
    ).text == ("from the image\n0\nboxed\nsystemd\n")
    assert syscalls.uid_range(sliver.handle["pid"]) == (ID_BASE + IDS_PER_SLIVER, IDS_PER_SLIVER)
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        assert os.readlink(f"/proc/self/ns/{kind}") != os.readlink(
            f"/proc/{sliver.handle['pid']}/ns/{kind}"
        ), kind
    assert sliver.shell("ls /sys/class/net").text.split() == ["lo"]
    # What is run inside is in the cgroup of the unit, and so below its limits.
    assert "0::/" in [line[:4] for line in sliver.shell("cat /proc/self/cgroup").text.splitlines()]
    assert (cgroup(machine, "s1") / "pids.max").read_text() == "200\n"
    assert machine.backend.usage(sliver.spec.name, sliver.handle)["pids"] >= 2
    assert machine.backend.adopt(sliver.spec, sliver.handle)
    sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
    assert not machine.backend.adopt(sliver.spec, sliver.handle)
    sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
    assert (
        sliver.shell("cat /file /root/.ssh/authorized_keys").text == "kept\nssh-ed25519 AAAA me\n"
    )
    sliver.change(ssh_keys="ssh-ed25519 BBBB you", rspec={"nm_pids_max": 100, "nm_mem_limit": 256})
    sliver.keep(machine.backend.configure(sliver.spec, sliver.handle))
    assert sliver.shell("cat /root/.ssh/authorized_keys").text == "ssh-ed25519 BBBB you\n"
    assert (cgroup(machine, "s1") / "pids.max").read_text() == "100\n"
    assert (cgroup(machine, "s1") / "memory.max").read_text() == f"{256 << 20}\n"


@pytest.mark.spec("NM-C.3: nspawn: nm_enabled 0 freezes")
def test_disabled_sliver_is_frozen(machine: Machine, tree: pathlib.Path) -> None:
    sliver = machine.sliver(image=f"dir:{tree}")
    machine.backend.freeze(sliver.spec, sliver.handle, True)
    wait_for(
        lambda: "frozen 1" in (cgroup(machine, "s1") / "cgroup.events").read_text(),
        20,
        "everything frozen",
    )
    machine.backend.freeze(sliver.spec, sliver.handle, False)
    assert sliver.shell("echo again").text == "again\n"


@pytest.mark.spec(
    "NM-C.7: nspawn: what a crash left is found and goes, with or without what was known of it"
)
def test_found_and_destroyed(machine: Machine, tree: pathlib.Path) -> None:
    sliver = machine.sliver(image=f"dir:{tree}")
    other = NspawnBackend(machine.backend.state_dir, machine.backend.services)
    assert other.found() == ["s1"]
    other.destroy("s1", 1, None)
    assert (
        other.found() == []
        and syscalls.start_time(sliver.handle["pid"]) != sliver.handle["start_time"]
    )
    other.destroy("s1", 1, None)
    made = machine.sliver(image=f"dir:{tree}")
    # Made by a daemon that ended before it noted it: made again, with no second machine.
    made.keep(other.create(made.spec))
    assert made.shell("echo newer").text == "newer\n"


@pytest.mark.spec("NM-C.2: nspawn: a start does not wait for a network, which comes later")
def test_container_starts_without_waiting_for_a_network(
    machine: Machine, tree: pathlib.Path
) -> None:
    units, wait = tree / "etc/systemd/system", "systemd-networkd-wait-online.service"
    (units / wait).unlink(missing_ok=True)
    (units / wait).write_text("[Service]\nType=oneshot\nExecStart=/bin/sleep 600\n")
    (units / "late.service").write_text(
        "[Unit]\nWants=network-online.target\nAfter=network-online.target\n"
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
    )
    # As systemd enables them at the first start of an image.
    wanted = [units / f"network-online.target.wants/{wait}"]
    wanted.append(units / "multi-user.target.wants/late.service")
    try:
        for link in wanted:
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(f"/etc/systemd/system/{link.name}")
        sliver = machine.sliver(image=f"dir:{tree}")
    finally:
        for link in wanted:
            link.unlink()
    assert sliver.shell("systemctl is-active late").text == "active\n"


def test_a_tree_without_systemd(machine: Machine, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty" / "etc").mkdir(parents=True)
    with pytest.raises(BackendError, match=r"systemd"):
        machine.sliver(image=f"dir:{tmp_path / 'empty'}")


@pytest.mark.spec("NM-C.7: nspawn: killing the daemon kills no sliver; the next one adopts it")
def test_killed_daemon_leaves_slivers_running(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    daemon = NmDaemon(tmp_path, backend="nspawn")
    daemon.start()
    try:
        daemon.put("alpha", image=f"dir:{tree}", wait=False)
        found = daemon.wait("alpha")
        assert found["backend"] == "nspawn" and found["host_keys"]
        assert daemon.ssh("alpha", "cat /proc/1/comm") == "systemd\n"
        pid = json.loads(daemon.client.call("DumpDatabase"))["local"]["sliver_alpha"]["handle"][
            "pid"
        ]
        daemon.stop(9)
        daemon.start()
        assert (
            json.loads(daemon.client.call("DumpDatabase"))["local"]["sliver_alpha"]["handle"]["pid"]
            == pid
        )
    finally:
        daemon.clean()
    wait_for(lambda: daemon.left() == [], 30, "all traces to go")
