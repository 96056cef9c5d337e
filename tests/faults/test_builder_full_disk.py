"""File systems without space: for images, for build logs, before the start (BLD-7, BLD-8,
BLD-20).
"""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from nodepool.zk.records import FAILED
from tests.conftest import wait_for
from tests.support.faults.builder import DEADLINE, BuilderBench, bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

__all__ = ["bench"]


def small(bench: BuilderBench, name: str, options: str) -> pathlib.Path:
    """A file system in memory; the bench unmounts it."""
    path = bench.tmp / name
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "small", str(path)], check=True, timeout=20
    )
    bench.mounted.append(path)
    return path


@pytest.mark.spec(
    "BLD-7: a build that fills the file system fails with the reason; other images go on"
)
def test_images_dir_fills_up(bench: BuilderBench) -> None:
    images_dir = small(bench, "small-images", "size=4m")
    images = [
        bench.image("big", env={"CREATE_FILL": "1", "CREATE_MOUNTS": "1"}),
        bench.image("little"),
    ]
    bench.config(images=images, images_dir=images_dir, top={"build-min-free": 1})
    bench.start()
    big = bench.wait_build("big", FAILED)
    progress = bench.wait_failed(big.id)
    assert progress.reason is not None
    assert "No space left on device" in progress.reason and str(images_dir) in progress.reason, (
        progress.reason
    )
    bench.wait_upload("little")
    assert bench.builds("big") == []
    # Space again: it is built.
    bench.config(
        images=[bench.image("big"), images[1]], images_dir=images_dir, top={"build-min-free": 1}
    )
    bench.wait_served("big", "little")


@pytest.mark.spec("BLD-20: disk-space check before a build")
def test_not_enough_space_before_the_start(bench: BuilderBench) -> None:
    images_dir = small(bench, "small-images", "size=4m")
    bench.config(images_dir=images_dir, top={"build-min-free": 100})
    bench.start()
    build = bench.wait_build(state=FAILED)
    reason = bench.wait_failed(build.id).reason
    assert reason is not None
    assert str(images_dir) in reason and "MiB free" in reason and "needs about 100 MiB" in reason
    assert bench.runs() == []
    bench.config(images_dir=images_dir, top={"build-min-free": 1})
    bench.wait_served()


@pytest.mark.spec(
    "BLD-8: a log that cannot be made fails the build with a reason that names the place"
)
def test_log_cannot_be_made(bench: BuilderBench) -> None:
    logs = small(bench, "small-logs", "size=64k,nr_inodes=2")
    (logs / "other").touch()
    bench.config(top={"build-log-dir": str(logs)})
    bench.start()
    build = bench.wait_build(state=FAILED)
    reason = bench.wait_failed(build.id).reason
    assert reason is not None
    assert str(logs) in reason and "No space left on device" in reason, reason
    assert bench.runs() == [] and bench.processes() == []
    (logs / "other").unlink()
    bench.wait_served()


@pytest.mark.spec("BLD-8: a log that becomes full does not stop the build")
def test_log_becomes_full(bench: BuilderBench) -> None:
    logs = small(bench, "small-logs", "size=4k")
    (logs / "other").write_text("x" * 4096)
    bench.config(top={"build-log-dir": str(logs)})
    builder = bench.start()
    bench.wait_served()
    (build,) = bench.builds()
    wait_for(
        lambda: f"Cannot write build log {logs}/i0-{build.id}.log" in builder.text(),
        DEADLINE,
        "a message naming the log",
    )
