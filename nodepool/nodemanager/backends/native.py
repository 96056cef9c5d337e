"""Slivers as root of the host: namespaces, id-mapped overlays, cgroups (NM-C.2)."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodepool.base.boot import boot_id
from nodepool.nodemanager.backends.base import (
    IDS_PER_SLIVER,
    Backend,
    BackendError,
    Handle,
    Problem,
    Services,
    SliverSpec,
    missing_ssh_server,
)
from nodepool.nodemanager.backends.folders import Folders
from nodepool.nodemanager.backends.processes import Processes, alive, with_ids
from nodepool.nodemanager.helper.zygote import Pending, Zygote
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.limits import free_space
from nodepool.nodemanager.rootfs import ssh_files as sshfiles
from nodepool.nodemanager.rootfs.templates import RootStore, RootTree

INITSCRIPT_PATH = "/etc/rc.vinit"
RESOLV_CONF = "/etc/resolv.conf"
CONSOLE_LIMIT = 64 * 1024
MAKE_TIMEOUT = 30.0
KERNEL = (5, 19)


class NativeBackend(Backend):
    """Each sliver has its own ids, namespaces, tree and cgroup; process 1 sleeps and reaps."""

    name = "native"
    operation = "make"
    ids = IDS_PER_SLIVER

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        super().__init__(state_dir, services)
        self.roots = RootStore(state_dir, services.free_space)
        self.folders = Folders(self.state_dir, services)
        self.processes = Processes(services, lambda _name, index: with_ids(self.base(index)))

    @property
    def freezes(self) -> bool:
        return self.services.cgroups is not None

    # --- what the host can do
    # ----------------------------------------------------------------------------------------

    def check(self) -> list[Problem]:
        problems = []
        if os.geteuid() != 0:
            return [
                Problem(
                    "root", True, "run nodepool-nodemanager as root, or use the backend rootless"
                )
            ]
        if not any(
            line.split()[4] == "/" for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ):
            return [
                Problem(
                    "root directory",
                    True,
                    "this process runs in a chroot, where slivers cannot change their root; run it "
                    "where / is a mount point",
                )
            ]
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if release < KERNEL:
            problems.append(
                Problem(
                    f"kernel {KERNEL[0]}.{KERNEL[1]}",
                    True,
                    f"this is {os.uname().release}; overlays cannot be id-mapped before "
                    f"{KERNEL[0]}.{KERNEL[1]}",
                )
            )
        else:
            self.folders.prepare()
            try:
                self.services.zygote.call(
                    "probe",
                    {
                        "base": self.services.id_base,
                        "count": IDS_PER_SLIVER,
                        "scratch": str(self.folders.stage),
                        "layer": str(self.folders.slivers),
                    },
                )
            except BackendError as error:
                problems.append(
                    Problem(
                        "sliver root tree",
                        True,
                        f"{error}; slivers need namespaces, id-mapped overlays and the "
                        "capabilities of root (a container may lack them: start it privileged), "
                        "or use the backend rootless as an ordinary user",
                    )
                )
        if self.services.cgroups is None:
            problems.append(
                Problem(
                    "cgroups",
                    False,
                    "mount the cgroup controllers; without them slivers have no limits",
                )
            )
        return problems + missing_ssh_server()

    # --- paths and numbers
    # -------------------------------------------------------------------------------------------

    def base(self, index: int) -> int:
        """Return first id of a sliver on the host."""
        if index < 1:
            raise BackendError(f"index {index}: must be 1 or more")
        first = self.services.id_base + index * IDS_PER_SLIVER
        if first + IDS_PER_SLIVER >= 1 << 32:
            raise BackendError(f"index {index}: no user ids left")
        return first

    # --- making
    # ----------------------------------------------------------------------------------------------

    def create(self, spec: SliverSpec) -> Handle:
        self.folders.prepare()
        self.base(spec.index)
        self.folders.of(spec.name).mkdir(mode=0o700, exist_ok=True)
        self.folders.claim(spec.name, spec.index)
        # A sliver without a record of it was created by a daemon that was killed before it stored
        # the record.
        if not self.processes.empty(spec.name, spec.index):
            self.processes.kill(spec.name, spec.index, None)
        tree = self._tree(spec)
        handle: Handle = {
            "backend": self.name,
            "name": spec.name,
            "index": spec.index,
            "template": tree.key,
            "privileges": list(spec.privileges),
        }
        return self._run(spec, handle, tree.layers)

    def _tree(self, spec: SliverSpec) -> RootTree:
        return self.roots.tree(spec.image, spec.name)

    def number(self, name: str) -> int | None:
        return self.folders.number(name)

    def _run(self, spec: SliverSpec, handle: Handle, layers: Mapping[str, list[str]]) -> Handle:
        private, public = self.folders.host_key(spec.name)
        names = resolv_conf(spec, self.services)
        request = {
            "base": self.base(spec.index),
            "count": self.ids,
            "writable": str(self.folders.writable(spec.name)),
            "stage": str(self.folders.stage),
            "layers": layers,
            "hostname": spec.hostname or spec.name,
            "api": spec.api_socket,
            "privileges": list(spec.privileges),
            "memory": int(spec.rspec.get("nm_mem_limit", 0)),
            "present": ["/var/log/lastlog", "/var/log/wtmp"],
            **self._furnishing(spec),
        }
        request["files"] += [
            *own_files(private, public, names),
            file_entry("/etc/hostname", f"{request['hostname']}\n".encode(), 0o644),
        ]
        # The namespaces are created while the disk is prepared, then the tree while the cgroups are
        # created.
        begun = self.services.zygote.begin(self.operation, request, timeout=MAKE_TIMEOUT)
        try:
            self.folders.ensure_disk(spec)
            begun.go_on(
                descriptor=syscalls.open_tree(str(self.folders.writable(spec.name)))
                if self.operation == "make"
                else None
            )
            handle = self.processes.limit(spec, handle)
            begun.go_on({"procs": self.processes.procs(spec.name)})
        except BaseException as error:
            begun.close()
            if isinstance(error, OSError):
                raise BackendError(
                    f"disk of sliver {spec.name}: {error.strerror}", retry=True
                ) from error
            raise
        answer, descriptors, connection = begun.answer()
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        handle = {
            **handle,
            "pid": answer["pid"],
            "start_time": answer["start_time"],
            "boot_id": boot_id(),
            "host_key": public,
            "resolv_conf": names,
        }
        try:
            self._begin_work(spec, handle)
        except BaseException:
            self.processes.kill(spec.name, spec.index, handle)
            raise
        return handle

    def _begin_work(self, spec: SliverSpec, handle: Handle) -> None:
        """Set up network and init script after process 1 was started, reserving disk space
        first.
        """
        disk = self.folders.writable(spec.name)
        if spec.initscript is not None:
            with contextlib.suppress(OSError):
                (disk / "console").touch(mode=0o600)
        if self.services.disks is not None:
            free_space.keep_on_disk(disk / "ballast")
        if spec.network != "none":
            if self.services.net is None:
                raise BackendError(f"network {spec.network!r}: this host offers only network none")
            info = self.services.net.create(
                spec.name, spec.index, handle["pid"], spec.network, spec.rspec
            )
            handle["veth"] = {"veth": info.veth, "address": info.address, "gateway": info.gateway}
            handle["address"] = info.address
        if spec.initscript is not None:
            argv = [] if spec.initscript.startswith(b"#!") else ["/bin/sh"]
            run_initscript(
                self.services.zygote,
                program(self._identity(handle), handle, [*argv, INITSCRIPT_PATH]),
                disk / "console",
            )
        if self.services.disks is not None:
            self.services.disks.settle_in(spec.name)

    def _furnishing(self, spec: SliverSpec) -> dict[str, Any]:
        """Return files and accounts for the worker that sets up a sliver."""
        script = spec.initscript
        return {
            "username": spec.username,
            "ssh_keys": spec.ssh_keys,
            "files": [] if script is None else [file_entry(INITSCRIPT_PATH, script, 0o755)],
            "remove": [INITSCRIPT_PATH] if script is None else [],
        }

    # --- while it lives
    # ----------------------------------------------------------------------------------------------

    def configure(self, spec: SliverSpec, handle: Handle) -> Handle:
        if self.services.disks is not None:
            self.services.disks.resize(spec.name, int(spec.rspec.get("nm_disk_quota", 5_000_000)))
        if self.services.cgroups is not None:
            self.services.cgroups.apply(spec.name, spec.rspec)
        if self.services.net is not None and handle.get("veth"):
            self.services.net.apply(spec.name, spec.rspec)
        handle = {
            **handle,
            "privileges": list(spec.privileges),
        }  # of programs from now on; process 1 keeps its own
        if alive(handle):
            self.services.zygote.call(
                "furnish",
                {**self._identity(handle), **self._furnishing(spec)},
                timeout=MAKE_TIMEOUT,
            )
        return handle

    def refresh(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Write the host's new name servers, unless the sliver has changed what it was given.

        One that was started while the host had none was given nothing.
        """
        names = resolv_conf(spec, self.services)
        # Without the key, a previous version has started it: what it wrote is not known.
        if names is None or handle.get("resolv_conf", names) == names or not alive(handle):
            return handle
        file = file_entry(RESOLV_CONF, names.encode(), 0o644)
        file["instead_of"] = handle["resolv_conf"]
        self.services.zygote.call(
            "furnish", {**self._identity(handle), "files": [file]}, timeout=MAKE_TIMEOUT
        )
        return {**handle, "resolv_conf": names}

    def _identity(self, handle: Handle) -> dict[str, Any]:
        if not handle.get("pid"):
            raise BackendError("the sliver does not run")
        return {
            "pid": handle["pid"],
            "start_time": handle["start_time"],
            "procs": self.processes.procs(handle["name"]),
        }

    def stop(self, spec: SliverSpec, handle: Handle) -> Handle:
        self.processes.kill(spec.name, spec.index, handle)
        if self.services.net is not None:
            self.services.net.destroy(spec.name)
        return {
            key: value
            for key, value in handle.items()
            if key not in ("pid", "start_time", "boot_id", "veth", "address")
        }

    def start(self, spec: SliverSpec, handle: Handle) -> Handle:
        if alive(handle):
            return handle
        self.folders.prepare()
        self.processes.kill(spec.name, spec.index, handle)
        self.folders.of(spec.name).mkdir(mode=0o700, exist_ok=True)
        tree = self._tree(spec)
        handle = {**handle, "template": tree.key, "privileges": list(spec.privileges)}
        return self._run(spec, handle, tree.layers)

    def freeze(self, spec: SliverSpec, handle: Handle, frozen: bool) -> None:
        if self.services.cgroups is None:
            raise BackendError(
                "a sliver cannot be frozen on a host without cgroups; stop it instead"
            )
        self.services.cgroups.freeze(spec.name, frozen)

    def adopt(self, spec: SliverSpec, handle: Handle) -> bool:
        return alive(handle) and syscalls.uid_range(handle["pid"]) == (
            self.base(spec.index),
            self.ids,
        )

    def usage(self, name: str, handle: Handle) -> dict[str, int]:
        numbers: dict[str, int] = {}
        if self.services.cgroups is not None:
            numbers.update(self.services.cgroups.usage(name))
        if self.services.disks is not None:
            numbers["disk_bytes"] = self.services.disks.usage(name)
        if self.services.net is not None and handle.get("veth"):
            numbers.update(self.services.net.usage(name))
        return numbers

    def spawn(
        self,
        handle: Handle,
        argv: Sequence[str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        env: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> Pending:
        pipes = list(
            dict.fromkeys(stream for stream in (stdin, stdout, stderr) if stream is not None)
        )
        streams = [
            None if stream is None else pipes.index(stream) for stream in (stdin, stdout, stderr)
        ]
        return self.services.zygote.begin(
            "spawn",
            program(self._identity(handle), handle, argv, env, user) | {"streams": streams},
            pipes,
        )

    def serve(self, handle: Handle, argv: Sequence[str], connection: int) -> Pending:
        return self.services.zygote.begin(
            "serve", program(self._identity(handle), handle, argv), [connection]
        )

    def listen(self, handle: Handle, port: int, address: str = "127.0.0.1") -> int:
        """Return a listening socket in the sliver's network namespace. Raises BackendError."""
        _answer, descriptors = self.services.zygote.call(
            "listen", {**self._identity(handle), "address": address, "port": port}
        )
        return descriptors[0]

    def console(self, spec: SliverSpec) -> bytes:
        try:
            with (self.folders.writable(spec.name) / "console").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CONSOLE_LIMIT))
                return file.read(CONSOLE_LIMIT)
        except FileNotFoundError:
            return b""

    # --- ending
    # ----------------------------------------------------------------------------------------------

    def end(self, name: str, index: int, handle: Handle | None) -> None:
        self.folders.of(name)  # refuses invalid names
        # The number stored at the creation is right; the caller may have had to assign one for the
        # deletion.
        self.processes.kill(name, self.number(name) or index, handle)

    def remove(self, name: str) -> None:
        if self.services.net is not None:
            self.services.net.destroy(name)
        if self.services.cgroups is not None:
            self.services.cgroups.remove(name)
        self.folders.remove(name)
        self.roots.release(name)

    def found(self) -> list[str]:
        names = {
            name
            for service in (self.services.cgroups, self.services.disks, self.services.net)
            if service is not None
            for name in service.found()
        }
        with contextlib.suppress(FileNotFoundError):
            names.update(os.listdir(self.folders.slivers))
        return sorted(names)


def program(
    identity: Mapping[str, Any],
    handle: Handle,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    user: str = "root",
) -> dict[str, Any]:
    """Return the request for a program in the sliver with that identity."""
    return {
        **identity,
        "argv": list(argv),
        "env": dict(env or {}),
        "user": user,
        "privileges": handle.get("privileges", []),
    }


def run_initscript(zygote: Zygote, script: Mapping[str, Any], path: Path) -> None:
    try:
        zygote.begin("spawn", {**script, "console": str(path)}).process().close()
    except BackendError as error:
        # Errors of the owner's script are left to the owner; the sliver runs without it.
        with contextlib.suppress(OSError):  # its disk may be full
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
            )
            with os.fdopen(descriptor, "ab") as console:
                console.write(f"init script: {error}\n".encode())


def file_entry(path: str, content: bytes, mode: int) -> dict[str, Any]:
    """Return a file for the worker that sets up a sliver."""
    return {"path": path, "content": base64.b64encode(content).decode(), "mode": mode}


def resolv_conf(spec: SliverSpec, services: Services) -> str | None:
    """Return resolv.conf of a sliver; None: its own."""
    content = None if services.net is None else services.net.resolv_conf(spec.network)
    return None if content is None else content.decode(errors="replace")


def own_files(private: bytes, public: str, names: str | None) -> list[dict[str, Any]]:
    """Return host key and configuration of the SSH server inside, and resolv.conf."""
    return [
        file_entry(sshfiles.HOST_KEY_PATH, private, 0o600),
        file_entry(f"{sshfiles.HOST_KEY_PATH}.pub", public.encode() + b"\n", 0o644),
        file_entry(sshfiles.CONFIG_PATH, sshfiles.CONFIG.encode(), 0o644),
        *([] if names is None else [file_entry(RESOLV_CONF, names.encode(), 0o644)]),
    ]
