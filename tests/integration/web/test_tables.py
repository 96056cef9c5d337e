"""Grouping, order and columns of the tables, in a real browser over a real launcher."""

from __future__ import annotations

import pytest

from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import Browser, browser


def titles(seen: Browser) -> list[str]:
    return [
        text.strip(" \u25b2\u25bc") for text in seen.page.locator("thead th").all_text_contents()
    ]


@pytest.mark.spec("issue: grouping by provider, label and state with counts")
def test_nodes_are_grouped_by_label_with_counts(site: Site) -> None:
    site.bench.fulfilled("fake-label")
    site.bench.fulfilled(HOSTILE)
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        seen.page.get_by_label("Group by").select_option("labels")
        groups = seen.page.locator("tr.group")
        wait_for(
            lambda: (
                sorted(groups.all_text_contents()) == sorted([f"{HOSTILE} (1)", "fake-label (1)"])
            ),
            what="two groups",
        )
        assert "group=labels" in seen.page.url and seen.accessible() == []
        seen.page.locator(".groups").get_by_role("link", name="fake-label: 1").click()
        wait_for(lambda: seen.page.locator("tbody tr").count() == 1, what="the rows of one group")
        assert seen.page.url.endswith("/ui/nodes?labels=fake-label")


@pytest.mark.spec("issue: remembered columns")
def test_chosen_columns_are_remembered(site: Site) -> None:
    site.bench.fulfilled("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        assert "Address" in titles(seen) and "Tenant" not in titles(seen)
        seen.page.get_by_text("Columns", exact=True).click()
        seen.page.get_by_label("Address", exact=True).uncheck()
        seen.page.get_by_label("Tenant", exact=True).check()
        wait_for(
            lambda: "Tenant" in titles(seen) and "Address" not in titles(seen), what="other columns"
        )
        seen.page.reload()
        wait_for(
            lambda: "Tenant" in titles(seen) and "Address" not in titles(seen),
            what="the same columns",
        )
        seen.page.get_by_text("Columns", exact=True).click()
        seen.page.get_by_role("button", name="Reset").click()
        wait_for(lambda: "Address" in titles(seen), what="the default columns")


@pytest.mark.spec("issue: sticky headers")
def test_header_of_a_long_table_stays_in_sight(site: Site) -> None:
    for request in [site.bench.submit("no-such-label") for _ in range(40)]:
        site.bench.wait_request(request, "failed")  # rows that change would be drawn again
    with browser(site.address, viewport={"width": 1280, "height": 500}) as seen:
        seen.open("/ui/requests")
        wait_for(lambda: seen.page.locator("tbody tr").count() == 40, what="all rows")
        seen.page.evaluate(
            "document.querySelector('tbody tr:last-child').scrollIntoView()"
        )  # a row may be drawn again
        assert seen.page.locator("thead th").first.is_visible()
        box = seen.page.locator("thead th").first.bounding_box()
        assert box is not None and 0 <= box["y"] < 500


@pytest.mark.spec("issue: waiting requests by queue position, then the newest")
def test_requests_are_ordered_by_queue_position(site: Site) -> None:
    served, _nodes = site.bench.fulfilled("fake-label")
    site.bench.fulfilled("fake-label")
    second = site.bench.submit("fake-label", relative_priority=5)
    first = site.bench.submit("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/requests")
        rows = seen.page.locator("tbody tr td:first-child")
        wait_for(lambda: rows.all_text_contents()[:2] == [first, second], what="the order")
        assert served in rows.all_text_contents()[2:]
        assert seen.page.locator("th[aria-sort=ascending]").all_text_contents() == [
            "Queue position \u25b2"
        ]
