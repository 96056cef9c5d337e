"""``/api/v1``, its events and who may have them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import http.client
import io
import json
import socket
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError

from nodepool.status import cluster
from nodepool.web import streams, usage, v1
from nodepool.web.server import WebApp
from nodepool.web.tables import TABLES
from nodepool.zk import reports
from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.launcher import LauncherBench, config, expire_session, provider


def ask(
    site: Site, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def get(site: Site, path: str) -> Any:
    status, _headers, body = ask(site, path)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.spec("issue: each table as JSON and CSV, filtered, sorted, in parts")
def test_tables_can_be_filtered_sorted_and_paged(site: Site) -> None:
    served, _ = site.bench.fulfilled("fake-label")
    site.bench.fulfilled(HOSTILE)
    about = get(site, "/api/v1")
    for path in about["paths"]:
        if path not in ("/api/v1/events", "/api/v1/openapi.json"):
            get(site, path.replace("KIND/NAME", "label/fake-label"))
    for name in about["tables"]:
        assert f"/api/v1/{name}" in about["paths"]
        found = get(site, f"/api/v1/{name}")
        assert {"columns", "more", "order", "rows", "total", "choices", "groups"} == set(found)
        for row in found["rows"]:
            assert {each["key"] for each in found["columns"]} <= set(row), name
    wait_for(lambda: get(site, "/api/v1/nodes")["total"] == 2, what="two nodes")
    (row,) = get(site, f"/api/v1/nodes?request={served}")["rows"]
    assert (row["labels"], row["state"], row["port"]) == (["fake-label"], "ready", 22)
    assert (
        get(site, f"/api/v1/nodes?id={row['id'].lstrip('0') or '0'}&state=ready,used")["total"] == 1
    )
    assert [r["id"] for r in get(site, "/api/v1/nodes?sort=-id")["rows"]] == [
        "0000000001",
        "0000000000",
    ]
    assert [r["id"] for r in get(site, "/api/v1/nodes?sort=id&limit=1&offset=1")["rows"]] == [
        "0000000001"
    ]
    wait_for(
        lambda: get(site, "/api/v1/nodes?locked=false")["total"] == 2,
        what="both locks are seen released",
    )
    assert (
        get(site, f"/api/v1/explain/label/{urllib.parse.quote(HOSTILE, safe='')}")["name"]
        == HOSTILE
    )
    status, headers, body = ask(site, "/api/v1/nodes?format=csv&q=img")
    assert body.decode().splitlines()[0].startswith("id,labels,state,since,created,")
    rows = list(csv.DictReader(io.StringIO(body.decode())))
    assert (
        status == 200
        and headers["content-type"].startswith("text/csv")
        and [r["labels"] for r in rows] == [HOSTILE]
    )


def test_large_answers_are_compressed_for_clients_that_accept_it(site: Site) -> None:
    site.bench.ready_node("fake-provider", "main", "fake-label", comment="kept")
    wait_for(lambda: get(site, "/api/v1/nodes")["total"] == 1, what="the node")
    for path in ("/api/v1/nodes", "/api/v1/nodes?format=csv&limit=20000", "/api/v1"):
        _status, head, plain = ask(site, path)
        _status, packed_head, packed = ask(site, path, Accept_Encoding="gzip, deflate, br")
        assert (
            "content-encoding" not in head
            and head["vary"] == packed_head["vary"] == "Accept-Encoding"
        )
        if len(plain) > 1000:
            assert packed_head["content-encoding"] == "gzip" and gzip.decompress(packed) == plain
            assert (
                packed_head["content-type"] == head["content-type"]
                and packed_head["etag"] != head["etag"]
            )
        else:
            assert packed == plain
        assert ask(site, path, Accept_Encoding="gzip", If_None_Match=packed_head["etag"])[0] == 304


@pytest.mark.spec("issue: malformed parameters, wrong methods, path traversal: clear 4xx")
@pytest.mark.parametrize(
    "path, status",
    [
        ("/api/v1/nodes?nosuch=1", 400),
        ("/api/v1/nodes?sort=nosuch", 400),
        ("/api/v1/nodes?limit=-1", 400),
        ("/api/v1/nodes?limit=%D9%A3", 400),
        ("/api/v1/nodes?format=xml", 400),
        ("/api/v1/nodes?q=" + "x" * 2000, 400),
        ("/api/v1/nodes?q=%ff", 400),
        ("/api/v1/nosuch", 404),
        ("/api/v1/explain/node/nosuch", 404),
        ("/api/v1/explain/node/..%2F..%2Fzookeeper", 404),
        ("/api/v1/explain/__class__/x", 404),
        ("/api/v1/explain/node", 404),
        ("/ui/static/../v1.py", 404),
        ("/ui/static/%2e%2e/v1.py", 404),
        ("/ui/static//etc/passwd", 404),
        ("/ui/static/", 404),
        ("/api/v1/events?since=x", 400),
        ("/api/v1/events?type=nosuch", 400),
    ],
)
def test_malformed_requests_get_a_clear_4xx(site: Site, path: str, status: int) -> None:
    site.bench.fulfilled("fake-label")
    found, headers, body = ask(site, path)
    assert found == status, body
    assert b"Traceback" not in body and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", ["", "/overview", "/trends", "/config", "/explain/label/x"])
def test_parameter_of_a_path_without_parameters_is_refused(site: Site, path: str) -> None:
    status, _headers, body = ask(site, f"/api/v1{path}?nosuch=1")
    assert status == 400 and b"has no parameters; remove nosuch" in body


def test_unknown_key_of_an_empty_table_is_refused(site: Site) -> None:
    for table in TABLES:
        refuses_unknown_keys(site, table)


def refuses_unknown_keys(site: Site, table: str) -> None:
    for query in ("nosuch=1", "sort=-nosuch", "group=nosuch"):
        status, _headers, body = ask(site, f"/api/v1/{table}?{query}")
        assert status == 400 and f"{table} has no nosuch".encode() in body, query
    keys = TABLES[table].keys
    for query in (f"{keys[0]}=x", f"sort={keys[0]}", f"group={keys[0]}"):
        assert ask(site, f"/api/v1/{table}?{query}")[0] == 200, query
    first, _, _rows = ask(site, f"/api/v1/{table}?format=csv")[2].decode().partition("\r\n")
    assert first.split(",") == keys


def test_keys_of_tables_are_those_of_their_rows(fixed_address: str) -> None:
    for name, table in TABLES.items():
        with urllib.request.urlopen(f"{fixed_address}/api/v1/{name}") as answer:
            rows = json.load(answer)["rows"]
        assert rows and all(set(row) == set(table.keys) for row in rows), name


@pytest.mark.spec(
    "issue: the new pages are on loopback unless the configuration says otherwise; the seven paths "
    "stay open"
)
def test_pages_are_only_available_on_loopback_by_default(site: Site) -> None:
    for path in ("/ui/", "/api/v1/nodes", "/api/v1/events"):
        assert ask(site, path, Host="evil.example")[0] == 403
        assert ask(site, path, "POST")[0] == 405
        assert ask(site, path, "DELETE")[0] == 405
    assert ask(site, "/", Host="evil.example", Accept="text/html")[0] == 404
    assert ask(site, "/node-list", Host="evil.example")[0] == 200
    status, headers, _body = ask(site, "/ui/nodes")
    policy = headers["content-security-policy"]
    assert status == 200 and "unsafe" not in policy and "script-src 'self'" in policy
    tag = headers["etag"]
    assert ask(site, "/ui/", If_None_Match=tag)[0] == 304
    for pages, expected in (("everywhere", 200), ("off", 404)):
        other = WebApp(site.pool, port=0, listen_address="127.0.0.1", pages=pages)
        other.start()
        try:
            there = Site(site.bench, site.pool, other)
            assert ask(there, "/ui/", Host="evil.example")[0] == expected
            assert ask(there, "/node-list")[0] == 200
        finally:
            other.stop()


@pytest.mark.spec("issue: the configuration as loaded, secrets redacted")
def test_configuration_is_shown_without_secrets(site: Site) -> None:
    (found,) = get(site, "/api/v1/config")["launchers"]
    assert found["providers"]["fake-provider"]["cloud"] == "fake"
    assert found["error"] is None and found["labels"]["fake-label"] == {"min-ready": 0}
    (warning,) = found["warnings"]
    assert warning.startswith(f"{found['file']}:") and "must not contain '/'" in warning


@pytest.mark.spec(
    "issue 32: the configuration page shows since when it is in force, and what has changed"
)
def test_change_of_the_configuration_is_shown(site: Site) -> None:
    (first,) = get(site, "/api/v1/config")["launchers"]
    assert first["changes"] == [] and first["in_force_since"] <= time.time()
    site.bench.config(config(provider(labels=["fake-label", HOSTILE], pool={"max-servers": 7})))
    wait_for(lambda: get(site, "/api/v1/config")["launchers"][0]["changes"], what="the change")
    (found,) = get(site, "/api/v1/config")["launchers"]
    assert found["changes"] == ["providers.fake-provider.pools[main].max-servers: not set -> 7"]
    assert found["in_force_since"] > first["in_force_since"]


@pytest.mark.spec(
    "issue: every page works from any launcher for the whole cluster: the configuration, too"
)
def test_config_of_others(site: Site) -> None:
    """A launcher's configuration is published, without secrets, renewed when it changes or its
    session does, and goes with it.
    """
    kazoo, own = site.pool.zk.kazoo_client, site.pool.state.identifier
    (published,) = wait_for(lambda: reports.read_configs(kazoo), what="it is published")
    assert published["providers"]["fake-provider"]["cloud"] == "fake"
    other = {**published, "hostname": "nl02", "providers": {HOSTILE: {"driver": "aws"}}}
    reports.write(kazoo, reports.path("nl02-1", reports.CONFIGS), other)
    kazoo.create(reports.path("damaged", reports.CONFIGS), b"x")
    first, second = get(site, "/api/v1/config")["launchers"]
    assert first["hostname"] == published["hostname"] and second["hostname"] == "nl02"
    assert second["providers"] == {HOSTILE: {"driver": "aws"}} and "error" not in second
    expire_session(site.pool)
    wait_for(
        lambda: any(own in name for name in kazoo_names(site)),
        30,
        "it is there again in the new session",
    )
    site.bench.stop(site.pool)
    assert not [name for name in kazoo_names(site) if own in name]


def kazoo_names(site: Site) -> list[str]:
    try:
        return list(site.bench.zuul.client.get_children(reports.CONFIGS))
    except NoNodeError:
        return []


@pytest.mark.spec("issue: requests: place in line, expected wait; tables: what can be chosen")
def test_places_and_choices(site: Site) -> None:
    site.bench.fulfilled("fake-label")
    site.bench.fulfilled("fake-label", requestor="people")
    waiting = [site.bench.submit("fake-label") for _ in range(3)]

    def rows() -> Any:
        found = get(site, "/api/v1/requests?sort=place")
        return found if [row["id"] for row in found["rows"] if row["expected"]] == waiting else None

    found = wait_for(rows, 30, "they wait, and their launcher tells how many it has served")
    assert [row["place"] for row in found["rows"]] == [1, 2, 3, None, None]
    first, second = found["rows"][:2]
    assert second["expected"] == pytest.approx(2 * first["expected"], abs=0.2)
    assert (
        found["choices"]["state"] == ["fulfilled", "requested"]
        or "pending" in found["choices"]["state"]
    )
    assert "people" in found["choices"]["requestor"] and found["choices"]["tenant"] == []
    overview = get(site, "/api/v1/overview")
    assert (overview["labels"][0]["label"], overview["labels"][0]["waiting"]) == ("fake-label", 3)
    (row,) = get(site, "/api/v1/providers")["rows"]
    assert row["pace"] and row["error"] is None


class Client:
    """Follows events on a plain socket."""

    def __init__(
        self, site: Site, query: str = "", head: str = "", address: str = "127.0.0.1"
    ) -> None:
        self.socket = socket.create_connection(
            ("127.0.0.1", site.port), timeout=30, source_address=(address, 0)
        )
        self.socket.sendall(
            f"GET /api/v1/events{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n".encode()
        )
        self.text = ""
        self.ended = False
        self._thread = threading.Thread(target=self._read, name="client", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := self.socket.recv(65536):
                self.text = (self.text + data.decode())[-100_000:]
        except OSError:
            return
        finally:
            self.ended = True

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.text.split("\n") if line.startswith("data: ")]

    def wait(self, text: str) -> None:
        wait_for(lambda: text in self.text, 30, f"{text} among {self.text[-500:]}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the server may have ended it
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._thread.join(10)


@pytest.mark.spec("issue: event feed: server-sent, typed, filterable; what was missed comes again")
def test_missed_events_are_sent_after_a_reconnect(site: Site) -> None:
    every, mine, page = (
        Client(site),
        Client(site, "?type=request-changed&labels=fake-label"),
        Client(site, "?digest"),
    )
    for client in (every, mine, page):
        client.wait("retry:")
    served, _ = site.bench.fulfilled("fake-label")
    site.bench.fulfilled(HOSTILE)
    every.wait('"state": "fulfilled"')
    wait_for(lambda: len(mine.events()) == 2, what="pending and fulfilled")
    assert [(event["request"], event["state"]) for event in mine.events()] == [
        (served, "pending"),
        (served, "fulfilled"),
    ]
    page.wait("event: changed")
    kinds = {event["type"] for event in every.events()}
    assert {
        "request-submitted",
        "request-changed",
        "node-created",
        "node-changed",
        "node-step",
    } <= kinds
    last = mine.events()[0]["number"]
    again = Client(site, "?type=request-changed&request=" + served, f"Last-Event-ID: {last}\r\n")
    wait_for(
        lambda: [event["state"] for event in again.events()] == ["fulfilled"],
        what="what was missed",
    )
    for client in (every, mine, page, again):
        client.close()
    site.bench.submit("fake-label")
    wait_for(lambda: len(site.app.streams) == 0, 30, "they are forgotten")


def test_head_of_the_events_is_answered_without_a_body(site: Site) -> None:
    with (
        socket.create_connection(("127.0.0.1", site.port), 30) as client,
        client.makefile("rb") as answer,
    ):
        client.sendall(b"HEAD /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = list(iter(answer.readline, b"\r\n"))
        assert head[0].startswith(b"HTTP/1.1 200")
        assert b"Content-Type: text/event-stream; charset=UTF-8\r\n" in head
        assert answer.read(1) == b""
    assert len(site.app.streams) == 0


@pytest.mark.spec(
    "security review S9: one client cannot take all places of those who follow events"
)
def test_client_with_most_streams_makes_way(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMS", 3)
    many = [Client(site) for _ in range(3)]
    for client in many:
        client.wait("retry:")
    refused = Client(site)
    refused.wait("503")
    other = Client(site, address="127.0.0.2")
    other.wait("retry:")
    wait_for(lambda: sum(client.ended for client in many) == 1, what="one of the three makes way")
    wait_for(lambda: len(site.app.streams) == 3)
    site.bench.fulfilled("fake-label")
    other.wait('"state": "fulfilled"')
    for client in (*many, refused, other):
        client.close()


@pytest.fixture
def long_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are shared for a second are shared for an hour."""
    monkeypatch.setattr(v1, "ROWS_AGE", 3600.0)


@pytest.mark.spec("issue: live: whoever was told of a change gets no answer from before it")
def test_no_old_answer(long_shared: None, site: Site) -> None:
    client = Client(site)
    wait_for(lambda: len(site.app.streams) == 1, what="it follows")
    assert get(site, "/api/v1/nodes")["total"] == 0
    site.bench.fulfilled("fake-label")
    wait_for(
        lambda: get(site, "/api/v1/nodes?state=ready")["total"] == 1, what="the change was told"
    )
    client.close()


def test_client_that_begins_to_follow_gets_no_old_answer(long_shared: None, site: Site) -> None:
    assert get(site, "/api/v1/nodes?state=ready")["total"] == 0
    site.bench.fulfilled("fake-label")
    client = Client(site)
    wait_for(lambda: len(site.app.streams) == 1, what="it follows")
    assert get(site, "/api/v1/nodes?state=ready")["total"] == 1
    client.close()


@pytest.mark.spec(
    "issue: slow and many clients: the launcher's work and other clients are unaffected"
)
def test_slow_clients_do_not_affect_others(site: Site) -> None:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", site.port))
    slow.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    quick = [Client(site) for _ in range(3)]
    wait_for(lambda: len(site.app.streams) == 4, 30, "all follow")
    # Until what the kernel keeps for it is full, too; the others follow.
    for portion in range(500):
        for _ in range(20):
            site.pool.feed.note("node-step", node=f"portion-{portion}.", step="y" * 1000)
        quick[0].wait(f"portion-{portion}.")
        if len(site.app.streams) == 3:
            break
    wait_for(lambda: len(site.app.streams) == 3, 30, "the slow one is cut off")
    site.bench.fulfilled("fake-label")
    for client in quick:
        client.wait('"state": "fulfilled"')
        client.close()
    assert ask(site, "/ready")[0] == 200
    slow.close()


@pytest.mark.spec("issue: tenant limits against use")
def test_tenants_show_limits_and_use(bench: LauncherBench) -> None:
    limits = {"tenant-resource-limits": [{"tenant-name": "t1", "max-servers": 3, "max-cores": 10}]}
    pool = bench.start(config(provider(), **limits))
    bench.fulfilled("fake-label", tenant_name="t1")
    wait_for(
        lambda: [row["used"].get("instances") for row in cluster.tenants(pool.zk).rows] == [1],
        30,
        "it is counted",
    )
    (row,) = cluster.tenants(pool.zk).rows
    assert row["tenant"] == "t1" and "instances 1/3" in row["limits"] and "/10" in row["limits"]


@pytest.fixture
def usage_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "AGE", 0.0)


@pytest.mark.spec("issue 49, 3: usage over the API, in the same groups")
def test_usage_of_the_last_day_in_groups(usage_is_not_cached: None, site: Site) -> None:
    _request, nodes = site.bench.fulfilled("fake-label")
    wait_for(lambda: get(site, "/api/v1/usage")["rows"])
    found = get(site, "/api/v1/usage?by=provider&since=3600")
    assert found["by"] == "provider" and "job" in found["groups"]
    [row] = found["rows"]
    assert (row["provider"], row["nodes"]) == (nodes[0].provider, 1)
    assert [each["key"] for each in found["columns"]] == list(row)
    for query in ("by=color", "since=1h", "limit=1"):
        status, _headers, body = ask(site, f"/api/v1/usage?{query}")
        assert status == 400 and b"since" in body
