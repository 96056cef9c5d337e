"""Sources of records: slices.xml from a file and over https, ZooKeeper; outages never remove a
sliver.
"""

from __future__ import annotations

import http.server
import json
import pathlib
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.config import parse
from nodepool.nodemanager.sources import sources
from nodepool.nodemanager.sources.sources import SlicesXmlSource
from nodepool.nodemanager.sources.zookeeper import ZooKeeperSource
from tests.conftest import Chroot, delete_tree, wait_for
from tests.support.authority import Authority
from tests.support.named_pipe import named_pipe
from tests.support.nodemanager.node import KEY, MemoryNode


def document(*names: str) -> bytes:
    slices = "".join(
        f'<slice id="{n}" name="{name}"><node id="here"/><user person_id="1"/></slice>'
        for n, name in enumerate(names)
    )
    return f'<slices>{slices}<key person_id="1" value="{KEY}"/></slices>'.encode()


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[MemoryNode]:
    (tmp_path / "state").mkdir()
    found = MemoryNode(
        parse(
            {"state-dir": str(tmp_path / "state"), "run-dir": str(tmp_path), "host-name": "here"},
            "test",
        )
    )
    yield found
    found.close()


def from_file(node: MemoryNode, path: pathlib.Path, new: bool = False) -> SlicesXmlSource:
    return SlicesXmlSource("slices-xml-0", {"file": str(path)}, node.config, node.deliver, new)


@pytest.mark.spec("NM-B.2: a slice named <prefix>_default overrides host-wide defaults")
def test_default_slice_overrides_defaults_of_the_host(
    node: MemoryNode, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "slices.xml"
    source = SlicesXmlSource(
        "slices-xml-0",
        {"file": str(path), "default-slice": "vini_default"},
        node.config,
        node.deliver,
    )
    for amount in (100, 200):
        default = (
            '<slice id="9" name="vini_default"><resource '
            f'name="nm_pids_max"><value>{amount}</value></resource></slice>'
        )
        path.write_bytes(document("a").replace(b"</slices>", default.encode() + b"</slices>"))
        assert source.fetch()
        assert node.sliver_names() == ["a"] and node.granted("a")["nm_pids_max"] == amount
    path.write_bytes(document("a"))
    assert source.fetch()
    assert node.granted("a")["nm_pids_max"] == 1024


@pytest.mark.spec(
    "NM-A.2, NM-C.6: slices.xml from a file; an outage or a broken document never sweeps"
)
def test_unreadable_file_never_deletes_slivers(
    node: MemoryNode, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "slices.xml"
    source = from_file(node, path)
    assert not source.fetch(), "not there yet"
    path.write_bytes(document("a", "b"))
    assert source.fetch()
    assert node.sliver_names() == ["a", "b"]
    assert not source.fetch(), "unchanged"
    for broken in (b"", b"<slices><slice", b"<html/>", document("c")[:-5]):
        path.write_bytes(broken)
        assert not source.fetch()
        assert not source.fetch(), "and again"
        assert node.sliver_names() == ["a", "b"]
    with named_pipe(path):
        assert not source.fetch()
    assert not source.fetch()
    assert node.sliver_names() == ["a", "b"]
    assert "keeping slivers unchanged" in caplog.text
    path.write_bytes(document("b", "c"))
    assert source.fetch()
    assert node.sliver_names() == ["b", "c"]


@pytest.mark.spec("NM-A.13: nothing propagates: what fails in taking over is tried again")
def test_failed_delivery_is_tried_again(node: MemoryNode, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "slices.xml"
    path.write_bytes(document("a"))
    failures = [RuntimeError("disk full")]

    def deliver(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return node.deliver(*arguments)

    source = SlicesXmlSource("s", {"file": str(path)}, node.config, deliver)
    assert not source.fetch()
    assert source.fetch()
    assert node.sliver_names() == ["a"]


@pytest.mark.spec("NM-C.6: keep last good copy; it adds, but never removes")
def test_last_good_copy_only_adds_records(node: MemoryNode, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "slices.xml"
    path.write_bytes(document("a", "b"))
    assert from_file(node, path).fetch()
    path.unlink()
    for key in ("sliver_a", "sliver_b"):
        node.database.delete(key)
    assert not from_file(node, path).fetch()
    assert node.sliver_names() == [], "the database knows this source: it is right"
    source = from_file(node, path, new=True)
    source.fetch()
    assert node.sliver_names() == ["a", "b"]
    assert node.database.serial("slices-xml-0") == 1
    path.write_bytes(document("b"))
    assert source.fetch()
    assert node.sliver_names() == ["b"]


@pytest.mark.spec("NM-A.3: the poller is a thread that stops when told")
def test_poller_stops_when_requested(node: MemoryNode, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "slices.xml"
    path.write_bytes(document("a"))
    source = SlicesXmlSource("s", {"file": str(path), "interval": 0.1}, node.config, node.deliver)
    source.start()
    wait_for(lambda: node.sliver_names() == ["a"], what="the first update")
    path.write_bytes(document("a", "b"))
    wait_for(lambda: node.sliver_names() == ["a", "b"], what="the second update")
    source.stop()


class Web:
    """An https server; ``answer`` decides what it says."""

    def __init__(self, cert: str, key: str) -> None:
        self.requests: list[dict[str, str]] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], None] = lambda handler: None
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.requests.append(dict(self.headers.items()))
                web.answer(self)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that does not trust us."""

        self.server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}/xml/slices-0.5.xml"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def says(self, body: bytes, etag: str = "", length: int | None = None) -> None:
        def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
            if etag and handler.headers.get("If-None-Match") == etag:
                handler.send_response(304)
                handler.end_headers()
                return
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body) if length is None else length))
            if etag:
                handler.send_header("ETag", etag)
            handler.end_headers()
            handler.wfile.write(body)

        self.answer = answer

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


@pytest.fixture
def authority(tmp_path: pathlib.Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def web(authority: Authority) -> Iterator[Web]:
    found = Web(*authority.issue("web", "IP:127.0.0.1"))
    yield found
    found.stop()


@pytest.mark.spec("NM-A.10, NM-C.6: fetched over TLS against a pinned CA file; ETag")
def test_document_is_fetched_over_pinned_tls_with_etag(
    node: MemoryNode, web: Web, authority: Authority
) -> None:
    source = SlicesXmlSource("s", {"url": web.url, "ca": authority.cert}, node.config, node.deliver)
    web.says(document("a"), '"1"')
    assert source.fetch()
    assert not source.fetch()
    assert [r.get("If-None-Match") for r in web.requests] == [None, '"1"']
    web.says(b"<slices><slice", '"2"')
    assert not source.fetch()
    assert not source.fetch(), "a broken one is not the last good one"
    web.says(document("a", "b"), '"3"')
    assert source.fetch()
    assert node.sliver_names() == ["a", "b"]
    web.says(document("a", "b"))
    assert not source.fetch(), "the same again, without ETag"


def test_renewed_authority_of_a_source_is_used_without_a_restart(
    node: MemoryNode, web: Web, authority: Authority, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "former").mkdir()
    former = Authority(tmp_path / "former", "former")
    options = {"url": web.url, "ca": former.cert}
    source = SlicesXmlSource("s", options, node.config, node.deliver)
    web.says(document("a"))
    assert not source.fetch()
    pathlib.Path(authority.cert).replace(former.cert)
    assert source.fetch()


@pytest.mark.spec("NM-A.6 g: only a complete, parsed, authenticated update may sweep")
def test_incomplete_update_deletes_nothing(
    node: MemoryNode, web: Web, authority: Authority, tmp_path: pathlib.Path
) -> None:
    source = SlicesXmlSource("s", {"url": web.url, "ca": authority.cert}, node.config, node.deliver)
    web.says(document("a"))
    assert source.fetch()
    empty = b"<slices/>" + b" " * 10

    def error(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_error(500, "down")

    def elsewhere(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "http://127.0.0.1:1/slices.xml")
        handler.end_headers()

    for answer in (error, elsewhere):
        web.answer = answer
        assert not source.fetch()
    web.says(empty, length=len(empty) + 500)
    assert not source.fetch(), "cut off"
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    web.says(empty)
    assert not SlicesXmlSource(
        "s", {"url": web.url, "ca": other.cert}, node.config, node.deliver
    ).fetch(), "not pinned"
    assert node.sliver_names() == ["a"]
    assert source.fetch()
    assert node.sliver_names() == [], "this one is complete"
    web.stop()
    assert not source.fetch()
    for wrong in ({"url": "http://127.0.0.1/x"}, {"url": web.url, "ca": "/nowhere"}):
        with pytest.raises(ConfigurationError, match="slices-xml"):
            SlicesXmlSource("s", wrong, node.config, node.deliver)


@pytest.mark.spec("NM-A.6: delegates; those taken out of the configuration go")
def test_delegates_of_the_configuration(node: MemoryNode) -> None:
    def made(*entries: dict[str, Any]) -> list[str]:
        config = parse(
            {
                "state-dir": node.config.state_dir,
                "run-dir": node.config.run_dir,
                "delegates": list(entries),
            },
            "test",
        )
        assert sources.make(config, node.database, node.deliver, node.capacity) == []
        return sorted(
            r.key for r in node.database.records() if r.content.get("account_type") == "delegate"
        )

    snoop = {
        "name": "del_snoop",
        "ssh-keys": [KEY, KEY.replace("someone", "else")],
        "methods": ["GetRSpec"],
    }
    assert made(snoop, {"name": "other"}) == ["delegate_del_snoop", "delegate_other"]
    assert node.database.get("delegate_del_snoop").content["methods"] == ["GetRSpec"]  # type: ignore[union-attr]
    assert made(snoop) == ["delegate_del_snoop"]
    assert made() == []
    for wrong, text in (
        ({"name": "a b"}, "is not a name"),
        ({"name": "a", "ssh-keys": "junk"}, "ssh_keys"),
        ({"name": "a", "methods": ["Fly"]}, "Fly: no such method"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            made(wrong)


# -- ZooKeeper


@pytest.fixture
def kazoo(zk_chroot: Chroot) -> Any:
    return zk_chroot.connect().client


def from_zookeeper(node: MemoryNode, zk_chroot: Chroot) -> ZooKeeperSource:
    host, port = zk_chroot.hosts.rsplit(":", 1)
    return ZooKeeperSource(
        {
            "servers": [{"host": host, "port": int(port), "chroot": zk_chroot.chroot}],
            "tls": {"ca": zk_chroot.ca, "cert": zk_chroot.cert, "key": zk_chroot.key},
        },
        node.config,
        node.deliver,
        node.capacity,
    )


@pytest.fixture
def source(node: MemoryNode, zk_chroot: Chroot) -> Iterator[ZooKeeperSource]:
    found = from_zookeeper(node, zk_chroot)
    found.start()
    yield found
    found.stop()


def publish(
    kazoo: Any, slice_: str, here: bool = True, content: bytes | None = None, **values: Any
) -> None:
    kazoo.ensure_path(f"/nodemanager/slices/{slice_}")
    kazoo.set(
        f"/nodemanager/slices/{slice_}",
        content if content is not None else json.dumps(values).encode(),
    )
    if here:
        kazoo.ensure_path(f"/nodemanager/slices/{slice_}/here")


@pytest.mark.spec("NM-C.6: /nodemanager/slices/<name> and per-host children, watched")
def test_slices_in_zookeeper_are_watched(
    node: MemoryNode, kazoo: Any, source: ZooKeeperSource
) -> None:
    publish(kazoo, "a", rspec={"nm_cpu_share": 3}, account_type="delegate", name="b")
    publish(kazoo, "elsewhere", here=False)
    wait_for(lambda: node.sliver_names() == ["a"], what="the slice")
    publish(kazoo, "a", rspec={"nm_cpu_share": 4})
    wait_for(lambda: node.granted("a")["nm_cpu_share"] == 4, what="its change")
    kazoo.set("/nodemanager/slices/a/here", b'{"rspec": {"nm_cpu_share": 5}}')
    wait_for(
        lambda: node.granted("a")["nm_cpu_share"] == 5, what="what is said for this host alone"
    )
    publish(kazoo, "a", content=b"junk")
    publish(kazoo, "b")
    wait_for(lambda: node.sliver_names() == ["a", "b"], what="the other, and the broken one stays")
    kazoo.delete("/nodemanager/slices/a/here")
    wait_for(lambda: node.sliver_names() == ["b"], what="it is not for this host any more")


@pytest.mark.spec("NM-A.6 g: a tree that is gone is no list without slices")
def test_zookeeper_is_emptied(
    node: MemoryNode, kazoo: Any, source: ZooKeeperSource, zk_chroot: Chroot
) -> None:
    publish(kazoo, "a")
    wait_for(lambda: node.sliver_names() == ["a"], what="the slice")
    kazoo.ensure_path("/nodemanager/hosts/marker")
    source.stop()
    kazoo.delete("/nodemanager/slices", recursive=True)
    again = from_zookeeper(node, zk_chroot)
    again.start()
    wait_for(lambda: kazoo.exists("/nodemanager/hosts/here"), what="it has looked")
    again.stop()
    assert node.sliver_names() == ["a"]


def test_host_announces_itself_again_after_its_record_was_deleted(
    kazoo: Any, source: ZooKeeperSource
) -> None:
    wait_for(lambda: kazoo.exists("/nodemanager/hosts/here"), what="the announcement")
    delete_tree(kazoo, "/nodemanager")
    wait_for(lambda: kazoo.exists("/nodemanager/hosts/here"), what="the new announcement")


@pytest.mark.spec("NM-C.6: host announces itself with an ephemeral /nodemanager/hosts/<name>")
def test_host_announces_itself_with_an_ephemeral_record(
    node: MemoryNode, kazoo: Any, source: ZooKeeperSource, zk_chroot: Chroot
) -> None:
    def announced() -> dict[str, Any]:
        return dict(json.loads(kazoo.get("/nodemanager/hosts/here")[0]))

    wait_for(lambda: kazoo.exists("/nodemanager/hosts/here"), what="the announcement")
    assert {
        "api",
        "tls_fingerprint",
        "ssh_address",
        "capacity",
        "allocated",
        "images",
        "backends",
        "version",
    } <= set(announced())
    assert kazoo.exists("/nodemanager/hosts/here").ephemeralOwner
    node.deliver("driver", None, [{"account_type": "sliver", "name": "x"}], False)
    source.changed()
    wait_for(lambda: announced()["allocated"]["slivers"] == 1, what="the new numbers")
    # One that a process before has left behind is replaced.
    second = from_zookeeper(node, zk_chroot)
    second.start()
    owner = kazoo.exists("/nodemanager/hosts/here").ephemeralOwner
    wait_for(
        lambda: (stat := kazoo.exists("/nodemanager/hosts/here")) and stat.ephemeralOwner != owner,
        what="the new owner",
    )
    second.stop()
    source.stop()
    wait_for(lambda: not kazoo.exists("/nodemanager/hosts/here"), what="it goes with the session")


def test_stop_while_no_server_answers(node: MemoryNode) -> None:
    found = ZooKeeperSource(
        {"servers": [{"host": "127.0.0.1", "port": 1}], "insecure": True},
        node.config,
        node.deliver,
        node.capacity,
    )
    found.start()
    found.stop()


@pytest.mark.spec("NM-C.6: watched, also after the connection broke")
def test_zookeeper_connection_breaks(node: MemoryNode, kazoo: Any, source: ZooKeeperSource) -> None:
    publish(kazoo, "a")
    wait_for(lambda: node.sliver_names() == ["a"], what="the slice")
    for name in ("b", "c"):
        connection, armed = source._client.client._connection, source._armed  # type: ignore[union-attr]
        connection._socket.shutdown(2)
        wait_for(
            lambda before=armed: source._armed > before and source._client.connected,
            what="a new connection",
        )  # type: ignore[misc]
        publish(kazoo, name)
        wait_for(lambda name=name: name in node.sliver_names(), what="what was published after it")  # type: ignore[misc]
    assert node.sliver_names() == ["a", "b", "c"]
