"""Mounts a sliver's root tree for backend `podman`; runs in a worker of the helper.

The tree is the same as that of backend `native`: layers id-mapped to the sliver's ids below an
upper directory on its disk. It is mounted in the host's mount namespace, because podman and its
runtime are programs of the host.
"""

from __future__ import annotations

import os
from typing import Any

from nodepool.nodemanager.helper.operation import Operation, StepError
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.setup import native as setup_native
from nodepool.nodemanager.setup import process_one


def mount_tree(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Mount `layers` at `target`."""
    host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with process_one.held_namespaces(syscalls.CLONE_NEWUSER) as pid:
            setup_native.write_maps(pid, request["base"], request["count"])
            userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
            root = setup_native.build_tree(
                {**request, "layers": {"root": request["layers"]["root"]}}, userns
            )
            mount_fd = syscalls.open_tree("", root)
            os.close(root)
            syscalls.setns(host, syscalls.CLONE_NEWNS)
            syscalls.move_mount(mount_fd, request["target"])
    except OSError as error:
        raise StepError(f"cannot build the root tree: {error.strerror or error}") from error
    finally:
        os.close(host)
    return {}, []


OPERATIONS: dict[str, Operation] = {"mount_tree": mount_tree}
