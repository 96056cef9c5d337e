"""Images that are built, uploaded to a node manager and verified on slivers: no request gets a
machine of a broken one, and a roll-back is used by the next launch (BLD-22, BLD-23, BLD-25).
"""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.cmd import nodepoolcmd
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.records import ImageUpload
from nodepool.zk.rollback import upload_path
from tests.conftest import wait_for
from tests.integration.nodemanager.daemon.test_launcher import config
from tests.support.builder import BuilderBench
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench
from tests.support.nodemanager.images import BROKEN, break_ssh, make_tree
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

IMAGE, PLACE, LABEL = "debian", "metal", "small"
#: Requests for each way in which an image is broken.
REQUESTS = 40
#: Roll-backs and their undoing.
SWITCHES = 20


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


class Scene:
    """A builder, a launcher and an operator with one file; the first build is used."""

    def __init__(
        self, bench: LauncherBench, builders: BuilderBench, nm: NmDaemon, tmp: pathlib.Path
    ) -> None:
        self.bench, self.builders, self.nm = bench, builders, nm
        self.tree = make_tree(tmp / "tree")

    def start(self, checks_keys: bool = False, **image: Any) -> Any:
        """Start the daemons, and return the launcher.

        :param checks_keys: launches connect to SSH.
        """
        label = {"diskimage": IMAGE, "ram": 64, "cpus": 0.01, "host-key-checking": checks_keys}
        options = {"launch-retries": 2, "boot-timeout": 2}
        given = config(self.nm, diskimages=[{"name": IMAGE}], label=label, **options)
        label = given["providers"][0]["pools"][0]["labels"][0]
        del label["cloud-image"]
        given["providers"][0]["pools"][0]["max-servers"] = 100
        entry = self.builders.image(IMAGE, username="root", **image)
        entry["env-vars"]["CREATE_TREE"] = str(self.tree)
        given |= {
            "images-dir": str(self.builders.images_dir),
            "build-log-dir": str(self.builders.log_dir),
            "elements-dir": ".",
            "diskimages": [entry],
        }
        self.path = self.bench.config(given)
        self.builders.start(self.path)
        self.old = self.builders.wait_upload(IMAGE, PLACE)
        launcher = self.bench.start(given)
        wait_for(lambda: not self.stored(self.old).held_back, 60, "the first verification")
        return launcher

    def verify(self, **options: Any) -> dict[str, Any]:
        """Return the option of an image that is verified with the key of this host's slivers."""
        return {"ssh-key": str(self.nm.key), "command": "cat /etc/passwd", **options}

    def run(self, *arguments: str) -> None:
        assert nodepoolcmd.main(["-c", self.path, *arguments]) == 0

    def build(self) -> ImageUpload:
        """Build the image again, and wait for its upload."""
        self.run("image-build", IMAGE, "--wait")
        (build, *_older) = self.builders.builds(IMAGE)
        found: ImageUpload = self.builders.wait_upload(IMAGE, PLACE, build.id)
        return found

    def stored(self, upload: ImageUpload) -> ImageUpload:
        found: ImageUpload | None = self.bench.zk.getImageUpload(
            IMAGE, upload.build_id, PLACE, upload.id
        )
        assert found is not None
        return found

    def used(self) -> str:
        return upload_path(self.bench.zk.getMostRecentImageUpload(IMAGE, PLACE))

    def verdict(self, upload: ImageUpload) -> str:
        """Wait for the reason why the upload is not used."""
        wait_for(
            lambda: (mark := self.stored(upload).rolled_back) is not None and not mark.unverified,
            60,
            "the result",
        )
        mark = self.stored(upload).rolled_back
        assert mark is not None and mark.automatic and self.used() == upload_path(self.old)
        return mark.reason

    def served(self, until: Callable[[], bool]) -> list[Any]:
        """Return the nodes of requests, of which there are always some until this is true.

        Their nodes are used and returned.
        """
        waiting: list[str] = []
        found: list[Any] = []
        while len(found) < REQUESTS or not until():
            while len(waiting) < 4:
                waiting.append(self.bench.submit(LABEL))
            request = waiting.pop(0)
            record = self.bench.wait_request(request, "fulfilled", timeout=60)
            found += [self.bench.node(each) for each in record["nodes"]]
            self.bench.zuul.give_back(*self.bench.zuul.accept(request))
        for request in waiting:
            record = self.bench.wait_request(request, "fulfilled", timeout=60)
            found += [self.bench.node(each) for each in record["nodes"]]
            self.bench.zuul.give_back(*self.bench.zuul.accept(request))
        return found

    def all_gone(self) -> None:
        wait_for(lambda: self.nm.client.call("ListSlivers") == [], 60, "the end of all slivers")


@pytest.fixture
def scene(
    bench: LauncherBench,
    builders: BuilderBench,
    nm: NmDaemon,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    monkeypatch.setattr("nodepool.launcher.verification.RETRY", Backoff(0.1, 0.1))
    monkeypatch.setattr("nodepool.launcher.verification.LOGIN_AGAIN", 0.5)
    return Scene(bench, builders, nm, tmp_path)


#: What the operator is shown.
REASONS = {
    "does not boot": "its machines do not start, see `nodepool explain request",
    "no SSH": "cannot log in as root: kex_exchange_identification: Connection closed",
    "other host keys": "cannot log in as root: ",
    "command fails": "its command has ended with status 127",
}


@pytest.mark.spec("BLD-25.1; BLD-25.4")
@pytest.mark.parametrize("way", BROKEN)
def test_no_request_gets_a_sliver_of_a_broken_image(scene: Scene, way: str) -> None:
    launcher = scene.start(verify=scene.verify(timeout=5))
    BROKEN[way](scene.tree)
    new = scene.build()
    nodes = scene.served(
        lambda: (mark := scene.stored(new).rolled_back) is not None and not mark.unverified
    )
    assert REASONS[way] in scene.verdict(new)
    assert {node.image_id for node in nodes} == {upload_path(scene.old)}
    assert any(f"build {new.build_id}" in each for each in launcher.getReadiness()[1])
    scene.all_gone()


@pytest.mark.spec("BLD-25.1; BLD-25.3")
def test_good_image_is_verified_on_a_sliver_and_used(scene: Scene) -> None:
    scene.start(verify=scene.verify())
    new = scene.build()
    nodes = scene.served(lambda: scene.used() == upload_path(new))
    assert nodes[0].image_id == upload_path(scene.old)
    _request, (node,) = scene.bench.fulfilled(LABEL)
    assert node.image_id == upload_path(new)
    scene.bench.use_up(_request)
    scene.all_gone()


def verifying(scene: Scene) -> str:
    """Wait for the sliver on which an upload is tried; return its name."""
    (node,) = scene.bench.wait_nodes(1, requestor=VERIFIER, state="hold", timeout=60)
    name = str(node.external_id["sliver"])
    # The shells of the login have started.
    wait_for(lambda: scene.nm.client.call("GetUsage", name)["pids"] > 3, what="the command")
    return name


@pytest.mark.spec("BLD-25.6")
def test_build_that_is_deleted_during_its_verification_leaves_nothing(scene: Scene) -> None:
    launcher = scene.start(verify=scene.verify(command="sleep 3"))
    new = scene.build()
    verifying(scene)
    scene.run("dib-image-delete", f"{IMAGE}-{new.build_id}")
    scene.all_gone()
    wait_for(lambda: scene.nm.client.images() == [scene.old.external_id], what="the old image")
    assert scene.used() == upload_path(scene.old) and launcher.verification.problems() == []
    request, (node,) = scene.bench.fulfilled(LABEL)
    assert node.image_id == upload_path(scene.old)
    scene.bench.use_up(request)


@pytest.mark.spec("BLD-25.7")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_node_manager_that_restarts_during_a_verification_blames_no_image(
    scene: Scene, number: signal.Signals
) -> None:
    scene.start(verify=scene.verify(command="sleep 3"))
    new = scene.build()
    name = verifying(scene)
    scene.nm.stop(number)
    scene.nm.start()
    assert name in [each["name"] for each in scene.nm.client.call("ListSlivers")]
    wait_for(lambda: scene.used() == upload_path(new), 60, "the new upload")
    assert scene.stored(new).rolled_back is None
    scene.all_gone()


@pytest.mark.spec("BLD-23.1; BLD-24.1")
def test_no_request_gets_a_sliver_of_an_image_that_fails_three_launches(scene: Scene) -> None:
    scene.start(checks_keys=True, canary=1)
    break_ssh(scene.tree)
    new = scene.build()
    nodes = scene.served(lambda: scene.stored(new).rolled_back is not None)
    assert "3 launches in a row failed" in scene.verdict(new)
    assert {node.image_id for node in nodes} == {upload_path(scene.old)}
    scene.all_gone()


@pytest.mark.spec("BLD-22.1")
def test_next_sliver_after_a_rollback_is_of_the_previous_image(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.start()
    new, late = scene.build(), []
    for number in range(SWITCHES):
        command, wanted = (("image-rollback", scene.old), ("image-rollforward", new))[number % 2]
        scene.run(command, IMAGE)
        began, image = time.monotonic(), ""
        while image != upload_path(wanted):
            late.append(time.monotonic() - began)
            request, (node,) = scene.bench.fulfilled(LABEL)
            image = node.image_id
            scene.bench.use_up(request)
    with capsys.disabled():
        print(f"{SWITCHES} switches, {len(late)} launches, the last one after {max(late):.3f} s")
    assert max(late) < limit(1)
