"""Programs that the launcher relays: real processes of this machine play those on a node."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import selectors
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from nodepool.client import MOST_INPUT, Done, Lease, Node, NodepoolError
from nodepool.client.lease import LONGEST_WORD
from nodepool.exceptions import RemoteException
from nodepool.nodemanager.config import Ssh
from nodepool.web.actions import execution
from nodepool.web.actions.places import Places
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api
from tests.support.deadline import limit


class LocalProgram:
    """A process of this machine, with the interface of ``nodepool.driver.Execution``."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            argv, stdin=-1, stdout=-1, stderr=-1, bufsize=0, start_new_session=True
        )
        self.status: int | None = None
        self.closed = threading.Event()
        self.relayed = 0
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
                self.relayed += len(data)
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
        self,
        node: object,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout: float = 30.0,
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


def test_call_is_answered_as_soon_as_its_program_runs(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "START", 20.0)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        done = executor.submit(lease.run, "true", timeout=30)
        wait_for(done.done, what="the end of the program")
        assert done.result().status == 0


@pytest.mark.parametrize("error", [BrokenPipeError(32, "no reader"), OSError(28, "no space")])
def test_output_that_cannot_be_written_is_no_failure_of_the_server(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    class Full(io.RawIOBase):
        def write(self, _data: object) -> int:
            raise error

    monkeypatch.setattr(lease._pool, "outputs", lambda _stream: [Full(), Full()])
    with pytest.raises(OSError) as found:
        lease.run("yes", stream=True)
    assert found.value is error


@pytest.mark.parametrize(
    ("command", "data"),
    [
        ("true " + "x" * 40_000, b""),
        ("true " + "x" * 10_000, bytes(45_000)),
        (["true", *["x"] * 1000], b""),
        ("true", bytes(60_000)),
    ],
)
def test_command_that_is_too_long_for_the_launcher_runs_over_ssh(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, command: str | list[str], data: bytes
) -> None:
    monkeypatch.setattr(Lease, "_ssh", lambda _lease: "ssh_config")
    monkeypatch.setattr(Lease, "_numbered", lambda *_: Node("1"))
    monkeypatch.setattr(Lease, "_execute", lambda *_: Done(7, b"", b""))
    assert lease.run(command, input=data).status == 7


def test_longest_command_that_the_launcher_takes_is_relayed(lease: Lease) -> None:
    command = "wc -c; exit 7 #"
    for longest, data in ((LONGEST_WORD, b""), (4000, bytes(MOST_INPUT))):
        done = lease.run(command + "x" * (longest - len(command)), input=data)
        assert (done.status, int(done.stdout)) == (7, len(data))


def test_large_output_arrives_completely(lease: Lease) -> None:
    done = lease.run("head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2")
    assert (len(done.stdout), len(done.stderr)) == (20_000_000, 3_000_000)


def test_program_is_killed_at_its_time_limit(lease: Lease, programs: Programs) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lease.run("sleep 100", timeout=0.5)
    assert programs.started[0].closed.wait(20)


def test_program_that_never_pauses_is_killed_at_its_time_limit(
    api: Api, lease: Lease, programs: Programs
) -> None:
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


def test_program_is_killed_when_the_client_disconnects(
    api: Api, lease: Lease, programs: Programs
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    body = json.dumps({"command": ["sh", "-c", "echo started; exec sleep 100"]})
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", body, headers)
    answer = connection.getresponse()
    assert answer.read(5 + 8)[5:] == b"started\n"
    answer.close()
    connection.close()
    assert programs.started[0].closed.wait(20)


def test_client_that_does_not_read_delays_its_own_program_only(
    api: Api, lease: Lease, programs: Programs
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    connection.request(
        "POST", f"/api/v1/leases/{lease.id}/exec", json.dumps({"command": ["yes"]}), headers
    )
    wait_for(lambda: programs.started, what="the program")
    assert lease.run("echo other", timeout=20).stdout == b"other\n"
    connection.close()
    assert programs.started[0].closed.wait(20)


def test_output_continues_when_a_slow_client_reads_again(
    api: Api, lease: Lease, programs: Programs
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    body = json.dumps({"command": ["head", "-c", "30000000", "/dev/zero"]})
    connection.request("POST", f"/api/v1/leases/{lease.id}/exec", body, headers)
    answer = connection.getresponse()
    seen: list[int] = []

    def waits() -> bool:
        seen.append(programs.started[0].relayed)
        return len(seen) > 10 and 0 < seen[-10] == seen[-1]

    wait_for(waits, what="the relay to wait")
    assert seen[-1] < 30_000_000, "what the client does not read is not kept here"
    assert len(answer.read()) > 30_000_000
    connection.close()


def places(api: Api, monkeypatch: pytest.MonkeyPatch, *limits: int) -> Places:
    """Set the number of programs in all, of one owner and of one lease."""
    calls: Any = next(
        route.function for route in api.actions.table.routes if route.path.endswith("/exec")
    )
    made: Places = calls.__self__.places
    monkeypatch.setattr(made, "limits", limits)
    return made


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(NodepoolError) as caught:
        call()
    return caught.value.code


@contextlib.contextmanager
def running(lease: Lease, programs: Programs, number: int = 1) -> Iterator[None]:
    """Programs that run until the end of the block."""
    before = len(programs.started)
    threads = [
        threading.Thread(target=lease.run, args=(["sleep", "100"],), name="runs")
        for _ in range(number)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(programs.started) == before + number, what="the programs")
    try:
        yield
    finally:
        for program in programs.started[before : before + number]:
            program.process.kill()
        for thread in threads:
            thread.join(20)


def test_owner_and_lease_have_a_part_of_the_places(
    api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    places(api, monkeypatch, 100, 3, 2)
    pool = api.pool("greedy")
    first, second = (pool.lease("fake-label", for_="10m") for _ in range(2))
    honest = api.pool("honest").lease("fake-label", for_="10m")
    with running(first, programs, 2):
        assert code_of(lambda: first.run("true", timeout=0.5)) == "busy", "of its lease"
        with running(second, programs, 1):
            assert code_of(lambda: second.run("true", timeout=0.5)) == "busy", "of its owner"
            assert honest.run("true", timeout=20).status == 0
    for lease in (first, second, honest):
        lease.give_back()


def test_short_programs_have_places_that_long_ones_do_not_get(
    lease: Lease, api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    places(api, monkeypatch, 10, 10, 10)
    with running(lease, programs, 9):
        long = api.call(
            "POST", f"/leases/{lease.id}/exec", {"command": ["true"], "timeout": 61}, lease.token
        )
        assert long.content["code"] == "busy"
        assert lease.run("true", timeout=60).status == 0


def test_client_waits_for_a_place_within_its_time(
    lease: Lease, api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = places(api, monkeypatch, 100, 100, 1)
    assert found.take("alice", lease.id)
    answer = api.call("POST", f"/leases/{lease.id}/exec", {"command": ["true"]}, lease.token)
    assert (answer.status, answer.content["code"], answer.headers["Retry-After"]) == (
        503,
        "busy",
        "1",
    )
    done: list[Any] = []
    thread = threading.Thread(
        target=lambda: done.append(lease.run("echo at last", timeout=60)), name="waits"
    )
    thread.start()
    assert code_of(lambda: lease.run("true", timeout=1.5)) == "busy"
    found.free("alice", lease.id)
    thread.join(30)
    assert [one.stdout for one in done] == [b"at last\n"]
    wait_for(lambda: found.take("alice", lease.id), what="the place")
    found.free("alice", lease.id)


def test_machine_that_starts_no_programs_occupies_no_web_thread(
    api: Api, lease: Lease, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner starts more programs at a time than there are web threads; another one uses the
    API meanwhile.
    """

    def ask() -> float:
        begin = time.monotonic()
        assert api.call("GET", "/leases", token=token).status == 200
        return time.monotonic() - begin

    token = api.token("honest")
    alone = statistics.median(ask() for _ in range(20))
    started, answer = threading.Semaphore(0), threading.Event()

    def silent(*_args: object, **_options: object) -> None:
        started.release()
        answer.wait(60)
        raise TimeoutError("the node does not answer")

    monkeypatch.setattr(programs, "execute", silent)
    threads = [
        threading.Thread(
            target=code_of, args=(lambda: lease.run("true", timeout=30),), name="greedy"
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=20)
    try:
        assert statistics.median(ask() for _ in range(20)) <= max(2 * alone, 0.5)
    finally:
        answer.set()
        for thread in threads:
            thread.join(20)


def test_program_whose_client_disconnects_during_its_start_is_ended(
    api: Api, lease: Lease, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "START", 0.2)
    found, execute = places(api, monkeypatch, 1, 1, 1), programs.execute
    starting, go = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> LocalProgram:
        starting.set()
        go.wait(20)
        return execute(*args, **options)

    monkeypatch.setattr(programs, "execute", slow)
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {lease.token}"}
    connection.request(
        "POST",
        f"/api/v1/leases/{lease.id}/exec",
        json.dumps({"command": ["sleep", "100"]}),
        headers,
    )
    assert starting.wait(20)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (503, "busy"), "it takes too long"
    connection.close()
    go.set()
    wait_for(
        lambda: programs.started and programs.started[0].closed.is_set(),
        what="the end of the program",
    )
    wait_for(lambda: found.take("alice", lease.id), what="the place")


def test_refusals_have_reasons_and_free_their_place(
    api: Api, lease: Lease, programs: Programs
) -> None:
    token, path = lease.token, f"/leases/{lease.id}/exec"
    assert (
        api.call("POST", path, {"command": ["true"], "node": 2}, token).content["code"]
        == "bad-request"
    )
    for wrong in ("%", "é", "abcde"):
        answer = api.call("POST", path, {"command": ["true"], "input": wrong}, token)
        assert (answer.status, answer.content["code"]) == (422, "bad-request")
        assert "input is not base64" in answer.content["detail"]
    assert api.call("POST", path, {"command": []}, token).status == 422
    assert api.call("POST", path, {"command": ["true"]}, api.token("bob")).status == 403
    programs.error = RemoteException("the host does not answer")
    for _ in range(execution.MOST[2] + 1):
        answer = api.call("POST", path, {"command": ["true"]}, token)
        assert answer.status == 502 and "does not answer" in answer.content["detail"]


def test_nodes_of_other_drivers_refer_to_ssh(api: Api) -> None:
    with api.pool().lease("fake-label", for_="10m") as lease:
        answer = api.call("POST", f"/leases/{lease.id}/exec", {"command": ["true"]}, lease.token)
        assert (answer.status, answer.content["code"]) == (
            409,
            "no-exec",
        ) and "use SSH" in answer.content["detail"]


def test_programs_are_recorded_without_their_command(
    api: Api, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "nodepool.audit"):
        lease.run("echo secret")
    [line] = [record.getMessage() for record in caplog.records if record.name == "nodepool.audit"]
    assert (
        json.loads(line)["action"] == "execute"
        and json.loads(line)["target"] == f"lease {lease.id}"
        and "secret" not in line
    )


@pytest.mark.spec("issue 49, 2: only kills on the node, during the command, are named after it")
def test_only_kills_of_the_command_are_named(api: Api, programs: Programs) -> None:
    with api.pool().lease("fake-label", "fake-label") as lease:
        mine, other = sorted(node.id for node in lease.nodes)

        def kill(node: str, pid: int, **fields: float) -> None:
            found = api.launcher.zk.node_tree.get(node)
            assert found is not None
            fields |= {"pid": pid, "memory_limit": 1 << 31}
            api.launcher.feed.note(
                "node-killed", node=node, provider=found.provider, program="cc1plus", **fields
            )

        def lines(status: int) -> list[str]:
            done = lease.run(f"echo mine >&2; exit {status}")
            assert done.status == status and done.stderr.startswith(b"mine\n")
            return done.stderr.decode().splitlines()[1:]

        # A command that did not fail long ago has survived it.
        kill(mine, 1, time=time.time() - 3600)
        kill(other, 2)
        assert lines(137) == []
        for pid in range(10, 35):
            kill(mine, pid)
        assert lines(0) == []
        found = lines(2)
        text = "process {} (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
        assert found == [f"nodepool: {text.format(pid)}" for pid in range(15, 35)]
        assert lines(137) == [] and len(lease.kills) == 20
        kill(mine, 40)
        with pytest.raises(subprocess.CalledProcessError) as raised:
            lease.run("exit 3", check=True)
        assert text.format(40) in raised.value.stderr.decode()


def test_launcher_that_does_not_answer_delays_no_result(
    api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api.pool().lease("fake-label") as lease, monkeypatch.context() as patch:
        error = NodepoolError("unreachable", "no answer")
        patch.setattr(lease._pool, "call", lambda *_args, **_options: raise_(error))
        assert lease.run("exit 137").status == 137
        began = time.monotonic()
        assert lease.run("exit 1").status == 1
        assert time.monotonic() - began < limit(1.0), "it does not wait for a quick command"


def raise_(error: Exception) -> None:
    raise error


def test_launcher_relays_fewer_programs_of_a_lease_than_its_sliver_runs() -> None:
    """A sliver frees the place of a program a little later than the launcher, and refuses more."""
    assert execution.MOST[2] < Ssh().connections
