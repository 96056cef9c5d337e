"""Tokens leave this machine only encrypted, and come from files that not everybody may read."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import pytest
import voluptuous as v

from nodepool.adapters import gitlab
from nodepool.adapters.gitea.program import INSTANCE, instance_of
from nodepool.adapters.runners.program import ConfigError, Pools, secret_file
from nodepool.client import Lease, NodepoolError, Pool, read_secret
from tests.support.fault_proxy import FaultProxy, Reply

OTHER = "http://pool.example.org:8005"


def test_client_sends_no_token_to_other_machines_without_encryption() -> None:
    for call in (Pool(OTHER, "np_secret").leases, lambda: Pool(OTHER).get("200-1", "npl_secret")):
        with pytest.raises(NodepoolError, match="a token is sent by https only") as found:
            call()
        assert found.value.code == "insecure" and "secret" not in str(found.value)
    lease = Lease(
        Pool(OTHER), {"id": "200-1", "token": "npl_secret", "nodes": [{"id": "1"}], "state": "held"}
    )
    with pytest.raises(NodepoolError, match="a token is sent by https only"):
        lease.run("true")


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://gitea.example.org", False),
        ("http://127.0.0.1.example.org", False),
        ("http://127.0.0.1:3000", True),
        ("http://[::1]:3000", True),
        ("https://gitea.example.org", True),
    ],
)
def test_token_of_gitea_is_sent_by_https_or_to_this_machine(url: str, good: bool) -> None:
    entry = {"name": "main", "url": url, "token-file": "/f", "runners": [{"runs-on": "noble"}]}
    if good:
        assert INSTANCE(entry)["url"] == url
    else:
        with pytest.raises(v.Invalid, match="use https"):
            INSTANCE(entry)


def test_file_with_a_token_that_everybody_may_read_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEM_FAILURE_EXIT_CODE", "73")
    path = tmp_path / "token"
    path.write_text("np_secret")
    path.chmod(0o604)
    assert (
        gitlab.main(
            ["--url", "http://127.0.0.1:9", "--token-file", str(path), "run", "script", "stage"]
        )
        == 73
    )
    assert f"chmod o= {path}" in capsys.readouterr().out
    path.chmod(0o640)
    assert read_secret(str(path)) == "np_secret"


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A server that answers every call with empty lists."""
    empty = b'{"jobs": [], "runners": [], "total_count": 0, "leases": []}'
    with FaultProxy(
        ("127.0.0.1", 9),
        look_alike=lambda _request, _forward: Reply(
            200, empty, [("Content-Type", "application/json")]
        ),
    ) as found:
        yield found


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "token"
    path.write_text("first")
    path.chmod(0o600)
    return path


def test_replaced_token_of_the_pool_is_used_without_a_restart(
    proxy: FaultProxy, file: pathlib.Path
) -> None:
    """Kubernetes replaces the tokens of service accounts each hour."""
    url = f"http://127.0.0.1:{proxy.port}"
    pool = Pools({"url": url, "token-file": str(file)}, "nodepool-test")("")
    pool.call("GET", "/leases")
    file.write_text("second")
    pool.call("GET", "/leases")
    sent = [request.headers["authorization"] for request in proxy.requests]
    assert sent == ["Bearer first", "Bearer second"]


def test_replaced_token_of_gitea_is_used_without_a_restart(
    proxy: FaultProxy, file: pathlib.Path
) -> None:
    url = f"http://127.0.0.1:{proxy.port}"
    entry = {"name": "main", "url": url, "token-file": str(file), "runners": [{"runs-on": "noble"}]}
    gitea = instance_of(INSTANCE(entry), Pools({}, "nodepool-test"), threading.Event())
    gitea._api.queue()
    file.write_text("second")
    gitea._api.queue()
    sent = [request.headers["authorization"] for request in proxy.requests]
    assert sent == ["token first", "token second"]


def test_former_secret_is_used_while_its_file_cannot_be_read(
    file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = secret_file(str(file))
    file.unlink()
    assert [secret(), secret()] == ["first", "first"]
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    file.write_text("second")
    file.chmod(0o600)
    assert secret() == "second"


@pytest.mark.parametrize("text", ["# of CI\nnp_hidden", "\ufeffnp_hidden", "np_hidden\u20ac"])
def test_text_that_is_not_a_token_is_refused_without_repeating_it(
    file: pathlib.Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    secret = secret_file(str(file))
    file.write_text(text)
    assert secret() == "first"
    with pytest.raises(ConfigError, match=f"{file} must be one line") as refused:
        secret_file(str(file))
    with pytest.raises(NodepoolError, match="The token must be one line") as unsent:
        Pool("http://127.0.0.1:9", text).call("GET", "/leases")
    assert "hidden" not in f"{refused.value} {unsent.value} {caplog.text}"


def test_private_keys_have_several_lines(file: pathlib.Path) -> None:
    file.write_text("-----BEGIN\nKEY-----\n")
    assert secret_file(str(file), any_text=True)() == "-----BEGIN\nKEY-----"
