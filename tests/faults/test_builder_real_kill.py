"""Real diskimage-builder builds, stopped and killed at bad moments (minutes)."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
import yaml

from nodepool.builder.building.worker import INTERRUPTED
from nodepool.zk.records import BUILDING, FAILED
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.faults.builder import DEADLINE, BuilderBench, BuilderProcess, bench

sys.path.insert(0, str(REPOSITORY / "tools"))
from demo import image as demo_image

MINUTES = 60
pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(15 * MINUTES),
]

__all__ = ["bench"]


@pytest.fixture
def configure(bench: BuilderBench) -> Any:
    """Writes the configuration of a builder with one Debian image and no provider."""
    problem = demo_image.obstacle()
    assert problem is None, problem
    elements = bench.tmp / "elements"
    elements.mkdir()
    # The image of the sample configuration that builds on every kernel.
    sample = {
        i["name"]: i
        for i in yaml.safe_load((REPOSITORY / "etc" / "nodepool.yaml").read_text())["diskimages"]
    }
    block_device = sample["debian-flat"]["env-vars"]["DIB_BLOCK_DEVICE_CONFIG"]

    def write(fmt: str, **options: Any) -> None:
        bench.config(
            providers=[],
            top={"elements-dir": str(elements)},
            images=[
                {
                    "name": "debian",
                    "elements": ["debian-minimal"],
                    "release": "bookworm",
                    "formats": [fmt],
                    **options,
                    "env-vars": {
                        "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "0",
                        "DIB_IMAGE_CACHE": str(bench.tmp / "cache"),
                        "DIB_BLOCK_DEVICE_CONFIG": block_device,
                        **demo_image.apt_mirrors(demo_image.read_apt_sources()),
                    },
                }
            ],
        )

    return write


def wait_phase(
    bench: BuilderBench, builder: BuilderProcess, phase: str, besides: tuple[str, ...] = ()
) -> str:
    """Until a build is in this phase; its id."""

    def reached() -> str:
        assert builder.alive(), builder.text()[-3000:]
        for build in bench.builds("debian", state=None):
            progress = bench.progress(build.id)
            if build.id not in besides and progress is not None:
                assert progress.state == BUILDING, f"{progress.reason}\n{progress.tail}"
                if progress.phase == phase:
                    return str(build.id)
        return ""

    return str(wait_for(reached, 5 * MINUTES, f"phase {phase}"))


def leader(bench: BuilderBench) -> int:
    """The process of disk-image-create."""
    (entry,) = (bench.tmp / "images-b0" / ".builds").glob("*.json")
    return int(json.loads(entry.read_text())["pid"])


@pytest.mark.exhaustive
@pytest.mark.spec(
    "BLD-2: a real build ends in seconds with its builder, without mounts, processes, trees"
)
def test_stopped_in_the_root_phase(bench: BuilderBench, configure: Any) -> None:
    configure("tar")
    builder = bench.start(plain=True)
    build_id = wait_phase(bench, builder, "root")
    wait_for(
        lambda: any("debootstrap" in p for p in bench.processes()), MINUTES, "debootstrap at work"
    )
    wait_for(bench.mounts, 2 * MINUTES, "a mount of debootstrap")
    took = builder.stop(timeout=20)
    print(f"stopped within {took:.1f} s")
    assert builder.process.returncode == 0
    assert bench.processes() == [] and bench.mounts() == [] and bench.loop_devices() == []
    assert list(bench.scratch.iterdir()) == []
    (record,) = bench.builds("debian", state=None)
    assert record.id == build_id and record.state == FAILED
    progress = bench.progress(build_id)
    assert (
        progress is not None
        and progress.state == FAILED
        and progress.reason == "the builder is stopping"
    )
    assert (bench.tmp / "logs-b0" / f"debian-{build_id}.log").read_text().splitlines()[-1] == (
        "Build terminated: the builder is stopping"
    )


@pytest.mark.exhaustive
@pytest.mark.spec(
    "BLD-2: mounts, loop device, processes and trees of a killed real build go with the next start"
)
def test_killed_with_mounts_and_loop_device(bench: BuilderBench, configure: Any) -> None:
    configure("raw")
    builder = bench.start(plain=True)
    first = wait_phase(bench, builder, "pre-install")
    pid = leader(bench)
    assert bench.mounts()
    builder.kill()
    os.kill(pid, signal.SIGKILL)
    assert bench.mounts(), "there is something to clear up"

    # The next one clears up, and comes further.
    builder = bench.start(plain=True)
    second = wait_phase(bench, builder, "root", besides=(first,))
    assert bench.wait_failed(first).reason == INTERRUPTED
    assert len(list(bench.scratch.iterdir())) == 1, "the tree of the first build is gone"
    wait_for(lambda: bench.loop_devices() or not builder.alive(), 8 * MINUTES, "a loop device")
    builder.kill()
    assert bench.loop_devices() and bench.processes()

    configure("raw", pause=True)
    builder = bench.start()
    assert bench.wait_failed(second).reason == INTERRUPTED
    bench.wait_clean(2 * MINUTES)
    assert list((bench.tmp / "images-b0").glob("debian*")) == []
    assert builder.stop() < DEADLINE
