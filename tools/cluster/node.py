"""A machine for tools/kubernetes that really runs containers: a kubelet and containerd.

Both run in their own mount and PID namespace, which ends with its first process. The cgroups and
the network bridge outlive that namespace, and are removed by their name. Kubelets before 1.38
accept Debian's containerd 1.6; later ones need its RuntimeConfig, and may not start on cgroup v1.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import tarfile
import time

from cluster import control_plane
from cluster.control_plane import ClusterError, ControlPlane, start_time

NAME = "real-0"
#: Only pods that tolerate this taint run here; all others stay with KWOK.
TAINT = {"key": "test/real", "value": "true", "effect": "NoSchedule"}
#: The only image. It also is the image of the sandboxes, which need a program that does nothing.
IMAGE = "nodepool.test/small:1"
PROGRAMS = ("sh", "sleep", "cat", "ls", "id", "head", "tail", "touch")
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "unshare": "util-linux",
    "ip": "iproute2",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
#: Files that the programs create outside of DIR, whatever their configuration says.
HIDDEN = ("/run", "/var/lib", "/var/log")
#: What a kubelet sets otherwise, in the whole system.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
CGROUPS = pathlib.Path("/sys/fs/cgroup")
STOP_TIMEOUT = 30.0


def install() -> None:
    """Install containerd and runc, build the kubelet. Raises ClusterError."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if os.geteuid() != 0:
        raise ClusterError("a node that runs containers needs root")
    if missing:
        control_plane.apt(*missing)
    control_plane.build("kubelet", "k8s.io/kubernetes/cmd/kubelet", control_plane.MODULES)


class Node:
    """The machine of one control plane, in the folder ``node`` of its directory."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.dir = plane.dir / "node"

    @property
    def unique(self) -> str:
        """Return the name of its cgroups and its bridge, which has at most 15 characters."""
        return f"npk8s{self.plane.values['port']}"

    def _process(self) -> tuple[int, str | None]:
        """Return process id and start time of its first process; None: it was not started."""
        pid, began = self.plane.values["pids"].get("node", (0, None))
        return pid, began

    # --- up

    def up(self) -> None:
        """Start it and wait until it is ready. Raises ClusterError."""
        if any(self.dir.is_relative_to(path) for path in HIDDEN):
            raise ClusterError(f"use a directory outside of {', '.join(HIDDEN)}")
        pid, began = self._process()
        if began and start_time(pid) == began:
            return
        self.dir.mkdir(exist_ok=True)
        (self.dir / "ready").unlink(missing_ok=True)
        port = control_plane.ports.reserve()
        self._configure(port)
        for group in self._cgroups():
            group.mkdir(exist_ok=True)
        self._register(port)
        (self.dir / "start").write_text(self._script())
        flags = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self.plane.spawn("node", ["unshare", *flags, "sh", str(self.dir / "start")])
        self.plane.wait("node", lambda: (self.dir / "ready").exists())
        self.plane.wait("node", self._ready)

    def _configure(self, port: int) -> None:
        plane, folder = self.plane, self.dir
        for name in ("cni", "root", "state", "kubelet", "logs", "plugins", "ipam"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "containerd.toml").write_text(f"""version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/plugins"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
""")
        bridge = {
            "type": "bridge",
            "bridge": self.unique,
            "ipam": {
                "type": "host-local",
                "dataDir": f"{folder}/ipam",
                "ranges": [[{"subnet": "198.18.0.0/24"}]],
            },
        }
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
        (folder / "cni" / "pods.conflist").write_text(json.dumps(network))
        signals = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "tlsCertFile": f"{plane.dir}/server.crt",
            "tlsPrivateKeyFile": f"{plane.dir}/server.key",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{plane.dir}/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "registerNode": False,
            "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.unique}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "failCgroupV1": False,
            "makeIPTablesUtilChains": False,
            "podLogsDir": f"{folder}/logs",
            "volumePluginDir": f"{folder}/plugins",
            "resolvConf": "",
            # The disk of the machine is not that of the test.
            "evictionHard": dict.fromkeys(signals, "0%"),
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
        }
        (folder / "kubelet.json").write_text(json.dumps(kubelet, indent=1))
        pack(folder / "image.tar")
        for name, value in SYSCTLS.items():
            (folder / name.replace("/", "-")).write_text(f"{value}\n")

    def _script(self) -> str:
        """Return what the first process of the namespace does; the last loop reaps orphans."""
        folder, socket = self.dir, shlex.quote(f"{self.dir}/containerd.sock")
        client = f"ctr -a {socket} -n k8s.io"
        kubelet = [
            str(control_plane.binaries() / "kubelet"),
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={self.plane.dir}/admin.kubeconfig",
            f"--hostname-override={NAME}",
            f"--root-dir={folder}/kubelet",
            # It keeps the address that its object has.
            "--cloud-provider=external",
        ]
        lines = ["set -e"]
        lines += [f"mount -t tmpfs tmpfs {path}" for path in HIDDEN]
        for name in SYSCTLS:
            copy = shlex.quote(f"{folder}/{name.replace('/', '-')}")
            lines += [f"mount --bind {copy} /proc/sys/{name}"]
        lines += [
            f"containerd --config {shlex.quote(f'{folder}/containerd.toml')} &",
            f"until {client} version >/dev/null 2>&1; do sleep 0.1; done",
            f"{client} images import {shlex.quote(f'{folder}/image.tar')}",
            f"touch {shlex.quote(f'{folder}/ready')}",
            f"while true; do {shlex.join(kubelet)} || sleep 1; done",
        ]
        return "\n".join(lines) + "\n"

    def _register(self, port: int) -> None:
        self.plane.add_node(
            NAME,
            {
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            },
            taints=[TAINT],
        )

    def _ready(self) -> bool:
        return control_plane.ready(self.plane.call("GET", f"/api/v1/nodes/{NAME}"))

    # --- down

    def down(self) -> None:
        """Stop it and remove what remains in the system. Raises ClusterError."""
        pid, began = self._process()
        if began and start_time(pid) == began:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_TIMEOUT
        for group in self._cgroups():
            while not remove(group):
                if time.monotonic() > deadline:
                    raise ClusterError(f"processes of {group} do not end")
                time.sleep(0.05)
        if os.path.exists(f"/sys/class/net/{self.unique}"):
            subprocess.run(["ip", "link", "delete", self.unique], check=True, timeout=30)

    def _cgroups(self) -> list[pathlib.Path]:
        """Return its cgroup in each hierarchy, existing or not."""
        mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        return [
            pathlib.Path(place, self.unique)
            for _, place, system, *_ in mounts
            if system in ("cgroup", "cgroup2") and pathlib.Path(place).is_relative_to(CGROUPS)
        ]


def remove(group: pathlib.Path) -> bool:
    """Remove a cgroup with all below it; return False as long as one has processes."""
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError:
            return False
    return True


def pack(target: pathlib.Path) -> None:
    """Write an image with a shell and a few programs of this system."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in sorted(_files()):
            info = tarfile.TarInfo(path.lstrip("/"))
            data = pathlib.Path(path).read_bytes()
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(tmp)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": {"aarch64": "arm64"}.get(platform.machine(), "amd64"),
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sleep", "infinity"], "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as tar:
        for name, data in (
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _files() -> set[str]:
    """Return the paths of the programs, and of the libraries that they need."""
    found = {f"/bin/{name}" for name in PROGRAMS}
    for program in tuple(found):
        said = subprocess.run(
            ["ldd", program], capture_output=True, text=True, check=True, timeout=20
        ).stdout
        found |= {word for word in said.split() if word.startswith("/")}
    return found
