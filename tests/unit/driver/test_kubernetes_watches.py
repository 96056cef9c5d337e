"""The watch of objects that are waited for, against a scripted server."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.cloud import CloudCalls
from nodepool.cloud.http import NoAnswer
from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.kubernetes.api.errors import ApiError, classify
from nodepool.driver.kubernetes.api.kinds import POD
from nodepool.driver.kubernetes.api.watches import QUIET, WITHOUT, Watcher
from tests.conftest import wait_for

LOG = logging.getLogger("test")


def pod(name: str, version: int, phase: str = "Pending") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"phase": phase}}


class Script:
    """A stream of a watch; what is put is sent, exceptions are raised, None ends it."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (event := self.events.get(timeout=20)) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def tell(self, what: str, found: dict[str, Any]) -> None:
        self.events.put({"type": what, "object": found})

    def close(self) -> None:
        self.events.put(None)


class Server(ClusterClient):
    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self.lists = 0
        self.versions: list[str] = []
        self.stream = Script()
        self.refusals: list[Exception] = []

    def list_versioned(self, *_args: Any) -> tuple[list[dict[str, Any]], str]:
        self.lists += 1
        return self.listed, str(100 * self.lists)

    def watch(self, _kind: Any, _selector: str, version: str, *_args: Any) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.versions.append(version)
        self.stream = Script()
        return self.stream


class Scene:
    def __init__(self) -> None:
        self.server = Server()
        # Waits between two tries are over immediately.
        self.calls: CloudCalls = CloudCalls(
            "p", classify, {}, wait=lambda event, _seconds: event.is_set()
        )
        self.watcher = Watcher(
            self.server,
            self.calls,
            POD,
            "",
            lambda found: str((found.get("metadata") or {}).get("name")),
            LOG,
        )
        self.woken: queue.Queue[int] = queue.Queue()
        self.waiting = self.watcher.wait_for("one", lambda: self.woken.put(1))

    def wait_live(self, versions: int) -> None:
        wait_for(lambda: self.watcher.live and len(self.server.versions) == versions, 20, "a watch")

    def close(self) -> None:
        self.calls.stop()
        self.watcher.stop()
        wait_for(
            lambda: not any("watch-pods" in each.name for each in threading.enumerate()),
            20,
            "the end of its thread",
        )


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.woken.get(timeout=20)  # the first list
    made.wait_live(1)
    yield made
    made.close()


@pytest.mark.spec("KUB-7: changes are told to those who wait for that object, and nobody else")
def test_changes_are_reported_only_to_machines_that_wait_for_them(scene: Scene) -> None:
    assert scene.waiting.doubtful() and not scene.waiting.doubtful()  # it was not in the list
    assert scene.waiting.pause() == QUIET
    scene.server.stream.tell("MODIFIED", pod("another", 101))
    scene.server.stream.tell("MODIFIED", pod("one", 102, "Running"))
    scene.woken.get(timeout=20)
    assert scene.woken.empty()
    news = scene.waiting.take()
    assert (
        news is not None and news["status"]["phase"] == "Running" and scene.waiting.take() is None
    )
    scene.server.stream.tell("DELETED", pod("one", 103))
    scene.woken.get(timeout=20)
    assert scene.waiting.doubtful() and scene.waiting.take() is None
    scene.waiting.end()
    scene.server.stream.tell("MODIFIED", pod("one", 104))
    scene.server.stream.close()
    scene.wait_live(2)
    assert scene.woken.empty()


@pytest.mark.spec(
    "KUB-7: a watch that broke off goes on where it was; those who wait ask meanwhile"
)
def test_broken_watch_resumes_at_its_version(scene: Scene) -> None:
    scene.waiting.doubtful()
    scene.server.stream.tell("BOOKMARK", pod("", 150))
    scene.server.stream.events.put(NoAnswer("broken"))
    scene.woken.get(timeout=20)
    assert scene.waiting.doubtful()
    scene.wait_live(2)
    assert scene.server.versions == ["100", "150"] and scene.server.lists == 1


@pytest.mark.spec("KUB-7: a version that is too old: everything is listed anew")
@pytest.mark.parametrize("told", ["answer", "event"])
def test_expired_version_causes_a_new_list(scene: Scene, told: str) -> None:
    scene.server.listed = [pod("one", 199, "Running")]
    if told == "answer":
        scene.server.refusals.append(ApiError("watch", 410, "Expired"))
        scene.server.stream.close()
    else:
        scene.server.stream.tell("ERROR", {"code": 410, "reason": "Expired"})
    scene.wait_live(2)
    news = scene.waiting.take()
    assert news is not None and news["status"]["phase"] == "Running"
    assert scene.server.versions == ["100", "200"]


@pytest.mark.spec("KUB-3: what the account lacks is told once, and the watch is tried again")
def test_missing_right_is_reported_once_and_the_watch_retried(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.server.refusals = [ApiError("watch pods", 403, "Forbidden", "no") for _ in range(3)]
    scene.server.stream.close()
    scene.wait_live(2)
    assert sum("allow the account" in record.getMessage() for record in caplog.records) == 1
    assert scene.watcher.trouble is None


@pytest.mark.spec("KUB-3: an account that may not watch asks, less and less often")
def test_account_that_may_not_watch_asks_less_and_less_often() -> None:
    calls: CloudCalls = CloudCalls("p", classify, {})
    waiting = Watcher(Server(), calls, POD, "", str, LOG, allowed=False).wait_for(
        "one", lambda: None
    )
    assert [waiting.pause() for _ in range(7)] == [*WITHOUT, WITHOUT[-1], WITHOUT[-1]]


@pytest.mark.spec("KUB-7: what is no event harms nothing")
@pytest.mark.parametrize(
    "odd", [{}, {"type": "ADDED"}, {"type": 3, "object": []}, {"type": "MODIFIED", "object": {}}]
)
def test_unknown_events_are_ignored(scene: Scene, odd: dict[str, Any]) -> None:
    scene.server.stream.events.put(odd)
    scene.server.stream.tell("MODIFIED", pod("one", 102))
    wait_for(lambda: scene.waiting.take() is not None, 20, "news")
