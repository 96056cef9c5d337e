"""Slivers as containers of podman (NM-C.2)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends import load
from nodepool.nodemanager.backends.base import IDS_PER_SLIVER, BackendError, SliverSpec
from nodepool.nodemanager.backends.podman import LABEL, PodmanBackend, run_argv
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.limits.cgroups.detect import keep_moves_quick
from tests.conftest import wait_for
from tests.integration.nodemanager.backends.test_native import small_tree
from tests.support.nodemanager.machine import ID_BASE, Machine, machine_at
from tests.support.nodemanager.scene import NmDaemon

needs_podman = [
    pytest.mark.skipif(os.geteuid() != 0, reason="slivers in podman need root"),
    pytest.mark.skipif(
        shutil.which("podman") is None or shutil.which("crun") is None,
        reason="podman and crun are not installed",
    ),
]
pytestmark = pytest.mark.timeout(180)


def podman(*arguments: str) -> str:
    return subprocess.run(
        ["podman", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    ).stdout


@pytest.fixture
def steady_hierarchies() -> Iterator[None]:
    """Hold the hierarchy that daemons hold: otherwise, it is created and removed by daemons of
    other tests meanwhile.
    """
    descriptor = keep_moves_quick()
    yield
    if descriptor >= 0:
        os.close(descriptor)


@pytest.fixture
def machine(tmp_path: pathlib.Path, steady_hierarchies: None) -> Iterator[Machine]:
    with machine_at(tmp_path / "state", factory=PodmanBackend) as made:
        assert [p for p in made.backend.check() if p.fatal] == []
        yield made
    assert not made.backend.trees.exists()
    containers = (
        json.loads(podman("ps", "--all", "--format", "json", "--filter", f"label={LABEL}") or "[]")
        or []
    )
    mine = made.backend._container("")
    assert [
        c["Names"] for c in containers if any(name.startswith(mine) for name in c["Names"])
    ] == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small_tree(tmp_path_factory.mktemp("tree") / "root")


@pytest.fixture(scope="module")
def image(tree: pathlib.Path) -> Iterator[str]:
    name = f"localhost/nodepool-test-{os.getpid()}:latest"
    archive = tree.parent / "tree.tar"
    subprocess.run(["tar", "-C", str(tree), "-cf", str(archive), "."], check=True, timeout=60)
    podman("import", str(archive), name)
    yield name
    podman("rmi", name)


class TestContainers:
    pytestmark = needs_podman

    @pytest.mark.spec(
        "NM-C.2: podman: OCI images, root inside is an ordinary user outside, own namespaces"
    )
    def test_oci_image_runs_with_own_ids_and_namespaces(self, machine: Machine, image: str) -> None:
        sliver = machine.sliver(image=f"oci:{image}", hostname="boxed")
        assert (
            sliver.shell("cat /marker; id -u; echo mine > /file; cat /file").text
            == "from the image\n0\nmine\n"
        )
        assert syscalls.uid_range(sliver.handle["pid"]) == (
            ID_BASE + IDS_PER_SLIVER,
            IDS_PER_SLIVER,
        )
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            assert os.readlink(f"/proc/self/ns/{kind}") != os.readlink(
                f"/proc/{sliver.handle['pid']}/ns/{kind}"
            ), kind
        assert (
            podman(
                "container", "inspect", "--format", "{{.State.Status}}", sliver.handle["container"]
            )
            == "running\n"
        )
        assert os.stat(os.devnull).st_uid == 0, "the host's own device keeps its owner"
        assert sliver.shell("stat -c %u /dev/null").text == "65534\n"
        assert sliver.shell("chmod 666 /dev/null").status != 0
        again = machine.sliver("s2", 2, image=f"oci:{image}")
        assert again.shell("ls /file").status != 0, "each sliver has its own files"

    @pytest.mark.spec("NM-C.3: podman: the limits are those of the node manager's cgroups")
    def test_limits_and_confinement(self, machine: Machine, tree: pathlib.Path) -> None:
        sliver = machine.sliver(image=f"dir:{tree}", rspec={"nm_pids_max": 20})
        assert sliver.handle["pid"] in machine.backend.services.cgroups.members("s1")
        assert sliver.shell("ls /dev").text.find("sda") < 0
        assert sliver.shell("echo 1 > /proc/sys/kernel/panic").status != 0
        assert sliver.shell("ls " + str(tree)).status != 0
        frozen = sliver.start_program("sleep", "1000")
        with frozen:
            machine.backend.freeze(sliver.spec, sliver.handle, True)
            machine.backend.freeze(sliver.spec, sliver.handle, False)
            assert machine.backend.usage(sliver.spec.name, sliver.handle)["pids"] >= 2
        assert (
            "fork"
            in sliver.shell(
                "for i in 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2; do sleep 3 & done 2>&1"
            ).text.lower()
        )

    def test_processes_that_ended_do_not_pile_up(
        self, machine: Machine, tree: pathlib.Path
    ) -> None:
        sliver = machine.sliver(image=f"dir:{tree}")
        sliver.shell("(sleep 0.1 &) ; (sleep 0.1 &)")
        wait_for(
            lambda: machine.backend.services.cgroups.members("s1") == [sliver.handle["pid"]],
            10,
            "orphans to be reaped",
        )

    @pytest.mark.spec(
        "NM-C.2, NM-C.7: podman: stop keeps the tree; start, adopt, configure, console"
    )
    def test_container_keeps_its_tree_when_stopped(
        self, machine: Machine, tree: pathlib.Path
    ) -> None:
        sliver = machine.sliver(
            image=f"dir:{tree}",
            initscript=b"#!/bin/sh\necho begun\n",
            ssh_keys="ssh-ed25519 AAAA me",
        )
        wait_for(lambda: machine.backend.console(sliver.spec) == b"begun\n", 10, "the init script")
        sliver.shell("echo kept > /file")
        assert machine.backend.adopt(sliver.spec, sliver.handle)
        sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
        assert not machine.backend.adopt(sliver.spec, sliver.handle) and "pid" not in sliver.handle
        sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
        assert (
            sliver.shell("cat /file /root/.ssh/authorized_keys").text
            == "kept\nssh-ed25519 AAAA me\n"
        )
        sliver.change(ssh_keys="ssh-ed25519 BBBB you")
        machine.backend.configure(sliver.spec, sliver.handle)
        assert sliver.shell("cat /root/.ssh/authorized_keys").text == "ssh-ed25519 BBBB you\n"

    @pytest.mark.spec(
        "NM-C.7: podman: what a crash left is found and goes, with or without what was known of it"
    )
    def test_found_and_destroyed(self, machine: Machine, tree: pathlib.Path) -> None:
        sliver = machine.sliver(image=f"dir:{tree}")
        other = PodmanBackend(machine.backend.state_dir, machine.backend.services)
        assert other.found() == ["s1"]
        other.destroy("s1", 1, None)
        assert (
            other.found() == []
            and syscalls.start_time(sliver.handle["pid"]) != sliver.handle["start_time"]
        )
        other.destroy("s1", 1, None)
        made = machine.sliver(image=f"dir:{tree}")
        assert made.shell("echo new").text == "new\n"
        # Made by a daemon that ended before it noted it: made again, with no second container.
        made.keep(other.create(made.spec))
        assert made.shell("echo newer").text == "newer\n"

    def test_images_that_podman_does_not_have_are_refused(
        self, machine: Machine, tree: pathlib.Path
    ) -> None:
        with pytest.raises(BackendError, match="podman has none of this; use oci:"):
            machine.sliver(image="host")
        with pytest.raises(BackendError, match="podman pull: "):
            machine.sliver(image="oci:localhost/not-there:latest")

    @pytest.mark.spec("NM-C.7: podman: killing the daemon kills no sliver; the next one adopts it")
    def test_killed_daemon_leaves_slivers_running(self, tmp_path: pathlib.Path, image: str) -> None:
        daemon = NmDaemon(tmp_path, backend="podman")
        daemon.start()
        try:
            found = daemon.put("alpha", image=f"oci:{image}")
            assert found["backend"] == "podman" and found["host_keys"]
            pid = json.loads(daemon.client.call("DumpDatabase"))["local"]["sliver_alpha"]["handle"][
                "pid"
            ]
            daemon.stop(signal.SIGKILL)
            daemon.start()
            assert (
                json.loads(daemon.client.call("DumpDatabase"))["local"]["sliver_alpha"]["handle"][
                    "pid"
                ]
                == pid
            )
            assert daemon.client.call("GetUsage", "alpha")["pids"] >= 1
            with pytest.raises(AssertionError, match="podman pull"):
                daemon.put("beta", image="oci:localhost/not-there")
        finally:
            daemon.clean()
        wait_for(lambda: daemon.left() == [], 10, "all traces to go")


def test_podman_command_line_isolates_the_container() -> None:
    argv = run_argv(
        "c",
        "tag",
        SliverSpec("s1", 1, "oci:x", {"nm_mem_limit": 100}, hostname="h"),
        "/tree",
        5000,
        65536,
    )
    assert argv[0] == "run" and argv[-5:] == ["--rootfs", "/tree", "/bin/sh", "-c", argv[-1]]
    assert {
        "--uidmap=0:5000:65536",
        "--network=none",
        "--cgroups=disabled",
        "--pull=never",
        "--hostname=h",
    } <= set(argv)
    assert "--tmpfs=/run:rw,nosuid,nodev,mode=755,size=20m" in argv and not [
        a for a in argv if "privileged" in a
    ]


def test_podman_backend_is_found_by_its_name() -> None:
    assert load("podman") is PodmanBackend
