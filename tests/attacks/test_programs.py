"""What a hostile sliver does to the launcher's programs in it, and through them to the daemon
and to others.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client import programs
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from tests.attacks.conftest import ATTACKER, VICTIM
from tests.conftest import wait_for
from tests.support.nodemanager.programs import descriptors, memory, output, processes, started
from tests.support.nodemanager.scene import NmDaemon

MIB = 1 << 20
#: Seconds for a call of a launcher; without a flood: 0.005.
LIMIT = float(os.environ.get("NM_FLOOD_LIMIT", "1"))


@pytest.fixture(autouse=True)
def nothing_left(host: NmDaemon) -> Iterator[None]:
    before = descriptors(host)
    yield
    wait_for(
        lambda: host.client.call("GetRecord", ATTACKER)["sessions"] == 0, 20, "the sessions to end"
    )
    wait_for(lambda: descriptors(host) <= before, 20, "the daemon to close its descriptors")


def drain(running: programs.Running) -> None:
    with contextlib.suppress(RpcError):
        while running.read(60) is not None:
            pass


@pytest.mark.parametrize(
    "reads", [True, False], ids=["reading caller", "caller that does not read"]
)
def test_floods_of_output_delay_no_other_call(host: NmDaemon, reads: bool) -> None:
    before = memory(host)
    floods = [started(host, ATTACKER, "yes >&2 & exec yes") for _ in range(8)]
    readers = [
        threading.Thread(target=drain, args=(each,), name="Thread-test-drain")
        for each in floods
        if reads
    ]
    for reader in readers:
        reader.start()
    try:
        took = []
        for _ in range(20):
            begun = time.monotonic()
            host.client.call("GetCapacity")
            assert programs.run(host.client, VICTIM, ["true"]) == 0
            took.append(time.monotonic() - begun)
        assert sorted(took)[-2] < LIMIT, took
        assert memory(host) < before + 32 * MIB
    finally:
        for each in floods:
            each.close()
        for reader in readers:
            reader.join(20)
    programs.run(host.client, ATTACKER, ["pkill", "-9", "yes"])


def test_larger_pipes_cost_the_daemon_no_memory(host: NmDaemon) -> None:
    enlarge = (
        "import fcntl, os; [fcntl.fcntl(n, 1031, 1 << 20) for n in (0, 1, 2)]; os.write(1, "
        "b'begun' + bytes(1 << 20))"
    )
    before = memory(host)
    running = [
        programs.start(host.client, ATTACKER, ["python3", "-I", "-c", f"{enlarge}; input()"])
        for _ in range(8)
    ]
    for each in running:
        assert each.read(20) is not None
    assert memory(host) < before + 16 * MIB
    for each in running:
        each.close()


def test_descriptors_of_a_program_cannot_be_opened_again(host: NmDaemon) -> None:
    """Its pipes belong to the host: otherwise a sliver could read what is meant for the
    launcher, or keep the other end.
    """
    out: list[bytes] = []
    script = "for n in 0 1 2; do cat < /proc/self/fd/$n; echo x > /proc/self/fd/$n; done 2>&1"
    programs.run(host.client, ATTACKER, ["bash", "-c", script], stdout=out.append, user="root")
    text = b"".join(out).decode()
    assert text.count("Permission denied") == 6, text


def test_descendants_that_leave_the_session_hold_no_session_of_the_daemon(host: NmDaemon) -> None:
    script = 'trap "" HUP; for n in 1 2 3; do setsid setsid sleep 1008 & done; echo done'
    with programs.start(host.client, ATTACKER, ["bash", "-c", script]) as running:
        assert output(running) == b"done\n"
        assert running.status == 0
    wait_for(
        lambda: len(processes(host, "1008")) == 3,
        10,
        "the descendants, which continue as after a login",
    )
    programs.run(host.client, ATTACKER, ["pkill", "-9", "sleep"])


def test_stopped_program_is_killed_when_its_caller_disconnects(host: NmDaemon) -> None:
    running = started(host, ATTACKER, "kill -STOP $$", "stopped-word")
    wait_for(
        lambda: (
            "T"
            in pathlib.Path(f"/proc/{processes(host, 'stopped-word')[0]}/stat")
            .read_text()
            .split()[2]
        ),
        20,
    )
    running.close()
    wait_for(lambda: not processes(host, "stopped-word"), 20, "the program to be killed")


def test_busy_sliver_without_free_processes_delays_only_itself(host: NmDaemon) -> None:
    holding = started(host, ATTACKER, "while sleep 1009 & do :; done 2>/dev/null; read line")
    wait_for(
        lambda: host.client.call("GetUsage", ATTACKER)["pids"] > 280, 30, "the sliver to be full"
    )
    begun = time.monotonic()
    assert programs.run(host.client, VICTIM, ["true"]) == 0
    assert time.monotonic() - begun < LIMIT
    with contextlib.suppress(RpcFault, RpcError):  # it may or may not be started
        programs.run(host.client, ATTACKER, ["true"], timeout=20)
    holding.close()
    host.client.call("ReCreate", ATTACKER)
    host.wait(ATTACKER)


def test_hostile_program_for_copies_can_only_break_its_own_copy(host: NmDaemon) -> None:
    bad = b"#!/bin/bash\nwhile :; do echo flood; echo flood >&2; done\n"
    programs.put(host.client, ATTACKER, io.BytesIO(bad), "/usr/local/bin/cat", 0o755)
    try:
        with pytest.raises(TimeoutError):
            programs.get(host.client, ATTACKER, "/etc/hostname", io.BytesIO(), timeout=1)
    finally:
        programs.run(host.client, ATTACKER, ["rm", "/usr/local/bin/cat"])


def test_signal_of_a_program_reaches_no_process_of_the_victim(host: NmDaemon) -> None:
    with started(host, VICTIM, "read line; echo got $line") as victim:
        running = started(host, ATTACKER, 'trap "" HUP; kill -9 -1; while :; do sleep 1; done')
        running.close()
        wait_for(lambda: host.client.call("GetRecord", ATTACKER)["sessions"] == 0, 20)
        victim.write(b"hello\n", 10)
        assert output(victim) == b"got hello\n"
        assert victim.status == 0
