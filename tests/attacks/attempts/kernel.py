"""Calls of the kernel that have had holes, or that belong to the host. Runs inside; standard
library only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct

from tests.attacks.library import Escape, all_tried, attempt, attempt_calls, call, name_of, write

_NO = ("EPERM",)
_NONE = ("ENOSYS",)
attempt_calls(
    [
        ("17 add_key", ("EPERM", "ENOSYS"), (248, b"user", b"x", b"y", 1, -2)),
        ("17 request_key", ("EPERM", "ENOSYS"), (249, b"user", b"x", 0, 0)),
        ("17 keyctl", ("EPERM", "ENOSYS"), (250, 0, -3, 0)),
        ("17 bpf", _NO, (321, 0, 0, 0)),
        ("17 perf_event_open", _NO, (298, 0, 0, -1, -1, 0)),
        ("17 userfaultfd", _NO, (323, 0)),
        ("17 userfaultfd, user mode only", _NO, (323, 1)),
        ("17 open_by_handle_at", _NO, (304, -100, 0, 0)),
        ("17 kexec_load", _NO, (246, 0, 0, 0, 0)),
        ("17 kexec_file_load", _NO, (320, -1, -1, 0, 0, 0)),
        ("17 reboot", _NO, (169, 0xFEE1DEAD, 672274793, 0x89ABCDEF, 0)),
        ("17 init_module", _NO, (175, 0, 0, 0)),
        ("17 finit_module", _NO, (313, -1, 0, 0)),
        ("17 delete_module", _NO, (176, 0, 0)),
        ("17 clock_settime", _NO, (227, 0, 0)),
        ("17 settimeofday", _NO, (164, 0, 0)),
        ("17 adjtimex", _NO, (159, 0)),
        ("17 clock_adjtime", _NO, (305, 0, 0)),
        ("17 swapon", _NO, (167, b"/x", 0)),
        ("17 swapoff", _NO, (168, b"/x")),
        ("17 acct", _NO, (163, b"/x")),
        ("17 quotactl", _NO, (179, 0, 0, 0, 0)),
        ("17 quotactl_fd", _NO, (443, 0, 0, 0, 0)),
        ("17 syslog", _NO, (103, 3, 0, 0)),
        ("17 iopl", _NO, (172, 3)),
        ("17 ioperm", _NO, (173, 0, 1, 1)),
        ("18a io_uring_setup", _NONE, (425, 8, 0)),
        ("18a io_uring_enter", _NONE, (426, 0, 0, 0, 0, 0)),
        ("18a io_uring_register", _NONE, (427, -1, 0, 0, 0)),
        ("18 fsopen", _NONE, (430, b"tmpfs", 0)),
        ("18 fspick", _NONE, (433, -100, b"/", 0)),
        ("18 open_tree", _NONE, (428, -100, b"/", 1)),
        ("18 move_mount", _NONE, (429, -100, b"/", -100, b"/", 0)),
        ("18 mount_setattr", _NONE, (442, -100, b"/", 0, 0, 0)),
        ("open_tree_attr", _NONE, (467, -100, b"/", 0, 0, 0)),
        ("statmount", _NONE, (457, 0, 0, 0, 0)),
        ("listmount", _NONE, (458, 0, 0, 0, 0)),
        ("clone3", _NONE, (435, 0, 0)),
        ("modify_ldt", _NO, (154, 0, 0, 0)),
        ("memfd_secret", _NONE, (447, 0)),
        ("fanotify_init", _NO, (300, 0, 0)),
        ("fanotify_mark", _NO, (301, -1, 0, 0, 0, 0)),
        ("lookup_dcookie", _NO, (212, 0, 0, 0)),
        ("vhangup", _NO, (153,)),
        ("_sysctl", _NO, (156, 0)),
        ("uselib", _NO, (134, b"/x")),
        ("nfsservctl", _NO, (180, 0, 0, 0)),
        ("sysfs", _NO, (139, 3)),
        ("ustat", _NO, (136, 0, 0)),
        ("move_pages", _NO, (279, 0, 0, 0, 0, 0, 0)),
        ("migrate_pages", _NO, (256, 0, 0, 0, 0)),
        ("set_mempolicy", _NONE, (238, 0, 0, 0)),
        ("mbind", _NONE, (237, 0, 0, 0, 0, 0, 0)),
        ("51 io_setup", _NONE, (206, 1, 0)),
        ("io_submit", _NONE, (209, 0, 0, 0)),
        ("lsm_set_self_attr", _NONE, (460, 0, 0, 0, 0)),
        ("a call that no kernel has yet", _NONE, (599,)),
        ("10 a call of x32", _NONE, (0x40000000 + 39,)),
        ("personality READ_IMPLIES_EXEC", _NO, (135, 0x0400000)),
        ("seccomp with a listener", ("EPERM", "EINVAL"), (317, 1, 8, 0)),
        ("TIOCLINUX", _NO, (16, 0, 0x541C, 0)),
        ("TIOCSETD: a line discipline of a module", _NO, (16, 0, 0x5423, 0)),
    ]
)


@attempt("sync: all file systems of the host would be written out", {"none"})
def sync_of_the_host() -> str:
    # Nothing to see from inside but that it answers; the filter is checked by a unit test.
    return "none" if call(162) == 0 else "EIO"


@attempt("16 thresholds of pressure of the host", {"refused"})
def pressure() -> str:
    return all_tried(
        [
            (name, lambda name=name: write(f"/proc/pressure/{name}", "some 100000 1000000\0"))
            for name in ("cpu", "memory", "io")
        ],
        ("EINVAL", "EACCES", "EPERM", "EROFS", "ENOENT", "EOPNOTSUPP"),
    )


@attempt("16 a better place before the out-of-memory killer", {"refused"})
def out_of_memory_score() -> str:
    return all_tried(
        [
            (str(value), lambda value=value: write("/proc/self/oom_score_adj", str(value)))
            for value in (-1, -500, -1000)
        ],
        ("EACCES", "EPERM"),
    )


@attempt(
    "F13: process 1 is protected from the out-of-memory killer and can be asked to run programs",
    {"none"},
)
def score_of_process_1() -> str:
    with open("/proc/1/oom_score_adj") as file:
        if int(file.read()) < 0:
            raise Escape("process 1 is protected")
    return "none"


@attempt("15 sysctls and the like of the host", {"refused"})
def sysctls() -> str:
    return all_tried(
        [
            (path, lambda path=path: write(path, "1"))
            for path in (
                "/proc/sys/kernel/core_pattern",
                "/proc/sys/kernel/modprobe",
                "/proc/sys/kernel/hotplug",
                "/proc/sys/vm/overcommit_memory",
                "/proc/sys/fs/binfmt_misc/register",
                "/proc/sysrq-trigger",
                "/sys/kernel/uevent_helper",
                "/sys/power/state",
                "/sys/kernel/mm/ksm/run",
                "/proc/irq/default_smp_affinity",
                "/proc/sys/user/max_user_namespaces",
                "/proc/sys/user/max_inotify_instances",
                "/sys/class/net/lo/mtu",
                "/proc/self/timens_offsets",
                "/proc/1/timens_offsets",
                "/proc/mtrr",
            )
        ],
        ("EROFS", "EACCES", "EPERM", "ENOENT", "EINVAL"),
    )


@attempt("sysctls of the sliver's own network", {"EROFS", "EACCES"}, privileged={"done"})
def sysctls_of_the_network() -> str:
    write("/proc/sys/net/ipv4/ip_forward", "1")
    return "done"


@attempt("core dumps go to a program of the host", {"none"}, privileged={"may"})
def core_dumps() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (2, 2))
    except (OSError, ValueError):
        return "none" if (soft, hard) == (1, 1) else f"{soft} {hard}"
    return "may"


@attempt("25 real time, better priorities, more than the limits", {"refused"})
def priorities() -> str:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def limit(kind: int, value: int) -> None:
        try:
            resource.setrlimit(kind, (value, value))
        except ValueError as error:
            raise PermissionError(1, str(error)) from error

    return all_tried(
        [
            ("SCHED_FIFO", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
            ("nice -20", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20)),
            ("I/O class RT", lambda: _raise(call(251, 1, 0, 1 << 13))),
            ("more files", lambda: limit(resource.RLIMIT_NOFILE, files + 1)),
            (
                "SCHED_DEADLINE",
                lambda: _raise(
                    call(314, 0, struct.pack("=IIQiIQQQ", 48, 6, 0, 0, 0, 10**7, 10**7, 10**7), 0)
                ),
            ),
        ],
        ("EPERM", "EACCES"),
    )


def _raise(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


@attempt("19 sockets of rare families and protocols, whose modules would be loaded", {"refused"})
def socket_families() -> str:
    tries = [
        (str(family), lambda family=family, kind=kind: socket.socket(family, kind))
        for kind in (1, 2, 3, 5)
        for family in range(64)
        if family not in (1, 2, 10, 16, 17)
    ]
    tries += [
        (
            f"internet {protocol}",
            lambda protocol=protocol, kind=kind: socket.socket(2, kind, protocol),
        )
        for protocol, kind in ((132, 1), (132, 5), (33, 6), (136, 2), (115, 2), (0x100, 1))
    ]
    tries += [
        (f"netlink {protocol}", lambda protocol=protocol: socket.socket(16, 3, protocol))
        for protocol in (7, 10, 11, 19, 20, 21)
    ]
    return all_tried(
        tries, ("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EINVAL", "EPERM")
    )


@attempt(
    "netlink of packet filters, IPsec and generic kinds", {"EPROTONOSUPPORT"}, privileged={"open"}
)
def netlink() -> str:
    for protocol in (6, 12, 16):
        try:
            socket.socket(16, 3, protocol).close()
        except OSError as error:
            return name_of(-(error.errno or 0))
    return "open"


@attempt("raw and packet sockets", {"EPERM", "EAFNOSUPPORT"}, privileged={"open"})
def raw_sockets() -> str:
    for family, kind, protocol in ((17, 3, 0x300), (2, 3, 255), (2, 3, 1), (10, 3, 58)):
        try:
            socket.socket(family, kind, protocol).close()
        except OSError as error:
            return name_of(-(error.errno or 0))
    return "open"


def _accept_all() -> ctypes.Array[ctypes.c_char]:
    """A filter of one instruction that lets everything through: its length, its address, and
    itself.
    """
    whole = ctypes.create_string_buffer(24)
    whole[:] = struct.pack("@HPHBBI", 1, ctypes.addressof(whole) + 16, 0x06, 0, 0, 0x7FFF0000)
    return whole


@attempt(
    "filters on sockets, which the kernel compiles into an area of all slivers and the host",
    {"refused"},
    {"done"},
)
def filters_on_sockets() -> str:
    results = set()
    for make in (
        lambda: socket.socket(2, 2),
        lambda: socket.socket(1, 2),
        lambda: socket.socket(16, 3, 0),
    ):
        for option in (26, 51):
            with make() as end:
                results.add(name_of(call(54, end.fileno(), 1, option, _accept_all(), 16)))
    # The other option belongs to sockets that share a port.
    return (
        "refused" if results == {"EPERM"} else "done" if "done" in results else str(sorted(results))
    )


def _filters() -> str:
    with open("/proc/self/status") as file:
        return next((line for line in file if line.startswith("Seccomp_filters:")), "")


# prctl succeeds and does nothing, because sshd ends without it.
@attempt("system call filters of a program", {"done EINVAL ignored"}, {"done done in force"})
def filters_of_system_calls() -> str:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        call(157, 38, 1, 0, 0, 0)
        before = _filters()
        results = [call(157, 22, 2, _accept_all(), 0, 0), call(317, 1, 0, _accept_all())]
        names = [name_of(result) for result in results]
        names.append("ignored" if _filters() == before else "in force")
        os.write(writing, " ".join(names).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    return os.read(reading, 100).decode()


@attempt("20 typing into the terminal of who looks in", {"EPERM"})
def terminal_injection() -> str:
    _ours, theirs = os.openpty()
    return name_of(call(16, theirs, 0x5412, ctypes.create_string_buffer(b"x")))


@attempt(
    "24 attributes that overlays and capabilities trust in; files of ids that are not ours",
    {"refused"},
)
def trusted_attributes() -> str:
    path = "/root/attributes"
    with open(path, "w"):
        pass
    tries = [
        (name, lambda name=name: os.setxattr(path, name, b"y"))
        for name in (
            "trusted.overlay.redirect",
            "trusted.overlay.metacopy",
            "trusted.overlay.opaque",
            "trusted.x",
        )
    ]
    tries += [
        ("chown", lambda: os.chown(path, 65536, 65536)),
        ("chown far", lambda: os.chown(path, 2_000_000, 0)),
        ("mknod disk", lambda: os.mknod("/root/disk", 0o60600, os.makedev(253, 0))),
        ("mknod memory", lambda: os.mknod("/root/memory", 0o20600, os.makedev(1, 1))),
        ("mknod fuse", lambda: os.mknod("/dev/fuse", 0o20600, os.makedev(10, 229))),
        (
            "mknod whiteout with privileges",
            lambda: os.mknod("/root/console", 0o20600, os.makedev(5, 1)),
        ),
    ]
    return all_tried(tries, ("EPERM", "EINVAL", "EOPNOTSUPP", "EACCES"))


@attempt("capabilities of files", {"EPERM"}, privileged={"done"})
def file_capabilities() -> str:
    with open("/root/program", "w"):
        pass
    os.setxattr(
        "/root/program", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    )
    return "done"


@attempt("17 ptrace and memory of processes outside", {"refused"})
def processes_outside() -> str:
    tries = [
        (f"ptrace {pid}", lambda pid=pid: _raise(call(101, 0x4206, pid, 0, 0)))
        for pid in (99999, 300000, 4000000)
    ]
    tries += [("kill all outside", lambda: os.kill(4000000, 0))]
    return all_tried(tries, ("ESRCH", "EPERM"))


@attempt("calls of 32-bit programs, which have other numbers", {"-38"})
def calls_of_32_bit() -> str:
    import mmap

    # mov eax, 20 (getpid of i386); int 0x80; ret; in a child, as a kernel without them sends a
    # signal
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(bytes.fromhex("b814000000cd80c3"))
        function = ctypes.CFUNCTYPE(ctypes.c_int)(
            ctypes.addressof(ctypes.c_char.from_buffer(memory))
        )
        os.write(writing, str(function()).encode())
        os._exit(0)
    os.close(writing)
    text = os.read(reading, 100).decode()
    os.waitpid(pid, 0)
    return text or "-38"


@attempt("names of other slivers, the state directory and what others write, by disks", {"none"})
def disks_of_others() -> str:
    for path in ("/proc/cmdline", "/proc/diskstats", "/proc/partitions"):
        with open(path, "rb") as file:
            if text := file.read(4096):
                raise Escape(f"{path}: {text[:80]!r}")
    for place in (
        "block",
        "devices/virtual/block",
        "fs/ext4",
        "class/block",
        "class/bdi",
        "dev/block",
    ):
        if os.path.isdir(f"/sys/{place}") and os.listdir(f"/sys/{place}"):
            raise Escape(f"/sys/{place}: {os.listdir(f'/sys/{place}')}")
    return "none"


@attempt("secrets of the kernel: addresses, messages, memory, keys, timers", {"none"})
def kernel_secrets() -> str:
    for path in (
        "/proc/kcore",
        "/proc/kmsg",
        "/proc/keys",
        "/proc/timer_list",
        "/proc/sched_debug",
        "/proc/vmallocinfo",
        "/dev/mem",
        "/dev/kmsg",
        "/proc/kallsyms",
        "/proc/modules",
        "/sys/kernel/debug/sched",
        "/proc/iomem",
        "/sys/firmware/dmi/tables/DMI",
        "/proc/slabinfo",
        "/proc/pagetypeinfo",
        "/sys/kernel/notes",
    ):
        try:
            with open(path, "rb") as file:
                text = file.read(4096)
        except OSError:
            continue
        if path in ("/proc/iomem", "/proc/kallsyms"):  # numbers all 0 are none
            text = (
                b""
                if all(
                    set(line.split()[0]) <= set(b"0-") for line in text.splitlines()[:-1] if line
                )
                else text
            )
        if text:
            raise Escape(f"{path}: {text[:80]!r}")
    return "none"


@attempt("a setuid program gives more than the sliver has", {"none"})
def setuid_programs() -> str:
    with open("/proc/self/status") as file:
        bound = next(line for line in file if line.startswith("CapBnd"))
    output = os.popen("su -s /bin/sh -c 'grep CapEff /proc/self/status' root").read()
    if output and int(output.split()[1], 16) & ~int(bound.split()[1], 16):
        raise Escape(output)
    return "none"
