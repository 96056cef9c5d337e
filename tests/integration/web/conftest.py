"""A launcher with its web server."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool import metrics
from nodepool.web.actions.actions import Actions
from nodepool.web.server import WebApp
from tests.conftest import wait_for
from tests.support import fixed_cluster
from tests.support.launcher import LauncherBench, config, provider

HOSTILE = "<img src=x onerror=alert(1)>/%41"


class Site:
    """What the tests of the pages check: a node in use, one that is free, a request that
    waits, one that failed.
    """

    def __init__(self, bench: LauncherBench, pool: Any, app: WebApp) -> None:
        self.bench, self.pool, self.app = bench, pool, app
        self.port = int(app.server.socket.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def site(bench: LauncherBench) -> Iterator[Site]:
    bench.quota(instances=2)
    entry = provider(labels=["fake-label", HOSTILE])
    pool = bench.start(config(entry))
    app = WebApp(pool, port=0, listen_address="127.0.0.1")
    app.start()
    try:
        yield Site(bench, pool, app)
    finally:
        app.stop()


@pytest.fixture
def fixed_address(zk: Any, zk_chroot: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The pages over a cluster that never changes."""
    fixed_cluster.stop_clocks(monkeypatch)
    fixed_cluster.write(zk_chroot.connect().client)
    expected = (len(fixed_cluster.nodes()), len(fixed_cluster.requests()))
    wait_for(
        lambda: (len(zk.readNodes()), len(zk.readRequests())) == expected and zk.readReports(),
        what="the mirror",
    )
    launcher: Any = fixed_cluster.Launcher(zk)
    silent: Any = types.SimpleNamespace(getZK=lambda: zk, config=None, feed=None)
    actions = Actions(silent, "loopback")
    app = WebApp(
        launcher, port=0, listen_address="127.0.0.1", statistics=metrics.Metrics(), actions=actions
    )
    app.start()
    yield f"http://127.0.0.1:{app.server.socket.getsockname()[1]}"
    app.stop()
