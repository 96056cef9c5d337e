"""A launcher with its web server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.web.server import WebApp
from tests.support.launcher import LauncherBench, config, provider

HOSTILE = "<img src=x onerror=alert(1)>/%41"


class Site:
    """What the tests of the pages look at: a node in use, one that is free, a request that waits, one that failed."""

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
