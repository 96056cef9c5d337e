"""What the parts of a launcher share."""

from __future__ import annotations

from nodepool.driver.request.base import Claims


def test_free_node_is_claimed_by_one_handler_at_a_time() -> None:
    claims = Claims()
    assert claims.claim("0000000001") and claims.claim("0000000002")
    assert not claims.claim("0000000001")
    claims.release("0000000001")
    assert claims.claim("0000000001")
