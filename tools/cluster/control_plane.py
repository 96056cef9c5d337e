"""Build, configure, start and stop the servers of tools/kubernetes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import ports

HERE = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(
    os.environ.get("NODEPOOL_KUBERNETES_CACHE") or HERE.parent.parent / ".kubernetes"
)
#: What is built: the present Kubernetes, or one that few installations are older than.
CURRENT = "go.mod"
MODULES = {"": CURRENT, "oldest": "oldest.mod"}[os.environ.get("NODEPOOL_KUBERNETES_SET", "")]
PACKAGES = {"openssl": "openssl"}
GO = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go")
#: What the go command has to be, to fetch the version that go.mod names automatically.
OLDEST_GO = (1, 21)
BUILD_TIMEOUT, START_TIMEOUT, STOP_TIMEOUT = 3600.0, 120.0, 15.0
NODES = 3
#: The label of the nodes that KWOK plays.
PLAYED = "test/played=true"
MACHINE = {
    "cpu": "400",
    "memory": "4000Gi",
    "ephemeral-storage": "40000Gi",
    "pods": "5000",
    "example.com/gpu": "100",
}


class ClusterError(Exception):
    """A server does not build or start; the text names it and its log."""


def go() -> str:
    """Return the go command; install it if there is none. Raises ClusterError."""
    known = [path for path in (shutil.which("go"), *GO) if path and os.path.exists(path)]
    if not known:
        if os.geteuid() != 0:
            raise ClusterError("install Go first, as root: apt-get install golang-go")
        apt("golang-go")
        known = ["/usr/bin/go"]
    newest = max(known, key=_go_version)
    return newest if _go_version(newest) >= OLDEST_GO else _newer_go(newest)


def _newer_go(old: str) -> str:
    """Return a newer go command, which is one of the modules; older ones do not download it.

    Raises ClusterError.
    """
    match = re.search(r"^go ([\d.]+)$", (HERE / "go.mod").read_text(), re.MULTILINE)
    assert match is not None
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    module = f"golang.org/toolchain@v0.0.1-go{match[1]}.linux-{machine}"
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [old, "mod", "download", "-json", module],
            cwd=empty,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    try:
        root = pathlib.Path(json.loads(done.stdout)["Dir"])
    except (ValueError, KeyError):
        raise ClusterError(
            f"Go {match[1]} cannot be had by {old}: {done.stdout}{done.stderr}"
        ) from None
    # Modules have no programs, and are read-only.
    for path in (*(root / "bin").iterdir(), *(root / "pkg" / "tool").rglob("*")):
        if path.is_file():
            path.chmod(0o755)
    return str(root / "bin" / "go")


def environment() -> dict[str, str]:
    return {"HOME": "/root", **os.environ, "CGO_ENABLED": "0", "GOFLAGS": ""}


def apt(*names: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-o", "DPkg::Lock::Timeout=300", "-y", "-qq"]
        + ["--no-install-recommends", *names],
    ):
        subprocess.run(words, check=True, env=environment, stdout=sys.stderr, timeout=900)


def _go_version(path: str) -> tuple[int, ...]:
    said = subprocess.run(
        [path, "version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    match = re.search(r"go(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def version(modules: str = MODULES) -> str:
    """Return the version of Kubernetes, which the module file pins."""
    match = re.search(r"k8s\.io/kubernetes (v[\d.]+)", (HERE / modules).read_text())
    assert match is not None
    return match[1]


def binaries(modules: str = MODULES) -> pathlib.Path:
    """Return where the servers are kept: one folder for each state of the sources."""
    names = (modules, modules.replace(".mod", ".sum"), "main.go")
    return (
        CACHE
        / hashlib.sha256(b"".join((HERE / name).read_bytes() for name in names)).hexdigest()[:16]
    )


def install() -> None:
    """Build the servers if they do not exist. Raises ClusterError."""
    missing = [name for name, program in PACKAGES.items() if shutil.which(program) is None]
    if missing:
        apt(*missing)
    build("servers", ".", MODULES)
    # It goes with all of them.
    build("kwok", "sigs.k8s.io/kwok/cmd/kwok", CURRENT)


def build(name: str, package: str, modules: str) -> None:
    """Build one program unless it exists. Raises ClusterError."""
    program = binaries(modules) / name
    if program.exists():
        return
    program.parent.mkdir(parents=True, exist_ok=True)
    number = version(modules).removeprefix("v").split(".")
    stamp = "k8s.io/component-base/version"
    flags = (
        f"-s -w -X {stamp}.gitVersion={version(modules)} -X {stamp}.gitMajor={number[0]} -X "
        f"{stamp}.gitMinor={number[1]}"
    )
    # Workers of the tests may build concurrently.
    made = program.with_suffix(f".{os.getpid()}")
    # Concurrently with tests that measure.
    words = [
        "nice",
        "-n",
        "19",
        go(),
        "build",
        "-mod=readonly",
        f"-modfile={modules}",
        "-trimpath",
        "-ldflags",
        flags,
    ]
    words += ["-o", str(made), package]
    done = subprocess.run(
        words,
        cwd=HERE,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"{name} does not build ({' '.join(words)}):\n{done.stderr[-3000:]}")
    made.rename(program)


class ControlPlane:
    """One cluster below a directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.dir = directory
        self.state = directory / "state.json"
        self.values: dict[str, Any] = (
            json.loads(self.state.read_text()) if self.state.exists() else {}
        )

    def running(self) -> bool:
        pids = self.values.get("pids", {})
        return bool(pids) and all(start_time(pid) == began for pid, began in pids.values())

    # --- up

    def up(self) -> dict[str, Any]:
        """Start everything. Raises ClusterError; then nothing of it runs."""
        if self.running():
            return self._settings()
        self.down()
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
            self._start()
        except BaseException:
            self.down()
            raise
        return self._settings()

    def _settings(self) -> dict[str, Any]:
        return {
            "kubeconfig": str(self.dir / "admin.kubeconfig"),
            "server": self.url,
            "ca": str(self.dir / "ca.crt"),
            "version": version(),
            "pids": {name: pid for name, (pid, _) in self.values["pids"].items()},
        }

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.values['port']}"

    def _prepare(self) -> None:
        port, etcd, peer = (ports.reserve() for _ in range(3))
        self.values = {
            "port": port,
            "etcd": etcd,
            "peer": peer,
            "token": secrets.token_hex(16),
            "pids": {},
        }
        self._certificates()
        self._write("tokens.csv", f'{self.values["token"]},admin,admin,"system:masters"\n')
        self._write(
            "admin.kubeconfig",
            kubeconfig(self.url, (self.dir / "ca.crt").read_bytes(), self.values["token"]),
        )
        self._save()

    def _write(self, name: str, text: str) -> None:
        with os.fdopen(
            os.open(self.dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
        ) as file:
            file.write(text)

    def _save(self) -> None:
        self._write("state.json", json.dumps(self.values, indent=1))

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(
            ["openssl", *words],
            cwd=self.dir,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"openssl {' '.join(words)}: {done.stderr}")

    def _certificates(self) -> None:
        """Create a CA, certificates and the key of service accounts.

        The certificates are for the server and for the proxy of aggregated servers.

        """
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650")
        self._openssl(
            "req",
            "-x509",
            *key,
            "-subj",
            "/CN=nodepool-test-ca",
            # Python 3.13 needs these extensions.
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
        )
        for name, subject in (("server", "/CN=kube-apiserver"), ("proxy", "/CN=front-proxy")):
            names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
            self._write(f"{name}.ext", f"{names}\nauthorityKeyIdentifier=keyid\n")
            self._openssl(
                "req", *key, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr"
            )
            self._openssl(
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                "-CA",
                "ca.crt",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
                "-days",
                "3650",
                "-extfile",
                f"{name}.ext",
                "-out",
                f"{name}.crt",
            )
        self._openssl("genrsa", "-out", "accounts.key", "2048")
        self._openssl("rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")

    def _start(self) -> None:
        values = self.values
        servers, admin = str(binaries() / "servers"), f"--kubeconfig={self.dir}/admin.kubeconfig"
        etcd = f"http://127.0.0.1:{values['etcd']}"
        peer = f"http://127.0.0.1:{values['peer']}"
        self.spawn(
            "etcd",
            [
                servers,
                "etcd",
                f"--data-dir={self.dir}/etcd",
                f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
        )
        self.wait("etcd", lambda: b"true" in _get(f"{etcd}/health"))
        self.spawn(
            "kube-apiserver",
            [
                servers,
                "kube-apiserver",
                f"--etcd-servers={etcd}",
                "--bind-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                f"--secure-port={values['port']}",
                f"--tls-cert-file={self.dir}/server.crt",
                f"--tls-private-key-file={self.dir}/server.key",
                f"--client-ca-file={self.dir}/ca.crt",
                f"--token-auth-file={self.dir}/tokens.csv",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self.dir}/accounts.pub",
                f"--service-account-signing-key-file={self.dir}/accounts.key",
                "--service-cluster-ip-range=10.96.0.0/16",
                f"--requestheader-client-ca-file={self.dir}/ca.crt",
                "--requestheader-allowed-names=front-proxy",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={self.dir}/proxy.crt",
                f"--proxy-client-key-file={self.dir}/proxy.key",
                # To the kubelet of a real node, which has the same certificate.
                f"--kubelet-certificate-authority={self.dir}/ca.crt",
                f"--kubelet-client-certificate={self.dir}/server.crt",
                f"--kubelet-client-key={self.dir}/server.key",
                "--profiling=false",
                "--allow-privileged=true",
                "--max-requests-inflight=2000",
                "--max-mutating-requests-inflight=1000",
            ],
        )
        self.wait(
            "kube-apiserver", lambda: self.call("GET", "/readyz?exclude=none", raw=True) is not None
        )
        rates = ["--kube-api-qps=2000", "--kube-api-burst=4000", "--leader-elect=false"]
        self.spawn(
            "kube-controller-manager",
            [
                servers,
                "kube-controller-manager",
                admin,
                *rates,
                f"--service-account-private-key-file={self.dir}/accounts.key",
                f"--root-ca-file={self.dir}/ca.crt",
                "--secure-port=0",
                "--concurrent-namespace-syncs=50",
                "--concurrent-serviceaccount-token-syncs=20",
                "--controllers=*,-node-ipam-controller",
            ],
        )
        self.spawn("kube-scheduler", [servers, "kube-scheduler", admin, *rates, "--secure-port=0"])
        self.spawn(
            "kwok",
            [
                str(binaries(CURRENT) / "kwok"),
                admin,
                "--manage-all-nodes=false",
                f"--manage-nodes-with-label-selector={PLAYED}",
                f"--config={HERE}/stages.yaml",
                "--node-lease-duration-seconds=40",
                "--server-address=",
            ],
        )
        for number in range(NODES):
            played = dict([PLAYED.split("=")])
            status = {"capacity": MACHINE, "allocatable": MACHINE}
            self.add_node(f"node-{number}", status, played)
        self.wait("kwok", self._nodes_are_ready)
        self.wait(
            "kube-controller-manager",
            lambda: bool(self.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")),
        )

    def add_node(
        self,
        name: str,
        status: dict[str, Any],
        labels: dict[str, str] | None = None,
        taints: Sequence[dict[str, str]] = (),
    ) -> None:
        known = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {**known, **(labels or {})}},
            "spec": {"taints": list(taints)},
        }
        try:
            self.call("POST", "/api/v1/nodes", node)
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there since an earlier start
                raise
        self.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def _nodes_are_ready(self) -> bool:
        found = (self.call("GET", f"/api/v1/nodes?labelSelector={PLAYED}") or {}).get("items", [])
        return len([node for node in found if ready(node)]) >= NODES

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, raw: bool = False
    ) -> Any:
        """Call the API as the administrator. Raises urllib's errors."""
        context = ssl.create_default_context(cafile=str(self.dir / "ca.crt"))
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self.values['token']}", "Content-Type": kind}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            text = answer.read()
        return text if raw else json.loads(text)

    def spawn(self, name: str, words: list[str]) -> None:
        with open(self.dir / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.dir,
                env={**os.environ, "GOMAXPROCS": "4"},
            )
        self.values["pids"][name] = [process.pid, start_time(process.pid)]
        self._save()

    def wait(self, name: str, answers: Any) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
                if answers():
                    return
            pid, began = self.values["pids"][name]
            if start_time(pid) != began:
                break
            time.sleep(0.1)
        raise ClusterError(
            f"{name} does not start, its log is {self.dir / name}.log:\n{self._tail(name)}"
        )

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.dir / f"{name}.log").read_text(errors="replace")[-2000:]
        return ""

    # --- down

    def down(self) -> None:
        """Stop everything; keep what it has written."""
        pids = self.values.get("pids", {})
        for number, patience in (
            (signal.SIGTERM, STOP_TIMEOUT / 3),
            (signal.SIGKILL, STOP_TIMEOUT),
        ):
            deadline = time.monotonic() + patience
            for pid, began in pids.values():
                if start_time(pid) == began:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            while time.monotonic() < deadline and any(
                start_time(pid) == began for pid, began in pids.values()
            ):
                time.sleep(0.05)
        if self.values:
            self.values["pids"] = {}
            if self.dir.is_dir():
                self._save()


def ready(node: dict[str, Any]) -> bool:
    """Return whether a node says that it is ready."""
    conditions = node["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def kubeconfig(
    server: str, ca: bytes, token: str, context: str = "admin", namespace: str = "default"
) -> str:
    """Return a kubeconfig file, in JSON, which is YAML."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": base64.b64encode(ca).decode(),
                    },
                }
            ],
            "users": [{"name": context, "user": {"token": token}}],
            "contexts": [
                {
                    "name": context,
                    "context": {"cluster": "test", "user": context, "namespace": namespace},
                }
            ],
        },
        indent=1,
    )


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def start_time(pid: int) -> str | None:
    """Return the start time, which identifies a process; None: it does not exist, or has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
