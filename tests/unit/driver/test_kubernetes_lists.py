"""Lists of the API server that arrive in several pages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.kubernetes.api.errors import ApiError
from nodepool.driver.kubernetes.api.kinds import POD
from tests.support.fault_proxy import FaultProxy, Reply, Request

EXPIRED = Reply(410, b'{"kind": "Status", "reason": "Expired", "message": "too old"}')


class Lists:
    """Two pages; the second one can expire before it is read."""

    def __init__(self, expires: int) -> None:
        self.expires = expires
        self.asked: list[str] = []

    def answer(self, request: Request, _forward: object) -> Reply:
        second = "continue=" in request.path
        self.asked.append("second" if second else "first")
        if second and self.expires:
            self.expires -= 1
            return EXPIRED
        name, metadata = ("b", {}) if second else ("a", {"continue": "token"})
        page = {"items": [{"metadata": {"name": name}}], "metadata": metadata}
        return Reply(200, json.dumps(page).encode())


@pytest.fixture
def lists(request: pytest.FixtureRequest) -> Lists:
    return Lists(request.param)


@pytest.fixture
def client(lists: Lists) -> Iterator[ClusterClient]:
    with FaultProxy(("127.0.0.1", 9), look_alike=lists.answer) as proxy:
        access: Any = SimpleNamespace(
            host=f"http://127.0.0.1:{proxy.port}",
            verify_ssl=True,
            proxy=None,
            authorization=lambda: None,
        )
        found = ClusterClient(access, logging.getLogger("test"))
        yield found
        found.close()


@pytest.mark.parametrize("lists", [1], indirect=True)
def test_list_that_expires_between_two_pages_is_read_again(
    lists: Lists, client: ClusterClient
) -> None:
    assert [pod["metadata"]["name"] for pod in client.list(POD)] == ["a", "b"]
    assert lists.asked == ["first", "second", "first", "second"]


@pytest.mark.parametrize("lists", [100], indirect=True)
def test_list_that_always_expires_is_an_error(lists: Lists, client: ClusterClient) -> None:
    with pytest.raises(ApiError, match="Expired"):
        client.list(POD)
    assert lists.asked == ["first", "second"] * 3
