"""SIGKILL of a builder at each step of a build and of an upload, then a new start (BLD-2, BLD-7,
BLD-9, BLD-10).
"""

from __future__ import annotations

import signal
import time

import pytest

from nodepool.builder.building.worker import INTERRUPTED
from nodepool.zk.records import BUILDING, READY
from tests.conftest import wait_for
from tests.support.faults.builder import DEADLINE, BuilderBench, bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

__all__ = ["bench"]


def revived(bench: BuilderBench, crash_at: str) -> str:
    """A builder that dies at this point; a new one, which puts everything right; the id of the
    build that was hit.
    """
    builder = bench.start(crash_at=crash_at, wait=False)
    builder.end(DEADLINE)
    assert builder.process.returncode == -signal.SIGKILL
    ids = [b.id for b in bench.builds(state=None)]
    bench.start()
    bench.wait_served()
    assert len(bench.builds()) == 1 and len(bench.uploads()) == 1 and len(bench.cloud.images()) == 1
    return ids[0] if ids else ""


@pytest.mark.spec(
    "BLD-2: a killed builder's build is failed, its files, processes and trees go, the image is "
    "built again"
)
@pytest.mark.parametrize(
    "crash_at",
    [
        "build-record-before",
        "build-record-after",
        "process-before",
        "process-after",
        "result-before",
    ],
)
def test_during_a_build(bench: BuilderBench, crash_at: str) -> None:
    bench.config(images=[bench.image(env={"CREATE_MOUNTS": "1"})])
    hit = revived(bench, crash_at)
    assert hit or crash_at == "build-record-before"
    assert hit not in [b.id for b in bench.builds(state=None)]
    if hit:
        progress = bench.wait_failed(hit)
        assert progress.reason and "builder" in progress.reason and progress.ended


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.spec("BLD-10.C: files of abandoned builds go on the host that has them")
def test_while_the_command_runs(bench: BuilderBench, where: str) -> None:
    bench.config(images=[bench.image(env={"CREATE_MOUNTS": "1"})])
    hold = bench.hold(where)
    builder = bench.start()
    bench.wait_begun("begun" if where == "before" else "made")
    interrupted = bench.wait_build(state=BUILDING)
    wait_for(lambda: bench.progress(interrupted.id), DEADLINE, "progress of the build")
    builder.kill()
    assert bench.processes(), "the command outlives its builder"
    assert any(p.name.startswith("i0-") for p in builder.images_dir.iterdir())
    hold.unlink()
    bench.start()
    bench.wait_served()
    (build,) = bench.builds()
    assert build.id != interrupted.id
    progress = bench.wait_failed(interrupted.id)
    assert progress.reason == INTERRUPTED and progress.ended and progress.started
    assert len(bench.uploads()) == len(bench.cloud.images()) == 1


@pytest.mark.spec("BLD-7: a result that was stored is kept")
def test_after_the_result(bench: BuilderBench) -> None:
    hit = revived(bench, "result-after")
    assert [b.id for b in bench.builds(state=None)] == [hit]
    assert len(bench.runs()) == 1
    wait_for(
        lambda: (p := bench.progress(hit)) is not None and p.state == READY,
        DEADLINE,
        "progress says ready",
    )


@pytest.mark.spec("BLD-6: a manual request outlives a killed builder")
def test_manual_request_survives(bench: BuilderBench) -> None:
    builder = bench.start()
    bench.wait_served()
    first = bench.builds()[0].id
    hold = bench.hold("before")
    (bench.hold_dir / "i0.begun").unlink()
    bench.zk.submitBuildRequest("i0")
    bench.wait_begun()
    builder.kill()
    hold.unlink()
    bench.start()
    bench.wait_build(besides=(first,))
    wait_for(lambda: not bench.zk.hasBuildRequest("i0"), DEADLINE, "request served")
    wait_for(lambda: len(bench.uploads()) == 2, DEADLINE, "both builds uploaded")
    bench.wait_clean()
    assert len(bench.builds()) == 2


@pytest.mark.spec("BLD-10.B: an upload not in progress is dropped, its image too; it is made again")
@pytest.mark.parametrize(
    "crash_at",
    [
        "upload-record-before",
        "upload-record-after",
        "note-before",
        "note-after",
        "cloud-before",
        "cloud-after",
        "upload-result-before",
        "upload-result-after",
    ],
)
def test_during_an_upload(bench: BuilderBench, crash_at: str) -> None:
    revived(bench, crash_at)
    assert len(bench.runs()) == 1, "the build is not made again"
    uploads = {"cloud-after": 2, "upload-result-before": 2}
    assert len(bench.cloud.calls("upload")) == uploads.get(crash_at, 1)


@pytest.mark.spec(
    "BLD-9: an image that came into being in the cloud just before the kill does not stay"
)
def test_killed_while_the_cloud_works(bench: BuilderBench) -> None:
    bench.config()
    bench.cloud.do("upload-blocks")
    builder = bench.start()
    wait_for(bench.cloud.images, DEADLINE, "an image in the cloud")
    builder.kill()
    (orphan,) = bench.cloud.images()
    bench.cloud.stop_doing("upload-blocks")
    bench.cloud.do("list-fails", 1)  # the cloud has its troubles, too
    bench.start()
    bench.wait_served()
    assert [i["id"] for i in bench.cloud.images()] != [orphan["id"]]
    assert len(bench.cloud.images()) == 1


@pytest.mark.spec(
    "BLD-14: another builder drops a killed builder's upload; its image goes when that is back"
)
def test_other_builder_drops_the_record(bench: BuilderBench) -> None:
    bench.config("b0")
    bench.config("b1")
    bench.cloud.do("upload-blocks")
    builder = bench.start("b0")
    wait_for(bench.cloud.images, DEADLINE, "an image in the cloud")
    (orphan,) = bench.cloud.images()
    bench.start("b1")
    builder.kill()
    wait_for(lambda: not bench.uploads(state=None), DEADLINE, "record dropped")
    bench.cloud.stop_doing("upload-blocks")
    bench.start("b0")
    bench.wait_served()
    assert [i["id"] for i in bench.cloud.images()] != [orphan["id"]]
    assert len(bench.runs()) == len(bench.builds()) == 1


@pytest.mark.spec("BLD-10.D: deletion is repeated until it succeeds, over the end of the builder")
@pytest.mark.parametrize("crash_at", ["mark-before", "mark-after", "delete-before", "delete-after"])
def test_during_a_deletion(bench: BuilderBench, crash_at: str) -> None:
    builder = bench.start()
    bench.wait_served()
    builder.kill()
    # The provider takes the image no more.
    bench.config(providers=[bench.cloud.provider([])])
    crashed = bench.start(crash_at=crash_at, wait=False)
    crashed.end(DEADLINE)
    bench.start()
    wait_for(
        lambda: not bench.cloud.images() and not bench.uploads(state=None), DEADLINE, "upload gone"
    )
    bench.wait_clean()
    assert len(bench.builds()) == 1


@pytest.mark.spec(
    "BLD-14: record deleted while the builder is down: it deletes the files when it is back"
)
def test_record_deleted_meanwhile(bench: BuilderBench) -> None:
    images = [bench.image(formats=["qcow2"])]
    bench.config(images=images)
    builder = bench.start()
    bench.wait_served()
    builder.kill()
    (build,) = bench.builds()
    bench.config("b1", providers=[bench.cloud.provider([])], images=images)
    # Another builder, which cleans records and cloud, but has not these files.
    bench.start("b1")
    build.state = "deleting"
    bench.zk.storeBuild("i0", build, build.id)
    wait_for(lambda: build.id not in bench.zk.getBuildIds("i0"), DEADLINE, "record gone")
    wait_for(lambda: not bench.cloud.images(), DEADLINE, "image gone")
    assert list(builder.images_dir.glob(f"i0-{build.id}*"))
    bench.config("b0", providers=[bench.cloud.provider([])], images=images)
    bench.start("b0")
    wait_for(lambda: not list(builder.images_dir.glob(f"i0-{build.id}*")), DEADLINE, "files gone")
    wait_for(bench.builds, DEADLINE, "a new build")
    bench.wait_clean()


@pytest.mark.spec(
    "BLD-2: a builder killed again and again while it cleans up leaves nothing in the end"
)
def test_killed_again_and_again(bench: BuilderBench) -> None:
    bench.config(images=[bench.image(env={"CREATE_MOUNTS": "1"})])
    for pause in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2):
        builder = bench.start(wait=False)
        time.sleep(pause)  # wherever it may be by then
        builder.kill()
    bench.start()
    bench.wait_served()
    assert len(bench.builds()) == len(bench.uploads()) == 1
