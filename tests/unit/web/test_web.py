from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool import metrics
from nodepool.web.cache import ResponseCache
from nodepool.web.http import HttpError, negotiate
from nodepool.web.server import WebApp
from tests.unit.status.test_status import FakeZK, make_build, make_node

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
TEXT = "text/plain; charset=UTF-8"


class FakeNodePool:
    def __init__(self):
        self.zk = FakeZK(
            [make_node(0), make_node(1, contenders={"x"})],
            builds=[make_build("fake-image", "b1")],
            pools=[SimpleNamespace(supported_labels=["fake-label"])],
        )
        self.ready = False
        self.metrics = metrics.Metrics()
        self.feed = None

    def getReadiness(self):
        return self.ready, []

    def getZK(self):
        return self.zk


@pytest.fixture
def nodepool():
    return FakeNodePool()


@pytest.fixture
def webapp(nodepool):
    app = WebApp(nodepool, port=0, listen_address="127.0.0.1", statistics=nodepool.metrics)
    app.start()
    yield app
    app.stop()
    app.join(5)
    assert not app.is_alive()


@pytest.fixture
def get(webapp):
    port = webapp.server.socket.getsockname()[1]

    def get(path, method="GET", **headers):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            method=method,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return SimpleNamespace(
                    status=reply.status, headers=reply.headers, body=reply.read().decode()
                )
        except urllib.error.HTTPError as error:
            with error:
                return SimpleNamespace(
                    status=error.code, headers=error.headers, body=error.read().decode()
                )

    return get


@pytest.mark.spec(
    "CLI-9: browser-like Accept, and text/plain: Content-Type text/plain; charset=UTF-8"
)
@pytest.mark.parametrize(
    "accept", [BROWSER, "text/plain", "*/*", "text/*", "application/json, text/plain, */*", ""]
)
def test_text_is_the_default_representation(get, accept):
    reply = get("/dib-image-list", Accept=accept)
    assert reply.status == 200 and reply.headers["Content-Type"] == TEXT
    assert "fake-image" in reply.body and not reply.body.endswith("\n")


@pytest.mark.spec("CLI-9: Accept application/json: Content-Type equals application/json")
@pytest.mark.parametrize(
    "accept", ["application/json", "application/*", "text/plain;q=0.5, application/json"]
)
def test_json_is_returned_on_request(get, accept):
    reply = get("/dib-image-list", Accept=accept)
    assert reply.headers["Content-Type"] == "application/json"
    first = json.loads(reply.body)[0]
    assert (
        first["id"] == "fake-image-b1"
        and first["formats"] == ["qcow2"]
        and first["state"] == "ready"
    )


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "text/html"),
        ("nonsense", "text/html"),
        ("application/json;q=x", "text/html"),
        ("text/html;q=0, application/json;q=0.1", "application/json"),
        ("*/*;q=0.5, application/json", "application/json"),
        ("image/png", None),
        ("text/html;q=0", None),
        ("text/*, text/html;q=0.1", "text/plain"),
    ],
)
def test_most_preferred_offer_is_chosen(accept, expected):
    assert negotiate(accept, ("text/html", "text/plain", "application/json")) == expected


def test_unacceptable_media_type_gives_406(get):
    assert get("/image-list", Accept="image/png").status == 406


@pytest.mark.spec("CLI-6.2: fields shows only those columns in the table's order")
def test_fields_select_columns_of_tables_only(get):
    reply = get("/dib-image-list?fields=state,id,nonsense,image")
    assert "| fake-image-b1 | fake-image | ready |" in reply.body
    reply = get("/dib-image-list?fields=id", Accept="application/json")
    assert "state" in json.loads(reply.body)[0]


@pytest.mark.spec("CLI-9: /node-list")
def test_node_list_can_be_limited_to_one_node(get):
    rows = json.loads(get("/node-list", Accept="application/json").body)
    assert (
        rows[0]["id"] == "0000000000" and rows[0]["connection_port"] == 22 and rows[0]["ipv6"] == ""
    )
    assert [row["locked"] for row in rows] == ["unlocked", "locked"]
    one = json.loads(get("/node-list?node_id=0000000001", Accept="application/json").body)
    assert [(row["id"], row["locked"]) for row in one] == [("0000000001", "locked")]
    assert json.loads(get("/node-list?node_id=999", Accept="application/json").body) == []
    assert "| Driver Data |" in get("/node-list").body


@pytest.mark.spec("CLI-9: /label-list")
def test_label_list_contains_offered_labels(get):
    assert json.loads(get("/label-list", Accept="application/json").body) == [
        {"label": "fake-label"}
    ]


@pytest.mark.spec("CLI-6.2: /ready: 503, then OK; never from the cache")
def test_readiness_is_never_cached(get, nodepool):
    assert get("/ready").status == 503
    nodepool.ready = True
    reply = get("/ready")
    assert (reply.status, reply.body) == (200, "OK")


def test_readiness_details_follow_in_separate_lines(get, nodepool):
    nodepool.getReadiness = lambda: (False, ["ZooKeeper: not connected"])
    reply = get("/ready")
    assert reply.status == 503 and reply.body.splitlines()[1:] == ["ZooKeeper: not connected"]
    nodepool.getReadiness = lambda: (True, ["configuration: stale"])
    reply = get("/ready?verbose")
    assert reply.status == 200 and reply.body == "OK\nconfiguration: stale"


def test_ready_launcher_answers_exactly_ok_whatever_its_problems(get, nodepool):
    nodepool.getReadiness = lambda: (True, ["image debian: not built yet"])
    reply = get("/ready")
    assert (reply.status, reply.body) == (200, "OK")


@pytest.mark.parametrize("path", ["/", "/nothing", "/image-list/", "/ready/", "/%ff"])
def test_unknown_path_gives_404(get, path):
    assert get(path).status == 404


@pytest.mark.parametrize(
    "query", ["fields=%ff", "node_id=" + "x" * 2000, "&".join(f"a{n}=1" for n in range(50))]
)
def test_invalid_parameter_gives_400(get, query):
    assert get(f"/node-list?{query}").status == 400


@pytest.mark.spec("CLI-6.4: headers")
def test_headers_and_conditional_requests(get):
    reply = get("/image-list")
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert reply.headers["Cache-Control"] == "max-age=1, public"
    modified, expires = (
        http.client.email.utils.parsedate_to_datetime(reply.headers[name])
        for name in ("Last-Modified", "Expires")
    )
    assert (expires - modified).total_seconds() == 1
    old = get("/image-list", If_Modified_Since="Thu, 01 Jan 1998 00:00:00 GMT")
    assert old.status == 200
    future = get("/image-list", If_Modified_Since="Thu, 01 Jan 2099 00:00:00 GMT")
    assert future.status == 304 and future.body == ""
    assert get("/image-list", If_Modified_Since="nonsense").status == 200


@pytest.mark.parametrize("method", ["POST", "DELETE", "HEAD"])
def test_every_method_like_get(get, method):
    reply = get("/image-list", method=method)
    assert reply.status == 200
    assert (reply.body == "") == (method == "HEAD")
    assert int(reply.headers["Content-Length"]) > 0


def test_response_is_cached(get, webapp, nodepool):
    webapp.cache._monotonic = lambda: 100.0
    before = get("/label-list").body
    nodepool.zk.pools = []
    assert get("/label-list").body == before
    webapp.cache.cache.clear()
    assert get("/label-list").body != before


def test_cache_is_bounded_and_knows_only_known_parameters(get, webapp):
    webapp.cache._monotonic = lambda: 100.0
    for number in range(5):
        get(f"/label-list?nonsense={number}&fields=label,x{number}")
    assert len(webapp.cache.cache) == 1
    for number in range(100):
        get(f"/node-list?node_id={number}")
    assert 0 < len(webapp.cache.cache) <= 64


def test_cached_response_expires():
    now = [0.0]
    cache = ResponseCache(1, clock=lambda: 1000.5, monotonic=lambda: now[0])
    assert cache.get("k", lambda: b"1").made_at == 1000.0
    now[0] = 0.9
    assert cache.get("k", lambda: b"2").body == b"1"
    now[0] = 1.0
    assert cache.get("k", lambda: b"3").body == b"3"
    cache.get("l", lambda: b"4")
    assert list(cache.cache) == ["k", "l"]
    now[0] = 2.0
    cache.get("m", lambda: b"5")
    assert list(cache.cache) == ["m"], "what has expired takes no memory"


def test_zookeeper_not_reached(get, nodepool):
    nodepool.zk = None
    assert get("/node-list").status == 503


@pytest.mark.parametrize(
    ("error", "code"), [(ConnectionLoss(), 503), (RuntimeError("secret"), 500)]
)
def test_no_traceback_out(get, nodepool, monkeypatch, error, code):
    def fail(**kw):
        raise error

    monkeypatch.setattr(nodepool.zk, "readNodes", fail)
    reply = get("/node-list")
    assert reply.status == code
    assert "Traceback" not in reply.body and "secret" not in reply.body


def test_metrics_are_exposed_for_prometheus(get, nodepool):
    nodepool.metrics.gauge(metrics.NODES("ready"), 3)
    reply = get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'nodepool_nodes{state="ready"} 3.0' in reply.body


def test_address_in_use_is_explained(webapp, nodepool):
    port = webapp.server.socket.getsockname()[1]
    with pytest.raises(OSError, match=f"web server cannot listen on 127.0.0.1 port {port}: "):
        WebApp(nodepool, port=port, listen_address="127.0.0.1")


def test_stop_without_start(nodepool):
    before = set(threading.enumerate())  # a call of the test before may not have ended
    app = WebApp(nodepool, port=0, listen_address="::1")
    assert app.daemon
    app.stop()
    app.stop()
    assert not [t for t in set(threading.enumerate()) - before if "WebApp" in t.name]


@pytest.mark.spec(
    "issue 11, B7: a page that takes long holds up no other, and not for ever those who want the "
    "same"
)
def test_a_slow_page_holds_up_no_other(monkeypatch):
    monkeypatch.setattr("nodepool.web.cache.MAKE_TIMEOUT", 0.1)
    cache = ResponseCache(10)
    begun, go_on = threading.Event(), threading.Event()
    made = []

    def slow():
        begun.set()
        assert go_on.wait(10)
        return b"slow"

    thread = threading.Thread(target=lambda: made.append(cache.get("slow", slow)))
    thread.start()
    assert begun.wait(10)
    try:
        assert cache.get("other", lambda: b"other").body == b"other"
        with pytest.raises(HttpError, match="try again"):
            cache.get("slow", lambda: b"made twice")
    finally:
        go_on.set()
        thread.join(10)
    assert made[0].body == b"slow" == cache.get("slow", lambda: b"made twice").body


def test_renewal_invalidates_entries_being_generated():
    """What was made, or begun to be made, before is given to nobody who asks after."""
    cache: ResponseCache[str] = ResponseCache(10)
    inner: list[str] = []

    def begun_before() -> str:
        cache.renew()
        inner.append(cache.get("page", lambda: "after").body)
        return "before"

    assert cache.get("page", begun_before).body == "before", "who asked before the change"
    assert inner == ["after"] and cache.get("page", lambda: "made twice").body == "after"


def test_a_page_that_cannot_be_created_is_tried_again():
    cache = ResponseCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("page", lambda: bytes(1 // 0))
    assert cache.get("page", lambda: b"page").body == b"page"


@pytest.mark.spec("issue 11, B7: while ZooKeeper cannot be reached lists say so at once")
@pytest.mark.parametrize("connected", [True, False])
def test_lists_without_zookeeper(get, nodepool, connected):
    nodepool.zk.synced, nodepool.zk.connected = False, connected
    reply = get("/node-list")
    assert (reply.status, reply.body) == (
        503,
        (
            "ZooKeeper's content is being read, try again"
            if connected
            else "ZooKeeper cannot be reached"
        ),
    )
    nodepool.zk.synced = True
    assert get("/node-list").status == 200
