"""SIGKILL of launcher and builder around each call of the drivers gce, azure and ibmvpc; nothing
stays in the account.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.conftest import wait_for
from tests.support.builder import BuilderBench
from tests.support.clouds.scene import CloudScene, Ibm, launcher, scene  # noqa: F401
from tests.support.kill import Daemon, killing
from tests.support.launcher import LauncherBench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.mark.spec("issue: SIGKILL of the launcher around every changing call leaves nothing")
def test_killed_launcher_leaves_nothing_in_the_cloud(
    bench: LauncherBench, scene: CloudScene, tmp_path: pathlib.Path
) -> None:
    config = bench.config({**scene.config(), "zookeeper-timeout": 2.0})
    daemons: list[Daemon] = []
    faults = [
        scene.proxy.fail(scene.matches(operation), killing(daemons, when))
        for operation in scene.launcher_calls
        for when in ("before", "after")
    ]
    daemon = Daemon(tmp_path, "serve.py", config, NODEPOOL_FAULT_CLEANUP="0.5")
    daemons.append(daemon)
    try:
        request = bench.submit("small")

        def fulfilled() -> bool:
            daemon.again()
            return bool(bench.zuul.request(request)["state"] == "fulfilled")

        wait_for(fulfilled, 120, "request fulfilled")
        bench.zuul.give_back(*bench.zuul.accept(request))

        def nothing_left() -> bool:
            daemon.again()
            return not bench.nodes() and not scene.leftovers()

        wait_for(nothing_left, 120, "no node, and nothing left in the cloud")
        assert [fault.used for fault in faults] == [1] * len(faults)
    finally:
        daemon.stop()


@pytest.mark.spec(
    "issue: SIGKILL of the builder around every call of an upload leaves one image and nothing else"
)
def test_killed_builder_leaves_one_image(
    scene: CloudScene, builders: BuilderBench, bench: LauncherBench, tmp_path: pathlib.Path
) -> None:
    if isinstance(scene, Ibm):
        scene.cloud.make_bucket()
    provider = scene.provider(scene.label(image="fake-image"), diskimages=[scene.diskimage()])
    image = builders.image(username="zuul", **{"env-vars": {"CREATE_SIZE": str(1 << 20)}})
    config = builders.config(
        [image], [provider], labels=[{"name": "small"}], **{"zookeeper-timeout": 2.0}
    )
    daemons: list[Daemon] = []
    faults = [
        scene.proxy.fail(scene.matches(operation), killing(daemons, when))
        for operation in scene.builder_calls
        for when in ("before", "after")
    ]
    daemon = Daemon(tmp_path, "serve_builder.py", config)
    daemons.append(daemon)
    pool = launcher(bench, config, 0.5)
    pool.start()
    try:

        def uploaded() -> bool:
            daemon.again()
            found = builders.uploads(provider=scene.name)
            return bool(found) and all(fault.used for fault in faults)

        wait_for(uploaded, 150, f"an upload, in spite of {len(faults)} kills")

        def nothing_else() -> bool:
            daemon.again()
            (upload, *_) = builders.uploads(provider=scene.name)
            left = scene.leftovers()
            return scene.image_of(upload.external_id) is not None and len(left) == 1

        wait_for(nothing_else, 60, "nothing but the image")
    finally:
        daemon.stop()
