"""Requests that another launcher has let go, as one of 11.0.0 does: in state pending, by giving
up its lock.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodepool.driver.statemachine.handler import StateMachineHandler
from nodepool.version import get_version_string
from nodepool.zk import paths
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider


class OtherLauncher:
    """Takes requests and lets them go."""

    def __init__(self, bench: LauncherBench, version: str) -> None:
        self.client = bench.chroot.connect().client
        content = {
            "hostname": "other",
            "kind": "pool",
            "model_api": 0,
            "state": "running",
            "version": version,
            "paused": False,
            "id": "other-main",
            "name": "main",
            "provider_name": "elsewhere",
            "priority": 999,
            "supported_labels": ["fake-label"],
        }
        self.client.create(
            f"{paths.COMPONENTS}/pool/other",
            json.dumps(content).encode(),
            ephemeral=True,
            sequence=True,
            makepath=True,
        )

    def take(self, bench: LauncherBench) -> tuple[str, str]:
        """A request for its provider: the id and our contender."""
        request_id = bench.submit("fake-label", provider="elsewhere")
        directory, record = paths.request_lock(request_id), bench.zuul.request(request_id)
        self.client.ensure_path(directory)
        contender = self.client.create(
            f"{directory}/{'a' * 32}__lock__", ephemeral=True, sequence=True
        )
        self.client.set(
            paths.request(request_id), json.dumps({**record, "state": "pending"}).encode()
        )
        return request_id, contender


def watch_reads(pool: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests whose locks the launcher reads."""
    seen: list[str] = []
    read = pool.zk.kazoo_client.get_children_async

    def watched(path: str, *args: Any, **kw: Any) -> Any:
        folder, _, name = path.rpartition("/")
        if folder == paths.REQUEST_LOCKS:
            seen.append(name)
        return read(path, *args, **kw)

    monkeypatch.setattr(pool.zk.kazoo_client, "get_children_async", watched)
    return seen


def test_request_dropped_with_a_living_session_is_served_again_soon(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(config(provider()), cleanup_interval=1000)
    real, conflicts = StateMachineHandler.prepareNode, list[str]()

    def rewritten_before(handler: StateMachineHandler, node: Any) -> None:
        if not conflicts:
            conflicts.append(node.id)
            bench.zuul.write_node(node.id, comment="written by another client")
        real(handler, node)

    monkeypatch.setattr(StateMachineHandler, "prepareNode", rewritten_before)
    _request, (node,) = bench.fulfilled("fake-label")
    assert conflicts and node.id not in conflicts


def test_a_request_that_is_released_is_noticed_immediately(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    other = OtherLauncher(bench, "11.0.0")
    wait_for(lambda: len(pool.zk.getRegisteredPools()) == 2)
    seen = watch_reads(pool, monkeypatch)
    request_id, contender = other.take(bench)
    wait_for(lambda: request_id in seen, what="its lock is watched")
    assert bench.zuul.request(request_id)["state"] == "pending"
    other.client.delete(contender)
    bench.wait_request(request_id, "requested")


def test_our_own_kind_is_not_watched_so(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    other = OtherLauncher(bench, get_version_string())
    wait_for(lambda: len(pool.zk.getRegisteredPools()) == 2)
    seen = watch_reads(pool, monkeypatch)
    request_id, _contender = other.take(bench)
    wait_for(lambda: pool.zk.request_tree.get(request_id).state == "pending")
    bench.fulfilled("fake-label")  # by then the other one has been checked, if at all
    assert seen == []
