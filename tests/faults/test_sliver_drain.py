"""Operators drain a host with real slivers, whose jobs continue, while launchers are killed."""

from __future__ import annotations

import pathlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import Bench
from tests.support.faults.slivers import LABEL, SliverBench
from tests.support.nodemanager.scene import make_daemon

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(300)]

#: Slivers with jobs, idle ones, and how many jobs end together.
JOBS, IDLE, TOGETHER = 100, 10, 10


@pytest.fixture
def slivers(bench: Bench, tmp_path: pathlib.Path) -> Iterator[SliverBench]:
    for nm in make_daemon(tmp_path, overcommit={"disk": 100.0}):
        yield SliverBench(bench, nm)
        for launcher in bench.launchers:
            launcher.kill()


def ended(process: subprocess.Popen[str]) -> tuple[float, str, str]:
    """Wait for the end of a command; return when that was, and what it has printed."""
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, (out, err)
    return time.monotonic(), out, err


def test_drain_of_a_host_with_100_slivers_kills_no_job(
    slivers: SliverBench, capsys: pytest.CaptureFixture[str]
) -> None:
    slivers.start(slivers.config(**{"min-ready": IDLE}))
    jobs = slivers.jobs(JOBS)
    wait_for(lambda: len(slivers.ready()) == IDLE, 60, "the idle slivers")
    waiting = slivers.command("drain", "host", "h0", "--wait", "--reason", "new disks")
    busy = {job.sliver for job in jobs}
    wait_for(lambda: slivers.slivers() == busy, 60, "the end of the idle slivers")
    request = slivers.zuul.submit(LABEL)
    while jobs:
        assert slivers.slivers() == {job.sliver for job in jobs}
        slivers.end(*jobs[:TOGETHER])
        jobs, gone = jobs[TOGETHER:], jobs[:TOGETHER]
        for job in gone:
            slivers.nm.wait(job.sliver, "gone")
        assert not jobs or waiting.poll() is None
    last = time.monotonic()
    end, out, err = ended(waiting)
    with capsys.disabled():
        print(f"{JOBS} jobs; --wait ended {end - last:.3f} s after the last sliver")
    assert end - last < limit(1)
    assert "host h0 is drained: new disks" in out and "host h0 has no nodes left" in out
    assert f"{TOGETHER} in-use" in err
    assert slivers.zuul.states([request])["requested"] == 1
    assert "host h0 is drained: new disks" in slivers.run("explain", "request", request)
    slivers.run("undrain", "host", "h0")
    slivers.zuul.wait_fulfilled([request], timeout=limit(60))


def test_launcher_killed_during_a_drain_loses_no_job(slivers: SliverBench) -> None:
    config = slivers.config(**{"min-ready": 2})
    first = slivers.start(config)
    jobs = slivers.jobs(6)
    wait_for(lambda: len(slivers.ready()) == 2, 60, "the idle slivers")
    waiting = slivers.command("drain", "host", "h0", "--wait")
    wait_for(lambda: slivers.slivers() == {job.sliver for job in jobs}, 60, "the idle slivers")
    slivers.end(*jobs[:3])
    first.kill()
    slivers.start(config)
    for job in jobs[:3]:
        slivers.nm.wait(job.sliver, "gone", 60)
    assert slivers.slivers() == {job.sliver for job in jobs[3:]} and waiting.poll() is None
    slivers.end(*jobs[3:])
    assert "host h0 has no nodes left" in ended(waiting)[1]
    assert slivers.slivers() == set()


def test_second_operator_sees_the_first_and_both_wait(slivers: SliverBench) -> None:
    slivers.start(slivers.config())
    jobs = slivers.jobs(2)
    first = slivers.command("drain", "host", "h0", "--wait", "--reason", "new disks")
    wait_for(lambda: "new disks" in slivers.run("drain", "list"), 30, "the first drain")
    second = slivers.command("drain", "host", "h0", "--wait", "--reason", "new kernel")
    wait_for(lambda: "new kernel" in slivers.run("drain", "list"), 30, "the second drain")
    slivers.end(*jobs)
    assert "has no nodes left" in ended(first)[1]
    _end, out, err = ended(second)
    assert "has no nodes left" in out and "host h0 was already drained by" in err
    assert "new disks; this is replaced" in err


def test_undrain_by_another_operator_ends_the_wait_with_an_error(slivers: SliverBench) -> None:
    slivers.start(slivers.config())
    jobs = slivers.jobs(1)
    waiting = slivers.command("drain", "host", "h0", "--wait")
    wait_for(lambda: "h0" in slivers.run("drain", "list"), 30, "the drain")
    slivers.run("undrain", "host", "h0")
    out, err = waiting.communicate(timeout=limit(30))
    assert waiting.returncode == 1, (out, err)
    assert "the drain of host h0 has ended while nodes were left: 1 in-use" in err
    slivers.end(*jobs)


def test_drain_of_an_unknown_host_names_the_known_ones(slivers: SliverBench) -> None:
    slivers.start(slivers.config())
    said = slivers.run("drain", "host", "h1", status=1)
    assert "no running launcher has host h1; known: h0" in said
    assert slivers.run("drain", "list", "--format", "csv").count("\n") == 1


@pytest.mark.parametrize("kind", ["host", "label"])
def test_what_is_removed_from_the_configuration_while_it_is_drained_loses_no_job(
    slivers: SliverBench, kind: str
) -> None:
    """The sliver of a removed host ends with its lease."""
    name = {"host": "h0", "label": LABEL}[kind]
    launcher = slivers.start(slivers.config(**{"min-ready": 1}))
    jobs = slivers.jobs(1)
    wait_for(lambda: len(slivers.ready()) == 1, 60, "the idle sliver")
    waiting = slivers.command("drain", kind, name, "--wait")
    wait_for(lambda: slivers.slivers() == {job.sliver for job in jobs}, 60, "no idle sliver")

    def remove(content: dict[str, Any]) -> None:
        (provider,) = content["providers"]
        if kind == "host":
            provider["hosts"] = [{"name": "h1", "url": "unix:/none"}]
        else:
            content["labels"] = provider["pools"][0]["labels"] = []

    launcher.rewrite(remove)
    wait_for(lambda: "The configuration has changed" in launcher.text(), 30, "the new file")
    assert waiting.poll() is None
    assert f"{kind} {name} is drained" in slivers.run("problem-list", "--format", "json")
    slivers.end(*jobs)
    assert f"{kind} {name} has no nodes left" in ended(waiting)[1]
    if kind == "label":
        assert slivers.slivers() == set()
    else:
        said = f"sliver {jobs[0].sliver} ends with its lease"
        wait_for(lambda: said in launcher.text(), 30, "the reason in the log")
    assert f"{kind} {name} is used again" in slivers.run("undrain", kind, name)


def test_no_sliver_appears_after_the_wait_although_requests_arrive_all_the_time(
    slivers: SliverBench,
) -> None:
    launcher = slivers.start(slivers.config())
    requests = [slivers.zuul.submit(LABEL) for _ in range(60)]
    slivers.zuul.wait_states(requests, lambda states: states["fulfilled"] >= 5, limit(60))
    waiting = slivers.command("drain", "host", "h0", "--wait")
    while waiting.poll() is None:
        requests.append(slivers.zuul.submit(LABEL))
        for request, record in slivers.zuul.read("requests", requests).items():
            if record["state"] == "fulfilled":
                slivers.zuul.use([request])
                requests.remove(request)
        assert len(requests) < 2000
    created = slivers.nm.log.count(": creating")
    assert "host h0 has no nodes left" in ended(waiting)[1] and slivers.slivers() == set()
    states = slivers.zuul.states(requests)
    assert states["requested"] + states["pending"] == len(requests), states
    wait_for(
        lambda: "host h0 is drained" in slivers.run("explain", "request", requests[-1]),
        30,
        "the reason",
    )
    assert slivers.nm.log.count(": creating") == created and launcher.alive()
