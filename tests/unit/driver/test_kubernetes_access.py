"""Access to clusters as the package kubernetes reads it: exec plug-ins, several files."""

from __future__ import annotations

import datetime
import json
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from nodepool.cloud.http import NoAccess
from nodepool.driver.kubernetes.api.access import KubeconfigAccess


class Cluster:
    """A kubeconfig whose user has an exec plug-in, which counts its runs."""

    def __init__(self, folder: pathlib.Path, name: str = "one") -> None:
        self.name, self.runs, self.file = name, folder / f"{name}.runs", folder / f"{name}.yaml"
        self.answer, self.plugin = folder / f"{name}.json", folder / f"{name}.py"
        self.plugin.write_text(
            f"import sys\nopen({str(self.runs)!r}, 'a').write('x')\n"
            f"text = open({str(self.answer)!r}).read()\nsys.exit('no more tokens') if not text "
            "else print(text)\n"
        )
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
        self.token(f"token-{name}", expirationTimestamp=soon.strftime("%Y-%m-%dT%H:%M:%SZ"))
        version = "client.authentication.k8s.io/v1"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": name,
                    "clusters": [
                        {"name": name, "cluster": {"server": f"https://{name}.example.org"}}
                    ],
                    "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
                    "users": [
                        {
                            "name": name,
                            "user": {
                                "exec": {
                                    "apiVersion": version,
                                    "command": sys.executable,
                                    "args": [str(self.plugin)],
                                    "interactiveMode": "Never",
                                }
                            },
                        }
                    ],
                }
            )
        )

    def token(self, token: str, **status: Any) -> None:
        version = "client.authentication.k8s.io/v1"
        self.answer.write_text(
            json.dumps(
                {
                    "kind": "ExecCredential",
                    "apiVersion": version,
                    "status": {"token": token, **status},
                }
            )
        )

    def count(self) -> int:
        return len(self.runs.read_text())


@pytest.fixture
def cluster(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(found.file))
    return found


def test_plug_in_runs_once_for_many_requests_although_its_token_expires_soon(
    cluster: Cluster,
) -> None:
    access = KubeconfigAccess(None)
    before = cluster.count()
    with ThreadPoolExecutor(10) as threads:
        headers = list(threads.map(lambda _number: access.authorization(), range(10)))
    assert headers == ["Bearer token-one"] * 10 and cluster.count() <= before + 1


def test_refused_token_is_replaced_immediately(cluster: Cluster) -> None:
    access = KubeconfigAccess(None)
    assert access.authorization() == "Bearer token-one"
    cluster.token("newer")
    access.renew()
    assert access.authorization() == "Bearer newer"


def test_reason_of_a_failing_plug_in_is_reported(cluster: Cluster) -> None:
    access = KubeconfigAccess(None)
    cluster.answer.write_text("")
    with pytest.raises(NoAccess, match="no token: exec: process returned 1"):
        access.renew()


def test_context_of_the_first_of_several_files_counts(
    cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Cluster(tmp_path, "two")
    monkeypatch.setenv("KUBECONFIG", f"{cluster.file}:{other.file}")
    assert KubeconfigAccess(None).host == "https://one.example.org"
    assert KubeconfigAccess("two").host == "https://two.example.org"
