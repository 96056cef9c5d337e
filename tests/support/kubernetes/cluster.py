"""A real Kubernetes (tools/kubernetes) behind the fault proxy, and an account for the launcher
with the manual's rights.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests import REPOSITORY
from tests.support.fault_proxy import Action, FaultProxy, Request, reply

PROGRAM = REPOSITORY / "tools" / "kubernetes"
RIGHTS = REPOSITORY / "doc" / "examples" / "kubernetes-launcher.yaml"
ACCOUNT, ACCOUNT_NAMESPACE = "nodepool-launcher", "nodepool"
CONTEXT = "test-context"
#: The only image of the node that runs containers (tools/kubernetes up --node).
REAL_IMAGE = "nodepool.test/small:1"


class Server:
    """The API server, called as anyone."""

    def __init__(self, url: str, ca: str, token: str | None) -> None:
        self.url = url
        self.ca = ca
        self.token = token

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises urllib.error.HTTPError."""
        patch = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {
            "Content-Type": patch,
            **({"Authorization": f"Bearer {self.token}"} if self.token else {}),
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=self.ca)
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return json.loads(answer.read())

    def status(self, method: str, path: str, body: dict[str, Any] | None = None) -> int:
        """HTTP's, also of refusals."""
        try:
            self.call(method, path, body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def get(self, path: str) -> Any:
        """None: it is not there."""
        try:
            return self.call("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def kubeconfig(url: str, ca: str, user: dict[str, Any], context: str = CONTEXT) -> dict[str, Any]:
    cluster = {
        "server": url,
        "certificate-authority-data": base64.b64encode(pathlib.Path(ca).read_bytes()).decode(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
    }


class KubernetesCluster:
    """One for all tests of a worker; each test has its names."""

    def __init__(self, directory: pathlib.Path, url: str, admin_token: str) -> None:
        self.dir = directory
        self.ca = str(directory / "ca.crt")
        self.admin = Server(url, self.ca, admin_token)
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        tls = (str(directory / "server.crt"), str(directory / "server.key"), self.ca)
        self.proxy = FaultProxy((parts.hostname, parts.port), tls=tls)
        self.token = self._account()

    def apply(self, *objects: dict[str, Any]) -> None:
        for each in objects:
            group = each["apiVersion"]
            root = "/api/v1" if group == "v1" else f"/apis/{group}"
            namespace = each["metadata"].get("namespace")
            place = f"{root}/namespaces/{namespace}" if namespace else root
            plural = (
                each["kind"].lower() + "s"
                if not each["kind"].endswith("y")
                else each["kind"][:-1].lower() + "ies"
            )
            try:
                self.admin.call("POST", f"{place}/{plural}", each)
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise AssertionError(f"{each['kind']}: {error.read().decode()}") from error

    def _account(self) -> str:
        """The launcher's, as the manual has it."""
        self.apply(*yaml.safe_load_all(RIGHTS.read_text()))
        return self.token_of(ACCOUNT_NAMESPACE, ACCOUNT)

    def token_of(self, namespace: str, account: str) -> str:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        made = self.admin.call("POST", path, {"spec": {"expirationSeconds": 3600}})
        return str(made["status"]["token"])

    def kubeconfig(self, folder: pathlib.Path, **user: Any) -> str:
        """Path of a file with the launcher's account, through the proxy."""
        path = folder / f"kubeconfig-{uuid.uuid4().hex[:8]}"
        path.write_text(
            yaml.safe_dump(kubeconfig(self.proxy.url, self.ca, user or {"token": self.token}))
        )
        return str(path)

    # -- what is there

    def namespaces(self, prefix: str) -> dict[str, Any]:
        """Those that are not being deleted."""
        found = self.admin.call("GET", "/api/v1/namespaces")["items"]
        return {
            each["metadata"]["name"]: each
            for each in found
            if each["metadata"]["name"].startswith(prefix)
            and not each["metadata"].get("deletionTimestamp")
        }

    def pod(self, namespace: str, name: str) -> Any:
        return self.admin.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def pods(self, namespace: str) -> dict[str, Any]:
        found = self.admin.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
        return {
            each["metadata"]["name"]: each
            for each in found
            if not each["metadata"].get("deletionTimestamp")
        }

    def close(self) -> None:
        self.proxy.close()


def failure(code: int, reason: str, message: str, retry_after: int | None = None) -> Action:
    """An answer of the API server."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
    plain = reply(code, json.dumps(body), "application/json")
    if retry_after is None:
        return plain

    def act(request: Request, forward: Any) -> Any:
        answer = plain(request, forward)
        assert answer is not None
        answer.headers.append(("Retry-After", str(retry_after)))
        return answer

    return act


def require_real_node() -> None:
    """Skip the test if this machine cannot be a node that runs containers."""
    if os.geteuid() != 0:
        pytest.skip("only root starts a kubelet and containers")
    words = [sys.executable, str(PROGRAM), "install", "--node"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        pytest.skip(f"no kubelet or no container runtime: {done.stderr[-300:]}")


@contextlib.contextmanager
def running(*options: str) -> Iterator[tuple[pathlib.Path, str, str]]:
    """Folder, address and the administrator's token of the one in the environment, or of a new
    one.

    :param options: of ``tools/kubernetes up``, for one that the environment cannot provide.
    """
    given = os.environ.get("NODEPOOL_KUBERNETES")
    if given and not options:
        yield _settings(pathlib.Path(given))
        return
    with tempfile.TemporaryDirectory(prefix="nodepool-kubernetes-") as directory:
        words = [sys.executable, str(PROGRAM)]
        subprocess.run(
            [*words, "up", *options, "--dir", directory],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=3600,
        )
        try:
            yield _settings(pathlib.Path(directory))
        finally:
            subprocess.run([*words, "down", "--dir", directory], check=True, timeout=60)


def _settings(directory: pathlib.Path) -> tuple[pathlib.Path, str, str]:
    values = json.loads((directory / "state.json").read_text())
    return directory, f"https://127.0.0.1:{values['port']}", values["token"]
