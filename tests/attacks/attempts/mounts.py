"""Mounts, namespaces, cgroups, devices. Runs inside; standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os

from tests.attacks.library import (
    Escape,
    all_tried,
    attempt,
    call,
    libc,
    mount,
    name_of,
    refused,
    write,
)

USER, MNT, NET, PID, TIME, CGROUP = 0x10000000, 0x20000, 0x40000000, 0x20000000, 0x80, 0x2000000


def _raise(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def child_of(flags: int) -> int:
    """clone(2); a child ends immediately."""
    result = call(56, flags | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    if result > 0:
        os.waitpid(result, 0)
    return result


@attempt("10 a user namespace by unshare", {"EPERM"})
def user_namespace_by_unshare() -> str:
    return name_of(call(272, USER))


@attempt("10 a user namespace by unshare, with others", {"EPERM"})
def user_namespace_with_others() -> str:
    return name_of(call(272, USER | MNT | NET))


@attempt("10 a user namespace by clone", {"EPERM"})
def user_namespace_by_clone() -> str:
    return name_of(child_of(USER))


@attempt("10 a user namespace by x32", {"ENOSYS"})
def user_namespace_by_x32() -> str:
    return name_of(call(0x40000000 + 272, USER))


@attempt(
    "10 the sliver's own user namespace anew, which gives all capabilities", {"EPERM", "EINVAL"}
)
def own_user_namespace() -> str:
    space = os.open("/proc/1/ns/user", os.O_RDONLY)
    try:
        return name_of(call(308, space, USER))
    finally:
        os.close(space)


@attempt("10 other namespaces: what they open has had holes", {"EPERM"}, privileged={"done"})
def other_namespaces() -> str:
    outcomes = {name_of(child_of(flag)) for flag in (MNT, NET, PID, CGROUP, 0x8000000, 0x4000000)}
    return outcomes.pop() if len(outcomes) == 1 else str(outcomes)


@attempt("another time for this sliver's processes", {"EPERM"}, privileged={"done"})
def time_namespace() -> str:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if call(272, TIME) == 0 else 1)
    return "done" if os.waitpid(pid, 0)[1] == 0 else "EPERM"


@attempt("11-12 block devices of the host", {"refused"})
def block_devices() -> str:
    os.makedirs("/mnt/d", exist_ok=True)
    tries = [
        (f"{source} {kind}", lambda source=source, kind=kind: mount(source, "/mnt/d", kind))
        for source in ("/dev/vda", "/dev/sda1", "/dev/loop0", "/dev/loop1")
        for kind in ("ext4", "xfs", "btrfs", "vfat", "iso9660")
    ]
    tries += [
        ("mknod", lambda: os.mknod("/root/vda", 0o60600, os.makedev(253, 0))),
        ("loop-control", lambda: os.open("/dev/loop-control", os.O_RDWR)),
        ("mapper", lambda: os.open("/dev/mapper/control", os.O_RDWR)),
        ("fuse", lambda: os.open("/dev/fuse", os.O_RDWR)),
        ("tun", lambda: os.open("/dev/net/tun", os.O_RDWR)),
        ("kvm", lambda: os.open("/dev/kvm", os.O_RDWR)),
        ("vhost", lambda: os.open("/dev/vhost-net", os.O_RDWR)),
        ("mem", lambda: os.open("/dev/mem", os.O_RDWR)),
    ]
    return all_tried(tries, ("EPERM", "EACCES", "ENOENT", "ENODEV", "ENOTBLK", "EINVAL"))


#: With the privilege only what the kernel lets every user namespace mount.
_HARMLESS = {
    "proc",
    "sysfs",
    "tmpfs",
    "ramfs",
    "mqueue",
    "devpts",
    "cgroup",
    "cgroup2",
    "binfmt_misc",
    "cpuset",
    "overlay",
}


@attempt("13 file systems of many kinds", {"none"}, privileged=_HARMLESS | {"some"})
def kinds_of_mounts() -> str:
    os.makedirs("/mnt/k", exist_ok=True)
    with open("/proc/filesystems") as file:
        kinds = sorted(
            {line.split()[-1] for line in file}
            | {
                "nfs",
                "cifs",
                "fuse",
                "9p",
                "ceph",
                "debugfs",
                "tracefs",
                "bpf",
                "pstore",
                "securityfs",
                "configfs",
                "hugetlbfs",
                "efivarfs",
                "fusectl",
                "selinuxfs",
            }
        )
    mounted = []
    for kind in kinds:
        with contextlib.suppress(OSError):
            mount("none", "/mnt/k", kind)
            mounted.append(kind)
            libc.umount2(b"/mnt/k", 2)
    if not set(mounted) <= _HARMLESS:
        raise Escape(f"mounted: {mounted}")
    return "some" if mounted else "none"


@attempt(
    "14 masks of /proc and /sys are taken away, or made anew without",
    {"refused"},
    privileged={"refused"},
)
def masks() -> str:
    os.makedirs("/mnt/p", exist_ok=True)
    tries = [
        (
            f"umount {path}",
            lambda path=path: _raise(-ctypes.get_errno() if libc.umount2(path.encode(), 2) else 0),
        )
        for path in (
            "/proc/kcore",
            "/proc/keys",
            "/proc/sys",
            "/proc/sysrq-trigger",
            "/proc",
            "/sys",
            "/sys/firmware",
            "/run/nodepool",
        )
    ]
    tries += [
        (f"remount {path}", lambda path=path: mount("none", path, "", 0x20 | 0x1000))
        for path in ("/proc/sys", "/sys", "/proc/sysrq-trigger", "/run/nodepool")
    ]
    tries += [
        ("remount of the superblock", lambda: mount("none", "/sys", "", 0x20)),
        ("device nodes on the root", lambda: mount("none", "/", "", 0x20 | 0x1000)),
        ("setuid in /dev/shm", lambda: mount("none", "/dev/shm", "", 0x20 | 0x1000)),
        ("move", lambda: mount("/proc/sys", "/mnt/p", "", 0x2000)),
    ]
    if not os.path.exists("/run/nodepool-whole"):
        tries += [
            ("second proc", lambda: mount("proc", "/mnt/p", "proc")),
            ("second sysfs", lambda: mount("sysfs", "/mnt/p", "sysfs")),
        ]
    return all_tried(tries, ("EPERM", "EINVAL", "EBUSY", "EACCES", "EROFS", "ENOENT"))


@attempt("8 cgroups of version 1: release_agent and limits", {"refused"})
def cgroups_1() -> str:
    for number, controller in enumerate(
        (
            "memory",
            "pids",
            "cpu",
            "devices",
            "freezer",
            "blkio",
            "cpuset",
            "cpuacct",
            "rdma",
            "misc",
            "net_cls",
        )
    ):
        target = f"/mnt/c{number}"
        os.makedirs(target, exist_ok=True)
        try:
            mount("none", target, "cgroup", 0, controller)
        except OSError:
            continue
        tries = [
            (
                f"{controller} {name}",
                lambda name=name, text=text, target=target: write(f"{target}/{name}", text),
            )
            for name, text in (
                ("release_agent", "/x"),
                ("notify_on_release", "1"),
                ("tasks", "0"),
                ("cgroup.procs", "0"),
                ("memory.limit_in_bytes", "-1"),
                ("pids.max", "max"),
                ("cpu.shares", "1024"),
                ("cpu.cfs_quota_us", "-1"),
                ("devices.allow", "a *:* rwm"),
                ("freezer.state", "FROZEN"),
                ("cpuset.cpus", "0"),
                ("cgroup.clone_children", "1"),
            )
        ]
        tries.append((f"{controller} mkdir", lambda target=target: os.mkdir(f"{target}/x")))
        all_tried(tries, ("EACCES", "EPERM", "ENOENT", "EROFS", "EINVAL", "EBUSY"))
        libc.umount2(target.encode(), 2)
    return "refused"


@attempt("9 cgroups of version 2", {"refused"})
def cgroups_2() -> str:
    os.makedirs("/mnt/c2", exist_ok=True)
    try:
        mount("none", "/mnt/c2", "cgroup2")
    except OSError as error:
        return "refused" if refused(error) in ("EPERM", "EBUSY", "EINVAL") else refused(error)
    tries = [
        (name, lambda name=name, text=text: write(f"/mnt/c2/{name}", text))
        for name, text in (
            ("cgroup.procs", "0"),
            ("cgroup.threads", "0"),
            ("cgroup.freeze", "1"),
            ("cgroup.kill", "1"),
            ("cgroup.subtree_control", "+pids"),
            ("memory.max", "max"),
            ("pids.max", "max"),
            ("cgroup.type", "threaded"),
            ("cgroup.pressure", "0"),
        )
    ]
    tries.append(("mkdir", lambda: os.mkdir("/mnt/c2/x")))
    try:
        return all_tried(tries, ("EACCES", "EPERM", "ENOENT", "EROFS"))
    finally:
        libc.umount2(b"/mnt/c2", 2)


@attempt(
    "overlays of layers that are not ours (CVE-2021-3493, CVE-2023-0386): no capability comes of "
    "it",
    {"EPERM"},
    privileged={"EPERM", "EINVAL", "none", "ENODEV"},
)
def overlays() -> str:
    for name in ("lower", "upper", "work", "merged"):
        os.makedirs(f"/dev/shm/o/{name}", exist_ok=True)
    mount(
        "overlay",
        "/dev/shm/o/merged",
        "overlay",
        0,
        "lowerdir=/dev/shm/o/lower,upperdir=/dev/shm/o/upper,workdir=/dev/shm/o/work",
    )
    libc.umount2(b"/dev/shm/o/merged", 2)
    return "none"


@attempt("pivot_root and chroot out of the tree", {"none"})
def out_of_the_tree() -> str:
    os.makedirs("/root/jail", exist_ok=True)
    pid = os.fork()
    if pid == 0:
        top = os.open("/", os.O_RDONLY)
        os.chroot("/root/jail")
        os.fchdir(top)
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        # The sliver's own root, no more: its own marks are there.
        inside = os.path.exists("/run/nodepool") or os.path.exists("/etc/ssh/sshd_config_nodepool")
        os._exit(0 if inside else 1)
    if os.waitpid(pid, 0)[1] != 0:
        raise Escape("another root")
    return "none"


@attempt("23 the trees of other processes: /proc/1/root, cwd, exe, map_files", {"none"})
def trees_of_processes() -> str:
    own = os.stat("/")
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        for name in ("root", "cwd"):
            try:
                found = os.stat(f"/proc/{pid}/{name}/")
            except OSError:
                continue
            if name == "root" and (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino):
                raise Escape(f"process {pid} has another root")
        try:
            text = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            continue
        if "(unreachable)" in text:
            raise Escape(f"process {pid}: {text}")
    return "none"


@attempt("28 /run/nodepool: unlink, replace, write", {"refused", "none"})
def api_directory() -> str:
    if not os.path.isdir("/run/nodepool") or not os.listdir("/run/nodepool"):
        return "none"  # this backend shows no socket
    if os.listdir("/run/nodepool") != ["nodemanager.api"]:
        raise Escape(f"more than the socket is seen: {os.listdir('/run/nodepool')}")
    return all_tried(
        [
            ("unlink", lambda: os.unlink("/run/nodepool/nodemanager.api")),
            ("make", lambda: os.mkdir("/run/nodepool/x")),
            ("rename", lambda: os.rename("/run/nodepool/nodemanager.api", "/run/nodepool/y")),
            ("chmod", lambda: os.chmod("/run/nodepool/nodemanager.api", 0o600)),
            ("chmod directory", lambda: os.chmod("/run/nodepool", 0o777)),
            ("chown", lambda: os.chown("/run/nodepool/nodemanager.api", 0, 0)),
            ("link", lambda: os.link("/run/nodepool/nodemanager.api", "/run/api")),
            ("bind", lambda: mount("/run/nodepool", "/run/nodepool", "", 0x1000 | 0x20)),
            ("time", lambda: os.utime("/run/nodepool")),
        ],
        ("EROFS", "EACCES", "EPERM", "EXDEV", "EBUSY", "EINVAL"),
    )
