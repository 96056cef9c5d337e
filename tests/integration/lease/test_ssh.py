"""SSH of leases with a real sshd, whose limits are those of OpenSSH unless a test says so."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from nodepool import ssh
from nodepool.adapters import gitlab
from nodepool.client import LeaseEnded, NodepoolError, Pool
from nodepool.lease import Lease, LeaseState, Terms
from nodepool.lease.ssh import inventory
from nodepool.zk.records import Node
from tests.conftest import wait_for
from tests.integration.lease.conftest import places
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer, ssh_server


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    options = [
        "Subsystem sftp internal-sftp",
        "MaxStartups 10:30:100",
        "MaxSessions 10",
        "MaxAuthTries 6",
    ]
    with ssh_server(kinds=["ed25519"], options=options) as server:
        # The first value of an option counts.
        server.pause()
        server.config.write_text(server.config.read_text().replace("MaxStartups 2000\n", ""))
        server.restart()
        yield server


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, 1) as made:
        yield made


@pytest.fixture
def node(sshd: SSHServer) -> ssh.Node:
    return ssh.Node(
        "0000000001",
        address="127.0.0.1",
        port=sshd.port,
        username="root",
        host_keys=list(sshd.host_keys),
    )


@pytest.fixture
def path(sshd: SSHServer, node: ssh.Node, tmp_path: pathlib.Path) -> str:
    identity = {"IdentityFile": ssh.quoted(str(sshd.client_key)), "IdentitiesOnly": "yes"}
    return ssh.write([node], str(tmp_path / "ssh"), identity=identity)


@pytest.fixture
def vanish(
    sshd: SSHServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Thread]:
    """Stop all connections of sshd as soon as the program there has written its process id, and
    both streams are known to have begun; kill both in the end.
    """
    place, stopped, feed = tmp_path / "pid", [], ssh._Stream.feed
    begun: set[int] = set()

    def seen(stream: ssh._Stream, data: bytes) -> bool:
        ended = feed(stream, data)
        (begun.add if stream.numbers and not ended else begun.discard)(id(stream))
        return ended

    monkeypatch.setattr(ssh._Stream, "feed", seen)

    def stop() -> None:
        wait_for(lambda: place.exists() and place.read_text().strip(), 30, "the program")
        wait_for(lambda: len(begun) == 2, what="the begin of both streams")
        assert sshd.process is not None
        # From OpenSSH 9.8 on, a child of the connection's process serves it.
        for process in psutil.Process(sshd.process.pid).children(recursive=True):
            if process.name().startswith("sshd"):
                stopped.append(process.pid)
                process.suspend()

    thread = threading.Thread(target=stop, name="stop", daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    for process in [*stopped, int(place.read_text())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def run(
    path: str, node: ssh.Node, command: str, data: bytes = b"", seconds: float = 60.0
) -> tuple[int, bytes, bytes]:
    out, err = io.BytesIO(), io.BytesIO()
    status = ssh.run(
        *ssh.remote(path, node, command), (out, err), data, time.monotonic() + seconds, set()
    )
    return status, out.getvalue(), err.getvalue()


def test_forty_concurrent_commands_succeed(path: str, node: ssh.Node) -> None:
    with concurrent.futures.ThreadPoolExecutor(40) as threads:
        found = list(
            threads.map(
                lambda number: run(path, node, f"echo {number}; echo e{number} >&2; exit {number}"),
                range(40),
            )
        )
    assert found == [(number, b"%d\n" % number, b"e%d\n" % number) for number in range(40)]


def test_process_in_the_background_does_not_keep_the_command_open(
    path: str, node: ssh.Node
) -> None:
    began = time.monotonic()
    status, out, _err = run(path, node, "sleep 300 & echo $!; exit 5")
    os.kill(int(out), signal.SIGKILL)
    assert status == 5 and time.monotonic() - began < limit(30)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.1", "::ffff:7f00:1", "0:0:0:0:0:FFFF:127.0.0.1"]
)
def test_host_keys_are_found_however_the_address_is_written(
    sshd: SSHServer, node: ssh.Node, tmp_path: pathlib.Path, address: str
) -> None:
    node = dataclasses.replace(node, address=address)
    identity = {"IdentityFile": ssh.quoted(str(sshd.client_key)), "IdentitiesOnly": "yes"}
    path = ssh.write([node], str(tmp_path / "ssh"), identity=identity)
    assert run(path, node, "echo there") == (0, b"there\n", b"")


def test_address_of_a_node_may_have_a_scope(node: ssh.Node, tmp_path: pathlib.Path) -> None:
    node = dataclasses.replace(node, address="FE80:0:0::1%lo")
    path = ssh.write([node], str(tmp_path / "ssh"))
    read = subprocess.run(
        ["ssh", "-F", path, "-G", "n1"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "hostname fe80::1%lo" in read.stdout.lower().split("\n")
    assert ssh.known_hosts([node]).startswith(f"[fe80::1%lo]:{node.port} ")


@pytest.mark.parametrize("status", [0, 1, 254, 255])
def test_status_is_that_of_the_command(path: str, node: ssh.Node, status: int) -> None:
    assert run(path, node, f"exit {status}") == (status, b"", b"")


def test_command_on_a_network_device_runs_once_whatever_it_prints(
    path: str, node: ssh.Node, tmp_path: pathlib.Path
) -> None:
    """Its text and status may be those of a refused login, which is repeated."""
    device, note = dataclasses.replace(node, connection_type="network_cli"), tmp_path / "ran"
    assert run(path, device, "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")
    with pytest.raises(ssh.Lost, match="or that has ended with status 255"):
        run(path, device, f"echo x >> {note}; echo Connection reset by peer >&2; exit 255")
    assert note.read_text() == "x\n"


def test_command_that_a_signal_ended_has_the_status_of_shells(path: str, node: ssh.Node) -> None:
    assert run(path, node, "exec sh -c 'kill -TERM $$'")[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "text", ["a  b", "it's \\ \\\\ \\n %s %% ${HOME} ! \"", "one\ntwo\n\nthree", "ä€\x1e\x1b"]
)
def test_command_arrives_as_it_was_given(path: str, node: ssh.Node, text: str) -> None:
    quoted = text.replace("'", "'\"'\"'")
    assert run(path, node, f"printf %s '{quoted}'")[1] == text.encode()


def test_all_bytes_pass_in_both_directions(path: str, node: ssh.Node) -> None:
    data = bytes(range(256)) * 8000 + b"\x1e"
    assert run(path, node, "cat; cat /dev/null >&2", data) == (0, data, b"")


def test_output_beyond_its_bound_keeps_the_beginning_and_the_end(pool: Pool) -> None:
    pool.most_output = 1000
    with pool.lease("small") as lease:
        done = lease.run("echo begin; head -c 3000000 /dev/zero; echo end; echo few >&2")
    assert (
        done.stdout
        == b"begin\n" + bytes(494) + b"\n[2999010 bytes omitted]\n" + bytes(496) + b"end\n"
    )
    assert done.stderr == b"few\n"


@pytest.mark.parametrize("sizes", [[9], [10], [4, 6], [11], [3] * 9, [1] * 40, [100, 1]])
def test_kept_output_never_exceeds_its_bound(sizes: list[int]) -> None:
    kept, given = ssh.Kept(10), b""
    for number, size in enumerate(sizes):
        data = bytes([number]) * size
        given += data
        kept.write(data)
    kept.flush()
    first, note, last = kept.content().partition(b"\n[%d bytes omitted]\n" % (len(given) - 10))
    assert (
        (first + last == given)
        if len(given) <= 10
        else (first, last) == (given[:5], given[-5:]) and note
    )


def test_command_is_killed_with_its_children_after_its_time(
    path: str, node: ssh.Node, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(TimeoutError):
        run(path, node, f"sleep 300 & echo $! > {tmp_path}/pid; sleep 300", seconds=3)
    process = pathlib.Path("/proc", (tmp_path / "pid").read_text().strip())
    wait_for(
        lambda: not process.exists() or "Z" in (process / "stat").read_text(), 20, "no process"
    )


@pytest.mark.usefixtures("vanish")
def test_machine_that_vanishes_ends_the_command(
    sshd: SSHServer, node: ssh.Node, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ssh.OPTIONS, "ServerAliveInterval", "1")
    path = ssh.write(
        [node], str(tmp_path / "ssh"), identity={"IdentityFile": ssh.quoted(str(sshd.client_key))}
    )
    with pytest.raises(ssh.Lost, match="lost before the program ended"):
        run(path, node, f"echo $$ > {tmp_path}/pid; exec sleep 300", seconds=limit(100))


def test_other_keys_of_the_agent_are_not_offered(
    path: str, node: ssh.Node, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(agent)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(agent.exists, 10, "the agent")
            monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
            for number in range(6):
                key = str(tmp_path / f"key{number}")
                subprocess.run(
                    ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key],
                    check=True,
                    timeout=60,
                )
                subprocess.run(["ssh-add", "-q", key], check=True, timeout=60)
            assert run(path, node, "true")[0] == 0
        finally:
            process.terminate()


@pytest.mark.parametrize("name", ["a b", "100%", "%h", "$HOME", "{x}"])
def test_directory_may_have_any_usual_name(
    sshd: SSHServer, node: ssh.Node, tmp_path: pathlib.Path, name: str
) -> None:
    key = tmp_path / name / "key"
    path = ssh.write([node], str(tmp_path / name), identity={"IdentityFile": ssh.quoted(str(key))})
    shutil.copy(sshd.client_key, key)
    assert run(path, node, "echo well")[1] == b"well\n"


@pytest.mark.parametrize("name", ["${HOME}", 'a"b', "a\\b", "a\nb", "{{x}}", "{%x%}"])
def test_directory_that_ssh_or_ansible_would_change_is_refused(
    node: ssh.Node, tmp_path: pathlib.Path, name: str
) -> None:
    with pytest.raises(ValueError, match="ssh cannot use the path"):
        ssh.write([node], str(tmp_path / name))


def test_node_whose_data_ansible_would_run_is_in_no_inventory() -> None:
    nodes = [Node(f"000000000{number}") for number in range(3)]
    for node, user in zip(nodes, ("root", "{{ lookup('pipe', 'true') }}", "zuul"), strict=True):
        node.interface_ip, node.username, node.type = "192.0.2.1", user, ["small"]
    lease = Lease(
        "200-0000000001", LeaseState.HELD, Terms("alice", "test"), ("small",), tuple(nodes)
    )
    found = inventory(lease)
    assert sorted(found["_meta"]["hostvars"]) == found["small"]["hosts"] == ["n1", "n3"]


def test_variables_of_the_inventory_for_groups_are_texts() -> None:
    """Numbers would end Ansible's plug-in `constructed` (findings/ansible-constructed-...)."""
    node = Node("0000000001")
    node.interface_ip, node.type, node.provider = "192.0.2.1", ["small", "2"], "7"
    lease = Lease("200-0000000001", LeaseState.HELD, Terms("alice", "test"), ("small",), (node,))
    variables = inventory(lease)["_meta"]["hostvars"]["n1"]
    ours = {name: value for name, value in variables.items() if name.startswith("nodepool_")}
    assert ours == {
        "nodepool_id": "0000000001",
        "nodepool_label": "small,2",
        "nodepool_provider": "7",
    }


def test_directory_that_others_may_change_is_refused(
    node: ssh.Node, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises(PermissionError, match="nobody else may change"):
            ssh.write([node], str(tmp_path / name))
    # A planted link is replaced, and not followed.
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "own" / "known_hosts").symlink_to(tmp_path / "victim")
    ssh.write([node], str(tmp_path / "own"))
    assert (tmp_path / "victim").read_text() == "kept" and not (
        tmp_path / "own" / "known_hosts"
    ).is_symlink()
    assert (tmp_path / "own" / "known_hosts").stat().st_mode & 0o777 == 0o600


def test_files_with_blanks_colons_and_percent_signs_are_copied(
    pool: Pool, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "100% a:b").write_bytes(b"\0\xff")
    with pool.lease("small") as lease:
        lease.put(tmp_path / "100% a:b", f"{tmp_path}/there %d x:y")
        lease.get(f"{tmp_path}/there %d x:y", tmp_path / "back:%s")
        assert (tmp_path / "back:%s").read_bytes() == b"\0\xff"
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            list(
                threads.map(
                    lambda number: lease.put(tmp_path / "back:%s", f"{tmp_path}/put{number}"),
                    range(20),
                )
            )
        with pytest.raises(NodepoolError, match="has 1 nodes; there is no node 2"):
            lease.run("true", node=1)
    assert len(list(tmp_path.glob("put*"))) == 20


def test_copy_is_repeated_if_scp_is_ended_by_the_refusal_of_its_login(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with OpenSSH 9.2 and 20 logins at a time: scp got SIGPIPE, and ended with status 1."""
    scp = tmp_path / "scp"
    scp.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/refused ] && exit 0\ntouch {tmp_path}/refused\n"
        "echo 'kex_exchange_identification: Connection closed by remote host' >&2\n"
        "echo 'lost connection' >&2\nexit 1\n"
    )
    scp.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh, "PAUSES", (0.0, 0.0))
    outputs = [ssh.Kept(1000), ssh.Kept(1000)]
    assert ssh.run(["scp", "a", "b"], None, outputs, None, None, set()) == 0
    assert (tmp_path / "refused").exists()


@pytest.mark.parametrize("shell_type", [None, "cmd"])
def test_program_that_is_ended_during_the_login_is_not_repeated(
    path: str,
    node: ssh.Node,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    shell_type: str | None,
) -> None:
    """As when a launcher stops while it probes a node."""
    client = tmp_path / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f"#!/bin/sh\necho >> {tmp_path}/tried\nexec sleep 300\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", str(client.parent), prepend=os.pathsep)
    programs, output = ssh.Programs(), ssh.Kept(1000)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        there = dataclasses.replace(node, shell_type=shell_type)
        argv, command = ssh.remote(path, there, "true")
        outputs, end = [output, output], time.monotonic() + limit(30)
        job = executor.submit(ssh.run, argv, command, outputs, b"", end, programs)
        wait_for((tmp_path / "tried").exists, 30, "the login")
        programs.stop()
        with pytest.raises(ssh.Lost, match="ssh was ended by signal 9"):
            job.result()
    assert (tmp_path / "tried").read_text() == "\n"


def test_end_of_the_lease_ends_its_commands_and_removes_its_files(
    pool: Pool, tmp_path: pathlib.Path
) -> None:
    pool.ssh_directory = str(tmp_path / "files")
    lease = pool.lease("small")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            lease.run(f"touch {tmp_path}/begun; sleep 300")
        except NodepoolError as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="work", daemon=True)
    thread.start()
    wait_for((tmp_path / "begun").exists, 30, "the command")
    assert (tmp_path / "files" / "known_hosts").exists()
    lease.give_back()
    thread.join(limit(30))
    assert [type(error) for error in errors] in ([NodepoolError], [LeaseEnded])
    assert not (tmp_path / "files").exists()


@pytest.mark.usefixtures("vanish")
def test_gitlab_job_on_a_vanished_machine_is_a_system_failure(
    pool: Pool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(ssh.OPTIONS, "ServerAliveInterval", "1")
    given = {
        "TMPDIR": str(tmp_path),
        "NODEPOOL_URL": pool.url,
        "NODEPOOL_TOKEN": pool.token or "",
        "NODEPOOL_SSH_KEY": str(pool.key_file),
        "SYSTEM_FAILURE_EXIT_CODE": "73",
    }
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    (tmp_path / "script").write_text(f"echo $$ > {tmp_path}/pid; exec sleep 300\n")
    with pool.lease("small", for_="1h") as lease:
        gitlab.Kept().write(lease)
        assert gitlab.main(["run", str(tmp_path / "script"), "build_script"]) == 73
    assert "the connection was lost before the program ended" in capfd.readouterr().out


def test_login_that_the_server_refuses_without_a_reason_is_retried(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the client of OpenSSH 10, which prints nothing then; this machine may have another."""
    client = tmp_path / "ssh"
    client.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 255; }}\n"
        'for last; do :; done\nexec sh -c "$last"\n'
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    out, err = ssh.Kept(1000), ssh.Kept(1000)
    assert ssh.run(["ssh", "node"], "echo done", [out, err], b"", None, set()) == 0
    assert out.content() == b"done\n"
