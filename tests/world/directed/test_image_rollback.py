"""Launchers return to the previous upload if machines of the new one do not start (BLD-23)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.nodescan import NodescanRequest
from nodepool.status import problem_list
from nodepool.zk.rollback import RollbackRefused, Rollbacks, rolled_back
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider
from tests.world.directed.test_images import dib

OLD, NEW = "works", "does not boot"


class Scene:
    """A launcher whose machines of the newer of two uploads have no SSH server."""

    def __init__(self, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        #: External ids of images whose machines fail, and with what.
        self.broken: dict[str, Exception] = {
            NEW: exceptions.ConnectionTimeoutException("Timeout waiting for port 22")
        }
        self.tried: list[str] = []
        original = NodescanRequest.advance
        scene = self

        def advance(request: NodescanRequest, socket_ready: bool) -> None:
            image = scene.image_of(request.node)
            if image in scene.broken:
                scene.tried.append(image)
                raise scene.broken[image]
            original(request, socket_ready)

        monkeypatch.setattr(NodescanRequest, "advance", advance)
        self.old = bench.store_image("img", "fake-provider", OLD, state_time=time.time() - 50)
        self.new = bench.store_image("img", "fake-provider", NEW, state_time=time.time() - 10)

    def start(self, retries: int = 1, **image: Any) -> Any:
        options = dib(self.bench, "img")
        options["diskimages"][0].update(image)
        labels = [{"name": "fake-label", "diskimage": "img", "min-ram": 1}]
        return self.bench.start(
            config(
                provider(
                    **{
                        "launch-retries": retries,
                        "diskimages": [{"name": "img"}],
                        "pools": [{"name": "main", "labels": labels}],
                    }
                ),
                **options,
            )
        )

    def image_of(self, node: Any) -> str:
        server = self.bench.cloud("fake-provider").get_server(node.external_id)
        return "" if server is None else str(server["image"]["id"])

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.bench.wait_request(self.bench.submit("fake-label"), "failed")

    def serve(self) -> str:
        """Return the image of the node that a request gets."""
        return self.image_of(self.bench.fulfilled("fake-label")[1][0])

    @staticmethod
    def newest(pool: Any) -> str:
        """Return the image that the launcher uses."""
        upload = pool.zk.getMostRecentImageUpload("img", "fake-provider", cached=True)
        return str(upload.external_id)

    @property
    def in_force(self) -> list[str]:
        """Return the uploads that are rolled back, as their images."""
        data = self.bench.zk.readImages(cached=False)
        return [str(switch.replaced.external_id) for switch in rolled_back(data)]


@pytest.fixture
def scene(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(bench, monkeypatch)


@pytest.mark.spec("BLD-23.1, BLD-23.3")
def test_requests_after_three_failed_launches_get_the_previous_image(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    pool = scene.start()
    scene.fail(2)
    assert scene.in_force == []
    # The third one causes the roll-back, and is served.
    assert scene.serve() == OLD
    assert scene.tried == [NEW] * 3 and scene.in_force == [NEW]
    (line,) = [r.getMessage() for r in caplog.records if "returned from build" in r.getMessage()]
    assert line.endswith(
        f"] Image img of provider fake-provider: returned from build {scene.new.build_id} to "
        f"{scene.old.build_id}: 3 launches in a row failed, the last one with: Timeout waiting "
        "for port 22"
    )
    rows = [row for row in problem_list(pool.zk).rows if "rolled back" in row["problem"]]
    assert [row["provider"] for row in rows] == ["fake-provider"]
    assert (
        "the last one with: Timeout waiting for port 22. Suggestion: repair the image"
        in (rows[0]["problem"])
    )
    (event,) = [each for each in pool.zk.feed.since(0)[0] if each["type"] == "action"]
    assert (event["action"], event["image"], event["result"]) == ("image-rollback", "img", "ok")


@pytest.mark.spec("BLD-23.2: a launch without further attempts gets one more")
def test_request_whose_attempts_cause_the_rollback_is_served(scene: Scene) -> None:
    scene.start(retries=3)
    assert scene.serve() == OLD
    assert scene.tried == [NEW] * 3


@pytest.mark.spec("BLD-23.1: failures of quota and capacity do not count")
@pytest.mark.parametrize(
    "error",
    [
        exceptions.CapacityException("full"),
        exceptions.OfferRefusedException("sold out; another offer will be tried"),
        RuntimeError("the API of the cloud does not answer"),
    ],
)
def test_failures_without_relation_to_the_image_do_not_count(
    scene: Scene, error: Exception
) -> None:
    scene.start(**{"rollback-after": 1})
    scene.broken[NEW] = error
    scene.fail(2)
    assert scene.in_force == []


@pytest.mark.spec("BLD-23.1")
def test_machine_that_was_not_created_does_not_count(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.start(**{"rollback-after": 1})
    cloud = scene.bench.cloud("fake-provider")

    def refused(*_args: object, **_values: object) -> None:
        raise exceptions.LaunchStatusException("the image has no such property")

    monkeypatch.setattr(scene.bench.adapter("fake-provider"), "_createServer", refused)
    scene.fail(2)
    assert scene.tried == [] and scene.in_force == [] and not cloud._server_list


@pytest.mark.spec("BLD-23.1: without a single success")
def test_image_that_has_worked_once_is_not_rolled_back(scene: Scene) -> None:
    scene.start(**{"rollback-after": 2})
    error = scene.broken.pop(NEW)
    assert scene.serve() == NEW
    scene.broken[NEW] = error
    scene.fail(4)
    assert scene.in_force == []


@pytest.mark.spec("BLD-23.1: without a single success")
def test_image_of_running_nodes_of_others_is_not_rolled_back(scene: Scene) -> None:
    """A launcher that has just started finds nodes of the upload."""
    pool = scene.start(**{"rollback-after": 1})
    path = scene.bench.zk._imageUploadPath("img", scene.new.build_id, "fake-provider")
    node = scene.bench.ready_node(
        "fake-provider", "main", "other", image_id=f"{path}/{scene.new.id}"
    )
    wait_for(lambda: pool.zk.getCachedNode(node.id) is not None)
    scene.fail(2)
    assert scene.in_force == []


@pytest.mark.spec("BLD-23.1")
def test_failures_count_per_upload(scene: Scene) -> None:
    pool = scene.start()
    scene.fail(2)
    scene.bench.store_image("img", "fake-provider", "newer")
    scene.broken["newer"] = scene.broken[NEW]
    wait_for(lambda: scene.newest(pool) == "newer")
    scene.fail(2)
    assert scene.in_force == []


@pytest.mark.spec("BLD-23.1: while the previous upload still exists")
def test_only_upload_stays_in_use(scene: Scene) -> None:
    pool = scene.start(**{"rollback-after": 1})
    scene.bench.zk.deleteUpload("img", scene.old.build_id, "fake-provider", scene.old.id)
    wait_for(lambda: len(pool.zk.readImages().uploads) == 1)
    scene.fail(2)
    assert scene.in_force == [] and scene.tried == [NEW] * 2


@pytest.mark.spec("BLD-23.1: 0 switches it off")
def test_rollback_can_be_switched_off(scene: Scene) -> None:
    scene.start(**{"rollback-after": 0})
    scene.fail(4)
    assert scene.in_force == []


@pytest.mark.spec("BLD-23.4")
def test_previous_upload_that_fails_too_is_not_rolled_back_further(scene: Scene) -> None:
    bench = scene.bench
    bench.store_image("img", "fake-provider", "oldest", state_time=time.time() - 90)
    scene.broken[OLD] = scene.broken[NEW]
    scene.start(**{"rollback-after": 1})
    scene.fail(3)
    assert scene.in_force == [NEW] and scene.tried == [NEW, *[OLD] * 3]


@pytest.mark.spec("BLD-23.4")
def test_image_that_an_operator_has_returned_to_is_not_rolled_back_again(scene: Scene) -> None:
    pool = scene.start(**{"rollback-after": 1})
    assert scene.serve() == OLD
    Rollbacks(scene.bench.zk, time.time).forward("img", None)
    wait_for(lambda: scene.newest(pool) == NEW)
    scene.fail(3)
    assert scene.in_force == [] and scene.newest(pool) == NEW


@pytest.mark.spec("BLD-23.5")
def test_launch_fails_as_usual_if_the_rollback_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def back(*_args: object) -> None:
        raise RollbackRefused("somebody has changed it")

    monkeypatch.setattr(Rollbacks, "back", back)
    scene.start(**{"rollback-after": 1})
    scene.fail(2)
    refused = "Image img of fake-provider is not rolled back: somebody has changed it"
    assert sum(record.getMessage().endswith(refused) for record in caplog.records) == 2


# -- canaries


@pytest.mark.spec("BLD-24.1")
def test_one_launch_tries_a_new_image_and_no_request_fails(scene: Scene) -> None:
    scene.start(retries=2, canary=1)
    assert [scene.serve() for _ in range(3)] == [OLD] * 3
    assert scene.tried == [NEW] * 3 and scene.in_force == [NEW]


@pytest.mark.spec("BLD-24.1: at most as many as have to start")
def test_burst_uses_the_previous_image_until_the_new_one_has_started(scene: Scene) -> None:
    scene.start(canary=2)
    bench, cloud = scene.bench, scene.bench.cloud("fake-provider")
    scene.broken.clear()
    cloud.pause_creates = True
    requests = [bench.submit("fake-label") for _ in range(5)]
    wait_for(lambda: len(cloud._server_list) == 5)
    images = sorted(str(server["image"]["id"]) for server in cloud.list_servers())
    assert images == sorted([NEW] * 2 + [OLD] * 3)
    cloud.pause_creates = False
    for server in list(cloud._server_list):
        server.event.set()
    for request in requests:
        bench.wait_request(request, "fulfilled")
    assert scene.serve() == NEW


@pytest.mark.spec("BLD-24.1")
def test_launcher_knows_the_machines_that_others_have_started(scene: Scene) -> None:
    pool = scene.start(canary=1)
    path = scene.bench.zk._imageUploadPath("img", scene.new.build_id, "fake-provider")
    node = scene.bench.ready_node(
        "fake-provider", "main", "other", image_id=f"{path}/{scene.new.id}"
    )
    wait_for(lambda: pool.zk.getCachedNode(node.id) is not None)
    scene.broken.clear()
    cloud = scene.bench.cloud("fake-provider")
    requests = [scene.bench.submit("fake-label") for _ in range(3)]
    for request in requests:
        scene.bench.wait_request(request, "fulfilled")
    assert {str(server["image"]["id"]) for server in cloud.list_servers()} == {NEW}


@pytest.mark.spec("BLD-24.2")
def test_only_upload_is_used_by_all_launches(scene: Scene) -> None:
    pool = scene.start(canary=1)
    scene.bench.zk.deleteUpload("img", scene.old.build_id, "fake-provider", scene.old.id)
    wait_for(lambda: len(pool.zk.readImages().uploads) == 1)
    scene.broken.clear()
    cloud = scene.bench.cloud("fake-provider")
    cloud.pause_creates = True
    for _ in range(2):
        scene.bench.submit("fake-label")
    wait_for(lambda: len(cloud._server_list) == 2)
    assert {str(server["image"]["id"]) for server in cloud.list_servers()} == {NEW}
    cloud.pause_creates = False
    for server in list(cloud._server_list):
        server.event.set()


@pytest.mark.spec("BLD-23.2, BLD-24.1: the number of attempts has a limit")
def test_launch_ends_if_both_images_fail(scene: Scene) -> None:
    scene.broken[OLD] = scene.broken[NEW]
    scene.start(retries=2, canary=1, **{"rollback-after": 1})
    scene.fail(3)
    assert len(scene.tried) <= 9
