"""Creates a sliver as root of the host (backend `native`); runs in a worker of the helper.

The worker creates all mounts in a mount namespace owned by the host. Then process 1 takes a copy of
that namespace into its own user namespace. The kernel locks copied mounts and their flags: root
inside cannot unmount the masks of /proc, nor make /sys writable, nor allow device nodes on the root
again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from nodepool.nodemanager.helper.operation import Operation, StepError, wait_for_daemon
from nodepool.nodemanager.helper.operations import child, open_cgroups
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)
from nodepool.nodemanager.setup import process_one

DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
READ_ONLY = ("proc/bus", "proc/fs", "proc/irq", "proc/sys", "proc/sysrq-trigger")
MASKED = (
    "proc/acpi",
    "proc/asound",
    "proc/kcore",
    "proc/keys",
    "proc/key-users",
    "proc/kallsyms",
    "proc/kmsg",
    "proc/latency_stats",
    "proc/timer_list",
    "proc/timer_stats",
    "proc/sched_debug",
    "proc/scsi",
    "proc/kpagecount",
    "proc/kpageflags",
    "proc/kpagecgroup",
    "proc/vmallocinfo",
    "proc/slabinfo",
    "proc/config.gz",
    "proc/modules",
    "proc/mdstat",
    "proc/cmdline",
    "proc/diskstats",
    "proc/partitions",
    # Files of loop devices are named after slivers.
    "sys/block",
    "sys/class/block",
    "sys/class/bdi",
    "sys/dev/block",
    "sys/devices/virtual/block",
    "sys/fs/ext4",
    "sys/firmware",
    "sys/fs/pstore",
    "sys/kernel/security",
    "sys/devices/virtual/powercap",
    "sys/devices/virtual/dmi",
    "sys/kernel/vmcoreinfo",
    "sys/kernel/notes",
    "sys/hypervisor",
)
PRIVATE = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
TTY_GROUP = 5
#: Maximum terminals of one sliver; a host has a few thousand.
TERMINALS = 256
#: Limits per sliver of objects that the kernel counts by user namespace.  Each type uses kernel
#: memory of which only a part is charged to the cgroup (a network namespace: about 200 KiB), or is
#: counted for all users of the host together.
OBJECTS = {
    "net_namespaces": 32,
    "mnt_namespaces": 256,
    "pid_namespaces": 256,
    "ipc_namespaces": 256,
    "uts_namespaces": 256,
    "cgroup_namespaces": 256,
    "time_namespaces": 256,
    "user_namespaces": 0,
    "inotify_instances": 512,
    "inotify_watches": 65536,
    "fanotify_groups": 16,
    "fanotify_marks": 8192,
}
#: Paths of /proc and /sys without masks, for containers inside.
WHOLE = "run/nodepool-whole"
#: Id that owns nothing in a layer: layers are mapped to the higher ids of slivers.
NOBODY = 65534
_SAFE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
NEW = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)


def place(root: int, path: str, directory: bool = True, make: bool = True) -> int:
    """Return an O_PATH descriptor of a path in the tree, refusing links on the path.

    Raises StepError, FileNotFoundError (only with `make` false).
    """
    flags = os.O_PATH | (os.O_DIRECTORY if directory else os.O_NOFOLLOW)
    try:
        return syscalls.openat2(root, path, flags, _SAFE)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(path, 0o755, dir_fd=root)
        return syscalls.openat2(root, path, flags, _SAFE)
    except OSError as error:
        if error.errno in syscalls.SHORTAGE:
            raise
        raise StepError(
            f"/{path} of the root tree is not a plain directory (a link or a file): "
            f"{error.strerror}"
        ) from error


def attach(mount_fd: int, root: int, path: str, directory: bool = True, make: bool = True) -> None:
    """Attach a detached mount inside the tree and close its descriptor."""
    with held(place(root, path, directory, make)) as target:
        syscalls.move_mount(mount_fd, target)


def overlay(layers: Sequence[str], upper: str, work: str) -> int:
    """Return a detached overlay; nodev, because images may contain device nodes."""
    return syscalls.new_mount(
        "overlay",
        {
            "lowerdir": ":".join(layers),
            "upperdir": upper,
            "workdir": work,
            "redirect_dir": "on",
            "metacopy": "off",
            "index": "off",
        },
        MOUNT_ATTR_NODEV,
    )


def only_public(layers: Sequence[str]) -> int:
    """Return a detached, read-only overlay that shows only files readable by everybody.

    This applies even to root. The kernel opens a file of a layer as the user who mounted the
    overlay, each time, after a check of the caller's own rights. Here that is nobody, without the
    capabilities that override modes: files that are created, or change their mode, while slivers
    run are covered, too. Processes of the host's other users can read the rest as well.
    """
    os.setgroups([])
    syscalls.file_user(NOBODY, NOBODY)
    try:
        return syscalls.new_mount(
            "overlay",
            {"lowerdir": ":".join([*layers, "empty"])},
            MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV,
        )
    finally:
        syscalls.file_user(0, 0)


def make_upper(writable: str, name: str, owner: int) -> None:
    """Create upper and work directory of one overlay on the sliver's disk."""
    for directory in (name, f"{name}-work"):
        path = os.path.join(writable, directory)
        try:
            os.mkdir(path, 0o755)
            os.chown(path, owner, owner)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise StepError(f"{path} is not a directory") from None


def build_tree(request: dict[str, Any], userns: int) -> int:
    """Build stage and overlays in this mount namespace; return a descriptor of the new root."""
    base = request["base"]
    syscalls.mount(
        "tmpfs",
        request["stage"],
        "tmpfs",
        syscalls.MS_NOSUID | syscalls.MS_NODEV,
        "size=64k,mode=711",
    )
    os.chdir(request["stage"])
    for directory in ("root", "upper", "empty"):
        os.mkdir(directory)
        os.chmod(directory, 0o755)
    writable_fd = request["disk"] if "disk" in request else syscalls.open_tree(request["writable"])
    syscalls.move_mount(writable_fd, "upper")
    number = 0
    mounts: dict[str, int] = {}
    for place_name, layers in request["layers"].items():
        make_upper("upper", place_name, base)
        names = []
        for layer in layers:
            layer_fd = syscalls.open_tree(layer)
            try:
                syscalls.mount_setattr(layer_fd, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, userns)
            except OSError as error:
                raise StepError(
                    f"{layer}: its file system cannot be id-mapped ({error.strerror}); use another "
                    "file system "
                    "for the image, or a newer kernel"
                ) from error
            os.mkdir(f"l{number}")
            syscalls.move_mount(layer_fd, f"l{number}")
            names.append(f"l{number}")
            number += 1
        if place_name != "root":  # a directory of the host itself, as it is now
            os.mkdir(f"public-{place_name}")
            syscalls.move_mount(only_public(names), f"public-{place_name}")
            names = [f"public-{place_name}"]
        mounts[place_name] = overlay(names, f"upper/{place_name}", f"upper/{place_name}-work")
    syscalls.move_mount(mounts.pop("root"), "root")
    root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for place_name, mount_fd in mounts.items():
        attach(mount_fd, root, place_name)
    return root


def tmpfs_size(request: dict[str, Any], parts: int) -> dict[str, str | None]:
    """Return a size: a part of the sliver's memory, to which files in a tmpfs are charged."""
    memory = int(request.get("memory", 0))
    return {"size": f"{max(1, memory // parts)}m"} if memory else {}


def build_devices(root: int, base: int, request: dict[str, Any]) -> None:
    """Build /dev, /dev/pts, /dev/shm."""
    owner: dict[str, str | None] = {"uid": str(base), "gid": str(base)}
    dev = syscalls.new_mount(
        "tmpfs",
        {**owner, "mode": "755", "size": "64k", "nr_inodes": "64"},
        MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
    )
    for name, (major, minor) in DEVICES.items():
        os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(major, minor), dir_fd=dev)
        os.chmod(name, 0o666, dir_fd=dev)
        os.chown(name, base, base + (TTY_GROUP if name == "tty" else 0), dir_fd=dev)
    for name, target in LINKS.items():
        os.symlink(target, name, dir_fd=dev)
        os.chown(name, base, base, dir_fd=dev, follow_symlinks=False)
    for name in ("pts", "shm"):
        os.mkdir(name, 0o755, dir_fd=dev)
    attach(dev, root, "dev")
    terminals: dict[str, str | None] = {
        "newinstance": None,
        "ptmxmode": "0666",
        "mode": "0620",
        "gid": str(base + TTY_GROUP),
        "max": str(TERMINALS),
    }
    attach(
        syscalls.new_mount("devpts", terminals, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC),
        root,
        "dev/pts",
        make=False,
    )
    attach(
        syscalls.new_mount(
            "tmpfs",
            {**owner, "mode": "1777", **tmpfs_size(request, 2)},
            PRIVATE & ~MOUNT_ATTR_NOEXEC,
        ),
        root,
        "dev/shm",
        make=False,
    )


def build_run(root: int, base: int, request: dict[str, Any]) -> None:
    """Build /run with the API's socket."""
    api = request.get("api")
    run = syscalls.new_mount(
        "tmpfs",
        {"uid": str(base), "gid": str(base), "mode": "755", **tmpfs_size(request, 5)},
        MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
    )
    whole = os.path.basename(WHOLE)
    below = (
        ((whole, 0o755), (f"{whole}/proc", 0o755), (f"{whole}/sys", 0o755))
        if "docker" in request["privileges"]
        else ()
    )
    for name, mode in (("lock", 0o1777), ("sshd", 0o755), ("nodepool", 0o755), *below):
        os.mkdir(name, mode, dir_fd=run)
        os.chmod(name, mode, dir_fd=run)
        os.chown(name, base, base, dir_fd=run)
    target = "run/nodepool"
    directory = True
    if api and not os.path.isdir(api):
        os.close(
            os.open(
                "nodepool/nodemanager.api",
                os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC,
                0o600,
                dir_fd=run,
            )
        )
        target, directory = "run/nodepool/nodemanager.api", False
    attach(run, root, "run")
    if api:
        mount_fd = syscalls.open_tree(api)
        syscalls.mount_setattr(mount_fd, MOUNT_ATTR_RDONLY | PRIVATE)
        attach(mount_fd, root, target, directory, make=False)


def process_view(one: process_one.First) -> int:
    """Return a detached /proc of the sliver's pid namespace."""
    try:
        return syscalls.new_mount("proc", {"pidns": f"/proc/{one.pid}/ns/pid"}, PRIVATE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Before 6.17 the kernel uses the namespace of the calling process: a child of this one.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        syscalls.setns(one.pidfd, syscalls.CLONE_NEWPID)

        def mount(_pipe: int) -> None:
            socket.send_fds(theirs, [b"m"], [syscalls.new_mount("proc", {}, PRIVATE)])

        helper, helper_fd = child(0, mount, "cannot mount /proc")
        os.waitpid(helper, 0)
        os.close(helper_fd)
        return socket.recv_fds(ours, 1, 1)[1][0]


def mount_process_views(
    root: int, one: process_one.First, base: int, given: Collection[str]
) -> None:
    """Mount /proc and /sys of the sliver; enters the sliver's network for that."""
    syscalls.setns(one.pidfd, syscalls.CLONE_NEWNET)
    attach(process_view(one), root, "proc")
    if "ping" in given:
        with held(place(root, "proc")) as proc:
            syscalls.write("sys/net/ipv4/ping_group_range", f"{base} {base + 65535}", proc)
    attach(syscalls.new_mount("sysfs", {}, PRIVATE | MOUNT_ATTR_RDONLY), root, "sys")
    for path in READ_ONLY:
        if path != "proc/sys" or "docker" not in given:
            cover(root, path, None)
    for path in MASKED:
        cover(root, path, "dev/null")
    if "docker" in given:
        # The kernel mounts these for containers inside only where they are whole somewhere; what
        # they show of the host is guarded by the owner of the files, root of the host.
        attach(process_view(one), root, f"{WHOLE}/proc", make=False)
        attach(
            syscalls.new_mount("sysfs", {}, PRIVATE | MOUNT_ATTR_RDONLY),
            root,
            f"{WHOLE}/sys",
            make=False,
        )


def cover(root: int, path: str, mask: str | None) -> None:
    """Make a path read-only (mask None) or hide it; ignore paths that this kernel lacks."""
    try:
        target = syscalls.openat2(root, path, os.O_PATH, _SAFE)
    except OSError:
        return
    with held(target):
        attributes = MOUNT_ATTR_RDONLY | PRIVATE
        if mask is None:
            source = syscalls.open_tree("", target)
        elif stat.S_ISDIR(os.fstat(target).st_mode):
            source = syscalls.open_tree("empty")
        else:
            source = syscalls.open_tree(mask, root)
            attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
        syscalls.mount_setattr(source, attributes)
        syscalls.move_mount(source, target)


def write_maps(pid: int, base: int, count: int) -> None:
    """Write the id maps of the sliver."""
    for kind in ("uid_map", "gid_map"):
        syscalls.write(f"/proc/{pid}/{kind}", f"0 {base} {count}\n")


@contextlib.contextmanager
def as_owner(base: int) -> Iterator[None]:
    """Run the block as the sliver's first id, with all capabilities; it owns new objects.

    The kernel counts inotify instances, namespaces, message queues, pending signals and the like of
    a user namespace for its owner as well: with root of the host as the owner of all, one sliver
    could use up the limits of the host and all slivers.
    """
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.SECBIT_NO_SETUID_FIXUP)
    os.setresgid(base, base, base)
    os.setresuid(base, base, base)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, 0)


def limit_objects(proc: int) -> None:
    """Set limits of this user namespace, by its first process; root inside cannot raise them.

    :param proc: a /proc in which sysctls can be written; what stands at that path changes while the
        tree is built.
    """
    for name, value in OBJECTS.items():
        # Kernels without this limit, and containers whose /proc is read-only: the limits of the
        # host apply.
        with contextlib.suppress(OSError):
            syscalls.write(f"sys/user/max_{name}", value, proc)


def lock_in() -> None:
    """Give process 1 its own copy of the mounts and make it root of the sliver."""
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWCGROUP)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir("/")
    os.umask(0o022)


def stand(request: dict[str, Any], one: process_one.First) -> None:
    """Build the tree for process 1 and make it the root of this process."""
    base = request["base"]
    userns = os.open(f"/proc/{one.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = build_tree(request, userns)
    except OSError as error:
        raise StepError(f"cannot build the root tree: {error.strerror}") from error
    wait_for_daemon(request)  # for the cgroups
    one.join(open_cgroups(request["procs"]))
    try:
        build_devices(root, base, request)
        build_run(root, base, request)
    except OSError as error:
        raise StepError(f"cannot build /dev and /run: {error.strerror}") from error
    try:
        mount_process_views(root, one, base, request["privileges"])
    except OSError as error:
        raise StepError(f"cannot mount /proc and /sys: {error.strerror}") from error
    os.fchdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.umount(".")


def make(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Create namespaces, tree and process 1. Return pid and start_time; with a pidfd."""
    base, count = request["base"], request["count"]
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def after() -> None:
        lock_in()
        if "docker" in request["privileges"]:
            # Its own part, in which it may write nothing; container runtimes expect the file system
            # there.
            syscalls.mount(
                "cgroup2",
                "/sys/fs/cgroup",
                "cgroup2",
                syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC,
            )
        process_one.settle(request)

    def before() -> None:
        limit_objects(proc)
        os.close(proc)

    with as_owner(base):
        one = process_one.begin(NEW, request, before, after)
    os.close(proc)
    write_maps(one.pid, base, count)
    started = syscalls.start_time(one.pid)
    try:
        # It was mounted before this mount namespace existed.
        (request["disk"],) = wait_for_daemon(request)
        stand(request, one)
    except (OSError, StepError):
        one.failed()  # process 1 has the better reason
        raise
    one.go()
    return {"pid": one.pid, "start_time": started, "watch": one.pid}, [one.pidfd]


def probe(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Try everything that a sliver needs; return the first failure.

    The layer is on the file system of the state directory, all else in memory: no disk space is
    needed.
    """
    base, scratch = request["base"], request["scratch"]
    syscalls.machine()
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    with contextlib.ExitStack() as held:
        with as_owner(base):
            pid = held.enter_context(process_one.held_namespaces(NEW))
        write_maps(pid, base, request["count"])
        userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        syscalls.mount(
            "tmpfs", scratch, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64k,mode=700"
        )
        for name in ("writable", "stage"):
            os.mkdir(os.path.join(scratch, name))
        build_tree(
            {
                "base": base,
                "writable": os.path.join(scratch, "writable"),
                "stage": os.path.join(scratch, "stage"),
                "layers": {"root": [request["layer"]]},
            },
            userns,
        )
    return {}, []


OPERATIONS: dict[str, Operation] = {"make": make, "probe": probe}
