"""What each privilege of a label makes possible, and that it is not possible without."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends.base import BackendError
from tests.support.nodemanager.machine import Machine, Sliver, machine_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the backend native needs root")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_at(tmp_path_factory.mktemp("nm")) as made:
        yield made


def compare(machine: Machine, privilege: str, script: str, user: str = "root") -> tuple[str, str]:
    """What the script prints without the privilege, and with it."""
    texts = []
    for given in ((), (privilege,)):
        sliver = machine.sliver(
            "s1", 1, username="zuul", privileges=given, rspec={"nm_mem_limit": 512}
        )
        try:
            texts.append(sliver.shell(script, user=user, timeout=60).text)
        finally:
            sliver.destroy()
    return texts[0], texts[1]


PING = (
    "python3 -c 'import socket; s = socket.socket(2, 2, 1); s.settimeout(5); "
    's.sendto(bytes([8, 0, 0, 0, 0, 0, 0, 1]), ("127.0.0.1", 0)); print(s.recv(100)[0])\''
)


@pytest.mark.spec("issue 10, 3: ping is a named option")
def test_ping_needs_its_privilege(machine: Machine) -> None:
    without, given = compare(machine, "ping", PING, user="zuul")
    assert "Permission denied" in without
    assert given == "0\n"


@pytest.mark.spec("issue 10, 3: tcpdump is a named option")
def test_tcpdump_needs_its_privilege(machine: Machine) -> None:
    without, given = compare(
        machine,
        "tcpdump",
        "python3 -c 'import socket; print(socket.socket(17, 3, 0x300).family.name)'",
    )
    assert "Address family not supported" in without
    assert given == "AF_PACKET\n"


@pytest.mark.spec("issue 10, 3: sudo and apt are there; capabilities of files with the option apt")
def test_file_capabilities_need_the_privilege_apt(machine: Machine) -> None:
    script = (
        "cp /bin/true /root/x; python3 -c \"import os; os.setxattr('/root/x', "
        "'security.capability', "
        "bytes.fromhex('010000020020000000000000000000000000000000'[:40]))\" && echo done"
    )
    without, given = compare(machine, "apt", script)
    assert "Operation not permitted" in without
    assert given == "done\n"
    package = (
        "set -e; mkdir -p p/DEBIAN p/opt; printf 'Package: x\\nVersion: 1\\nArchitecture: all\\n"
        "Maintainer: x\\nDescription: x\\n' "
        "> p/DEBIAN/control; echo x > p/opt/x; dpkg-deb -b p x.deb > /dev/null; sudo dpkg -i x.deb "
        "> /dev/null; cat /opt/x"
    )
    sliver = machine.sliver("s2", 2, username="zuul")
    try:
        answer = sliver.shell(package, user="zuul", timeout=60)
        assert answer.text.splitlines()[-1] == "x", answer.text
    finally:
        sliver.destroy()


@pytest.mark.spec("issue 10, 3: mounts inside are a named option")
def test_mounts_need_their_privilege(machine: Machine) -> None:
    without, given = compare(
        machine, "mount", "mount -t tmpfs x /mnt && unshare -m -p -f echo done"
    )
    assert "ermission denied" in without or "not permitted" in without
    assert given == "done\n"


@pytest.mark.spec("issue 10, 3: the network of the sliver can be administered with the option only")
def test_network_can_be_administered_only_with_the_option(machine: Machine) -> None:
    without, given = compare(
        machine,
        "network-admin",
        "ip link add d0 type dummy; ip addr add 192.0.2.1/24 dev lo && echo done",
    )
    assert "not permitted" in without
    assert given.splitlines()[-1] == "done"


@pytest.mark.spec("issue 10, 3: debuggers across users and core dumps are a named option")
def test_debuggers_need_their_privilege(machine: Machine) -> None:
    script = (
        "ulimit -c; sudo -u zuul sleep 60 & until pgrep -x -u zuul sleep > /dev/null; do :; done; "
        'python3 -c "import ctypes, subprocess; '
        "pid = int(subprocess.check_output(['pgrep', '-x', '-u', 'zuul', 'sleep'])); "
        'print(ctypes.CDLL(None).ptrace(0x4206, pid, 0, 0))"; pkill sleep'
    )
    without, given = compare(machine, "debug", script)
    assert without.split() == ["0", "-1"], without
    assert given.split()[-1] == "0", given


@pytest.mark.spec("issue 10, 3: containers inside a sliver are a named option")
def test_containers_need_their_privilege(machine: Machine) -> None:
    if shutil.which("podman") is None or shutil.which("crun") is None:
        pytest.skip("podman and crun are not installed")
    script = (
        "mkdir -p r/usr r/proc r/dev r/sys r/tmp r/etc; for d in bin lib lib64 sbin; do ln -s "
        "usr/$d r/$d; done; "
        "podman --cgroup-manager=cgroupfs run --rm --cgroups=disabled --network=none -v "
        "/usr:/usr:ro --rootfs $PWD/r "
        "/bin/sh -c 'echo in; ls /proc | grep -c ^1$; hostname' 2>&1"
    )
    without, given = compare(machine, "docker", script)
    assert "in\n1\n" not in without
    assert given.startswith("in\n1\n"), given


@pytest.mark.spec(
    "issue 10, 3: what a backend cannot give is refused with the names of what it can"
)
def test_refused_by_the_daemon(tmp_path: pathlib.Path) -> None:
    from tests.support.nodemanager.scene import NmDaemon, run_daemon

    for daemon in run_daemon(NmDaemon(tmp_path, number=3)):
        daemon.put("alpha", wait=False, privileges=["systemd"])
        found = daemon.client.call("WaitSliver", "alpha", "ready", 20, timeout=25)
        assert found["state"] == "failed"
        assert (
            "backend native cannot give systemd; it has apt, debug, docker, mount" in found["error"]
        )
        daemon.put("alpha", privileges=["ping"])


def test_privileges_are_for_new_programs_immediately(machine: Machine) -> None:
    sliver: Sliver = machine.sliver("s3", 3)
    try:
        assert "permission denied" in sliver.shell("mount -t tmpfs x /mnt; true").text
        with pytest.raises(BackendError, match="only pipes"), open("/etc/passwd", "rb") as file:
            sliver.backend.spawn(sliver.handle, ["true"], file.fileno(), None, None).process()
        sliver.change(privileges=("mount",))
        sliver.keep(sliver.backend.configure(sliver.spec, sliver.handle))
        assert sliver.shell("mount -t tmpfs x /mnt && echo done").text == "done\n"
    finally:
        sliver.destroy()
