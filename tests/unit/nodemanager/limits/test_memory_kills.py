"""Lines of the kernel's log about processes that were killed for memory."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable

import pytest

from nodepool.nodemanager.limits.memory_kills import Kill, MemoryKills
from tests.conftest import wait_for


def line(sequence: int, seconds: float, program: str = "cc1plus", priority: int = 3) -> bytes:
    """A record as /dev/kmsg returns it."""
    text = (
        f"{priority},{sequence},{int(seconds * 1e6)},-;Memory cgroup out of memory: Killed process "
        f"4711 ({program}) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB, UID:2065536 "
        "pgtables:4kB oom_score_adj:0\n"
    )
    return text.encode()


class Log:
    """A pipe in place of the log: a record for each write that is read before the next."""

    def __init__(self, tmp_path: pathlib.Path, killed: Callable[[Kill], object]) -> None:
        path = tmp_path / "kmsg"
        os.mkfifo(path)
        self.kills = MemoryKills(killed, str(path))
        self._file = os.open(path, os.O_RDWR)

    def write(self, data: bytes) -> None:
        os.write(self._file, data)

    def close(self) -> None:
        self.kills.stop()
        os.close(self._file)


def test_kills_of_the_kernel_are_reported_with_their_times(tmp_path: pathlib.Path) -> None:
    found: list[Kill] = []
    log = Log(tmp_path, found.append)
    try:
        # Of before the start: half of the time since the boot ago, by the clock of the log.
        age = time.clock_gettime(time.CLOCK_MONOTONIC) / 2
        log.write(line(1, age))
        log.kills.start()
        wait_for(lambda: len(found) == 1)
        assert abs(time.time() - age - found[0].when) < 60 and not found[0].is_new
        # The clock of the log is far behind: a new line is of now all the same.
        wait_for(lambda: log.kills._is_new)
        log.write(line(2, 1.0, "x) total-vm:1 (y"))
        wait_for(lambda: len(found) == 2)
        assert abs(time.time() - found[1].when) < 60 and found[1].is_new
        kill = found[1]
        assert (kill.sequence, kill.uid, kill.pid) == (2, 2065536, 4711)
        assert kill.program == "x) total-vm:1 (y"
    finally:
        log.close()


@pytest.mark.parametrize(
    "record",
    [
        line(1, 1.0, priority=11),  # of a program: another facility
        b"6,1,1,-;something else\n",
        b"\xff\xfe\n",
        line(1, 1.0).replace(b"UID:", b"XID:"),
    ],
)
def test_other_lines_are_ignored(tmp_path: pathlib.Path, record: bytes) -> None:
    found: list[Kill] = []
    log = Log(tmp_path, found.append)
    try:
        log.write(record)
        log.kills.start()
        wait_for(lambda: log.kills._is_new)
        log.write(line(2, 1.0))
        wait_for(lambda: found)
        assert [kill.sequence for kill in found] == [2]
    finally:
        log.close()


def test_error_of_a_listener_concerns_one_kill(tmp_path: pathlib.Path) -> None:
    found: list[Kill] = []

    def killed(kill: Kill) -> None:
        found.append(kill)
        raise RuntimeError("database is locked")

    log = Log(tmp_path, killed)
    try:
        log.kills.start()
        log.write(line(1, 1.0))
        wait_for(lambda: len(found) == 1)
        log.write(line(2, 1.0))
        wait_for(lambda: len(found) == 2)
    finally:
        log.close()


def test_log_that_cannot_be_read_is_given_up(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, lambda kill: None)
    read = os.read
    failures: list[int] = []

    def fail(descriptor: int, length: int) -> bytes:
        if descriptor == log.kills._log:
            failures.append(descriptor)
            raise OSError(5, "Input/output error")
        return read(descriptor, length)

    try:
        monkeypatch.setattr(os, "read", fail)
        log.kills.start()
        log.write(b"x")
        wait_for(lambda: "not named any more" in caplog.text)
        log.write(b"y")
        log.kills._loop.post(lambda: None)
        assert len(failures) == 1
    finally:
        monkeypatch.undo()
        log.close()


def test_without_the_log_kills_are_not_named(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    kills = MemoryKills(lambda kill: None, str(tmp_path / "missing"))
    kills.start()
    kills.stop()
    assert "cannot be named" in caplog.text
