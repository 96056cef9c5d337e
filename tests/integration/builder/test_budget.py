"""What a builder costs at rest, and how soon it reacts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.builder import BuilderBench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

IMAGES = [f"image-{n:02}" for n in range(20)]
PROVIDERS = [f"provider-{n}" for n in range(5)]
#: Seconds of observation.
WINDOW = 10.0
OPERATIONS_PER_MINUTE = 60
CPU_SHARE = 0.01
REACTION = 0.2
SAMPLES = 7


def start(builders: BuilderBench, images: list[str], providers: list[str], **options: Any) -> Any:
    """A builder with the intervals of the program."""
    builder = builders.make(
        builders.config(
            [builders.image(name) for name in images],
            [builders.provider(name, images) for name in providers],
        ),
        **options,
    )
    builder.build_interval = builder.upload_interval = 10
    builder.cleanup_interval = 60
    builder.start()
    return builder


def requests_sent(builder: Any) -> int:
    """What was sent to ZooKeeper on this connection; pings have no number."""
    return int(builder.state.zk.client.client._connection._xid)


@pytest.mark.spec(
    "a builder at rest needs under 60 ZooKeeper operations a minute, under 1 % of a core"
)
def test_builder_at_rest_needs_little_zookeeper_and_cpu(builders: BuilderBench) -> None:
    builder = start(builders, IMAGES, PROVIDERS, num_builders=2)

    def uploaded() -> bool:
        uploads = [u for u in builder.zk.readImages().uploads if u.state == "ready"]
        return len(uploads) == len(IMAGES) * len(PROVIDERS)

    wait_for(uploaded, 120, "all images built and uploaded")
    assert builder.state.publisher.flush(20)
    wait_for(lambda: not builders.zk.readProgress().uploads, what="progress of uploads gone")
    connection = builder.state.zk.client.client._connection
    # Quiet for a moment, whatever the last events were.
    last = [requests_sent(builder), time.monotonic()]

    def quiet() -> bool:
        now = requests_sent(builder)
        if now != last[0]:
            last[:] = [now, time.monotonic()]
        return time.monotonic() - last[1] > 2

    wait_for(quiet, 30, "two seconds without a request")
    sent, cpu, began = requests_sent(builder), time.process_time(), time.monotonic()
    time.sleep(WINDOW)  # the observation itself
    seconds = time.monotonic() - began
    resting, share = (
        (requests_sent(builder) - sent) / seconds * 60,
        (time.process_time() - cpu) / seconds,
    )
    # One whole pass of cleaning a minute.
    sent, cpu = requests_sent(builder), time.process_time()
    builder._janitor._cleanup()
    cleaning, cleaning_cpu = requests_sent(builder) - sent, time.process_time() - cpu
    assert builder.state.zk.client.client._connection is connection
    print(
        f"at rest {resting:.0f} operations a minute and {cleaning} for cleaning; {share:.2%} of a "
        "core and "
        f"{cleaning_cpu * 1000:.0f} ms for cleaning"
    )
    assert resting + cleaning < OPERATIONS_PER_MINUTE
    assert share + cleaning_cpu / 60 < CPU_SHARE


@pytest.mark.spec(
    "a request is being built within 0.2 s, a ready build is being uploaded within 0.2 s"
)
def test_requests_and_builds_are_processed_within_200_ms(builders: BuilderBench) -> None:
    """By the clock of the server; the median, since a loaded machine delays some."""
    start(builders, IMAGES[:1], PROVIDERS[:1])
    image, provider = IMAGES[0], PROVIDERS[0]
    kazoo = builders.zk.kazoo_client
    begins: list[float] = []
    uploads: list[float] = []
    known: list[str] = []
    build = builders.wait_build(image)
    for _ in range(SAMPLES):
        upload = builders.wait_upload(image, provider, build=build.id)
        ready = kazoo.get(f"/nodepool/images/{image}/builds/{build.id}")[1]
        uploads.append((upload.stat.ctime - ready.mtime) / 1000)
        known.append(build.id)
        wait_for(lambda: not builders.zk.hasBuildRequest(image), what="request served")
        asked = time.time()
        builders.zk.submitBuildRequest(image)
        build = builders.wait_build(image, besides=tuple(known))
        begins.append(
            kazoo.get(f"/nodepool/images/{image}/builds/{build.id}")[1].ctime / 1000 - asked
        )
    print(
        f"request to build: median {statistics.median(begins) * 1000:.0f} ms, worst "
        f"{max(begins) * 1000:.0f} ms; "
        f"build to upload: median {statistics.median(uploads) * 1000:.0f} ms, worst "
        f"{max(uploads) * 1000:.0f} ms"
    )
    assert statistics.median(begins) < REACTION
    assert statistics.median(uploads) < REACTION
