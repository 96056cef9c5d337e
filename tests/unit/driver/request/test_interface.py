"""What a handler may use of its pool remains small, so that a driver's tests can provide it."""

from __future__ import annotations

from nodepool.driver.request.base import Capacity, RequestHost


def members(protocol: type) -> set[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")}
    return own | set(protocol.__annotations__)


def test_handler_needs_at_most_twelve_things_of_its_pool() -> None:
    assert {"launcher_id", "getZK", "ended", "capacity"} < members(RequestHost)
    assert len(members(RequestHost)) <= 12
    assert len(members(Capacity)) <= 12
