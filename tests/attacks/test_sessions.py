"""After each kind of session: nothing of the host is open inside."""

from __future__ import annotations

import base64
import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from tests.attacks.conftest import ATTACKER, attack, attempts_of, judge
from tests.conftest import wait_for
from tests.support.nodemanager.programs import output, started
from tests.support.nodemanager.scene import NmDaemon


@contextlib.contextmanager
def ssh(host: NmDaemon) -> Iterator[None]:
    with host.session(ATTACKER) as session:
        yield
        session.communicate("bye\n", timeout=20)


@contextlib.contextmanager
def terminal(host: NmDaemon) -> Iterator[None]:
    found = host.client.call("GetRecord", ATTACKER)
    with subprocess.Popen(
        [
            "ssh",
            "-tt",
            "-i",
            str(host.key),
            "-p",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "root@127.0.0.1",
            "echo begun; read line",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as session:
        assert session.stdout is not None
        assert session.stdout.readline().strip() == b"begun"
        yield
        session.communicate(b"bye\n", timeout=20)


@contextlib.contextmanager
def sftp(host: NmDaemon) -> Iterator[None]:
    found = host.client.call("GetRecord", ATTACKER)
    with subprocess.Popen(
        [
            "sftp",
            "-q",
            "-b",
            "-",
            "-i",
            str(host.key),
            "-P",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "root@127.0.0.1",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as session:
        assert session.stdin is not None and session.stdout is not None
        session.stdin.write(b"pwd\n")
        while b"Remote working directory" not in session.stdout.readline():
            assert session.poll() is None
        yield
        session.communicate(b"bye\n", timeout=20)


@contextlib.contextmanager
def program(host: NmDaemon) -> Iterator[None]:
    """Of a launcher, through the API."""
    with started(host, ATTACKER, "read line", "program") as running:
        yield
        running.write(b"bye\n", 20)
        assert output(running) == b""


@contextlib.contextmanager
def init_script(host: NmDaemon) -> Iterator[None]:
    script = b"#!/bin/sh\necho begun\nsleep 1000\n"
    host.put(
        ATTACKER,
        initscript=base64.b64encode(script).decode(),
        rspec={"nm_mem_limit": 256, "nm_pids_max": 300},
    )
    host.client.call("ReCreate", ATTACKER)
    host.wait(ATTACKER)
    wait_for(lambda: "begun" in host.client.call("GetConsole", ATTACKER), 20)
    yield
    host.put(ATTACKER, rspec={"nm_mem_limit": 256, "nm_pids_max": 300})
    host.client.call("ReCreate", ATTACKER)
    host.wait(ATTACKER)


@contextlib.contextmanager
def api(host: NmDaemon) -> Iterator[None]:
    """Keys are changed while it runs, and the sliver waits for an answer of the API."""
    found = host.client.call("GetRecord", ATTACKER)
    ask = (
        "import socket\ns = "
        "socket.socket(socket.AF_UNIX)\ns.connect('/run/nodepool/nodemanager.api')\n"
        "print('begun', flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [
            "ssh",
            "-i",
            str(host.key),
            "-p",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "root@127.0.0.1",
            f'python3 -c "{ask}"',
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as session:
        assert session.stdout is not None
        assert session.stdout.readline().strip() == b"begun"
        yield
        session.communicate(b"\n", timeout=20)


@pytest.mark.spec(
    "issue 10, F1 and 2: a sliver's processes hold no descriptor, mount, namespace, key or "
    "capability of the host"
)
@pytest.mark.parametrize(
    "kind", [ssh, terminal, sftp, program, init_script, api], ids=lambda kind: kind.__name__
)
def test_nothing_of_the_host_is_open_inside(host: NmDaemon, kind: object) -> None:
    with kind(host):  # type: ignore[operator]
        found = attack(host, ATTACKER, "sessions")
    assert len(found) == len(attempts_of("sessions"))
    assert judge("sessions", found) == []
