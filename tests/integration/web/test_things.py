"""The pages of one node and one request, in a real browser over a real launcher."""

from __future__ import annotations

import pytest

from tests.conftest import wait_for
from tests.integration.web.conftest import Site
from tests.support.browser import browser

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
FINGERPRINT = "ssh-ed25519 SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


@pytest.mark.spec("issue: a node page that answers who has it and how one gets in")
@pytest.mark.core
def test_node_page_shows_who_has_it_and_how_to_log_in(site: Site) -> None:
    node = site.bench.ready_node(
        "fake-provider",
        "main",
        "fake-label",
        interface_ip="192.0.2.7",
        connection_port=2222,
        username="debian",
        host_keys=[KEY],
        tenant_name="acme",
        user_data={"project_name": "nova", "build": "b1"},
    )
    with browser(site.address, permissions=["clipboard-read", "clipboard-write"]) as seen:
        seen.open(f"/ui/node/{node.id}")
        seen.sees("ssh -p 2222 debian@192.0.2.7")
        facts = dict(
            zip(
                seen.page.locator("dt").all_text_contents(),
                seen.page.locator("dd").all_text_contents(),
                strict=True,
            )
        )
        assert (facts["tenant"], facts["project"], facts["host keys"]) == (
            "acme",
            "nova",
            FINGERPRINT,
        )
        seen.page.get_by_role("button", name="Copy ssh -p 2222 debian@192.0.2.7").click()
        seen.page.get_by_text("Copied").wait_for()
        assert (
            seen.page.evaluate("navigator.clipboard.readText()") == "ssh -p 2222 debian@192.0.2.7"
        )
        assert seen.accessible() == []


@pytest.mark.spec("issue: a request page with candidates, queue position and timeline")
def test_request_page_has_a_timeline_and_links_what_blocks_it(site: Site) -> None:
    served, [node, *_rest] = site.bench.fulfilled("fake-label")
    site.bench.fulfilled("fake-label")
    blocker = site.bench.submit("fake-label")
    waiting = site.bench.submit("fake-label")
    with browser(site.address) as seen:
        seen.open(f"/ui/request/{served}")
        steps = seen.page.get_by_role("list", name="Timeline").locator("li strong")
        seen.page.get_by_role("list", name="Timeline").wait_for()
        assert steps.all_text_contents() == [
            "requested",
            "accepted",
            "launch started",
            "nodes ready",
            "fulfilled",
        ]
        site.bench.zuul.accept(served)
        wait_for(lambda: steps.all_text_contents()[-2:] == ["in use", "now"], 30, "it is in use")
        assert seen.accessible() == []

        def told() -> bool:
            groups = [group for report in site.pool.zk.readReports() for group in report["waiting"]]
            return any(waiting in group["ids"] for group in groups)

        wait_for(told, what="the report")
        seen.open(f"/ui/request/{waiting}")
        seen.page.get_by_role("heading", name="Candidate pools").wait_for()
        seen.page.get_by_role("link", name=blocker).first.click()
        seen.page.get_by_role("heading", name=f"request {blocker}").wait_for()
        assert node.id


@pytest.mark.spec("issue: links of texts lead to pages, and hostile texts stay texts")
def test_ids_in_texts_are_links(site: Site) -> None:
    comment = "see node 0000000001 and 100-0000000002, <b>`nodepool list`</b>"
    node = site.bench.ready_node("fake-provider", "main", "fake-label", comment=comment)
    with browser(site.address) as seen:
        seen.open(f"/ui/node/{node.id}")
        seen.sees("<b>")
        for kind, name in (("node", "0000000001"), ("request", "100-0000000002")):
            assert seen.page.locator(f"dd a[href='/ui/{kind}/{name}']").count() == 1
        assert seen.page.get_by_role("button", name="Copy nodepool list", exact=True).count() == 1
