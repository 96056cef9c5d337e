"""A launcher is killed while it verifies an image on a sliver."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.support.builder import CREATE
from tests.support.faults.launcher import Bench
from tests.support.faults.slivers import SliverBench
from tests.support.nodemanager.images import make_tree
from tests.support.nodemanager.scene import make_daemon

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(300)]

BUILDER = str(pathlib.Path(sys.executable).with_name("nodepool-builder"))
IMAGE = "debian"


@pytest.fixture
def slivers(bench: Bench, tmp_path: pathlib.Path) -> Iterator[SliverBench]:
    for nm in make_daemon(tmp_path):
        yield SliverBench(bench, nm)
        for launcher in bench.launchers:
            launcher.kill()


def used(slivers: SliverBench) -> str | None:
    """Return the build that launchers use."""
    zk = ZooKeeper(slivers.zuul.connection, enable_cache=False)
    upload = zk.getMostRecentImageUpload(IMAGE, "metal")
    return None if upload is None else upload.build_id


def verifying(slivers: SliverBench) -> set[str]:
    """Return the slivers on which an image is being tried."""
    return {
        str(node["external_id"]["sliver"])
        for node in slivers.zuul.read("nodes").values()
        if node.get("requestor") == VERIFIER and node.get("state") == "hold"
    }


@pytest.mark.parametrize("in_use", [True, False], ids=["of-a-new-build", "of-the-first-build"])
def test_launcher_killed_in_a_verification_repeats_it(
    slivers: SliverBench, tmp_path: pathlib.Path, in_use: bool
) -> None:
    (slivers.bench.tmp / "images").mkdir()
    tree = make_tree(tmp_path / "tree")
    image = {
        "name": IMAGE,
        "elements": ["x"],
        "dib-cmd": str(CREATE),
        "env-vars": {"TMPDIR": str(tmp_path), "CREATE_TREE": str(tree)},
        "username": "root",
        "verify": {"ssh-key": str(slivers.nm.key), "command": "sleep 4", "timeout": 20},
    }
    config = slivers.config(image)
    launcher = slivers.start(config)
    with open(tmp_path / "builder.log", "ab") as log:
        argv = [BUILDER, "-f", "-c", str(config), "-p", str(tmp_path / "builder.pid")]
        builder = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        old = None
        if in_use:
            old = wait_for(lambda: used(slivers), 60, "the first upload")
            slivers.run("image-build", IMAGE, "--wait")
        (first,) = wait_for(lambda: verifying(slivers), 60, "the verification")
        launcher.kill()
        assert used(slivers) == old
        slivers.start(config)
        wait_for(lambda: used(slivers) != old, 90, "the new upload")
        # The lease of the first sliver ends two minutes after the time-out.
        wait_for(lambda: verifying(slivers) <= {first}, 30, "the end of the second sliver")
    finally:
        builder.terminate()
        builder.wait(30)
