"""What newer peers store in the records of requests and nodes survives all that a launcher does
with them.
"""

from __future__ import annotations

import pytest

from tests.support.launcher import LauncherBench, config, provider


@pytest.mark.spec("issue 11, users 5: keys that we do not know stay when a record is rewritten")
@pytest.mark.parametrize("reuse", [True, False])
def test_keys_of_newer_peers_stay(bench: LauncherBench, reuse: bool) -> None:
    if reuse:
        node = bench.ready_node("fake-provider", "main", "fake-label")
        bench.zuul.write_node(node.id, from_tomorrow="node")
    bench.start(config(provider()))
    request_id = bench.submit("fake-label", from_tomorrow={"a": "request"})
    record = bench.wait_request(request_id, "fulfilled")
    assert record["from_tomorrow"] == {"a": "request"}
    if reuse:
        assert record["nodes"] == [node.id]
        assert bench.zuul.node(node.id)["from_tomorrow"] == "node"
        assert bench.zuul.node(node.id)["allocated_to"] == request_id
