"""The overview: health, causes, capacity and charts, over a real launcher."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.zk import reports
from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import Browser, browser, shoot


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", 0.2)


def other_launcher(site: Site, **content: Any) -> None:
    """A second launcher that reports this."""
    (own,) = wait_for(site.bench.zk.readReports, what="the first report")
    reports.write(site.bench.zk.kazoo_client, reports.path("nl02-1"), {**own, "hostname": "nl02", "waiting": [], **content})


def health(seen: Browser) -> Any:
    return seen.page.get_by_role("region", name="Health")


def test_cluster_without_problems_says_so(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/")
        wait_for(lambda: health(seen).inner_text().replace("\u2713", "").strip() == "No problems", what="green")


def test_worst_problems_lead_to_the_pages_that_explain_them(site: Site) -> None:
    other_launcher(
        site, ready=False, details=["ZooKeeper: not connected"], config={"error": f"line 7 {HOSTILE}", "stale_since": 1.0}
    )
    with browser(site.address) as seen:
        seen.open("/ui/")
        health(seen).get_by_text("Failing").wait_for()
        lines = health(seen).get_by_role("listitem").all_inner_texts()
        assert ["launcher nl02" in line for line in lines] == [True, True] and "not ready" in lines[0] and HOSTILE in lines[1]
        shoot(seen, "overview-problems")
        assert seen.accessible() == []
        health(seen).get_by_role("link", name="launcher nl02 uses an older configuration").click()
        seen.page.get_by_role("heading", name="Configuration").wait_for()


def test_cause_opens_to_its_requests_labels_tenants_and_suggestion(site: Site) -> None:
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    ids = [site.bench.submit("fake-label", tenant_name="acme"), site.bench.submit("fake-label", "fake-label")]
    with browser(site.address) as seen:
        seen.open("/ui/")
        row = seen.page.locator("details.cause").filter(has_text="2 requests: Quota of fake-provider: 2 of 2 instances in use")
        row.locator("summary").click()
        for request in ids:
            assert row.get_by_role("link", name=request).get_attribute("href") == f"/ui/request/{request}"
        text = row.inner_text()
        assert "1 acme" in text and "fake-label \u00d72" in text and "raise the cloud quota of provider fake-provider" in text
        # It stays open when the page is updated.
        ids.append(site.bench.submit("fake-label"))
        seen.page.locator("details.cause[open]").get_by_role("link", name=ids[2]).wait_for()


def test_full_provider_and_pool_name_the_limit_in_red(site: Site) -> None:
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    site.bench.submit("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/")
        seen.page.locator(".meter.red").get_by_text("instances: 2 of 2, full").wait_for()
        seen.page.locator(".full").get_by_text("Quota of fake-provider: 2 of 2 instances in use").wait_for()


def card(seen: Browser, **row: Any) -> str:
    """Text of the card of a provider."""
    made = {"provider": "east", "launchers": ["nl01"], "driver": "static", "nodes": "5 ready", "states": {"ready": 5}, "used": {},
            "limit": {}, "hosts": 0, "hosts_down": 0, "problems": 0, **row}  # fmt: skip
    script = (
        "async (row) => { const { providerCard } = await import('/ui/static/cards.js'); return providerCard(row).textContent; }"
    )
    return str(seen.page.evaluate(script, made))


def test_cards_show_the_scarcest_limit_first_in_real_units(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/")
        text = card(
            seen, driver="openstack", used={"ram": 163840, "cores": 19, "volumes": 0},
            limit={"cores": 100, "ram": 163840, "volumes": 0, "instances": 2000},
        )  # fmt: skip
        assert text.endswith("RAM: 160 of 160 GiB, fullcores: 19 of 100, 19 %instances: 0 of 2,000, 0 %")
        assert "5 slots, 1 host down" in card(seen, hosts_down=1)
        assert "5 nodes, 2 of 3 hosts usable" in card(seen, driver="nodemanager", hosts=3, hosts_down=1)
        assert card(seen, problems=1).endswith("1 problem") and card(seen, problems=2).endswith("2 problems")


def test_provider_of_two_launchers_has_one_card(site: Site) -> None:
    other_launcher(site)
    with browser(site.address) as seen:
        seen.open("/ui/")
        seen.page.get_by_text("launcher nl02, ").wait_for()
        assert seen.page.locator(".card h3").filter(has_text="fake-provider").count() == 2  # of the provider and its pool
