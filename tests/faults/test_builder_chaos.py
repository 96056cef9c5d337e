"""Two builders that are killed at random while they build and upload three images."""

from __future__ import annotations

import random
import time

import pytest

from tests.conftest import wait_for
from tests.support.faults.builder import DEADLINE, BuilderBench, bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

__all__ = ["bench"]

SECONDS = 20.0
IMAGES = ["i0", "i1", "i2"]
NAMES = ["b0", "b1"]


@pytest.mark.spec(
    "BLD-14: each build and each upload has one worker; killed builders lose and leave nothing"
)
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_builders_lose_nothing_and_leave_nothing(bench: BuilderBench, seed: int) -> None:
    chance = random.Random(seed)
    images = [bench.image(i, env={"CREATE_MOUNTS": "1"}) for i in IMAGES]
    running = {}
    for name in NAMES:
        bench.config(name, images=images)
        running[name] = bench.start(name, "--build-workers", "2", wait=False)
    deadline = time.monotonic() + SECONDS
    kills = 0
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.2, 3.0))  # the builder gets so far as it gets
        if chance.random() < 0.5:
            bench.zk.submitBuildRequest(chance.choice(IMAGES))
        name = chance.choice(NAMES)
        running[name].kill()
        kills += 1
        running[name] = bench.start(name, "--build-workers", "2", wait=False)
    print(
        f"{kills} kills, {len(bench.runs())} finished commands, {len(bench.cloud.calls('upload'))} "
        "uploads"
    )
    wait_for(
        lambda: not any(bench.zk.hasBuildRequest(i) for i in bench.zk.getImageNames()),
        DEADLINE,
        "requests served",
    )
    bench.wait_served(*IMAGES)
    for image in IMAGES:
        wait_for(lambda image=image: settled(bench, image), DEADLINE, f"{image} settled")  # type: ignore[misc]


def settled(bench: BuilderBench, image: str) -> bool:
    """The newest build is uploaded; of older ones there are those that retention keeps.

    One that was replaced before it was uploaded counts among the two that stay.
    """
    builds = [b.id for b in bench.builds(image)]
    uploaded = {u.build_id for u in bench.uploads(image)}
    return builds[0] in uploaded and set(builds[2:]) <= uploaded and len(builds) <= 4
