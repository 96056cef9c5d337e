"""The API over its real transports: Unix socket, loopback TCP, TLS with certificates."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import pathlib
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
import xmlrpc.client
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import eventloop
from nodepool.nodemanager.api import connections, exchange, handshakes, shares
from nodepool.nodemanager.api.methods import OTHER
from nodepool.nodemanager.client import xml_rpc
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault, Tls
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.authority import Authority
from tests.support.deadline import limit
from tests.support.nodemanager.node import Running, delegate, sliver

SLIVER_UID = 3_000_000
CONTROLLER_UID = 4_000_000_777
TRIPLE = ["b", "nm_cpu_guaranteed_share", 200]


@pytest.fixture
def running(folder: pathlib.Path) -> Iterator[Running]:
    with Running(folder) as found:
        found.add(
            sliver(
                "a", rspec={"nm_cpu_guaranteed_share": 400}, delegations=[["del_snoop", "GetRSpec"]]
            ),
            sliver("b"),
            delegate("del_snoop"),
        )
        found.node.uids[SLIVER_UID] = "a"
        yield found


AS = """
import encodings.idna, http.client, os, socket, sys, xmlrpc.client
sys.path.insert(0, {repository!r})
from nodepool.nodemanager.client import rpc as rpc_client, xml_rpc
from nodepool.nodemanager.client.rpc import *
os.setresuid({uid}, {uid}, {uid})
client = Client({url!r})
"""


def as_user(uid: int, url: str, code: str) -> str:
    """Output of Python code run by another user; ``client`` is there."""
    repository = str(REPOSITORY)
    program = AS.format(uid=uid, url=url, repository=repository) + code
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def raw(running: Running, data: bytes, half_close: bool = False) -> bytes:
    """Whatever comes back, also when the connection is closed early."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(running.socket)
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def states(running: Running) -> Counter[str]:
    """Number of connections by state."""
    return Counter(c.state for c in running.servers.connections.shares.connections())


def post(body: bytes, length: int | None = None) -> bytes:
    return (
        b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length)
        + body
    )


@pytest.mark.spec("NM-A.8: XML-RPC over HTTP POST to /, on both sockets")
def test_both_sockets_serve_xml_rpc(running: Running) -> None:
    for url in (f"unix:{running.socket}", f"http://127.0.0.1:{running.servers.tcp_port}"):
        client = Client(url)
        assert "SetLoans" in client.call("Help")
        with pytest.raises(RpcFault) as caught:
            client.call("Nonsense")
        assert caught.value.code == 100
    client = Client(f"unix:{running.socket}")
    assert client.call("GetRSpec", "a")["nm_net_max_rate"] == 10**12, "more than 32 bits"
    assert os.stat(running.socket).st_mode & 0o777 == 0o666


@pytest.mark.spec("issue 10, F15: the API's TCP port gives nobody root by uid")
def test_root_by_tcp(running: Running) -> None:
    """Nor what a controller may; the text says where it may."""
    running.servers.identity._controllers = frozenset({CONTROLLER_UID})
    url = f"http://127.0.0.1:{running.servers.tcp_port}"
    for method, arguments in (
        ("GetRSpec", ["a"]),
        ("DumpDatabase", []),
        ("ListSlivers", []),
        ("PutRecord", [sliver("c")]),
    ):
        with pytest.raises(
            RpcFault, match=r"Permission denied: other root may not .*use the Unix socket"
        ):
            Client(url).call(method, *arguments)
    code = """
try:
    client.call("ListSlivers")
except RpcFault as fault:
    print(fault.text)
"""
    assert "use the Unix socket" in as_user(CONTROLLER_UID, url, code)
    assert (
        as_user(CONTROLLER_UID, f"unix:{running.socket}", "print(len(client.call('ListSlivers')))")
        == "2"
    )


@pytest.mark.spec("NM-C.9.1: README walk with the standard library's client")
def test_standard_library_client_works(running: Running) -> None:
    code = """
loans = ["b", "nm_cpu_guaranteed_share", 200]
for method, arguments in (("Help", ()), ("SetLoans", (loans,)), ("GetEffectiveRSpec", ("a",))):
    with xmlrpc.client.ServerProxy(client.url) as proxy:
        print(getattr(proxy, method)(*arguments))
"""
    text = as_user(SLIVER_UID, f"http://127.0.0.1:{running.servers.tcp_port}", code)
    assert "GetRSpec(sliver)" in text
    assert "'nm_cpu_guaranteed_share': 200" in text


@pytest.mark.spec("NM-A.8, NM-C.5: a sliver is known by its uid, on the Unix socket and on TCP")
def test_sliver_is_known_by_its_uid_on_both_sockets(running: Running) -> None:
    for url in (f"unix:{running.socket}", f"http://127.0.0.1:{running.servers.tcp_port}"):
        code = """
print(client.call("SetLoans", ["b", "nm_cpu_guaranteed_share", 200]))
try:
    client.call("GetRSpec", "b")
except RpcFault as fault:
    print(fault.code)
"""
        root = Client(f"unix:{running.socket}")
        assert as_user(SLIVER_UID, url, code).split() == ["1", "108"]
        assert root.call("GetLoans", "a") == [TRIPLE]
        root.call("SetLoans", "a", [])


@pytest.mark.spec("NM-A.8: unknown caller id must be a clean refusal")
def test_unknown_uid_is_refused(running: Running) -> None:
    code = """
try:
    client.call("GetRSpec", "a")
except RpcFault as fault:
    print(fault.code, fault.text)
"""
    assert as_user(4_000_000_123, f"unix:{running.socket}", code).startswith(
        "108 Permission denied: other uid 4000000123"
    )


def forwarded(running: Running, name: str, method: str, *arguments: Any) -> Any:
    body = xml_rpc.call(method, arguments)
    head = (
        f"POST / HTTP/1.0\r\nX-Nodepool-Delegate: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    answer = raw(running, head + body)
    return xmlrpc.client.loads(answer.partition(b"\r\n\r\n")[2])[0][0]


@pytest.mark.spec("NM-C.5: --as is accepted from root and the shared account only")
def test_speaking_for_a_delegate(running: Running) -> None:
    assert forwarded(running, "del_snoop", "GetRSpec", "a")["nm_cpu_guaranteed_share"] == 400
    for name, method in (("del_snoop", "Stop"), ("stranger", "GetRSpec"), ("root", "GetRSpec")):
        with pytest.raises(xmlrpc.client.Fault) as caught:
            forwarded(running, name, method, "a")
        assert caught.value.faultCode == 108
    code = """
connection = client._connection(10)
who = {"X-Nodepool-Delegate": "del_snoop"}
connection.request("POST", "/", xml_rpc.call("GetRSpec", ["b"]), who)
try:
    xmlrpc.client.loads(connection.getresponse().read())
except xmlrpc.client.Fault as fault:
    print(fault.faultCode, fault.faultString)
connection.close()
"""
    assert "may not speak for others" in as_user(SLIVER_UID, f"unix:{running.socket}", code)


@pytest.mark.spec("NM-C.5: what XML cannot carry does not spoil an answer")
def test_control_characters_do_not_break_answers(running: Running) -> None:
    assert (
        Client(f"unix:{running.socket}").call("GetConsole", "a")
        == "\ufffd[1mbold\ufffd\ufffd[0m\r\n"
    )


# -- hostile input


@pytest.mark.spec("NM issue: oversized XML-RPC bodies")
def test_oversized_bodies_and_headers_are_refused(running: Running) -> None:
    body = b"x" * (exchange.MAX_BODY + 1)
    assert b" 413 " in raw(running, post(body)).split(b"\r\n")[0]
    assert b" 413 " in raw(running, post(b"", 10**17)).split(b"\r\n")[0]
    with pytest.raises(RpcError, match="413"):
        Client(f"unix:{running.socket}").call("Help", "x" * 3_000_000)
    assert b" 431 " in raw(running, b"POST / HTTP/1.0\r\n" + b"X: y\r\n" * 20000)


@pytest.mark.spec("NM issue: entity bombs, nonsense, deep nesting; no traceback to the caller")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"<a/>",
        b"<methodCall/>",
        b"<methodCall><methodName>Help</methodName>",
        b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b '
        b'"&a;&a;&a;">]><methodCall><methodName>&b;</methodName></methodCall>',
        b"<!DOCTYPE x SYSTEM "
        b'"http://127.0.0.1:1/x.dtd"><methodCall><methodName>Help</methodName></methodCall>',
        b"<methodCall><methodName>Help</methodName><params><param><value><int>x</int></value></"
        b"param></params></methodCall>",
        b"<methodCall><methodName>Help</methodName><params><param>"
        + b"<value><array><data>" * 40000,
        b"<methodCall><methodName>GetRSpec</methodName><params><param>"
        + b"<value><array><data>" * 33
        + b"</data></array></value>" * 33
        + b"</param></params></methodCall>",
        b"<a>" * 250_000,
        xml_rpc.fault(1, "x"),
        b"\xff\xfe\x00",
    ],
)
def test_malformed_calls_get_faults_without_traceback(running: Running, body: bytes) -> None:
    answer = raw(running, post(body))
    with pytest.raises(xmlrpc.client.Fault) as caught:
        xmlrpc.client.loads(answer.partition(b"\r\n\r\n")[2])
    assert caught.value.faultCode == 102
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"POST\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 404),
        (b"DELETE / HTTP/1.0\r\n\r\n", 405),
        (b"POST / HTTP/1.0\r\n\r\n", 411),
        (b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 411),
        (b"POST / HTTP/1.0\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST / HTTP/1.0\r\nbad line\r\n\r\n", 400),
        (b"POST /elsewhere HTTP/1.0\r\nContent-Length: 0\r\n\r\n", 404),
        (b"POST / HTTP/1.0\r\nContent-Le", 400),
    ],
)
def test_malformed_requests_are_refused(running: Running, request_: bytes, status: int) -> None:
    assert raw(running, request_, half_close=True).split(b" ")[1] == b"%d" % status


@pytest.mark.spec("NM issue: slow requests are cut off")
def test_slow_requests_are_closed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.5)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(running.socket)
        connection.sendall(b"POST / HTTP/1.0\r\n")
        assert b" 408 " in connection.recv(1000)


@pytest.mark.spec("NM issue: connection floods: one caller cannot shut out the others")
def test_one_caller_cannot_block_the_others(running: Running) -> None:
    code = f"""
import time
sockets = []
for _ in range(120):
    s = socket.socket(socket.AF_UNIX); s.settimeout(5)
    s.connect({running.socket!r}); sockets.append(s)
closed = 0
for s in sockets:
    s.setblocking(False)
deadline = time.monotonic() + 10
while closed < 88 and time.monotonic() < deadline:
    closed = 0
    for s in sockets:
        try:
            closed += s.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            pass
        except ConnectionResetError:
            closed += 1
    time.sleep(0.05)
print(closed, flush=True)
sys.stdin.read()
"""
    repository = str(REPOSITORY)
    text = AS.format(uid=SLIVER_UID, url=f"unix:{running.socket}", repository=repository) + code
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as flood:
        assert flood.stdout is not None
        assert int(flood.stdout.readline()) == 120 - shares.MAX_PER_CALLER
        started = time.monotonic()
        assert Client(f"unix:{running.socket}").call("GetRSpec", "b")
        assert time.monotonic() - started < limit(2)
    wait_for(lambda: not states(running), what="all places are free again")


@pytest.mark.spec("NM-C.5: WaitSliver holds nobody up")
def test_waiting_calls_do_not_block_others(running: Running) -> None:
    client = Client(f"unix:{running.socket}")
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(client.call("WaitSliver", "late", "ready", 20))
        )
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: states(running) == {"parked": 20}, what="twenty wait")
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("Thread-nm-api")
    ][20:]
    client.call("PutRecord", sliver("late"))
    for thread in threads:
        thread.join(10)
    assert [answer["name"] for answer in answers] == ["late"] * 20


# -- life


@pytest.mark.spec("NM-A.1: stale socket file unlinked at start; C.5: link at the old path")
def test_stale_socket_is_replaced_and_a_live_one_is_not(folder: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "api.sock"))
    old = folder / "node_mgr_api"
    with Running(folder, api={"old-unix": str(old)}) as running:
        assert Client(f"unix:{old}").call("Help")
        other = (
            Running(folder / "other", api={"unix": running.socket})
            if (folder / "other").mkdir() is None
            else None
        )
        assert other is not None
        with pytest.raises(ConfigurationError, match="another node manager"):
            other.servers.start()
        other.servers.stop()
        other.node.close()
        assert Client(f"unix:{running.socket}").call("Help"), "the first one goes on"
    assert not old.is_symlink()
    assert not (folder / "api.sock").exists()


@pytest.mark.spec("NM issue: port 812 in use: clear message")
def test_port_in_use(folder: pathlib.Path) -> None:
    (folder / "api.sock").write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for api, text in (
            ({"tcp": port, "unix": False}, f"port {port}"),
            ({}, "is not a socket"),
            ({"unix": str(folder / ("x" * 200))}, "too long"),
        ):
            running = Running(folder, api=api)
            with pytest.raises(ConfigurationError, match=text):
                running.servers.start()
            running.servers.stop()
            running.node.close()
    assert (folder / "api.sock").read_text() == "precious"


def test_stop_without_descriptors(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pause when the process has no descriptor left ends with the server."""
    monkeypatch.setattr(eventloop, "DESCRIPTOR_WAIT", 60.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with Running(folder) as running, socket.socket(socket.AF_UNIX) as connection:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard)
        )
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(connection.fileno()))
            connection.connect(running.socket)
            wait_for(
                lambda: "API connections are queued" in caplog.text,
                what="the server has no descriptor",
            )
            started = time.monotonic()
            running.servers.stop()
            assert time.monotonic() - started < limit(2)
            assert "Thread-nm-connections" not in [thread.name for thread in threading.enumerate()]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in taken:
                os.close(number)


def test_stop_cuts_off(folder: pathlib.Path) -> None:
    with Running(folder) as running, socket.socket(socket.AF_UNIX) as idle:
        idle.connect(running.socket)
        wait_for(lambda: states(running), what="it is counted")
        started = time.monotonic()
        running.servers.stop()
        assert time.monotonic() - started < limit(3)
        idle.settimeout(5)
        assert idle.recv(100) == b""


def test_stop_closes_what_is_being_answered(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[connections.ApiConnection] = []
    begun, go_on = threading.Event(), threading.Event()

    def result(connection: connections.ApiConnection, _desk: object) -> bytes:
        answered.append(connection)
        begun.set()
        go_on.wait(10)
        return b""

    monkeypatch.setattr(connections.ApiConnection, "result", result)
    with Running(folder) as running, socket.socket(socket.AF_UNIX) as stream:
        stream.connect(running.socket)
        stream.sendall(post(b"<methodCall><methodName>Help</methodName></methodCall>"))
        assert begun.wait(10)
        stop = running.servers.connections._workers.stop

        def stop_workers(timeout: float) -> bool:
            go_on.set()  # the loop has ended
            return stop(timeout)

        monkeypatch.setattr(running.servers.connections._workers, "stop", stop_workers)
        running.servers.stop()
    assert [connection.stream.fileno() for connection in answered] == [-1]


class Backend:
    """Listens in this network instead of a sliver's."""

    def __init__(self) -> None:
        self.ports: list[int] = []

    def listen(self, handle: dict[str, Any], port: int, address: str = "127.0.0.1") -> int:
        assert port == 812
        found = socket.create_server((address, 0))
        self.ports.append(found.getsockname()[1])
        return found.detach()


@pytest.mark.spec("NM-C.5: inside each sliver's own network: the namespace is the identity")
def test_listener_of_a_sliver(running: Running) -> None:
    backend = running.node.backend = running.servers._backend = Backend()
    for pid in (5, 5, 6):
        running.servers.sliver_changed("b", {"pid": pid, "start_time": 1, "index": 7})
    assert len(backend.ports) == 2, "a new one only for a new life"
    client = Client(f"http://127.0.0.1:{backend.ports[1]}")
    assert client.call("SetLoans", ["a", "nm_cpu_share", 3]) == 1
    with pytest.raises(RpcFault, match="Permission denied: sliver b"):
        client.call("Stop", "a")
    for url in (f"http://127.0.0.1:{backend.ports[0]}", client.url):
        running.servers.sliver_changed(
            "b", {"pid": 6, "start_time": 1} if url != client.url else None
        )

        def refused(url: str = url) -> bool:
            try:
                return not Client(url).call("Help")
            except RpcError:
                return True

        wait_for(refused, what="nobody listens there")


@pytest.mark.spec(
    "issue 10, F16: the link at the old path has no name that others know before; links are not "
    "followed"
)
def test_link_at_the_old_path_follows_no_planted_link(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, precious = folder / "node_mgr_api", folder / "precious"
    precious.write_text("mine")
    (folder / "node_mgr_api.new").symlink_to(precious)
    old.symlink_to(precious)
    with Running(folder, api={"old-unix": str(old)}) as running:
        assert os.readlink(old) == running.socket
    assert precious.read_text() == "mine"
    assert sorted(
        path.name for path in folder.iterdir() if path.name.startswith("node_mgr_api")
    ) == ["node_mgr_api.new"]
    old.write_text("a file")
    with Running(folder, api={"old-unix": str(old)}):
        assert old.read_text() == "a file"
    assert "is not a link; leaving it unchanged" in caplog.text


@pytest.mark.spec(
    "issue 10, F5: bodies of slivers and strangers are small, of root and controllers 1 MiB"
)
def test_slivers_may_send_small_bodies_only(running: Running) -> None:
    code = """
for size in (60_000, 70_000):
    try:
        client.call("Help", "x" * size)
    except (RpcError, RpcFault) as error:
        print(getattr(error, "code", error))
connection = client._connection(10)
connection.request("POST", "/", xml_rpc.call("Help", ["x" * 70_000]), {"X-Nodepool-Delegate": ""})
print(connection.getresponse().status)
connection.close()
"""
    lines = as_user(SLIVER_UID, f"unix:{running.socket}", code).splitlines()
    assert lines[0] == "101"
    assert "HTTP status 413: a request may have at most 65536 bytes" in lines[1]
    assert lines[2] == "413", "who says that it is the forwarder, and is no delegate"
    with pytest.raises(RpcFault, match="argument count"):
        Client(f"unix:{running.socket}").call("Help", "x" * 900_000)


@pytest.mark.spec("issue 10, F5: one request of a caller at a time; others are answered meanwhile")
def test_one_at_a_time(running: Running) -> None:
    busy, most, go = [0], [0], threading.Event()

    def slow(name: str) -> str:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        go.wait(20)
        busy[0] -= 1
        return "done"

    running.node.api._calls["GetConsole"] = slow
    code = """
import threading
def ask():
    sys.stdout.write(client.call("GetConsole", "a") + "\\n")
threads = [threading.Thread(target=ask) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    answers: list[str] = []
    thread = threading.Thread(
        target=lambda: answers.append(as_user(SLIVER_UID, f"unix:{running.socket}", code))
    )
    thread.start()
    wait_for(lambda: busy[0] and states(running)["waiting"] == 5, what="the others wait")
    assert Client(f"unix:{running.socket}").call("GetRSpec", "b")
    go.set()
    thread.join(30)
    assert answers[0].split() == ["done"] * 6
    assert most[0] == 1


# -- TLS


@pytest.fixture
def authority(folder: pathlib.Path) -> Authority:
    return Authority(folder)


@pytest.fixture
def tls(folder: pathlib.Path, authority: Authority) -> Iterator[Running]:
    cert, key = authority.issue("host", "IP:127.0.0.1,DNS:localhost")
    options = {
        "address": "127.0.0.1",
        "port": 0,
        "cert": cert,
        "key": key,
        "ca": authority.cert,
        "controllers": ["nl01"],
    }
    with Running(folder, api={"tls": options, "tcp": False}) as found:
        found.add(sliver("a"), delegate("del_snoop"))
        yield found


def tls_client(running: Running, authority: Authority, name: str, ca: str | None = None) -> Client:
    cert, key = authority.issue(name)
    return Client(
        f"https://127.0.0.1:{running.servers.tls_port}", Tls(ca or authority.cert, cert, key)
    )


@pytest.mark.spec("NM-C.5: TLS, mutual certificates, subject -> role controller or named caller")
def test_tls_callers_are_identified_by_certificate(tls: Running, authority: Authority) -> None:
    launcher = tls_client(tls, authority, "nl01")
    assert launcher.call("PutRecord", sliver("np1"))["name"] == "np1"
    assert [s["name"] for s in launcher.call("ListSlivers")] == ["a", "np1"]
    with pytest.raises(RpcFault) as caught:
        launcher.call("DumpDatabase")
    assert caught.value.code == 108
    for name in ("stranger", "root", "nodepool-nm", "a"):
        other = tls_client(tls, authority, name)
        assert other.call("Help")
        for method, arguments in (("ListSlivers", ()), ("Stop", ("a",)), ("DumpDatabase", ())):
            with pytest.raises(RpcFault, match="Permission denied"):
                other.call(method, *arguments)
    connection = tls_client(tls, authority, "nodepool-nm")._connection(10)
    connection.request("POST", "/", xml_rpc.call("Help", []), {"X-Nodepool-Delegate": "del_snoop"})
    with pytest.raises(xmlrpc.client.Fault, match="speak for others"):
        xmlrpc.client.loads(connection.getresponse().read())
    connection.close()


@pytest.mark.spec("NM-C.5: without a certificate of the authority nothing is answered")
def test_tls_client_without_a_known_certificate_is_refused(
    tls: Running, authority: Authority, folder: pathlib.Path
) -> None:
    (folder / "evil").mkdir()
    evil = Authority(folder / "evil", "evil")
    with pytest.raises(RpcError):
        tls_client(tls, evil, "nl01", authority.cert).call("Help")
    with pytest.raises(RpcError, match="CERTIFICATE_VERIFY_FAILED"):
        tls_client(tls, authority, "nl01", evil.cert).call("Help")
    context = ssl.create_default_context(cafile=authority.cert)
    connection = http.client.HTTPSConnection(
        "127.0.0.1", tls.servers.tls_port, timeout=10, context=context
    )
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("POST", "/", xml_rpc.call("Help", []))
        connection.getresponse()
    connection.close()
    with socket.create_connection(("127.0.0.1", tls.servers.tls_port), timeout=10) as plain:
        plain.sendall(post(xml_rpc.call("Help", [])))
        plain.settimeout(10)
        try:
            assert b"methodResponse" not in plain.recv(1000)
        except ConnectionResetError:
            pass


def test_renewed_certificates_of_both_sides_are_used_without_a_restart(
    tls: Running, authority: Authority, folder: pathlib.Path
) -> None:
    launcher = tls_client(tls, authority, "nl01")
    assert launcher.call("ListSlivers")
    (folder / "renewed").mkdir()
    renewed = Authority(folder / "renewed", "renewed")
    with open(authority.cert, "a", encoding="ascii") as trusted:
        trusted.write(pathlib.Path(renewed.cert).read_text())
    for name, alternatives in (("host", "IP:127.0.0.1"), ("nl01", "")):
        cert, key = renewed.issue(name, alternatives)
        pathlib.Path(cert).replace(folder / f"{name}.pem")
        # The certificate does not match the key that is still there: the former pair is used.
        assert launcher.call("ListSlivers")
        pathlib.Path(key).replace(folder / f"{name}.key")
        assert launcher.call("ListSlivers")
    pathlib.Path(renewed.cert).replace(authority.cert)
    paths = (str(folder / name) for name in ("nl01.pem", "nl01.key"))
    started_later = Client(launcher.url, Tls(authority.cert, *paths))
    assert started_later.call("ListSlivers") == launcher.call("ListSlivers")


@pytest.mark.spec("NM issue: connection floods: before the handshake nobody takes all places")
def test_connections_before_the_handshake_do_not_take_all_places(
    tls: Running, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tls_client(tls, authority, "nl01")
    most = handshakes.MAX_PER_ADDRESS
    idle = [
        socket.create_connection(("127.0.0.1", tls.servers.tls_port), timeout=10)
        for _ in range(most + 50)
    ]
    try:
        wait_for(
            lambda: len(tls.servers.connections.handshakes) == most, what="the places are taken"
        )
        assert Client(f"unix:{tls.socket}").call("Help")
        # The oldest of them gives up its place.
        for _ in range(20):
            assert launcher.call("ListSlivers")
        monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", most)
        monkeypatch.setattr(handshakes, "MAX_PER_ADDRESS", 2 * most)
        for _ in range(20):
            assert launcher.call("ListSlivers")
        assert (
            len(
                [
                    thread
                    for thread in threading.enumerate()
                    if thread.name.startswith("Thread-nm-tls")
                ]
            )
            <= handshakes.THREADS
        )
    finally:
        for connection in idle:
            connection.close()
    wait_for(lambda: not len(tls.servers.connections.handshakes), what="the places are free again")
    assert launcher.call("Help")


@pytest.mark.spec("NM-C.8: uploadImage = stream tar to hosts, checksum; deleteImage")
def test_images_are_uploaded_with_checksum_and_deleted(
    tls: Running, authority: Authority, folder: pathlib.Path
) -> None:
    launcher = tls_client(tls, authority, "nl01")
    content = os.urandom(3 << 20)
    path = folder / "image.tar"
    path.write_bytes(content)
    with path.open("rb") as stream:
        launcher.put_image("deb13-1", stream, hashlib.sha256(content).hexdigest())
    assert launcher.images() == ["deb13-1"]
    assert (folder / "images" / "deb13-1.tar").read_bytes() == content
    for name, checksum, text in (
        ("x", "0" * 64, "checksum"),
        ("x", "junk", "64 hexadecimal"),
        ("../x", None, "image name"),
        ("a/b", None, "image name"),
    ):
        with path.open("rb") as stream, pytest.raises(RpcFault, match=text):
            launcher.put_image(name, stream, checksum)
    with path.open("rb") as stream, pytest.raises(RpcFault, match="may not touch images"):
        tls_client(tls, authority, "stranger").put_image("x", stream)
    copy = io.BytesIO()
    launcher.get_image("deb13-1", copy)
    assert copy.getvalue() == content
    for name, text in (("other", "image other does not exist"), ("../x", "image name")):
        with pytest.raises(RpcFault, match=text):
            launcher.get_image(name, io.BytesIO())
    with pytest.raises(RpcFault, match="may not touch images"):
        tls_client(tls, authority, "stranger").get_image("deb13-1", copy)
    launcher.delete_image("deb13-1")
    launcher.delete_image("deb13-1")
    assert os.listdir(folder / "images") == []


@pytest.mark.spec(
    "issue 10, F8: calls that wait take no place that others need: launchers, a sliver's, and "
    "other slivers'"
)
def test_waiting_calls_take_no_place_that_others_need(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 slivers with 32 WaitSliver each, more than all places of that kind; the 17th is let in
    at the cost of who has most.
    """
    monkeypatch.setitem(shares.PLACES, OTHER, 60)
    running.add(*[sliver(f"s{number}") for number in range(3)])
    for number in range(3):
        running.node.uids[running.config.id_base + (number + 1) * 65536] = f"s{number}"
    backend = running.node.backend = running.servers._backend = Backend()
    waiting: list[socket.socket] = []

    def places() -> dict[Any, int]:
        return {
            share.key[1]: len(share.connections)
            for share in list(running.servers.connections.shares.known.values())
            if isinstance(share.key, tuple)
        }

    try:
        for number in range(3):
            running.servers.sliver_changed(
                f"s{number}", {"pid": number + 1, "start_time": 1, "index": number + 1}
            )
            question = post(xml_rpc.call("WaitSliver", [f"s{number}", "gone", 300]))
            for _ in range(30 if number < 2 else 10):
                connection = socket.create_connection(("127.0.0.1", backend.ports[number]), 10)
                connection.sendall(question)
                waiting.append(connection)
            wanted = ({1: 30}, {1: 30, 2: 30}, {1: 25, 2: 25, 3: 10})[number]
            wait_for(
                lambda wanted=wanted: places() == wanted and set(states(running)) == {"parked"},
                what="they wait",
            )  # type: ignore[misc]
        assert Client(f"unix:{running.socket}").call("GetRSpec", "s1")
        assert (
            len(
                [
                    thread
                    for thread in threading.enumerate()
                    if thread.name.startswith("Thread-nm-api")
                ]
            )
            < 20
        )
        # One change, and all of that sliver are answered.
        running.node.database.delete("sliver_s2")
        running.node.changed("s2")
        for connection in waiting[60:]:
            connection.settimeout(20)
            assert b"methodResponse" in b"".join(
                iter(lambda connection=connection: connection.recv(65536), b"")
            )  # type: ignore[misc]
    finally:
        for connection in waiting:
            connection.close()


def test_cut_off_upload(running: Running, folder: pathlib.Path) -> None:
    head = b"PUT /images/x HTTP/1.0\r\nContent-Length: 1000000\r\n\r\n"
    assert b"too early" in raw(running, head + b"x" * 1000, half_close=True)
    assert os.listdir(folder / "images") == []


def test_client_of_wrong_addresses(folder: pathlib.Path) -> None:
    for url in ("", "ftp://x", "https://x", "http://"):
        with pytest.raises(ValueError):
            Client(url)
    with pytest.raises(ValueError, match="cannot use"):
        Client("https://x", Tls("/nowhere", "/nowhere", "/nowhere"))
    with pytest.raises(RpcError):
        Client(f"unix:{folder}/nobody").call("Help")


@pytest.mark.spec('issue 10, F8: no texts such as "Bad file descriptor" for who is sent away')
@pytest.mark.parametrize("reads", [False, True])
def test_client_that_is_sent_away(folder: pathlib.Path, authority: Authority, reads: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_away() -> None:
            connection, _ = listener.accept()
            with connection:
                if reads:
                    connection.recv(10)

        thread = threading.Thread(target=send_away)
        thread.start()
        client = Client(
            f"https://127.0.0.1:{listener.getsockname()[1]}",
            Tls(authority.cert, *authority.issue("nl01")),
        )
        with pytest.raises(RpcError, match="closed the connection during the TLS handshake"):
            client.call("Help")
        thread.join(10)
