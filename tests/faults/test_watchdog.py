"""A daemon one of whose threads ends by an error that nobody foresaw ends itself, for its
supervisor to start it again.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.conftest import wait_for
from tests.support.faults.builder import BuilderBench
from tests.support.faults.builder import bench as builder_bench
from tests.support.faults.launcher import Bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
__all__ = ["builder_bench"]

CONNECTION = "ThreadPoolExecutor zookeeper connection"


def end(order: pathlib.Path, name: str) -> None:
    """Raise an exception in that thread."""
    new = order.with_suffix(".new")
    new.write_text(name)
    new.rename(order)
    wait_for(lambda: not order.exists(), what="the exception is raised")


@pytest.mark.spec(
    "issue 11: the process ends with status 1 within seconds, and the log says which thread has "
    "ended and why"
)
@pytest.mark.parametrize("name", ["PoolWorker.p0-main", CONNECTION])
def test_launcher_ends_when_a_thread_has_ended(
    bench: Bench, tmp_path: pathlib.Path, name: str
) -> None:
    order = tmp_path / "end"
    launcher = bench.start(NODEPOOL_END_THREAD=str(order))
    bench.zuul.wait_fulfilled([bench.zuul.submit("l0")])
    end(order, name)
    waiting = bench.zuul.submit("l0")  # makes it run
    assert launcher.process.wait(15) == 1
    assert "has ended (Unforeseen: )" in launcher.text()
    assert (
        "Stopping with status 1, so that the supervisor restarts the daemon: thread "
        in launcher.text()
    )
    # As its supervisor does.
    bench.start()
    bench.zuul.wait_fulfilled([waiting])


@pytest.mark.parametrize("name", ["BuildWorker.0", "UploadWorker.0", "CleanupWorker.0", CONNECTION])
def test_builder_ends_when_a_thread_has_ended(
    builder_bench: BuilderBench, tmp_path: pathlib.Path, name: str
) -> None:
    order = tmp_path / "end"
    builder = builder_bench.start(NODEPOOL_END_THREAD=str(order))
    builder_bench.wait_build()
    end(order, name)
    builder.end(25)
    assert builder.process.returncode == 1
    assert "has ended (Unforeseen: )" in builder.text()
