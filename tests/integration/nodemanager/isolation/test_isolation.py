"""What a sliver cannot do: each line of the isolation checklist, tried from inside as its root."""

from __future__ import annotations

import os
import pathlib
import socket
import stat
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends.base import IDS_PER_SLIVER, BackendError
from nodepool.nodemanager.client import privileges
from nodepool.nodemanager.kernel import syscalls
from tests.integration.nodemanager.backends.test_native import small_tree
from tests.support.deadline import limit
from tests.support.nodemanager.machine import ID_BASE, Machine, Sliver, machine_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the backend native needs root")

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*a):
    ctypes.set_errno(0)
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    return os.strerror(ctypes.get_errno()) if r < 0 else 'done'
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("nm")


@pytest.fixture(scope="module")
def machine(state: pathlib.Path) -> Iterator[Machine]:
    with machine_at(state) as made:
        yield made


@pytest.fixture
def sliver(machine: Machine) -> Iterator[Sliver]:
    made = machine.sliver(username="zuul", rspec={"nm_pids_max": 200, "nm_mem_limit": 256})
    yield made
    made.destroy()


@pytest.fixture
def other(machine: Machine) -> Iterator[Sliver]:
    made = machine.sliver("s2", 2, username="zuul")
    yield made
    made.destroy()


@pytest.mark.spec("NM-C.2 isolation: own user, mount, pid, net, ipc, uts, cgroup namespace")
@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"])
def test_sliver_has_its_own_namespaces(sliver: Sliver, other: Sliver, kind: str) -> None:
    inside = sliver.shell(f"readlink /proc/self/ns/{kind}").text.strip()
    seen = {
        inside,
        other.shell(f"readlink /proc/self/ns/{kind}").text.strip(),
        os.readlink(f"/proc/self/ns/{kind}"),
    }
    assert len(seen) == 3
    assert inside == os.readlink(f"/proc/{sliver.handle['pid']}/ns/{kind}")


@pytest.mark.spec("NM-C.2 isolation: unique id range")
def test_slivers_have_disjoint_id_ranges(
    sliver: Sliver, other: Sliver, state: pathlib.Path
) -> None:
    sliver.shell("touch /root/mine; chmod 4755 /root/mine")
    found = (state / "slivers/s1/mnt/root/root/mine").stat()
    assert found.st_uid == ID_BASE + IDS_PER_SLIVER
    assert syscalls.uid_range(other.handle["pid"]) == (ID_BASE + 2 * IDS_PER_SLIVER, IDS_PER_SLIVER)
    assert stat.S_IMODE(os.stat(state / "slivers").st_mode) == 0o700


@pytest.mark.spec(
    "NM-C.2 isolation: /dev holds only null zero full random urandom tty ptmx pts shm"
)
def test_dev_has_only_the_listed_devices(sliver: Sliver) -> None:
    assert set(sliver.shell("ls /dev").text.split()) == {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "ptmx",
        "pts",
        "shm",
        "fd",
        "stdin",
        "stdout",
        "stderr",
    }
    assert (
        "Operation not permitted"
        in sliver.shell("mknod /dev/x b 254 0; mknod /root/x b 254 0; mknod /dev/shm/x c 1 1").text
    )
    assert sliver.shell(
        "head -c 3 /dev/zero | od -An -tx1; echo x > /dev/null; head -c1 /dev/urandom | wc -c"
    ).text.split() == ["00", "00", "00", "1"]


@pytest.mark.spec(
    "NM-C.2 isolation: /proc of its own pid namespace; cannot see or signal outside processes"
)
def test_outside_processes_cannot_be_seen_or_signaled(sliver: Sliver, other: Sliver) -> None:
    with other.start_program("sleep", "1000") as process:
        program = (
            "import os\nprint(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, "
            "os.getpid()])\n"
            f"for pid in ({process.pid}, {os.getpid()}, {other.handle['pid']}):\n"
            "    try:\n        os.kill(pid, 0); print('seen')\n    except ProcessLookupError:\n    "
            "    print('none')\n"
        )
        assert sliver.python(program).text.split() == ["True", "none", "none", "none"]
        assert process.wait(0) is None


@pytest.mark.spec("issue 4 security: ptrace across slivers")
def test_ptrace_does_not_reach_other_slivers(sliver: Sliver, other: Sliver) -> None:
    with other.start_program("sleep", "1000") as process:
        assert (
            sliver.python(CALL + f"print(call(101, 16, {process.pid}, 0, 0))").text
            == "No such process\n"
        )
    # Inside one sliver debuggers work.
    assert (
        sliver.python(
            CALL + "pid = os.fork()\nif pid == 0:\n    import time; time.sleep(60)\n"
            "print(call(101, 16, pid, 0, 0))\nos.kill(pid, 9)"
        ).text
        == "done\n"
    )


@pytest.mark.spec("NM-C.2 isolation: /sys read-only; global sysctls, sysrq, limits not writable")
@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/sys/kernel/mm/ksm/run",
        "/sys/kernel/uevent_helper",
        "/proc/sys/user/max_user_namespaces",
        "/proc/irq/default_smp_affinity",
    ],
)
def test_root_in_a_sliver_cannot_write_kernel_settings(sliver: Sliver, path: str) -> None:
    if not os.path.exists(path):
        pytest.skip("this kernel has no such file")
    before = (
        pathlib.Path(path).read_text()
        if os.access(path, os.R_OK) and path != "/proc/sysrq-trigger"
        else ""
    )
    answer = sliver.shell(
        f"echo h > {path}; mount -o remount,rw /proc/sys; mount -o remount,rw,bind /sys; umount "
        "/proc/sys; "
        f"echo h > {path}; umount -l /proc/sysrq-trigger; umount -l /sys; echo h > {path}; true"
    ).text
    assert (
        answer.count("Read-only file system")
        + answer.count("Permission denied")
        + answer.count("cannot create")
        >= 3
    ), answer
    if before:
        assert pathlib.Path(path).read_text() == before


@pytest.mark.spec("NM-C.2 isolation: masks of /proc stay; no second, unmasked /proc or /sys")
def test_masks_of_proc_cannot_be_removed(sliver: Sliver) -> None:
    assert (
        sliver.shell("cat /proc/keys /proc/kallsyms 2>&1 | head -c 100; ls /sys/firmware").text
        == ""
    )
    answer = sliver.shell(
        "umount /proc/keys; umount -l /proc/kallsyms; umount -l /proc; mkdir -p /mnt/p; "
        "mount -t proc proc /mnt/p; "
        "mount -t sysfs sysfs /mnt/p && echo h > /mnt/p/kernel/mm/ksm/run; ls /mnt/p | wc -l; "
        "cat /proc/keys /proc/kallsyms | wc -c"
    ).text
    assert answer.splitlines()[-1] == "0", answer
    assert "mount: /mnt/p: permission denied" in answer.lower(), answer


@pytest.mark.spec("NM-C.2 isolation: no host path reachable")
def test_no_host_path(sliver: Sliver, state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", state / "templates", f"/var/lib/../../../{tmp_path}"):
        assert sliver.shell(f"ls -d {path}").status == 2
    assert (
        sliver.shell(
            "cat /proc/self/mountinfo | awk '{print $5}' | grep -v -E '^/($|usr|dev|run|proc|sys)'"
        ).text
        == ""
    )
    # A handle from outside the tree (open_by_handle_at), and the trick with a directory held open
    # across chroot.
    assert (
        sliver.python(CALL + "print(call(304, -100, ctypes.create_string_buffer(64), 0))").text
        == "Operation not permitted\n"
    )
    escape = (
        "import os\nos.mkdir('/tmp/c')\nos.chroot('/tmp/c')\nfor _ in range(50): "
        "os.chdir('..')\nos.chroot('.')\n"
        f"print(os.path.exists({str(tmp_path)!r}))"
    )
    assert sliver.python(escape).text == "False\n"


@pytest.mark.spec("NM-C.2: allow-list copy only: never shadow, keys, home directories")
def test_no_host_secrets(sliver: Sliver) -> None:
    host = pathlib.Path("/etc/shadow").read_text().splitlines()
    inside = sliver.shell("cat /etc/shadow").text.splitlines()
    assert all(line.split(":")[1] == "*" for line in inside)
    assert not set(host) & {line for line in inside if line.split(":")[1] not in ("*", "!", "!*")}
    assert sliver.shell("ls /home /root -A").text.split() == [
        "/home:",
        "zuul",
        "/root:",
        ".bashrc",
        ".profile",
        ".ssh",
    ]
    assert sliver.shell("find /etc/ssl/private /etc/apt/auth.conf.d -type f").text == ""
    key = sliver.shell("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").text
    for path in pathlib.Path("/etc/ssh").glob("ssh_host_*_key.pub"):
        assert path.read_text().split()[1] not in sliver.shell("cat /etc/ssh/*.pub").text
    assert "ED25519" in key


def test_unreadable_parts_of_usr_are_hidden(machine: Machine, sliver: Sliver) -> None:
    hidden = pathlib.Path("/usr/share/polkit-1/rules.d")
    if not hidden.exists() or hidden.stat().st_mode & 0o005:
        pytest.skip("this host has no such directory")
    assert sliver.shell(f"ls -d {hidden}").status == 2
    assert sliver.shell("ls -d /usr/local/etc").status == 2


@pytest.mark.spec("NM-C.2 isolation: cannot mount block devices")
def test_root_in_a_sliver_cannot_mount_block_devices(
    machine: Machine, tmp_path: pathlib.Path
) -> None:
    tree = small_tree(tmp_path / "tree")
    number = os.stat("/").st_dev
    os.mknod(tree / "disk", stat.S_IFBLK | 0o666, number)
    os.mknod(tree / "memory", stat.S_IFCHR | 0o666, os.makedev(1, 1))
    (tree / "disk").chmod(0o666)
    sliver = machine.sliver("s3", 3, f"dir:{tree}")
    try:
        assert "Permission denied" in sliver.shell("cat /disk").text
        assert "Permission denied" in sliver.shell("cat /memory").text
    finally:
        sliver.destroy()
    with_mount = machine.sliver("s3", 3)
    try:
        upper = machine.backend.folders.writable("s3") / "root"
        os.mknod(upper / "disk", stat.S_IFBLK | 0o666, number)
        answer = with_mount.shell(
            "mount -o remount,dev / ; mount -o remount,dev,bind /; mount --bind / /mnt; "
            "mount -o remount,bind,dev /mnt; mount -t ext4 /disk /mnt; cat /disk; cat /mnt/disk; "
            "exit 0"
        ).text
        assert answer.count("ermission denied") >= 4, answer
    finally:
        with_mount.destroy()


SYSTEM_CALLS = {
    "init_module": 175,
    "finit_module": 313,
    "delete_module": 176,
    "bpf": 321,
    "perf_event_open": 298,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "reboot": 169,
    "swapon": 167,
    "swapoff": 168,
    "acct": 163,
    "quotactl": 179,
    "settimeofday": 164,
    "clock_settime": 227,
    "adjtimex": 159,
    "keyctl": 250,
    "add_key": 248,
    "userfaultfd": 323,
    "open_by_handle_at": 304,
    "iopl": 172,
    "ioperm": 173,
    "syslog": 103,
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers here are those of x86_64")
@pytest.mark.spec("NM-C.2, issue 4 security: no modules, kexec, bpf, clock, reboot, swap, keys")
def test_dangerous_system_calls_are_refused(sliver: Sliver) -> None:
    program = (
        CALL
        + f"for name, number in {SYSTEM_CALLS!r}.items(): print(name, call(number, 0, 0, 0, 0, 0, "
        "0))"
    )
    for user in ("root", "zuul"):
        lines = sliver.python(program, user=user).text.splitlines()
        assert len(lines) == len(SYSTEM_CALLS)
        assert [line for line in lines if not line.endswith("Operation not permitted")] == []
    answer = sliver.python(
        CALL + "for a in ((425, 1, 0), (430, b'tmpfs', 0), (435, 0, 0), (0x40000000 + 39,)): "
        "print(call(*a))"
    )
    assert answer.text.splitlines() == ["Function not implemented"] * 4


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers here are those of x86_64")
@pytest.mark.spec("NM-C.2: sshd of OpenSSH 10.4 and newer ends connections without a filter")
def test_prctl_pretends_to_install_a_filter(sliver: Sliver) -> None:
    # One statement: refuse all system calls.
    program = CALL + (
        "refuse = ctypes.create_string_buffer(bytes.fromhex('0600000001000500'))\n"
        "class Filter(ctypes.Structure):\n"
        "    _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]\n"
        "given = ctypes.byref(Filter(1, ctypes.addressof(refuse)))\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "filters = lambda: status().partition('filters:')[2][:3]\n"
        "before = filters()\n"
        "print(call(157, 38, 1, 0, 0, 0), call(157, 22, 2, given), call(157, 22, 2, 0))\n"
        "print(call(317, 1, 0, given), filters() == before)\n"
    )
    assert sliver.python(program).text.splitlines() == [
        "done done Invalid argument",
        "Invalid argument True",
    ]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86_64")
def test_calls_of_32_bit_programs(sliver: Sliver) -> None:
    # mov eax, 20 (getpid of i386); int 0x80; ret
    program = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, "
        "prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_"
        "buffer(m)))\nprint(f())"
    )
    assert sliver.python(program).text in ("-38\n", "")


@pytest.mark.spec(
    "NM-C.2 isolation: set the clock; bounded capabilities even for root and setuid programs"
)
def test_capabilities_are_bounded_even_for_root(sliver: Sliver) -> None:
    text = sliver.shell("grep -E 'CapEff|CapBnd|Seccomp:' /proc/self/status").text
    sudo = sliver.shell(
        "sudo -n grep -E 'CapEff|CapBnd|Seccomp:' /proc/self/status", user="zuul"
    ).text
    assert text == sudo
    effective = int(text.split()[1], 16)
    for number in (16, 17, 22, 25, 24, 27, 34, 38, 39):
        assert not effective >> number & 1, number
    assert effective == sum(1 << capability for capability in privileges.LEAST)
    assert "Operation not permitted" in sliver.shell("date -s 2001-01-01; true").text
    assert abs(time.time() - float(sliver.shell("date +%s").text)) < 5


@pytest.mark.spec("NM-C.2: nested user namespaces would give dropped capabilities back")
def test_nested_user_namespace(sliver: Sliver) -> None:
    for user in ("root", "zuul"):
        assert "Operation not permitted" in sliver.shell("unshare -U true", user=user).text
        assert (
            sliver.python(CALL + "print(call(56, 0x10000011, 0, 0, 0, 0))", user=user).text
            == "Operation not permitted\n"
        )
    assert "Operation not permitted" in sliver.shell("unshare -m -p -f -u echo works").text
    sliver.change(privileges=("mount",))
    sliver.keep(sliver.backend.configure(sliver.spec, sliver.handle))
    assert sliver.shell("unshare -m -p -f -u echo works").text == "works\n"
    assert "Operation not permitted" in sliver.shell("unshare -U true").text


@pytest.mark.spec(
    "issue 4 security: raw sockets see nothing of the host; no vsock, no rare protocols"
)
def test_raw_sockets_see_nothing_of_the_host(sliver: Sliver, other: Sliver) -> None:
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        abstract.bind(f"\0nm-test-{os.getpid()}")
        abstract.listen()
        port = listener.getsockname()[1]
        program = f"""
import socket
for make in (lambda: socket.create_connection(('127.0.0.1', {port}), 2),
             lambda: socket.create_connection(('169.254.169.254', 80), 2),
             lambda: socket.socket(socket.AF_UNIX).connect('\\0nm-test-{os.getpid()}'),
             lambda: socket.socket(40, 1), lambda: socket.socket(38, 5),
             lambda: socket.socket(21, 5),
             lambda: socket.socketpair(40)):
    try:
        make(); print('open')
    except OSError as error:
        print(error.strerror)
for make in (lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0),
             lambda: socket.socket(2, socket.SOCK_RAW, 1)):
    try:
        make(); print('open')
    except OSError as error:
        print(error.strerror)
print(sorted(name for _, name in socket.if_nameindex()))
"""
        lines = sliver.python(program).text.splitlines()
        sliver.change(privileges=("tcpdump",))
        sliver.keep(sliver.backend.configure(sliver.spec, sliver.handle))
        raw = sliver.python(program).text.splitlines()
    assert (
        lines[:3]
        == raw[:3]
        == ["Connection refused", "Network is unreachable", "Connection refused"]
    )
    assert lines[3:7] == raw[3:7] == ["Address family not supported by protocol"] * 4
    assert lines[7:9] == ["Address family not supported by protocol", "Operation not permitted"]
    assert raw[7:9] == ["open", "open"]
    for names in (lines[9], raw[9]):
        assert "'lo'" in names
        assert not {"eth0", "ens3", "ens5"} & set(names.replace("'", " ").split())


@pytest.mark.spec("NM-C.2 isolation: cannot raise its limits")
def test_limits_cannot_be_raised(machine: Machine, sliver: Sliver) -> None:
    cgroups = machine.backend.services.cgroups
    limit = cgroups._file("pids", "s1", "pids.max")
    before = limit.read_text()
    answer = sliver.shell(
        "mkdir -p /mnt/c; for k in pids memory cpu; do mount -t cgroup -o $k none /mnt/c && "
        "find /mnt/c -name pids.max -exec sh -c 'echo max > {}' \\; ; "
        "(echo $$ > /mnt/c/cgroup.procs; mkdir /mnt/c/x); umount /mnt/c; "
        "done; mount -t cgroup2 none /mnt/c && echo max > /mnt/c/pids.max; true"
    ).text
    assert limit.read_text() == before, answer
    assert sliver.handle["pid"] in cgroups.members("s1")
    assert "x" not in [path.name for path in limit.parent.iterdir() if path.is_dir()]


@pytest.mark.spec("C.9 3: a fork bomb is held at its limit, a memory hog dies inside")
def test_fork_bomb_and_memory_hog_stay_inside(machine: Machine) -> None:
    sliver = machine.sliver("s4", 4, rspec={"nm_pids_max": 50, "nm_mem_limit": 256})
    try:
        bomb = (
            "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n"
            "            os.close(1); os.close(2)\n            time.sleep(100)\n        n += 1\n"
            "except OSError as error:\n    print(n < 50, error.strerror)\n"
        )
        assert sliver.python(bomb).text == "True Resource temporarily unavailable\n"
        # With version 2 alone a program joins the sliver's only group when it has started; it has
        # no children then.
        try:
            refused = sliver.python("import os\nos.fork()").text
        except BackendError as error:
            refused = str(error)
        assert "temporarily unavailable" in refused
        sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
        sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
        assert sliver.python("x = bytearray(600 << 20); print(len(x))").status == -9
        assert "No space left" in sliver.shell("head -c 400M /dev/zero > /dev/shm/big").text
        assert sliver.run("hostname").text == "s4\n"
    finally:
        sliver.destroy()


@pytest.mark.spec("issue 4 security: setuid from the host tree gives the sliver's root only")
def test_setuid_gives_the_slivers_root_only(sliver: Sliver) -> None:
    assert sliver.shell("stat -c '%U %a' /usr/bin/su", user="zuul").text == "root 4755\n"
    program = "import os\nprint(open('/proc/self/uid_map').read().split())"
    assert (
        sliver.run("sudo", "-n", "/usr/bin/python3", "-c", program, user="zuul").text
        == f"['0', '{ID_BASE + IDS_PER_SLIVER}', '{IDS_PER_SLIVER}']\n"
    )


@pytest.mark.spec("issue 4 security: symlink and rename attacks on the paths the daemon writes")
def test_daemon_follows_no_planted_links(machine: Machine, sliver: Sliver) -> None:
    host = pathlib.Path("/etc/nm-test-target")
    assert not host.exists()
    sliver.shell(
        "rm -rf /home/zuul/.ssh; mkdir /etc/target; ln -s /etc/target /home/zuul/.ssh; chown -h "
        "zuul /home/zuul/.ssh"
    )
    sliver.change(ssh_keys="ssh-ed25519 AAAA planted")
    with pytest.raises(BackendError, match=r"\.ssh.* not a plain directory"):
        machine.backend.configure(sliver.spec, sliver.handle)
    assert sliver.shell("ls /etc/target").text == ""
    sliver.shell(
        "rm /home/zuul/.ssh; mkdir /home/zuul/.ssh; ln -s /etc/nm-test-target "
        "/home/zuul/.ssh/authorized_keys; "
        "ln -sf /etc/nm-test-target /etc/rc.vinit; mkfifo /home/zuul/.ssh/.authorized_keys.nodepool"
    )
    sliver.change(initscript=b"#!/bin/sh\n")
    machine.backend.configure(sliver.spec, sliver.handle)
    kinds = sliver.shell(
        "stat -c %F /home/zuul/.ssh/authorized_keys /etc/rc.vinit; ls /etc/nm-test-target"
    ).text
    assert kinds.splitlines()[:2] == ["regular file", "regular file"]
    assert not host.exists()
    sliver.shell("rm -f /etc/passwd; mkfifo /etc/passwd")
    with pytest.raises(BackendError, match="has no account"):
        sliver.run("true", user="zuul")
    assert sliver.run("id", "-u").text == "0\n"


@pytest.mark.spec(
    "issue 4 security: the helper runs no code of a sliver, whatever lies where its own modules are"
)
def test_helper_runs_no_code_of_a_sliver(machine: Machine, sliver: Sliver) -> None:
    directories = {
        str(pathlib.Path(module.__file__).parent)
        for module in (os, socket, pytest, syscalls)
        if module.__file__
    }
    plant = "import os; open('/planted', 'w').write('x')"
    for directory in sorted(directories):
        sliver.shell(
            f"mkdir -p {directory}/encodings; for f in traceback linecache pwd grp stringprep "
            "encodings/idna "
            f'encodings/punycode sitecustomize zlib bz2; do echo "{plant}" > {directory}/$f.py; '
            "done"
        )
    sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
    sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
    machine.backend.configure(sliver.spec, sliver.handle)
    with pytest.raises(BackendError, match="no account"):
        sliver.run("true", user="zuul2")
    assert sliver.shell("ls /planted").status == 2


@pytest.mark.spec("issue 4 security: a program inside holds no descriptor of the helper")
def test_no_foreign_descriptors(machine: Machine, sliver: Sliver, other: Sliver) -> None:
    with other.start_program("sleep", "1000"):
        descriptors = pathlib.Path(f"/proc/{sliver.handle['pid']}/fd")
        links = [os.readlink(descriptors / number) for number in os.listdir(descriptors)]
        assert links == ["/dev/null"] * 3
        assert "socket" not in sliver.shell("ls -l /proc/self/fd").text


@pytest.mark.spec(
    "issue 4 security: an image cannot lead the daemon outside (links where file systems are "
    "mounted)"
)
@pytest.mark.parametrize("name", ["proc", "sys", "dev", "run"])
def test_images_with_links(machine: Machine, tmp_path: pathlib.Path, name: str) -> None:
    tree = small_tree(tmp_path / "tree")
    (tree / name).rmdir()
    (tree / name).symlink_to("/etc")
    with pytest.raises(BackendError, match=f"/{name} must be a directory"):
        machine.sliver("s5", 5, f"dir:{tree}")
    machine.backend.destroy("s5", 5, None)


def test_link_made_before_a_restart(machine: Machine) -> None:
    sliver = machine.sliver("s6", 6)
    sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
    upper = machine.backend.folders.writable("s6") / "root"
    (upper / "run").symlink_to("/etc")
    with pytest.raises(BackendError, match="not a plain directory"):
        machine.backend.start(sliver.spec, sliver.handle)
    sliver.destroy()


@pytest.mark.spec("issue 4 security: symlink and rename attacks on host key paths")
@pytest.mark.parametrize(
    "plant",
    [
        "rm -rf /etc/ssh; ln -s /etc/nm-test-target /etc/ssh",
        "rm -f /etc/ssh/ssh_host_ed25519_key*; ln -s /etc/nm-test-target "
        "/etc/ssh/ssh_host_ed25519_key; "
        "ln -s /proc/1/root/etc/nm-test-target /etc/ssh/ssh_host_ed25519_key.pub",
        "rm -f /etc/ssh/ssh_host_ed25519_key; mkfifo /etc/ssh/ssh_host_ed25519_key; mkdir "
        "/etc/rc.vinit",
        "mv /etc /etc2; ln -s /etc2 /etc",
    ],
)
def test_planted_host_keys(machine: Machine, sliver: Sliver, plant: str) -> None:
    sliver.shell(plant)
    sliver.keep(machine.backend.stop(sliver.spec, sliver.handle))
    began = time.monotonic()
    try:
        sliver.keep(machine.backend.start(sliver.spec, sliver.handle))
        assert sliver.run("id", "-u").text == "0\n"
    except BackendError as error:
        assert "/etc" in str(error) or "rc.vinit" in str(error)
    assert time.monotonic() - began < limit(10)
    assert not pathlib.Path("/etc/nm-test-target").exists()


@pytest.mark.spec(
    "issue 4 security: a directory that is swapped for a link while the daemon writes below it"
)
def test_renames_while_keys_are_written(machine: Machine, sliver: Sliver) -> None:
    target = pathlib.Path("/etc/nm-test-target")
    sliver.shell(
        "mkdir -p /etc/trap /etc/nm-test-target; cp -a /home/zuul/.ssh /home/zuul/real; "
        "ln -sfn /etc/trap /home/zuul/link; chmod 777 /etc/trap"
    )
    swap = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nos.chdir('/home/zuul')\n"
        "while True: libc.renameat2(-100, b'.ssh', -100, b'link', 2)"
    )
    with sliver.start_program("python3", "-c", swap, user="root"):
        outcomes = set()
        for number in range(60):
            sliver.change(ssh_keys=f"ssh-ed25519 AAAA key{number}")
            try:
                sliver.keep(machine.backend.configure(sliver.spec, sliver.handle))
                outcomes.add("written")
            except BackendError as error:
                assert ".ssh" in str(error)
                outcomes.add("refused")
    print(outcomes)
    assert sliver.shell("ls -A /etc/trap").text == ""
    assert not target.exists()
