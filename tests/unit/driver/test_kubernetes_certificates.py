"""The authority of a cluster, which is renewed while the launcher runs."""

from __future__ import annotations

import base64
import http.server
import json
import logging
import pathlib
import ssl
import threading
from collections.abc import Iterator

import pytest

from nodepool.cloud.http import NoAccess
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.kubernetes.api.kinds import NAMESPACE
from tests.support.authority import Authority


class Lists(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = json.dumps({"items": [{"metadata": {"name": "one"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that was refused."""


class Cluster:
    """An API server, its authority, and a kubeconfig."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = folder / "kubeconfig"
        self.authority = Authority(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.issue("api", "IP:127.0.0.1"))
        self.server = Server(("127.0.0.1", 0), Lists)
        self.server.socket = context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )

    def trust(self, authority: Authority, inline: bool) -> None:
        """Write the kubeconfig, with the authority in it or, as in pods, in a separate file."""
        certificate = pathlib.Path(authority.cert).read_bytes()
        cluster = {"server": f"https://127.0.0.1:{self.server.server_address[1]}"}
        if inline:
            cluster["certificate-authority-data"] = base64.b64encode(certificate).decode()
        else:
            path = self.file.with_name("ca.crt")
            path.write_bytes(certificate)
            cluster["certificate-authority"] = str(path)
        content = {
            "current-context": "x",
            "clusters": [{"name": "x", "cluster": cluster}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "users": [{"name": "x", "user": {"token": "secret"}}],
        }
        self.file.write_text(json.dumps(content))


@pytest.fixture
def cluster(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(found.file))
    thread = threading.Thread(target=found.server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join(10)
    found.server.server_close()


@pytest.mark.parametrize("inline", [True, False])
def test_renewed_authority_of_a_cluster_is_used_without_a_restart(
    cluster: Cluster, tmp_path: pathlib.Path, inline: bool
) -> None:
    (tmp_path / "former").mkdir()
    cluster.trust(Authority(tmp_path / "former"), inline)
    client = ClusterClient(KubeconfigAccess(None), logging.getLogger("test"))
    with pytest.raises(NoAccess, match="certificate-authority in the kubeconfig"):
        client.list(NAMESPACE)
    cluster.trust(cluster.authority, inline)
    assert [item["metadata"]["name"] for item in client.list(NAMESPACE)] == ["one"]
    client.close()
