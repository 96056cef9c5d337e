"""The API, asked by root of a sliver for what is not its own. Runs inside; standard library
only.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import xmlrpc.client

from tests.attacks.library import Escape, attempt

VICTIM = "victim"
API = "/run/nodepool/nodemanager.api"


class _Connection(http.client.HTTPConnection):
    def __init__(self) -> None:
        super().__init__("localhost", timeout=20)

    def connect(self) -> None:
        if os.path.exists(API):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(20)
            self.sock.connect(API)
        else:
            self.sock = socket.create_connection(("127.0.0.1", 812), 20)


def post(
    body: bytes, headers: dict[str, str] | None = None, verb: str = "POST", path: str = "/"
) -> tuple[int, bytes]:
    connection = _Connection()
    with contextlib.closing(connection):
        connection.request(verb, path, body, {"Content-Type": "text/xml", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()


def ask(method: str, *arguments: object, headers: dict[str, str] | None = None) -> object:
    """The result, or minus the number of the fault or of the HTTP status."""
    status, body = post(xmlrpc.client.dumps(arguments, method, allow_none=True).encode(), headers)
    if status >= 400:
        return -status
    try:
        return xmlrpc.client.loads(body)[0][0]
    except xmlrpc.client.Fault as fault:
        return -fault.faultCode


_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAttackerAttackerAttackerAttackerAttackerAtta"


@attempt("53 methods about another sliver", {"refused"})
def another_sliver() -> str:
    for method, arguments in (
        ("DumpDatabase", ()),
        ("CreateSliver", (VICTIM,)),
        ("DeleteSliver", (VICTIM,)),
        ("Start", (VICTIM,)),
        ("Stop", (VICTIM,)),
        ("ReCreate", (VICTIM,)),
        ("GetRSpec", (VICTIM,)),
        ("GetEffectiveRSpec", (VICTIM,)),
        ("GetLoans", (VICTIM,)),
        ("SetLoans", (VICTIM, [])),
        ("GetRecord", (VICTIM,)),
        ("GetUsage", (VICTIM,)),
        ("GetConsole", (VICTIM,)),
        ("WaitSliver", (VICTIM, "ready", 1)),
        ("RenewSliver", (VICTIM, 2**31 - 1)),
        ("ListSlivers", ()),
        ("PutRecord", ({"account_type": "sliver", "name": VICTIM, "ssh_keys": _KEY},)),
        (
            "PutRecord",
            ({"account_type": "sliver", "name": "mallory", "rspec": {"nm_mem_limit": 100000}},),
        ),
        ("Destroy", (VICTIM,)),
        ("Create", (VICTIM,)),
        ("AdminTicket", ("x.y.z",)),
        ("Ticket", ("x.y.z",)),
    ):
        answer = ask(method, *arguments)
        if not isinstance(answer, int) or answer not in (-108, -102, -104, -101, -100):
            raise Escape(f"{method}{arguments}: {answer!r}"[:300])
    return "refused"


@attempt("53 names that are paths", {"refused"})
def names_that_are_paths() -> str:
    for name in (
        "../victim",
        "victim/",
        "./victim",
        "victim\0",
        "VICTIM",
        "victim\n",
        "..",
        "/etc/passwd",
        "%76ictim",
        "",
        "a" * 5000,
        ["victim"],
        {"name": "victim"},
        5,
        True,
    ):
        for method in ("GetRecord", "Stop", "GetConsole"):
            answer = ask(method, name)
            if answer not in (-102, -108, -100, -101):
                raise Escape(f"{method}({name!r}): {answer!r}"[:300])
    return "refused"


@attempt("54 speaking for a delegate", {"refused"})
def delegates() -> str:
    for name in ("root", "del_snoop", "nodepool-nm", VICTIM, "controller"):
        for header in ("x-nodepool-delegate", "X-Nodepool-Delegate"):
            answer = ask("GetRecord", VICTIM, headers={header: name})
            if answer not in (-108, -102):
                raise Escape(f"as {name}: {answer!r}"[:300])
    return "refused"


@attempt("55 images", {"403", "404", "405"})
def images() -> str:
    found = set()
    for verb, path in (
        ("GET", "/images"),
        ("GET", "/images/x"),
        ("PUT", "/images/x"),
        ("DELETE", "/images/x"),
        ("GET", "/images/..%2f..%2fetc%2fpasswd"),
        ("PUT", "/images/%2e%2e/x?sha256=0"),
    ):
        status, body = post(b"abc" if verb == "PUT" else b"", None, verb, path)
        found.add(str(status))
        if status < 400:
            raise Escape(f"{verb} {path}: {body[:100]!r}")
    return found.pop() if len(found) == 1 else max(found)


@attempt("56 malformed calls", {"refused"})
def malformed() -> str:
    bodies = [
        b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;&a;'>]>"
        b"<methodCall><methodName>&b;</methodName></methodCall>",
        b"<!DOCTYPE x [<!ENTITY a SYSTEM "
        b"'file:///etc/shadow'>]><methodCall><methodName>Help</methodName><params><param><value>&"
        b"a;</value>"
        b"</param></params></methodCall>",
        b"<methodCall><methodName>Help</methodName><params>"
        + b"<param><value><array><data>" * 5000,
        b"<methodCall><methodName>GetRecord</methodName><params><param><value><int>"
        + b"9" * 5000
        + b"</int></value></param></params></methodCall>",
        b"<methodCall><methodName>SetLoans</methodName><params><param><value><double>nan</double></"
        b"value></param></params></methodCall>",
        b"\0" * 5000,
        b"<" * 5000,
        b"<methodCall/>",
        b"<value/>" * 5000,
        b"",
    ]
    for body in bodies:
        status, answer = post(body)
        if status < 400 and b"<fault>" not in answer:
            raise Escape(f"{body[:60]!r}: {answer[:200]!r}")
        if b"root:" in answer:
            raise Escape("/etc/shadow")
    for raw in (
        b"POST / HTTP/1.0\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nContent-Length: 9999999999\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
        b"\r\n" * 100,
    ):
        connection = _Connection()
        connection.connect()
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.sock.sendall(raw)
            connection.sock.shutdown(socket.SHUT_WR)
            answer = connection.sock.recv(65536)
            if b" 200 " in answer.split(b"\r\n")[0] and b"<fault>" not in answer:
                raise Escape(f"{raw[:60]!r}: {answer[:100]!r}")
    return "refused"


@attempt("59 loans that are not possible", {"refused"})
def impossible_loans() -> str:
    for loans in (
        [[VICTIM, "nm_disk_quota", 1000]],
        [[VICTIM, "nm_cpu_share", -5]],
        [[VICTIM, "nm_cpu_share", 0]],
        [[VICTIM]],
        "x",
        [1],
        [[VICTIM, "nm_cpu_share", 2**70]],
        [["../x", "nm_cpu_share", "1"]],
        [[VICTIM, "nm_cpu_share", 1]] * 1001,
        [[VICTIM, "nm_enabled", 1]],
    ):
        try:
            answer = ask("SetLoans", loans)
        except OverflowError:
            continue
        if answer not in (-102, -101, -104, -413):
            raise Escape(f"{str(loans)[:60]}: {answer!r}")
    return "refused"


@attempt("2 the API's port of the host", {"none"})
def port_of_the_host() -> str:
    # In the sliver's own network the port is the sliver's own door.
    with (
        contextlib.suppress(OSError),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", 812, timeout=5)) as connection,
    ):
        connection.request("POST", "/", xmlrpc.client.dumps((), "DumpDatabase").encode())
        if b"<fault>" not in connection.getresponse().read():
            raise Escape("DumpDatabase by port 812")
    return "none"


@attempt("words of the sliver that reach terminals and logs of people", {"none"})
def terminal_escapes() -> str:
    answer = ask("SetLoans", [["\x1b]0;owned\x07", "nm_cpu_share", 1]])
    if "\x1b" in str(answer):
        raise Escape(repr(answer))
    return "none"
