"""Programs that a launcher runs in slivers through the API (Exec): a real daemon, real slivers."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.api import shares
from nodepool.nodemanager.client import frames, programs, xml_rpc
from nodepool.nodemanager.client.programs import STDERR, STDOUT
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault, Tls
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.authority import Authority
from tests.support.deadline import limit
from tests.support.nodemanager.programs import (
    descriptors,
    memory,
    output,
    processes,
    processor_time,
    started,
    threads,
)
from tests.support.nodemanager.scene import NmDaemon, run_daemon
from tests.support.ports import reserve

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]

LIMIT = 4
MIB = 1 << 20
CALLER = """
import sys
sys.path.insert(0, {repository!r})
from nodepool.nodemanager.client import programs
from nodepool.nodemanager.client.rpc import Client
running = programs.start(Client({url!r}), "a", {argv!r})
print(running.read(20), flush=True)
sys.stdin.read()
"""


class Host(NmDaemon):
    """A daemon that launchers can also call over TLS."""

    def __init__(self, folder: pathlib.Path) -> None:
        authority = Authority(folder)
        cert, key = authority.issue("host", "IP:127.0.0.1,DNS:localhost")
        port = reserve(1)
        tls = {
            "address": "127.0.0.1",
            "port": port,
            "cert": cert,
            "key": key,
            "ca": authority.cert,
            "controllers": ["nl01"],
        }
        super().__init__(folder, api={"tcp": 0, "tls": tls})
        self.write_config(ssh={**self.options["ssh"], "connections": LIMIT})
        self.remote = Client(
            f"https://127.0.0.1:{port}", Tls(authority.cert, *authority.issue("nl01"))
        )


@pytest.fixture(scope="module")
def nm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    for daemon in run_daemon(Host(tmp_path_factory.mktemp("exec"))):
        daemon.put("a", username="zuul")
        yield daemon


def ask(nm: NmDaemon, *argv: str) -> socket.socket:
    """A connection that has sent the call for a program in sliver a."""
    body = xml_rpc.call("Exec", ["a", list(argv), {}])
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(20)
    stream.connect(nm.client.url.removeprefix("unix:"))
    stream.sendall(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return stream


@pytest.fixture(params=["unix", "tls"])
def client(nm: Host, request: pytest.FixtureRequest) -> Client:
    return nm.client if request.param == "unix" else nm.remote


@pytest.fixture(autouse=True)
def nothing_left(nm: NmDaemon) -> Iterator[None]:
    """Each test ends without sessions, and the daemon with as many descriptors as before."""
    before = descriptors(nm)
    pid = nm.process.pid if nm.process is not None else 0
    yield
    if nm.process is not None and nm.process.pid == pid:
        wait_for(lambda: descriptors(nm) <= before, 20, "the daemon to close its descriptors")
        wait_for(
            lambda: nm.client.call("GetRecord", "a").get("sessions") == 0, 20, "sessions to end"
        )


def test_streams_status_account_and_environment_of_a_program(client: Client) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    script = 'cat; id -un; pwd; echo "$HOME $GREETING"; echo problem >&2; exit 7'
    status = programs.run(
        client,
        "a",
        ["sh", "-c", script],
        io.BytesIO(b"hello\n"),
        out.write,
        err.write,
        {"GREETING": "h\xe4llo \x01"},
    )
    assert status == 7
    assert out.getvalue().decode() == "hello\nzuul\n/home/zuul\n/home/zuul h\xe4llo \x01\n"
    assert err.getvalue() == b"problem\n"


def test_other_account_of_the_sliver(nm: NmDaemon) -> None:
    out = io.BytesIO()
    assert programs.run(nm.client, "a", ["id", "-un"], stdout=out.write, user="root") == 0
    assert out.getvalue() == b"root\n"


def test_signal_that_ended_the_program_is_reported(nm: NmDaemon) -> None:
    assert programs.run(nm.client, "a", ["sh", "-c", "kill -TERM $$"]) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "user", "text"),
    [
        (["no-such-program"], "", "no such program in the sliver"),
        (["/etc/passwd"], "", "Permission denied"),
        (["true"], "nobody-knows", "the sliver has no account"),
    ],
)
def test_program_that_cannot_be_started_is_a_fault_with_the_reason(
    client: Client, argv: list[str], user: str, text: str
) -> None:
    with pytest.raises(RpcFault, match=text):
        programs.start(client, "a", argv, user=user)


def test_program_in_a_stopped_sliver_is_refused_with_its_state(nm: NmDaemon) -> None:
    nm.put("stopped")
    nm.client.call("Stop", "stopped")
    nm.wait("stopped", "stopped")
    with pytest.raises(
        RpcFault, match="sliver stopped is stopped; programs can be run when it is ready"
    ):
        programs.start(nm.client, "stopped", ["true"])
    nm.delete("stopped")


def test_much_data_arrives_unchanged_in_both_directions(client: Client) -> None:
    data, out = os.urandom(5 * MIB), io.BytesIO()
    assert programs.run(client, "a", ["cat"], io.BytesIO(data), out.write) == 0
    assert hashlib.sha256(out.getvalue()).digest() == hashlib.sha256(data).digest()


def test_both_streams_get_their_turn(nm: NmDaemon) -> None:
    """A flood on one stream does not hide the other."""
    with programs.start(
        nm.client, "a", ["sh", "-c", "yes 1010 & sleep 0.31; echo problem >&2; wait"]
    ) as running:
        # Nothing is read meanwhile: when the problem is written, the flood waits.
        wait_for(
            lambda: processes(nm, "yes\0001010") and processes(nm, "sleep\0000.31"), 20, "the flood"
        )
        wait_for(lambda: not processes(nm, "sleep\0000.31"), 20, "the problem")
        for _ in range(200):
            found = running.read(20)
            assert found is not None
            if found[0] == STDERR:
                break
        assert found == (STDERR, b"problem\n")


def test_program_without_open_streams_is_waited_for(nm: NmDaemon) -> None:
    assert programs.run(nm.client, "a", ["sh", "-c", "exec <&- >&- 2>&-; sleep 0.3; exit 3"]) == 3


@pytest.mark.parametrize("child", ["sleep 1000", "yes", "while echo; do sleep 0.01; done"])
def test_program_ends_although_its_child_keeps_the_streams(nm: NmDaemon, child: str) -> None:
    out = io.BytesIO()
    started_at = time.monotonic()
    assert (
        programs.run(
            nm.client, "a", ["sh", "-c", f"({child}) & echo done >&2; exit 4"], stderr=out.write
        )
        == 4
    )
    assert time.monotonic() - started_at < limit(10)
    assert out.getvalue() == b"done\n"
    programs.run(nm.client, "a", ["sh", "-c", "kill -9 -1"], user="zuul")


def test_output_before_the_end_is_complete(nm: NmDaemon) -> None:
    out = io.BytesIO()
    assert programs.run(nm.client, "a", ["head", "-c", "60000", "/dev/zero"], stdout=out.write) == 0
    assert len(out.getvalue()) == 60000


def test_input_that_the_program_does_not_read_is_dropped_at_its_end(client: Client) -> None:
    with programs.start(
        client, "a", ["sh", "-c", "exec <&-; echo begun; sleep 0.3; echo end"]
    ) as running:
        assert running.read(20) == (STDOUT, b"begun\n")
        for _ in range(32):
            running.write(bytes(65536), limit(20))
        assert output(running) == b"end\n"
        assert running.status == 0


def test_last_output_reaches_a_slow_caller_whose_input_was_not_read(
    client: Client, nm: NmDaemon
) -> None:
    """Closing a connection with unread input destroys output that is still on its way."""
    script = "while [ ! -e go ]; do sleep 0.01; done; head -c 150000 /dev/zero; exit 5"
    with programs.start(client, "a", ["sh", "-c", script, "slow-word"]) as running:
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                running.write(bytes(65536), 0.2)
        programs.run(nm.client, "a", ["touch", "go"])
        wait_for(lambda: not processes(nm, "slow-word"), 20, "the program to end")
        assert len(output(running)) == 150000
        assert running.status == 5
    programs.run(nm.client, "a", ["rm", "go"])


def test_caller_that_sends_faster_than_the_program_reads_waits(
    client: Client, nm: NmDaemon
) -> None:
    before = memory(nm)
    with programs.start(client, "a", ["sleep", "1000"]) as running:
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                running.write(bytes(65536), 0.5)
        assert memory(nm) < before + 8 * MIB


def test_program_that_writes_faster_than_the_caller_reads_waits(
    client: Client, nm: NmDaemon
) -> None:
    before = memory(nm)
    with programs.start(
        client, "a", ["sh", "-c", "head -c 100000000 /dev/zero; echo end >&2"]
    ) as running:
        time.sleep(0.5)  # long enough for all of it
        assert memory(nm) < before + 8 * MIB
        assert programs.run(nm.client, "a", ["true"]) == 0
        assert len(output(running)) == 100_000_004


def test_disconnection_hangs_up(client: Client, nm: NmDaemon) -> None:
    """SIGHUP, and not the end of the input, which would make half of the data look like all of
    it.
    """
    script = (
        'trap "touch hung-up; exit" HUP; echo begun; cat > /dev/null; echo words >&2; touch ended'
    )
    running = programs.start(client, "a", ["sh", "-c", script, "hang-up-word"])
    assert running.read(20) == (STDOUT, b"begun\n")
    running.close()
    wait_for(lambda: not processes(nm, "hang-up-word"), 20, "the program to end")
    out = io.BytesIO()
    programs.run(nm.client, "a", ["ls"], stdout=out.write)
    assert out.getvalue() == b"hung-up\n"
    programs.run(nm.client, "a", ["rm", "hung-up"])


def test_program_that_ignores_the_disconnection_is_killed_with_its_children(nm: NmDaemon) -> None:
    running = started(
        nm, "a", 'trap "" HUP TERM; sleep 1001 & while :; do sleep 1001; done', "stubborn"
    )
    wait_for(
        lambda: processes(nm, "stubborn") and processes(nm, "1001"), 20, "the programs to start"
    )
    running.close()
    wait_for(
        lambda: not processes(nm, "stubborn") and not processes(nm, "1001"),
        20,
        "the programs to be killed",
    )


@pytest.mark.parametrize("reads", [True, False])
def test_program_ends_when_its_caller_is_killed(nm: NmDaemon, reads: bool) -> None:
    argv = ["sh", "-c", "echo begun; exec sleep 1002" if reads else "echo begun; exec yes 1002"]
    code = CALLER.format(repository=str(REPOSITORY), url=nm.client.url, argv=argv)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as caller:
        assert caller.stdout is not None
        assert b"begun" in caller.stdout.readline()
        wait_for(lambda: processes(nm, "1002"), 20, "the program to start")
        caller.kill()
        caller.wait(20)
        wait_for(lambda: not processes(nm, "1002"), 20, "the program to end")


def test_caller_that_sends_no_frames_is_disconnected(nm: NmDaemon) -> None:
    for garbage in (frames.pack(frames.STDOUT, b"x"), b"\0\xff\xff\xff\xff"):
        with ask(nm, "sleep", "1003") as stream:
            assert stream.recv(4096).startswith(b"HTTP/1.0 200 OK")
            wait_for(lambda: processes(nm, "1003"), 20, "the program to start")
            stream.sendall(garbage)
            assert stream.recv(1) == b""
        wait_for(lambda: not processes(nm, "1003"), 20, "the program to end")


def test_caller_that_disconnects_before_the_answer_leaves_nothing(nm: NmDaemon) -> None:
    for _ in range(10):
        ask(nm, "sleep", "1004").close()
    wait_for(
        lambda: nm.client.call("GetRecord", "a")["sessions"] == 0, limit(60), "the sessions to end"
    )
    wait_for(lambda: not processes(nm, "1004"), 20, "the programs to end")


def test_more_programs_than_allowed_are_refused(nm: NmDaemon) -> None:
    running = [started(nm, "a", "read line") for _ in range(LIMIT)]
    assert nm.client.call("GetRecord", "a")["sessions"] == LIMIT
    with pytest.raises(
        RpcFault, match=rf"sliver a has {LIMIT} programs of callers already \(ssh.connections\)"
    ):
        programs.start(nm.client, "a", ["true"])
    running[0].write(b"", 10)
    assert output(running[0]) == b""
    running[0].close()
    wait_for(
        lambda: nm.client.call("GetRecord", "a")["sessions"] < LIMIT, 20, "the first program to end"
    )
    assert programs.run(nm.client, "a", ["true"]) == 0
    for each in running[1:]:
        each.close()


def test_program_that_floods_its_caller_is_killed_at_the_time_limit(nm: NmDaemon) -> None:
    with pytest.raises(TimeoutError, match=r"the program has not ended within 0\.5 s"):
        programs.run(nm.client, "a", ["yes", "1007"], stdout=lambda data: None, timeout=0.5)
    wait_for(lambda: not processes(nm, "1007"), 20, "the program to be killed")


def test_flood_of_output_uses_a_quarter_of_a_core_of_the_daemon(nm: Host) -> None:
    begun, before, ends = time.monotonic(), processor_time(nm), math.inf
    with programs.start(nm.remote, "a", ["yes"]) as running:
        while (now := time.monotonic()) < ends:
            assert now < begun + limit(60), "this is no flood"
            running.read(20)
            # what was saved up is used at first
            if math.isinf(ends) and processor_time(nm) - before > shares.ALL_SAVED:
                ends = now + 4
    seconds = time.monotonic() - begun
    # without the limit it is nearly all of them; other work of the daemon counts, too
    assert processor_time(nm) - before < shares.ALL_SAVED + 1.5 * shares.ALL_TIME * seconds


def test_deletion_of_the_sliver_ends_its_programs(nm: NmDaemon) -> None:
    nm.put("b")
    with started(nm, "b", "exec yes") as running:
        nm.client.call("DeleteSliver", "b")
        output(running)
        assert running.status == -signal.SIGKILL
        nm.wait("b", "gone")


def test_stop_of_the_daemon_kills_programs_of_callers_and_nothing_else(nm: NmDaemon) -> None:
    nm.put("c")
    login = nm.session("c")
    running = started(nm, "c", 'trap "" HUP TERM; while :; do sleep 1005; done', "stays")
    flood = programs.start(nm.client, "c", ["yes", "1006"])
    begun = time.monotonic()
    assert nm.stop() == 0
    assert time.monotonic() - begun < limit(5)
    wait_for(
        lambda: not processes(nm, "stays") and not processes(nm, "1006"),
        10,
        "the programs to be killed",
    )
    with pytest.raises(RpcError):
        output(running)
    running.close()
    flood.close()
    nm.start()
    nm.wait("a")
    assert login.communicate("hello\n", timeout=20)[0] == "got hello\n"
    nm.delete("c")


def test_many_programs_leave_no_thread_and_no_descriptor(nm: NmDaemon) -> None:
    programs.run(nm.client, "a", ["true"])
    before = threads(nm), descriptors(nm)
    for number in range(40):
        with programs.start(nm.client, "a", ["sh", "-c", "echo x; sleep 0.01; echo x"]) as running:
            if number % 2:
                output(running)
    wait_for(lambda: descriptors(nm) <= before[1], 20, "the descriptors to be closed")
    # The API starts worker threads on demand and keeps them.
    assert threads(nm) <= before[0] + 2


def test_file_is_copied_in_and_out(client: Client) -> None:
    data, found = os.urandom(3 * MIB), io.BytesIO()
    programs.put(client, "a", io.BytesIO(data), "-a file", 0o750)
    programs.get(client, "a", "-a file", found)
    assert found.getvalue() == data
    out = io.BytesIO()
    programs.run(client, "a", ["stat", "-c", "%a %U", "./-a file"], stdout=out.write)
    assert out.getvalue() == b"750 zuul\n"
    programs.run(client, "a", ["rm", "./-a file"])


def test_copy_has_only_the_rights_of_its_account(nm: NmDaemon) -> None:
    with pytest.raises(programs.ProgramError, match=r"a: .*Permission denied"):
        programs.put(nm.client, "a", io.BytesIO(b"x"), "/etc/passwd")
    with pytest.raises(programs.ProgramError, match=r"a: .*Permission denied"):
        programs.get(nm.client, "a", "/etc/shadow", io.BytesIO())
    with pytest.raises(programs.ProgramError, match="/tmp is a directory"):
        programs.put(nm.client, "a", io.BytesIO(b"x"), "/tmp")


def test_links_of_a_sliver_lead_nowhere_on_the_host(nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    programs.run(
        nm.client,
        "a",
        ["sh", "-c", f"ln -s {secret} link; ln -s /proc/1/root{secret} link2"],
        user="root",
    )
    for link in ("/root/link", "/root/link2"):
        with pytest.raises(programs.ProgramError):
            programs.get(nm.client, "a", link, io.BytesIO(), user="root")
        programs.put(nm.client, "a", io.BytesIO(b"changed"), link, user="root")
    assert secret.read_text() == "of the host"


class Broken(io.BytesIO):
    """A file of which only the first piece can be read."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise OSError("the disk is broken")
        return super().read(size)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copy_that_is_cut_off_leaves_the_old_file(nm: NmDaemon) -> None:
    programs.put(nm.client, "a", io.BytesIO(b"old"), "kept")
    with pytest.raises(RpcError):
        programs.put(nm.client, "a", Broken(bytes(MIB)), "kept")
    wait_for(lambda: not processes(nm, "kept"), 20, "the copy to end")
    found = io.BytesIO()
    programs.get(nm.client, "a", "kept", found)
    assert found.getvalue() == b"old"
    programs.run(nm.client, "a", ["rm", "kept", "kept.part"])


def test_copy_during_which_the_daemon_is_killed_leaves_the_old_file(nm: NmDaemon) -> None:
    programs.put(nm.client, "a", io.BytesIO(b"old"), "kept")

    killed = threading.Event()

    class Killing(Broken):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                nm.stop(signal.SIGKILL)
                killed.set()
                return b""
            return super().read(size)

    with pytest.raises(RpcError):
        programs.put(nm.client, "a", Killing(bytes(MIB)), "kept")
    assert killed.wait(limit(20))  # another thread reads the file
    nm.start()
    nm.wait("a")
    wait_for(lambda: not processes(nm, "kept"), 20, "the copy to end")
    found = io.BytesIO()
    programs.get(nm.client, "a", "kept", found)
    assert found.getvalue() == b"old"
    programs.run(nm.client, "a", ["rm", "kept", "kept.part"])
