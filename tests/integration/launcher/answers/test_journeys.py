"""From symptom to cause and remedy by clicks, in a real browser over a real launcher."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.zk.records import HOLD
from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk
from tests.integration.launcher.answers.test_everyday_problems import disk_image_config
from tests.integration.launcher.answers.test_problems_of_hosts import node_manager
from tests.support.browser import Browser, browser
from tests.support.launcher import config, provider

pytestmark = pytest.mark.full


class Operator:
    """Somebody who sees the pages for the first time, and clicks."""

    def __init__(self, seen: Browser) -> None:
        self.seen = seen
        seen.open("/ui/")

    def reads(self, *words: str) -> None:
        """Wait until the page has all the words."""

        def found() -> bool:
            text = self.seen.page.locator("main").inner_text()
            return all(word in text for word in words)

        try:
            wait_for(found, 20, f"{words} on the page")
        except AssertionError as error:
            raise AssertionError(
                f"{error}: {self.seen.page.locator('main').inner_text()}"
            ) from None

    def follows_trouble(self, text: str) -> None:
        """Click on a line of the health of the cluster."""
        self.seen.page.get_by_role("region", name="Health").get_by_role(
            "link", name=text
        ).first.click()

    def opens_cause(self, text: str) -> None:
        """Open a cause for which requests wait."""
        self.seen.page.locator("details.cause").filter(has_text=text).locator(
            "summary"
        ).first.click()

    def follows(self, name: str) -> None:
        self.seen.page.locator("main").get_by_role("link", name=name, exact=True).first.click()

    def searches(self, text: str) -> None:
        self.seen.page.keyboard.press("/")
        self.seen.page.keyboard.type(text)
        self.seen.page.keyboard.press("Enter")


@pytest.fixture
def operator(desk: Desk, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the operator once the launcher runs."""
    opened = []

    def open_pages() -> Operator:
        context = browser(desk.address, viewport={"width": 1280, "height": 900})
        opened.append(context)
        return Operator(context.__enter__())

    yield open_pages
    for context in opened:
        context.__exit__(None, None, None)


def test_full_quota_shows_its_users_and_what_to_raise(desk: Desk, operator: Any) -> None:
    desk.bench.quota(instances=2)
    desk.start(config(provider()))
    for _ in range(2):
        desk.bench.fulfilled("fake-label", tenant_name="acme")
    request = desk.bench.submit("fake-label")
    one = operator()
    one.opens_cause("Quota of fake-provider: 2 of 2 instances in use")
    one.reads("tenant acme has 2", "Suggestion: raise the quota of provider fake-provider")
    one.follows(request)
    one.reads("Queue position", "tenant acme has 2", "Suggestion: raise the quota")


def test_misspelt_label_is_found_by_the_id_of_its_failed_request(desk: Desk, operator: Any) -> None:
    desk.start(config(provider()))
    request = desk.bench.submit("fake-labl")
    desk.bench.wait_request(request, "failed")
    one = operator()
    one.searches(request)
    one.reads("failed: no launcher offers fake-labl; did you mean fake-label?")


def test_image_that_nobody_builds_names_the_daemon_to_start(desk: Desk, operator: Any) -> None:
    desk.start(disk_image_config())
    one = operator()
    one.reads("image winimg")
    one.follows_trouble("winimg")
    one.reads("never been built", "Suggestion: start nodepool-builder")


def test_paused_image_names_its_option(desk: Desk, operator: Any) -> None:
    desk.start(disk_image_config(pause=True))
    one = operator()
    one.follows_trouble("winimg")
    one.reads("image winimg is paused by the option pause of its diskimage", "pause: false")


def test_dead_static_host_is_on_top_of_the_overview(desk: Desk, operator: Any) -> None:
    with socket.socket() as reserved:  # bound, and nobody listens
        reserved.bind(("127.0.0.1", 0))
        node = {
            "name": "127.0.0.1",
            "labels": ["metal"],
            "connection-port": reserved.getsockname()[1],
            "timeout": 1,
            "host-key-checking": True,
            "connection-type": "ssh",
            "username": "zuul",
        }
        desk.start(
            {
                "labels": [{"name": "metal"}],
                "providers": [
                    {
                        "name": "rack",
                        "driver": "static",
                        "pools": [{"name": "main", "nodes": [node]}],
                    }
                ],
            }
        )
        request = desk.bench.submit("metal")
        one = operator()
        one.reads("cannot be used now")
        one.opens_cause("cannot be used now")
        one.reads("Suggestion: repair the host, or remove it from the configuration")
        one.follows(request)
        one.reads("cannot be used now", "Suggestion: repair the host")


def test_dead_node_manager_is_on_top_of_the_overview(
    desk: Desk, operator: Any, tmp_path: pathlib.Path
) -> None:
    desk.start(node_manager(tmp_path))
    one = operator()
    one.reads("Failing", "provider metal: host h0: ")
    one.follows_trouble("host h0: ")
    one.reads("h0", "not usable")


def test_refused_credential_has_the_words_of_the_cloud(
    desk: Desk, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider(**{"launch-retries": 1})))

    def refuse(*args: Any, **kw: Any) -> None:
        raise exceptions.LaunchNodepoolException("HTTP 401: the password has expired")

    monkeypatch.setattr(desk.bench.adapter("fake-provider"), "_createServer", refuse)
    desk.bench.wait_request(desk.bench.submit("fake-label"), "failed")
    one = operator()
    one.follows_trouble("HTTP 401")
    one.reads("HTTP 401: the password has expired")


def test_limit_of_a_tenant_names_the_option(desk: Desk, operator: Any) -> None:
    desk.start(
        config(
            provider(), **{"tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 1}]}
        )
    )
    desk.bench.fulfilled("fake-label", tenant_name="acme")
    desk.bench.submit("fake-label", tenant_name="acme")
    one = operator()
    one.opens_cause("Limit of tenant acme: 1 of 1 instances in use")
    one.reads("max-servers of tenant acme in tenant-resource-limits", "1 acme")


def test_held_nodes_that_fill_a_pool_are_named_and_can_be_deleted(
    desk: Desk, operator: Any
) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    request_id, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request_id)
    desk.bench.zuul.write_node(
        node.id, state=HOLD, hold_job="nightly", comment="for alice", hold_expiration=7200
    )
    desk.bench.zuul.unlock(node.id)
    desk.bench.submit("fake-label")
    one = operator()
    one.opens_cause("Limit of pool fake-provider-main: 1 of 1 instances in use")
    one.reads(
        "1 of 1 are held", f"{node.id} by nightly, for alice", "delete held and forgotten nodes"
    )
    one.searches(node.id)
    one.reads("for alice", f"nodepool delete {node.id}")


def test_request_behind_another_one_leads_to_it(desk: Desk, operator: Any) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    desk.bench.fulfilled("fake-label")
    first = desk.bench.submit("fake-label", priority="100")
    desk.bench.wait_request(first, "pending")
    second = desk.bench.submit("fake-label", priority="300")
    one = operator()
    one.searches(second)
    one.reads(f"request {first} comes first")
    one.follows(first)
    one.reads("0 of 1 left", "Suggestion: raise max-servers of pool main")


def test_min_ready_that_cannot_be_reached_names_the_limit(desk: Desk, operator: Any) -> None:
    desk.start(config(provider(pool={"max-servers": 1}), labels={"fake-label": {"min-ready": 3}}))
    one = operator()
    one.follows_trouble("1 of 3 ready")
    one.reads("1 of 3 ready (min-ready), because", "max-servers")
