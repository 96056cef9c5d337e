"""Programs that the launcher relays: real processes of this machine play those on a node."""

from __future__ import annotations

import http.client
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from nodepool.client import Lease, NodepoolError
from nodepool.exceptions import RemoteException
from nodepool.web.actions import execution
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api


class LocalProgram:
    """A process of this machine, with the interface of ``nodepool.driver.Execution``."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.process = subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=-1, bufsize=0, start_new_session=True)
        self.status: int | None = None
        self.closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        for kind, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, kind)

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        while self._selector.get_map():
            found = self._selector.select(timeout)
            if not found:
                raise TimeoutError
            key = found[0][0]
            data = os.read(key.fd, 65536)
            if data:
                return key.data, data
            self._selector.unregister(key.fileobj)
        self.status = self.process.wait(10)
        return None

    def write(self, data: bytes, timeout: float) -> None:
        assert self.process.stdin is not None
        if data:
            self.process.stdin.write(data)
        else:
            self.process.stdin.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.closed.set()


class Programs:
    """Stands in for the provider of the nodes."""

    def __init__(self) -> None:
        self.started: list[LocalProgram] = []
        self.error: Exception | None = None

    def execute(
        self, node: object, argv: Sequence[str], env: Mapping[str, str] | None = None, user: str = "", timeout: float = 30.0
    ) -> LocalProgram:
        if self.error is not None:
            raise self.error
        self.started.append(LocalProgram(argv))
        return self.started[-1]


@pytest.fixture
def programs(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    found = Programs()
    monkeypatch.setattr(api.launcher, "getProviderManager", lambda _name: found)
    yield found
    for program in found.started:
        assert program.closed.wait(20), "every program is ended and closed"


@pytest.fixture
def lease(api: Api, programs: Programs) -> Iterator[Lease]:
    with api.pool().lease("fake-label", for_="10m") as found:
        yield found


def test_output_input_and_status_are_relayed(lease: Lease) -> None:
    done = lease.run(["sh", "-c", "cat; echo error >&2; exit 3"], input=b"\0\xff" * 20000)
    assert (done.status, done.stdout, done.stderr) == (3, b"\0\xff" * 20000, b"error\n")
    assert lease.run("kill -9 $$").status == 137
    assert lease.run("echo $((1+1))", check=True).stdout == b"2\n"


def test_large_output_arrives_completely(lease: Lease) -> None:
    done = lease.run("head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2")
    assert (len(done.stdout), len(done.stderr)) == (20_000_000, 3_000_000)


def test_program_is_killed_at_its_time_limit(lease: Lease, programs: Programs) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lease.run("sleep 100", timeout=0.5)
    assert programs.started[0].closed.wait(20)


def test_program_that_never_pauses_is_killed_at_its_time_limit(api: Api, lease: Lease, programs: Programs) -> None:
    """The limit of the call, with a client that reads on: it is not the client that ends it."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    body = json.dumps({"command": ["yes"], "timeout": 0.5})
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", body, headers)
    answer = connection.getresponse()
    deadline = time.monotonic() + 20
    while answer.read(1 << 20):
        assert time.monotonic() < deadline, "it was not killed"
    connection.close()
    assert programs.started[0].closed.wait(20)


def test_program_is_killed_when_the_client_disconnects(api: Api, lease: Lease, programs: Programs) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    body = json.dumps({"command": ["sh", "-c", "echo started; exec sleep 100"]})
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", body, headers)
    answer = connection.getresponse()
    assert answer.read(5 + 8)[5:] == b"started\n"
    answer.close()
    connection.close()
    assert programs.started[0].closed.wait(20)


def test_client_that_does_not_read_delays_its_own_program_only(api: Api, lease: Lease, programs: Programs) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", json.dumps({"command": ["yes"]}), headers)
    wait_for(lambda: programs.started, what="the program")
    assert lease.run("echo other", timeout=20).stdout == b"other\n"
    connection.close()
    assert programs.started[0].closed.wait(20)


def test_output_continues_when_a_slow_client_reads_again(api: Api, lease: Lease) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    body = json.dumps({"command": ["head", "-c", "30000000", "/dev/zero"]})
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", body, headers)
    answer = connection.getresponse()

    def blocked() -> bool:
        return any(channel.total_outbufs_len > 1 << 20 for channel in list(api.app.server.active_channels.values()))

    wait_for(blocked, what="the writer to wait")
    assert len(answer.read()) > 30_000_000
    connection.close()


def test_number_of_programs_is_limited(api: Api, lease: Lease, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = threading.BoundedSemaphore(1)
    calls: Any = next(route.function for route in api.actions.table.routes if route.path.endswith("/exec"))
    monkeypatch.setattr(calls.__self__, "_places", slots)
    thread = threading.Thread(target=lease.run, args=("read line",), kwargs={"timeout": 30})
    assert slots.acquire(blocking=False)
    with pytest.raises(NodepoolError) as caught:
        lease.run("true")
    assert caught.value.code == "busy"
    slots.release()
    thread.start()
    thread.join(30)

    def is_free() -> bool:
        # The client has the status of a program a moment before its place is free.
        try:
            return lease.run("true").status == 0
        except NodepoolError as error:
            assert error.code == "busy"
            return False

    wait_for(is_free, 20, "a free place")


def test_refusals_have_reasons_and_free_their_place(api: Api, lease: Lease, programs: Programs) -> None:
    token, path = lease.token, f"/leases/{lease.id}/exec"
    assert api.call("POST", path, {"command": ["true"], "node": 2}, token).content["code"] == "bad-request"
    assert api.call("POST", path, {"command": ["true"], "input": "%"}, token).content["code"] == "bad-request"
    assert api.call("POST", path, {"command": []}, token).status == 422
    assert api.call("POST", path, {"command": ["true"]}, api.token("bob")).status == 403
    programs.error = RemoteException("the host does not answer")
    for _ in range(execution.MOST + 1):
        answer = api.call("POST", path, {"command": ["true"]}, token)
        assert answer.status == 502 and "does not answer" in answer.content["detail"]


def test_nodes_of_other_drivers_refer_to_ssh(api: Api) -> None:
    with api.pool().lease("fake-label", for_="10m") as lease:
        answer = api.call("POST", f"/leases/{lease.id}/exec", {"command": ["true"]}, lease.token)
        assert (answer.status, answer.content["code"]) == (409, "no-exec") and "use SSH" in answer.content["detail"]


def test_programs_are_recorded_without_their_command(api: Api, lease: Lease, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nodepool.audit"):
        lease.run("echo secret")
    [line] = [record.getMessage() for record in caplog.records if record.name == "nodepool.audit"]
    assert json.loads(line)["action"] == "execute" and json.loads(line)["target"] == f"lease {lease.id}" and "secret" not in line
