"""What the parts of a launcher share."""

from __future__ import annotations

from nodepool.launcher.state import NodeClaims


def test_free_node_is_claimed_by_one_handler_at_a_time() -> None:
    claims = NodeClaims()
    assert claims.claim("0000000001") and claims.claim("0000000002")
    assert not claims.claim("0000000001")
    claims.release("0000000001")
    assert claims.claim("0000000001")
