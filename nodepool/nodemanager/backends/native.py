"""Slivers as root of the host: namespaces, id-mapped overlays, cgroups (NM-C.2)."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodepool.base.boot import boot_id
from nodepool.base.files import replace_file
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
from nodepool.nodemanager.helper.zygote import Pending
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.descriptors import held, readable
from nodepool.nodemanager.kernel.removal import remove_tree
from nodepool.nodemanager.limits import free_space
from nodepool.nodemanager.rootfs import ssh_files as sshfiles
from nodepool.nodemanager.rootfs.templates import RootStore, RootTree, check_sliver_name

INITSCRIPT_PATH = "/etc/rc.vinit"
CONSOLE_LIMIT = 64 * 1024
MAKE_TIMEOUT = 30.0
KILL_TIMEOUT = 10.0
KERNEL = (5, 19)


class NativeBackend(Backend):
    """Each sliver has its own ids, namespaces, tree and cgroup; process 1 sleeps and reaps."""

    name = "native"
    operation = "make"
    ids = IDS_PER_SLIVER

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        super().__init__(state_dir, services)
        self.roots = RootStore(state_dir, services.free_space)
        self._claims = threading.Lock()

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
        elif (failure := self._probe()) is not None:
            problems.append(
                Problem(
                    "sliver root tree",
                    True,
                    f"{failure}; slivers need namespaces, id-mapped "
                    "overlays and the capabilities of root (a container may lack them: start it "
                    "privileged), or "
                    "use the backend rootless as an ordinary user",
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

    def _probe(self) -> str | None:
        self._prepare()
        try:
            self.services.zygote.call(
                "probe",
                {
                    "base": self.services.id_base,
                    "count": IDS_PER_SLIVER,
                    "scratch": str(self.state_dir / "stage"),
                    "layer": str(self.state_dir / "slivers"),
                },
            )
        except BackendError as error:
            return str(error)
        return None

    def _prepare(self) -> None:
        for directory in (self.state_dir, self.state_dir / "slivers", self.state_dir / "stage"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

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

    def directory(self, name: str) -> Path:
        """Return the host's directory of a sliver."""
        return self.state_dir / "slivers" / check_sliver_name(name)

    def _writable(self, name: str) -> Path:
        return self.directory(name) / "mnt"

    # --- making
    # ----------------------------------------------------------------------------------------------

    def create(self, spec: SliverSpec) -> Handle:
        self._prepare()
        self.base(spec.index)
        directory = self.directory(spec.name)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._claim(spec.name, spec.index)
        # A sliver without a record of it was created by a daemon that was killed before it stored
        # the record.
        if not self._is_removed(spec.name, spec.index):
            self._kill(spec.name, spec.index, None)
        tree = self._tree(spec)
        handle: Handle = {
            "backend": self.name,
            "name": spec.name,
            "index": spec.index,
            "template": tree.key,
            "privileges": list(spec.privileges),
        }
        return self._run_on_disk(spec, handle, tree)

    def _run_on_disk(self, spec: SliverSpec, handle: Handle, tree: RootTree) -> Handle:
        handle = self._run(spec, handle, tree.layers)
        if self.services.disks is not None:
            self.services.disks.settle_in(spec.name)
        return handle

    def _tree(self, spec: SliverSpec) -> RootTree:
        return self.roots.tree(spec.image, spec.name)

    def _claim(self, name: str, index: int) -> None:
        """Record the owner of the ids; a sliver left by a crash may still run with them."""
        with self._claims:
            for other in (self.state_dir / "slivers").iterdir():
                if other.name != name and self.number(other.name) == index:
                    raise BackendError(
                        f"number {index} is still in use by sliver {other.name}", retry=True
                    )
            replace_file(str(self.directory(name) / "index"), f"{index}\n", sync=False)

    def number(self, name: str) -> int | None:
        try:
            return int((self.state_dir / "slivers" / name / "index").read_text())
        except (OSError, ValueError):
            return None

    def _ensure_disk(self, spec: SliverSpec) -> None:
        mnt = self._writable(spec.name)
        mnt.mkdir(mode=0o700, exist_ok=True)
        disks, quota = self.services.disks, int(spec.rspec.get("nm_disk_quota", 5_000_000))
        if disks is not None and not os.path.ismount(mnt):
            disks.create(spec.name, quota)
            disks.mount(spec.name, str(mnt))
        elif disks is not None and spec.ssh_keys is not None:  # else it is to start as it is
            disks.resize(spec.name, quota)
        free_space.give_up(self._ballast(spec.name))

    def _limit(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Create the cgroups of the sliver, after its disk, whose I/O they limit."""
        if self.services.cgroups is None:
            return handle
        return {**handle, "cgroups": self.services.cgroups.create(spec.name, spec.rspec)}

    def _run(self, spec: SliverSpec, handle: Handle, layers: Mapping[str, list[str]]) -> Handle:
        private, public = self._host_key(spec.name)
        request = {
            "base": self.base(spec.index),
            "count": self.ids,
            "writable": str(self._writable(spec.name)),
            "stage": str(self.state_dir / "stage"),
            "layers": layers,
            "hostname": spec.hostname or spec.name,
            "api": spec.api_socket,
            "privileges": list(spec.privileges),
            "memory": int(spec.rspec.get("nm_mem_limit", 0)),
            "present": ["/var/log/lastlog", "/var/log/wtmp"],
            **self._furnishing(spec),
            **self._extra(spec),
        }
        request["files"] += [
            *ssh_files(private, public),
            *self._network_files(spec),
            file_entry("/etc/hostname", f"{request['hostname']}\n".encode(), 0o644),
        ]
        # The namespaces are created while the disk is prepared, then the tree while the cgroups are
        # created.
        begun = self.services.zygote.begin(self.operation, request, timeout=MAKE_TIMEOUT)
        try:
            self._ensure_disk(spec)
            begun.go_on(
                descriptor=syscalls.open_tree(str(self._writable(spec.name)))
                if self.operation == "make"
                else None
            )
            handle = self._limit(spec, handle)
            begun.go_on({"procs": self._procs(spec.name)})
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
        }
        try:
            self._begin_work(spec, handle)
        except BaseException:
            self._kill(spec.name, spec.index, handle)
            raise
        return handle

    def _begin_work(self, spec: SliverSpec, handle: Handle) -> None:
        """Set up network and init script after process 1 was started, reserving disk space
        first.
        """
        if spec.initscript is not None:
            with contextlib.suppress(OSError):
                self._console_path(spec.name).touch(mode=0o600)
        if self.services.disks is not None:
            free_space.keep_on_disk(self._ballast(spec.name))
        self._network(spec, handle)
        self._initscript(spec, handle)

    def _extra(self, spec: SliverSpec) -> dict[str, Any]:
        """Return additional fields for the worker that creates the sliver, in derived backends."""
        return {}

    def _host_key(self, name: str) -> tuple[bytes, str]:
        """Return the host key, which is also kept on the host: a new tree keeps its identity."""
        path = self.directory(name) / "host_key"
        with contextlib.suppress(FileNotFoundError):
            private, _, public = path.read_bytes().partition(b"\n\n")
            if public:
                return private + b"\n", public.decode().strip()
        private, text = sshfiles.new_host_key()
        replace_file(str(path), private.rstrip(b"\n") + b"\n\n" + text.encode() + b"\n", sync=False)
        return private, text

    def _furnishing(self, spec: SliverSpec) -> dict[str, Any]:
        request: dict[str, Any] = {
            "username": spec.username,
            "ssh_keys": spec.ssh_keys,
            "files": [],
            "remove": [],
        }
        if spec.initscript is None:
            request["remove"].append(INITSCRIPT_PATH)
        else:
            request["files"].append(file_entry(INITSCRIPT_PATH, spec.initscript, 0o755))
        return request

    def _procs(self, name: str) -> list[str]:
        return self.services.cgroups.procs_files(name) if self.services.cgroups is not None else []

    def _network_files(self, spec: SliverSpec) -> list[dict[str, Any]]:
        content = (
            self.services.net.resolv_conf(spec.network) if self.services.net is not None else None
        )
        return [file_entry("/etc/resolv.conf", content, 0o644)] if content is not None else []

    def _network(self, spec: SliverSpec, handle: Handle) -> None:
        if spec.network == "none":
            return
        if self.services.net is None:
            raise BackendError(f"network {spec.network!r}: this host offers only network none")
        info = self.services.net.create(
            spec.name, spec.index, handle["pid"], spec.network, spec.rspec
        )
        handle["veth"] = {"veth": info.veth, "address": info.address, "gateway": info.gateway}
        handle["address"] = info.address

    def _initscript(self, spec: SliverSpec, handle: Handle) -> None:
        if spec.initscript is None:
            return
        argv = (
            [INITSCRIPT_PATH] if spec.initscript.startswith(b"#!") else ["/bin/sh", INITSCRIPT_PATH]
        )
        path = self._console_path(spec.name)
        try:
            self.services.zygote.begin(
                "spawn", self._program(handle, argv) | {"console": str(path)}
            ).process().close()
        except BackendError as error:
            # Errors of the owner's script are left to the owner; the sliver runs without it.
            with contextlib.suppress(OSError):  # its disk may be full
                descriptor = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
                )
                with os.fdopen(descriptor, "ab") as console:
                    console.write(f"init script: {error}\n".encode())

    def _console_path(self, name: str) -> Path:
        """Return a path on the sliver's disk, for its quota, but outside its visible trees."""
        return self._writable(name) / "console"

    def _ballast(self, name: str) -> Path:
        """Return the path of the ballast, which nothing inside can reach (like the console)."""
        return self._writable(name) / "ballast"

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
        if self._alive(handle):
            self.services.zygote.call(
                "furnish",
                {**self._identity(handle), **self._furnishing(spec)},
                timeout=MAKE_TIMEOUT,
            )
        return handle

    def _identity(self, handle: Handle) -> dict[str, Any]:
        if not handle.get("pid"):
            raise BackendError("the sliver does not run")
        return {
            "pid": handle["pid"],
            "start_time": handle["start_time"],
            "procs": self._procs(handle["name"]),
        }

    def stop(self, spec: SliverSpec, handle: Handle) -> Handle:
        self._kill(spec.name, spec.index, handle)
        self._drop_network(spec.name)
        return {
            key: value
            for key, value in handle.items()
            if key not in ("pid", "start_time", "boot_id", "veth", "address")
        }

    def start(self, spec: SliverSpec, handle: Handle) -> Handle:
        if self._alive(handle):
            return handle
        self._prepare()
        self._kill(spec.name, spec.index, handle)
        self.directory(spec.name).mkdir(mode=0o700, exist_ok=True)
        tree = self._tree(spec)
        return self._run_on_disk(
            spec, {**handle, "template": tree.key, "privileges": list(spec.privileges)}, tree
        )

    def freeze(self, spec: SliverSpec, handle: Handle, frozen: bool) -> None:
        if self.services.cgroups is None:
            raise BackendError(
                "a sliver cannot be frozen on a host without cgroups; stop it instead"
            )
        self.services.cgroups.freeze(spec.name, frozen)

    def adopt(self, spec: SliverSpec, handle: Handle) -> bool:
        return self._alive(handle) and syscalls.uid_range(handle["pid"]) == (
            self.base(spec.index),
            self.ids,
        )

    def _alive(self, handle: Handle) -> bool:
        pid = handle.get("pid")
        if not pid or handle.get("boot_id") != boot_id():
            return False
        return bool(syscalls.start_time(int(pid)) == handle["start_time"])

    def usage(self, spec: SliverSpec, handle: Handle) -> dict[str, int]:
        numbers: dict[str, int] = {}
        if self.services.cgroups is not None:
            numbers.update(self.services.cgroups.usage(spec.name))
        if self.services.disks is not None:
            numbers["disk_bytes"] = self.services.disks.usage(spec.name)
        if self.services.net is not None and handle.get("veth"):
            numbers.update(self.services.net.usage(spec.name))
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
        request = self._program(handle, argv, env, user) | {"streams": streams}
        return self.services.zygote.begin("spawn", request, pipes)

    def serve(self, handle: Handle, argv: Sequence[str], connection: int) -> Pending:
        return self.services.zygote.begin("serve", self._program(handle, argv), [connection])

    def _program(
        self,
        handle: Handle,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> dict[str, Any]:
        return {
            **self._identity(handle),
            "argv": list(argv),
            "env": dict(env or {}),
            "user": user,
            "privileges": handle.get("privileges", []),
        }

    def listen(self, handle: Handle, port: int, address: str = "127.0.0.1") -> int:
        """Return a listening socket in the sliver's network namespace. Raises BackendError."""
        _answer, descriptors = self.services.zygote.call(
            "listen", {**self._identity(handle), "address": address, "port": port}
        )
        return descriptors[0]

    def console(self, spec: SliverSpec) -> bytes:
        try:
            with self._console_path(spec.name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CONSOLE_LIMIT))
                return file.read(CONSOLE_LIMIT)
        except FileNotFoundError:
            return b""

    # --- ending
    # ----------------------------------------------------------------------------------------------

    def _is_removed(self, name: str, index: int) -> bool:
        if self.services.cgroups is not None:
            return self.services.cgroups.empty(name)
        return not self._members(index)

    def _members(self, index: int) -> list[int]:
        """Return the processes in the sliver's user namespace; for hosts without cgroups."""
        wanted = (self.base(index), IDS_PER_SLIVER)
        return [
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit() and syscalls.uid_range(int(entry)) == wanted
        ]

    def _kill(self, name: str, index: int, handle: Handle | None) -> None:
        """End all processes, or raise BackendError."""
        deadline = time.monotonic() + KILL_TIMEOUT
        if handle and self._alive(handle):
            self._kill_first(handle, deadline)
        if (cgroups := self.services.cgroups) is not None:
            if not cgroups.empty(name):
                cgroups.kill(name, max(0.1, deadline - time.monotonic()))
            return
        self._kill_all(lambda: self._members(index), name)

    @staticmethod
    def _kill_all(members: Callable[[], list[int]], name: str) -> None:
        """Kill until there are no processes; each is rechecked once a descriptor holds it."""
        deadline = time.monotonic() + KILL_TIMEOUT
        while found := members():
            if time.monotonic() > deadline:
                raise BackendError(f"sliver {name}: processes {found[:8]} do not end", retry=True)
            for pid in found:
                with contextlib.suppress(ProcessLookupError), held(os.pidfd_open(pid)) as pidfd:
                    if pid in members():
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        readable([pidfd], deadline - time.monotonic())

    def _kill_first(self, handle: Handle, deadline: float) -> None:
        """Kill process 1; the kernel kills its whole pid namespace with it."""
        if (cgroups := self.services.cgroups) is not None:
            with contextlib.suppress(BackendError, OSError):
                cgroups.freeze(
                    handle["name"], False
                )  # frozen by the old freezer it could not even die
        with (
            contextlib.suppress(ProcessLookupError),
            held(os.pidfd_open(int(handle["pid"]))) as pidfd,
        ):
            if syscalls.start_time(int(handle["pid"])) == handle["start_time"]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                readable([pidfd], deadline - time.monotonic())

    def _drop_network(self, name: str) -> None:
        if self.services.net is not None:
            self.services.net.destroy(name)

    def destroy(self, name: str, index: int, handle: Handle | None) -> None:
        directory = self.directory(name)
        # The number stored at the creation is right; the caller may have had to assign one for the
        # deletion.
        self._kill(name, self.number(name) or index, handle)
        self._drop_network(name)
        if self.services.cgroups is not None:
            self.services.cgroups.remove(name)
        if self.services.disks is not None:
            try:
                self.services.disks.discard(name)
            except FileNotFoundError:
                pass
            except OSError:  # no space even for a rename
                self.services.disks.destroy(name)
        if directory.is_dir():
            if os.path.ismount(directory / "mnt"):
                syscalls.umount(str(directory / "mnt"))
            try:
                remove_tree(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise BackendError(f"cannot remove {directory}: {error}", retry=True) from error
        self.roots.release(name)

    def found(self) -> list[str]:
        names: set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            names.update(os.listdir(self.state_dir / "slivers"))
        for service in (self.services.cgroups, self.services.disks, self.services.net):
            if service is not None:
                names.update(service.found())
        return sorted(names)


def file_entry(path: str, content: bytes, mode: int) -> dict[str, Any]:
    """Return a file for the worker that sets up a sliver."""
    return {"path": path, "content": base64.b64encode(content).decode(), "mode": mode}


def ssh_files(private: bytes, public: str) -> list[dict[str, Any]]:
    """Return host key and configuration of the SSH server inside."""
    return [
        file_entry(sshfiles.HOST_KEY_PATH, private, 0o600),
        file_entry(f"{sshfiles.HOST_KEY_PATH}.pub", public.encode() + b"\n", 0o644),
        file_entry(sshfiles.CONFIG_PATH, sshfiles.CONFIG.encode(), 0o644),
    ]
