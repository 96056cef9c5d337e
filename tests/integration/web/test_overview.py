"""The overview: health, causes, capacity and charts, over a real launcher."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest

from nodepool.launcher.trends import BUCKET, BUCKETS
from nodepool.zk import reports
from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import Browser, browser


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", 0.2)


def other_launcher(site: Site, **content: Any) -> None:
    """A second launcher that reports this."""
    (own,) = wait_for(site.bench.zk.readReports, what="the first report")
    reports.write(
        site.bench.zk.kazoo_client,
        reports.path("nl02-1"),
        {**own, "hostname": "nl02", "waiting": [], **content},
    )


def health(seen: Browser) -> Any:
    return seen.page.get_by_role("region", name="Health")


def test_cluster_without_problems_is_healthy(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/")
        wait_for(
            lambda: health(seen).inner_text().replace("\u2713", "").strip() == "No problems",
            what="green",
        )


def test_worst_problems_lead_to_the_pages_that_explain_them(site: Site) -> None:
    other_launcher(
        site,
        ready=False,
        details=["ZooKeeper: not connected"],
        config={"error": f"line 7 {HOSTILE}", "stale_since": 1.0},
    )
    with browser(site.address) as seen:
        seen.open("/ui/")
        health(seen).get_by_text("Failing").wait_for()
        lines = [
            line
            for line in health(seen).get_by_role("listitem").all_inner_texts()
            if "nl02" in line
        ]
        assert (
            ["launcher nl02" in line for line in lines] == [True, True]
            and "not ready" in lines[0]
            and HOSTILE in lines[1]
        )
        assert seen.accessible() == []
        health(seen).get_by_role("link", name="launcher nl02 uses an older configuration").click()
        seen.page.get_by_role("heading", name="Configuration").wait_for()


def test_cause_opens_to_its_requests_labels_tenants_and_suggestion(site: Site) -> None:
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    ids = [
        site.bench.submit("fake-label", tenant_name="acme"),
        site.bench.submit("fake-label", "fake-label"),
    ]
    with browser(site.address) as seen:
        seen.open("/ui/")
        row = seen.page.locator("details.cause").filter(
            has_text="2 requests: Quota of fake-provider: 2 of 2 instances in use"
        )
        row.locator("summary").click()
        for request in ids:
            assert (
                row.get_by_role("link", name=request).get_attribute("href")
                == f"/ui/request/{request}"
            )
        text = row.inner_text()
        assert (
            "1 acme" in text
            and "fake-label \u00d72" in text
            and "raise the quota of provider fake-provider" in text
        )
        # It stays open when the page is updated.
        ids.append(site.bench.submit("fake-label"))
        seen.page.locator("details.cause[open]").get_by_role("link", name=ids[2]).wait_for()


def test_full_provider_and_pool_name_the_limit_in_red(site: Site) -> None:
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    site.bench.submit("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/")
        seen.page.locator(".meter.red").get_by_text("instances 2 of 2, full").wait_for()
        seen.page.locator(".full").get_by_text(
            "Quota of fake-provider: 2 of 2 instances in use"
        ).wait_for()


def card(seen: Browser, **row: Any) -> str:
    """Text of the card of a provider."""
    made = {
        "provider": "east",
        "launchers": ["nl01"],
        "driver": "static",
        "nodes": "5 ready",
        "states": {"ready": 5},
        "used": {},
        "limit": {},
        "hosts": 0,
        "hosts_down": 0,
        "problems": 0,
        **row,
    }
    script = (
        "async (row) => { const { providerCard } = await import('/ui/static/cards.js'); "
        "return providerCard(row).textContent; }"
    )
    return str(seen.page.evaluate(script, made))


def test_cards_show_the_scarcest_limit_first_in_real_units(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/")
        text = card(
            seen,
            driver="openstack",
            used={"ram": 163840, "cores": 19, "volumes": 0},
            limit={"cores": 100, "ram": 163840, "volumes": 0, "instances": 2000},
        )
        assert text.endswith(
            "RAM 160 of 160 GiB, fullcores 19 of 100, 19 %instances 0 of 2,000, 0 %"
        )
        refused = card(seen, driver="not running: no aws", states={}, nodes="none")
        assert refused == "eastnot running: no awslauncher nl01; nodes: none"
        assert "5 slots, 2 of 3 hosts usable" in card(seen, hosts=3, hosts_down=1)
        assert "5 nodes, 2 of 3 hosts usable" in card(
            seen, driver="nodemanager", hosts=3, hosts_down=1
        )
        assert card(seen, problems=1).endswith("1 problem") and card(seen, problems=2).endswith(
            "2 problems"
        )


def test_provider_of_two_launchers_has_one_card(site: Site) -> None:
    other_launcher(site)
    with browser(site.address) as seen:
        seen.open("/ui/")
        seen.page.get_by_text("launcher nl02, ").wait_for()
        assert (
            seen.page.locator(".card h3").filter(has_text="fake-provider").count() == 2
        )  # of the provider and its pool


def rows_of_a_day(now: float, **last: Any) -> list[dict[str, Any]]:
    """Points of the charts; everything but the last hour is empty."""
    nothing = {
        "ready": 0,
        "failed": 0,
        "launch": None,
        "wait": None,
        "wait_p95": None,
        "nodes": None,
        "waiting": None,
    }
    times = [
        int(now // BUCKET * BUCKET - BUCKET * (BUCKETS - 1 - number)) for number in range(BUCKETS)
    ]
    return [
        {"time": when, **nothing, **(last if number >= BUCKETS - 6 else {})}
        for number, when in enumerate(times)
    ]


def chart(seen: Browser, title: str) -> Any:
    return seen.page.locator(".charts .card").filter(
        has=seen.page.get_by_role("heading", name=title, exact=True)
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_show_values_on_hover_and_as_a_table(
    site: Site, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    points = rows_of_a_day(
        time.time(),
        ready=7,
        failed=2,
        wait=40.0,
        wait_p95=147.0,
        nodes={"ready": 20, "in-use": 1300},
        waiting={"Quota of east": 12, HOSTILE: 3},
    )
    monkeypatch.setattr(site.pool.trends, "chart", lambda: points)
    with browser(site.address, color_scheme=scheme) as seen:
        seen.open("/ui/")
        seen.page.locator(".uplot canvas").nth(3).wait_for()
        seen.page.get_by_role("button", name="1 h").click()
        seen.page.locator("button[aria-pressed=true]").get_by_text("1 h").wait_for()
        legend = chart(seen, "Nodes by state").locator(".u-legend")
        wait_for(lambda: "1,300" in legend.inner_text(), what="the latest values, without pointing")
        # The cursors of all charts move together.
        over = chart(seen, "Nodes by state").locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        seen.page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 20)
        expected = {
            "Nodes by state": ("in-use", "1,300", "ready", "20"),
            "Waiting requests by cause": ("Quota of east", "12", HOSTILE, "3"),
            "Wait of requests": ("median", "40 s", "95 % within", "2 min 27 s"),
            "Launches per 5 min": ("ready", "7", "failed", "2"),
        }
        for title, words in expected.items():
            legend = chart(seen, title).locator(".u-legend")
            wait_for(
                lambda legend=legend, words=words: all(
                    word in legend.inner_text() for word in words
                ),
                what=title,
            )
        for title, words in expected.items():
            chart(seen, title).get_by_text("As a table").click()
            table = chart(seen, title).get_by_role("region")
            wait_for(
                lambda table=table, words=words: all(
                    word in table.inner_text() for word in words[1::2]
                ),
                what=f"{title} as a table",
            )
            assert table.locator("tbody tr").count() == 6
        assert seen.accessible() == []


def test_charts_without_data_name_what_is_missing(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/")
        chart(seen, "Wait of requests").get_by_text(
            "No request was fulfilled in this time."
        ).wait_for()
        chart(seen, "Launches per 5 min").get_by_text("No launch ended in this time.").wait_for()
        assert seen.page.locator(".uplot").count() == 0


def test_charts_end_with_their_page(site: Site) -> None:
    site.bench.fulfilled("fake-label")
    with browser(site.address) as seen:
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        seen.page.add_init_script(
            "const real = setInterval; globalThis.setInterval = (f, ms) => real(f, ms === 60000 ? "
            "100 : ms);"
        )
        seen.open("/ui/")
        # The events of the browser arrive during calls of its page.
        wait_for(
            lambda: seen.page.wait_for_timeout(50) or sum("trends" in url for url in asked) >= 3,
            what="fetched repeatedly",
        )
        seen.page.get_by_role("link", name="Events", exact=True).click()
        seen.page.get_by_role("heading", name="Events").wait_for()
        asked.clear()
        seen.page.wait_for_timeout(500)
        assert not [url for url in asked if "trends" in url]


def test_trends_are_sampled_by_the_launcher(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)
    monkeypatch.setattr("nodepool.launcher.trends.SAMPLE_INTERVAL", 0.1)
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    site.bench.submit("fake-label")

    def last() -> Any:
        found = json.loads(
            urllib.request.urlopen(f"{site.address}/api/v1/trends", timeout=30).read()
        )
        return {
            key: {name: values[-1] for name, values in found[key].items()}
            for key in ("nodes", "waiting")
        }

    wait_for(
        lambda: last() == {"nodes": {"ready": 2}, "waiting": {"Quota of fake-provider": 1}},
        30,
        "nodes and causes",
    )


def test_what_a_reader_clicks_on_stays_while_other_things_change(site: Site) -> None:
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    first = site.bench.submit("fake-label")
    site.bench.wait_request(first, "pending")
    with browser(site.address) as seen:
        seen.open("/ui/")
        summary = seen.page.locator("details.cause > summary").filter(
            has_text="Quota of fake-provider"
        )
        summary.focus()
        seen.page.keyboard.press("Enter")
        seen.page.evaluate("document.querySelector('details.cause').mark = 1")
        site.bench.submit("nosuch-label")
        seen.page.locator(".card").filter(has_text="1 failed").wait_for()
        assert seen.page.evaluate("document.querySelector('details.cause[open]').mark") == 1
        assert seen.page.evaluate("document.activeElement.tagName") == "SUMMARY"
        # Its own data change: it is another one now, in the same state.
        site.bench.submit("fake-label", tenant_name="acme")
        seen.page.locator("details.cause[open]").filter(has_text="1 acme").wait_for()
        assert seen.page.evaluate("document.activeElement.tagName") == "SUMMARY"
