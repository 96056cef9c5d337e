"""Signals during a build: what ends immediately, what is finished, what is left (BLD-2)."""

from __future__ import annotations

import signal
import time

import pytest

from nodepool.zk.records import BUILDING, FAILED
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.builder import BuilderBench, BuilderProcess, bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

__all__ = ["bench"]

LIMIT = 20.0


def begin(bench: BuilderBench, *options: str, **env: str) -> tuple[BuilderProcess, str]:
    """A builder with a build that waits for us; the build's id."""
    bench.config(images=[bench.image(env=env)])
    bench.hold("before")
    builder = bench.start("b0", *options, plain=True)
    bench.wait_begun()
    build = bench.wait_build(state=BUILDING)
    return builder, build.id


def log_of(bench: BuilderBench, build_id: str) -> str:
    return (bench.tmp / "logs-b0" / f"i0-{build_id}.log").read_text()


def check_failed(bench: BuilderBench, build_id: str) -> None:
    """The state that an interrupted build leaves when the builder had the time to clear up."""
    (record,) = bench.builds(state=None)
    assert record.id == build_id and record.state == FAILED and record.formats == []
    progress = bench.progress(build_id)
    assert progress is not None and progress.state == FAILED
    assert progress.reason == "the builder is stopping" and progress.ended
    assert log_of(bench, build_id).splitlines()[-1] == "Build terminated: the builder is stopping"
    assert bench.processes() == [] and bench.mounts() == [] and list(bench.scratch.iterdir()) == []


@pytest.mark.spec(
    "BLD-2: SIGINT/SIGTERM end the child's whole process group, mark the build failed, exit in "
    "seconds"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_build_ends_with_the_builder(bench: BuilderBench, number: signal.Signals) -> None:
    builder, build_id = begin(bench, CREATE_MOUNTS="1")
    assert len(bench.processes()) >= 4 and len(bench.mounts()) == 1
    took = builder.stop(number, LIMIT)
    assert builder.process.returncode == 0
    assert took < limit(10), f"it took {took:.1f} s"
    check_failed(bench, build_id)
    # The next start makes the image, and nothing is left of the failed build.
    (bench.hold_dir / "i0.before").unlink()
    bench.start("b0")
    bench.wait_served()
    assert [b.id for b in bench.builds(state=None)] != [build_id] and len(bench.builds()) == 1
    assert len(bench.runs()) == 1, "the command that was stopped never came to writing"


@pytest.mark.spec("BLD-2: TERM, then KILL after a grace period")
def test_command_ignores_term(bench: BuilderBench) -> None:
    builder, build_id = begin(bench, CREATE_DEAF="1")
    builder.stop(signal.SIGTERM, LIMIT)
    assert builder.process.returncode == 0
    check_failed(bench, build_id)


@pytest.mark.spec("BLD-2: keep a way to ask for 'finish the current build, then exit'")
@pytest.mark.parametrize(
    ("options", "number"),
    [((), signal.SIGUSR1), (("--finish-builds",), signal.SIGTERM)],
    ids=["SIGUSR1", "--finish-builds"],
)
def test_build_is_finished(
    bench: BuilderBench, options: tuple[str, ...], number: signal.Signals
) -> None:
    builder, build_id = begin(bench, *options)
    builder.send(number)
    wait_for(lambda: "when running work is finished" in builder.text(), 10, "the message")
    time.sleep(0.5)  # nothing is to happen
    assert builder.alive() and [b.state for b in bench.builds(state=None)] == [BUILDING]
    (bench.hold_dir / "i0.before").unlink()
    builder.end(LIMIT)
    assert builder.process.returncode == 0
    (build,) = bench.builds()
    assert build.id == build_id
    assert log_of(bench, build_id).endswith("Exit code: 0\n")
    bench.start("b0")
    bench.wait_served()
    assert [b.id for b in bench.builds()] == [build_id]


@pytest.mark.spec("CLI-2: a second signal ends the build that is waited for")
@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_second_signal_ends_the_build_that_is_waited_for(
    bench: BuilderBench, second: signal.Signals
) -> None:
    builder, build_id = begin(bench)
    builder.send(signal.SIGUSR1)
    wait_for(lambda: "when running work is finished" in builder.text(), 10, "the message")
    took = builder.stop(second, LIMIT)
    assert builder.process.returncode == 0
    assert took < limit(10), f"it took {took:.1f} s"
    check_failed(bench, build_id)


@pytest.mark.spec("BLD-2: upload workers are deliberately not waited for")
def test_stop_during_an_upload(bench: BuilderBench) -> None:
    bench.config()
    bench.cloud.do("upload-blocks")
    builder = bench.start("b0", plain=True)
    wait_for(bench.cloud.images, 30, "an image in the cloud")
    assert builder.stop(timeout=LIMIT) < 10
    assert builder.process.returncode == 0
    bench.cloud.stop_doing("upload-blocks")
    bench.start("b0")
    bench.wait_served()
    assert len(bench.runs()) == 1 and len(bench.cloud.calls("upload")) == 2


@pytest.mark.spec("BLD-2: start() and immediate stop works")
def test_stop_while_starting(bench: BuilderBench) -> None:
    bench.config()
    builder = bench.start("b0", plain=True, wait=False)
    wait_for(
        lambda: (bench.tmp / "images-b0" / "builder_id.txt").exists() or not builder.alive(),
        30,
        "the start",
    )
    assert builder.stop(timeout=LIMIT) < 10
    assert builder.process.returncode == 0
    assert bench.processes() == []
