"""Creates a sliver as an ordinary user (backend `rootless`) in a user namespace of one id.

Process 1 builds all of it. There is no root inside: capabilities end at exec, because the id is not
0, and no_new_privs prevents new ones.
"""

from __future__ import annotations

import os
from typing import Any

from nodepool.nodemanager.helper import inside
from nodepool.nodemanager.helper.operation import Operation, StepError, wait_for_daemon
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)
from nodepool.nodemanager.setup import native as setup_native
from nodepool.nodemanager.setup import process_one
from nodepool.nodemanager.setup.native import (
    DEVICES,
    LINKS,
    MASKED,
    PRIVATE,
    READ_ONLY,
    attach,
    cover,
)

UID = 1000
"""The one id inside."""
MARK = "NODEPOOL_SLIVER"
"""Environment variable of process 1, by which a sliver without a record is found."""
NEW = setup_native.NEW | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWCGROUP


def write_maps(pid: int, uid: int, gid: int) -> None:
    """Write the maps of one user and one group."""
    for kind, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{UID} {uid} 1\n"),
        ("gid_map", f"{UID} {gid} 1\n"),
    ):
        syscalls.write(f"/proc/{pid}/{kind}", text)


def build(request: dict[str, Any]) -> None:
    """Build the root tree and enter it."""
    writable = request["writable"]
    for name in ("root", "root-work"):
        os.makedirs(os.path.join(writable, name), mode=0o755, exist_ok=True)
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
    layers = request["layers"]
    root_fd = syscalls.new_mount(
        "overlay",
        {
            "lowerdir": ":".join(layers["root"]),
            "upperdir": os.path.join(writable, "root"),
            "workdir": os.path.join(writable, "root-work"),
            "userxattr": None,
        },
        MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID,
    )
    syscalls.mount(
        "tmpfs",
        request["stage"],
        "tmpfs",
        syscalls.MS_NOSUID | syscalls.MS_NODEV,
        "size=64k,mode=700",
    )
    os.chdir(request["stage"])
    for name in ("root", "empty"):
        os.mkdir(name, 0o755)
    syscalls.move_mount(root_fd, "root")
    root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name, sources in layers.items():
        if name != "root":
            mount_fd = syscalls.open_tree(
                sources[-1], flags=syscalls.OPEN_TREE_CLONE | syscalls.AT_RECURSIVE
            )
            syscalls.mount_setattr(
                mount_fd, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, recursive=True
            )
            attach(mount_fd, root, name)
    build_devices(root)
    setup_native.build_run(root, UID, request)
    attach(syscalls.new_mount("proc", {}, PRIVATE), root, "proc")
    attach(syscalls.new_mount("sysfs", {}, PRIVATE | MOUNT_ATTR_RDONLY), root, "sys")
    for path in READ_ONLY:
        cover(root, path, None)
    for path in MASKED:
        cover(root, path, "dev/null")
    os.fchdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.umount(".")
    os.chdir("/")


def build_devices(root: int) -> None:
    """Build /dev: device nodes cannot be created here, the host's are mounted one by one."""
    dev = syscalls.new_mount(
        "tmpfs",
        {"mode": "755", "size": "64k", "nr_inodes": "64"},
        MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
    )
    for name in DEVICES:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=dev))
    for name, target in LINKS.items():
        os.symlink(target, name, dir_fd=dev)
    for name in ("pts", "shm"):
        os.mkdir(name, 0o755, dir_fd=dev)
    attach(dev, root, "dev")
    for name in DEVICES:
        attach(syscalls.open_tree(f"/dev/{name}"), root, f"dev/{name}", directory=False, make=False)
    attach(
        syscalls.new_mount(
            "devpts",
            {"newinstance": None, "ptmxmode": "0666", "mode": "0600"},
            MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
        ),
        root,
        "dev/pts",
        make=False,
    )
    attach(
        syscalls.new_mount("tmpfs", {"mode": "1777"}, PRIVATE & ~MOUNT_ATTR_NOEXEC),
        root,
        "dev/shm",
        make=False,
    )


def make(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Create namespaces, tree and process 1. Return pid and start_time; with a pidfd."""
    uid, gid = os.getuid(), os.getgid()

    def after() -> None:
        os.umask(0o022)
        build(request)
        process_one.settle(request)
        inside.limit(request["limits"])
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)

    try:
        one = process_one.begin(NEW, request, lambda: None, after, {MARK: request["mark"]})
    except OSError as error:
        raise StepError(
            f"this host does not let ordinary users create namespaces ({error.strerror}); see "
            "sysctl "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone and "
            "kernel.apparmor_restrict_unprivileged_userns"
        ) from error
    write_maps(one.pid, uid, gid)
    for _ in ("disk", "cgroups"):
        wait_for_daemon(request)
    one.join({})
    one.go()
    return {"pid": one.pid, "start_time": syscalls.start_time(one.pid), "watch": one.pid}, [
        one.pidfd
    ]


OPERATIONS: dict[str, Operation] = {"make_rootless": make}
