"""The menu, the search box and the way back, in a real browser over a real launcher."""

from __future__ import annotations

import pytest

from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import browser


@pytest.mark.spec("issue: navigation in four groups; pages of one thing lead back to their table")
def test_menu_has_four_groups_and_a_thing_leads_back_to_its_table(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/labels")
        groups = seen.page.locator("#nav .group").all_text_contents()
        assert groups == ["Now", "Work", "Images", "Infrastructure"]
        assert seen.page.locator("#nav a[aria-current=page]").all_text_contents() == ["Labels"]
        seen.page.locator("tbody").get_by_role("link", name="fake-label", exact=True).first.click()
        seen.sees("label fake-label")
        seen.page.locator(".crumbs").get_by_role("link", name="Labels").click()
        assert seen.page.url.endswith("/ui/labels")


@pytest.mark.spec("issue: one search box over ids, labels, hosts and tenants; / focuses it")
def test_search_finds_ids_and_names(site: Site) -> None:
    request, [node, *_rest] = site.bench.fulfilled("fake-label", requestor=HOSTILE)
    with browser(site.address) as seen:

        def search(text: str) -> None:
            seen.page.keyboard.press("/")
            seen.page.keyboard.type(text)
            seen.page.keyboard.press("Enter")

        seen.open("/ui/")
        seen.sees("Requests waiting")
        search(node.id)
        seen.sees("created in fake-provider-main")
        search(request)
        seen.sees("fulfilled (was pending)")
        assert seen.page.url.endswith(f"/ui/request/{request}")
        search("fake-label")
        exact = seen.page.get_by_role("list", name="Exactly this name")
        exact.get_by_role("link", name="fake-label").wait_for()
        seen.sees("Labels: 1")
        seen.page.get_by_role("link", name="Requests: 1").wait_for()
        search(HOSTILE)
        seen.page.get_by_role("heading", name=f"Search: {HOSTILE}").wait_for()
        search("nowhere-at-all")
        seen.sees("Nothing has this id or name.")
        seen.page.go_back()
        seen.page.get_by_role("heading", name=f"Search: {HOSTILE}").wait_for()


def test_slash_in_a_field_is_text(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        box = seen.page.locator("#q")
        box.click()
        seen.page.keyboard.type("a/b")
        assert box.input_value() == "a/b"


def test_narrow_screen_folds_the_menu(site: Site) -> None:
    with browser(site.address) as seen:
        seen.page.set_viewport_size({"width": 390, "height": 800})
        seen.open("/ui/nodes")
        link = seen.page.locator("#nav").get_by_role("link", name="Hosts")
        assert not link.is_visible()
        seen.page.get_by_text("Menu", exact=True).click()
        link.click()
        assert seen.page.url.endswith("/ui/hosts")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
