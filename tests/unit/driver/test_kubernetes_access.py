"""Access to clusters as the package kubernetes reads it: exec plug-ins, several files."""

from __future__ import annotations

import datetime
import json
import logging
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kubernetes
import pytest
import requests
import yaml

from nodepool.cloud.http import NoAccess
from nodepool.driver.kubernetes.api import access as access_of_clusters
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.kubernetes.api.kinds import POD
from tests.support.fault_proxy import FaultProxy, Reply, Request


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


@pytest.mark.parametrize(
    ("excluded", "proxy"),
    [
        ("", "http://proxy.example.org:3128"),
        ("other.example.org", "http://proxy.example.org:3128"),
        ("one.example.org", None),
        (".example.org", None),
        ("localhost,one.example.org:443", None),
    ],
)
def test_proxy_of_the_environment_is_not_used_for_hosts_that_no_proxy_names(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, excluded: str, proxy: str | None
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", excluded)
    access = KubeconfigAccess(None)
    if int(kubernetes.__version__.partition(".")[0]) < 34:  # it reads neither of them
        proxy = None
    assert access.proxy == proxy


@pytest.mark.parametrize(
    ("url", "excluded", "result"),
    [
        ("https://10.96.0.1", "localhost,10.96.0.0/12", True),
        ("https://10.96.0.1:443", "10.96.0.1", True),
        ("https://10.96.0.1", "192.168.0.0/16, .svc", False),
        ("https://[fd00::1]:6443", "fd00::/8", True),
        ("https://kubernetes.default.svc", ".svc", True),
        ("https://kubernetes.default.svc", "*", True),
        ("https://kubernetes.default.svc:6443", "default.svc:443", False),
        ("https://example.org", "", False),
    ],
)
def test_no_proxy_names_hosts_domains_and_networks(url: str, excluded: str, result: bool) -> None:
    assert access_of_clusters._is_excluded(url, excluded) is result


def client_with(proxy: str) -> ClusterClient:
    access: Any = SimpleNamespace(
        host="http://one.example.org", verify_ssl=True, proxy=proxy, authorization=lambda: None
    )
    return ClusterClient(access, logging.getLogger("test"))


def test_proxy_gets_the_password_in_its_address() -> None:
    def answer(_request: Request, _forward: object) -> Reply:
        return Reply(200, b'{"items": []}')

    with FaultProxy(("127.0.0.1", 9), look_alike=answer) as proxy:
        client = client_with(f"http://user:pass%3Aword@127.0.0.1:{proxy.port}")
        assert client.list(POD) == []
        client.close()
        [request] = proxy.requests
    assert request.headers["proxy-authorization"] == requests.auth._basic_auth_str(
        "user", "pass:word"
    )


def test_proxy_of_an_unsupported_type_is_reported() -> None:
    with pytest.raises(NoAccess, match=r"proxy socks5://proxy\.example\.org: use an http"):
        client_with("socks5://user:secret@proxy.example.org")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("server", "https://one.example.org:6443x", "Port could not be cast"),
        ("server", "https://one.example.org:99999", "Port out of range"),
        ("certificate-authority", __file__, "certificate-authority cannot be used"),
    ],
)
def test_malformed_address_or_authority_is_reported_with_its_kubeconfig(
    cluster: Cluster, option: str, value: str, reason: str
) -> None:
    content = yaml.safe_load(cluster.file.read_text())
    content["clusters"][0]["cluster"][option] = value
    cluster.file.write_text(yaml.safe_dump(content))
    with pytest.raises(NoAccess, match=f"{cluster.file}.*{reason}"):
        ClusterClient(KubeconfigAccess(None), logging.getLogger("test"))
