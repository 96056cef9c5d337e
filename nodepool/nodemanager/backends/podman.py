"""Slivers as containers of podman, also from OCI images (NM-C.2).

Podman creates the namespaces and process 1, and shows the slivers to its users (`podman ps`,
`podman exec`). Root trees with disk quota, limits, networks and programs inside are those of
backend `native`: the container is created without podman's own cgroups and network, and its process
1 is treated as that of any sliver.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from nodepool.base.boot import boot_id
from nodepool.nodemanager.backends.base import BackendError, Handle, Problem, SliverSpec
from nodepool.nodemanager.backends.mounted import MountedTreeBackend
from nodepool.nodemanager.kernel import commands, syscalls
from nodepool.nodemanager.rootfs import tar_image
from nodepool.nodemanager.rootfs.templates import RootTree
from nodepool.nodemanager.setup.native import MASKED

COMMAND_TIMEOUT = 60.0
#: Seconds to get an image from a registry.
PULL_TIMEOUT = 600.0
#: Ended children of programs go to process 1, which must not keep them: the kernel reaps when their
#: signal is ignored.
INIT = "mkdir -p -m 755 /run/sshd /run/lock /run/nodepool; trap '' CHLD; exec sleep infinity"
LABEL = "nodepool-nm"
MAX_LIMIT = 32768
UNIFIED = "/sys/fs/cgroup/unified"


def command(unified: str = UNIFIED) -> list[str]:
    """Return the podman command; crun refuses hybrid hosts, so it must not see cgroup v2."""
    try:
        hybrid = bool(Path(unified, "cgroup.controllers").read_text().strip())
    except OSError:
        hybrid = False
    if not hybrid:
        return ["podman"]
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        f'umount {unified} && exec podman "$@"',
        "podman",
    ]


def _ulimits() -> list[str]:
    """Return bounded limits of this process: root may not always raise them as podman tries."""
    found = []
    for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        soft, hard = (min(value % (1 << 32), MAX_LIMIT) for value in resource.getrlimit(number))
        found.append(f"--ulimit={name}={soft}:{hard}")
    return found


def run_argv(
    name: str, label: str, spec: SliverSpec, root: str, base: int, count: int
) -> list[str]:
    """Return the arguments for podman that start a sliver's container."""
    memory = int(spec.rspec.get("nm_mem_limit", 0))
    size = f",size={max(1, memory // 5)}m" if memory else ""
    argv = [
        "run",
        "--detach",
        # Its stdin is a pipe: crun makes the root of the sliver the owner of /dev/null otherwise.
        "--interactive",
        "--name",
        name,
        "--label",
        f"{LABEL}={label}",
        "--cgroups=disabled",
        "--cgroupns=private",
        "--network=none",
        "--ipc=private",
        "--pid=private",
        "--uts=private",
        f"--uidmap=0:{base}:{count}",
        f"--gidmap=0:{base}:{count}",
        f"--hostname={spec.hostname or spec.name}",
        "--no-hosts",
        "--log-driver=none",
        "--restart=no",
        "--pull=never",
        *_ulimits(),
        f"--tmpfs=/run:rw,nosuid,nodev,mode=755{size}",
        # Process 1 only sleeps; programs of sessions get the sliver's privileges.
        "--cap-drop=all",
        f"--security-opt=mask={':'.join(f'/{path}' for path in MASKED)}",
    ]
    if spec.api_socket:
        target = (
            "/run/nodepool" if os.path.isdir(spec.api_socket) else "/run/nodepool/nodemanager.api"
        )
        argv.append(f"--volume={spec.api_socket}:{target}:ro")
    return [*argv, "--rootfs", root, "/bin/sh", "-c", INIT]


class PodmanBackend(MountedTreeBackend):
    """Slivers as podman containers; requires root, use backend rootless otherwise."""

    name = "podman"

    def check(self) -> list[Problem]:
        problems = super().check()
        if any(problem.fatal for problem in problems):
            return problems
        if shutil.which("podman") is None:
            return [
                *problems,
                Problem("podman", True, "install podman and crun, or use the backend native"),
            ]
        try:
            runtime = json.loads(self._podman("info", "--format", "json"))["host"]["ociRuntime"][
                "name"
            ]
        except (BackendError, KeyError, ValueError) as error:
            return [*problems, Problem("podman", True, f"podman does not work: {error}")]
        if runtime != "crun":
            problems.append(
                Problem("podman without cgroups", True, f"the runtime is {runtime}; install crun")
            )
        return problems

    # --- podman
    # ----------------------------------------------------------------------------------------------

    def _podman(self, *arguments: str, timeout: float = COMMAND_TIMEOUT) -> str:
        """Run podman and return its output. Raises BackendError with its messages."""
        return commands.run([*command(), *arguments], timeout, f"podman {arguments[0]}", retry=True)

    def _container(self, name: str) -> str:
        return f"{LABEL}-{self.label}-{name}"

    # --- root trees
    # ----------------------------------------------------------------------------------------------

    def _tree(self, spec: SliverSpec) -> RootTree:
        if spec.image == "host":
            raise BackendError(
                "image host: backend podman has none of this; use oci:, tar:, dir: or an uploaded "
                "image"
            )
        kind, _, reference = spec.image.partition(":")
        return self._oci(reference, spec.name) if kind == "oci" else super()._tree(spec)

    def _oci(self, reference: str, sliver: str) -> RootTree:
        """Return the tree of a local OCI image, or pull it from its registry first."""
        if reference.startswith("-"):
            raise BackendError(f"image oci:{reference}: not a valid reference")
        try:
            self._podman("image", "exists", reference)
        except BackendError:
            self._podman("pull", "--quiet", reference, timeout=PULL_TIMEOUT)
        identity = self._podman("image", "inspect", "--format", "{{.Id}}", reference).strip()

        def build(target: Path) -> None:
            archive = target / "export.tar"
            container = self._podman(
                "create",
                "--pull=never",
                "--network=none",
                "--label",
                f"{LABEL}={self.label}",
                identity,
                "/bin/sh",
            ).strip()
            try:
                self._podman("export", "--output", str(archive), container, timeout=PULL_TIMEOUT)
            finally:
                self._podman("rm", "--force", container)
            (target / "root").mkdir(mode=0o755)
            tar_image.extract(archive, target / "root", self.roots.limits)
            archive.unlink()
            for name in ("proc", "sys", "dev", "run"):
                (target / "root" / name).mkdir(exist_ok=True)

        return self.roots.made(f"oci-{identity[:32]}", build, sliver, f"image oci:{reference}")

    # --- life
    # ----------------------------------------------------------------------------------------------

    def _run(self, spec: SliverSpec, handle: Handle, layers: Mapping[str, list[str]]) -> Handle:
        self.folders.ensure_disk(spec)
        handle = self.processes.limit(spec, handle)
        private, public = self.folders.host_key(spec.name)
        container = self._container(spec.name)
        self._podman("rm", "--force", "--time", "0", "--ignore", container)
        root = str(self._mount(spec, layers))
        self._podman(*run_argv(container, self.label, spec, root, self.base(spec.index), self.ids))
        pid = int(
            self._podman("container", "inspect", "--format", "{{.State.Pid}}", container).strip()
        )
        started = syscalls.start_time(pid) if pid > 0 else None
        if started is None:
            raise BackendError(
                f"the first process of container {container} ended immediately; no /bin/sh in "
                f"{spec.image}?"
            )
        handle = {
            **handle,
            "pid": pid,
            "start_time": started,
            "boot_id": boot_id(),
            "host_key": public,
            "container": container,
        }
        return self._furnish(spec, handle, private, public)

    def _confine(self, spec: SliverSpec, handle: Handle) -> None:
        """Put process 1 into the sliver's cgroups; all others are started there."""
        try:
            for path in self.processes.procs(spec.name):
                Path(path).write_text(str(handle["pid"]), encoding="ascii")
        except OSError as error:
            raise BackendError(
                f"cannot limit container {handle['container']}: {error.strerror}", retry=True
            ) from error

    def _forget(self, name: str) -> None:
        if shutil.which("podman") is not None:
            self._podman("rm", "--force", "--time", "0", "--ignore", self._container(name))

    def found(self) -> list[str]:
        names = set(super().found())
        with contextlib.suppress(BackendError):
            prefix = self._container("")
            shown = self._podman(
                "ps", "--all", "--filter", f"label={LABEL}={self.label}", "--format", "{{.Names}}"
            ).splitlines()
            names.update(line.removeprefix(prefix) for line in shown if line.startswith(prefix))
        return sorted(names)
