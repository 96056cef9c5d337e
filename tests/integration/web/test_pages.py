"""The pages in a real browser over a real launcher."""

from __future__ import annotations

import pytest

from nodepool.zk import history
from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import browser

PATHS = (
    "",
    "nodes",
    "requests",
    "labels",
    "images",
    "builds",
    "uploads",
    "providers",
    "pools",
    "hosts",
    "tenants",
    "daemons",
    "problems",
    "events",
    "config",
    "usage",
)


def busy(site: Site) -> tuple[str, str]:
    """Ids of a fulfilled request and of one that waits for quota."""
    served, _nodes = site.bench.fulfilled("fake-label", requestor=HOSTILE)
    site.bench.fulfilled(HOSTILE)
    waiting = site.bench.submit("fake-label", "fake-label")
    wait_for(
        lambda: any(waiting in group["ids"] for group in site.pool.reporter.compose()["waiting"]),
        what="it waits",
    )
    wait_for(
        lambda: any(
            waiting in group["ids"] for r in site.pool.zk.readReports() for group in r["waiting"]
        ),
        what="published",
    )
    return served, waiting


@pytest.mark.spec(
    "issue: reasons on pages, deep links, live; no script of hostile names runs; nothing from "
    "other hosts"
)
def test_pages_show_reasons_and_run_no_foreign_script(site: Site) -> None:
    served, waiting = busy(site)
    with browser(site.address) as seen:
        seen.open("/")
        assert seen.page.url.endswith("/ui/")
        seen.sees("Requests waiting")
        seen.sees("Quota of fake-provider: 2 of 2 instances in use")
        seen.page.get_by_role("link", name="Requests", exact=True).click()
        seen.page.get_by_role("link", name=waiting).click()
        seen.sees("queue position")
        assert seen.page.url.endswith(f"/ui/request/{waiting}")
        seen.sees("fake-provider-main")
        seen.open(f"/ui/request/{served}")
        seen.sees("fulfilled (was pending)")
        seen.open("/ui/nodes?state=ready")
        assert seen.page.locator("tbody tr").count() == 2
        seen.page.locator("tbody").get_by_text(HOSTILE).first.wait_for()
        (node_id, *_rest) = site.bench.zuul.accept(served)
        site.bench.zuul.give_back(node_id)
        # Nobody has touched the page.
        wait_for(lambda: seen.page.get_by_text(node_id).count() == 0, 30, "it is live")
        seen.open(f"/ui/node/{node_id}")
        seen.sees("created in fake-provider-main")
        seen.sees("launch: attempt 1")


@pytest.mark.spec("issue: live, also after a proxy has answered for a launcher that was not there")
def test_page_follows_events_again_after_an_outage(site: Site) -> None:
    with browser(site.address) as seen:
        seen.page.route(
            "**/events?digest=1",
            lambda route: route.fulfill(status=502, body="bad gateway"),
            times=1,
        )
        seen.open("/ui/nodes")
        seen.sees("not connected, trying again")
        seen.page.get_by_text("live", exact=True).wait_for()
        assert [each for each in seen.errors if "502" not in each] == []
        seen.errors.clear()


@pytest.mark.spec("issue: event feed, filterable on its page, too; deep links")
def test_events_page_can_be_filtered(site: Site) -> None:
    served, _waiting = busy(site)
    with browser(site.address) as seen:
        seen.page.route(
            "**/events?since=*",
            lambda route: route.fulfill(status=502, body="bad gateway"),
            times=1,
        )
        seen.open("/ui/events")
        lines = seen.page.get_by_role("list", name="Events").locator("li")
        lines.filter(has_text="request-submitted").first.wait_for()
        entries = seen.page.get_by_role("list", name="Events").locator("> li")
        of_request = entries.filter(has=seen.page.get_by_role("link", name=served))
        of_request.get_by_text("earlier of this request").first.wait_for()
        assert of_request.count() == 1, "folded"
        seen.page.get_by_label("Type").select_option("request-changed")
        others = lines.filter(has_not_text="request-changed")
        wait_for(lambda: lines.count() >= 5 and others.count() == 0, what="pending, fulfilled")
        assert seen.page.url.endswith("/ui/events?type=request-changed")
        seen.open(f"/ui/events?type=request-changed&request={served}")
        wait_for(lambda: lines.count() == 2, what="those of one request")
        seen.page.get_by_role("button", name=f"request: {served}").click()
        wait_for(lambda: lines.count() >= 5, what="those of all")
        seen.open("/ui/events?type=nonsense")
        seen.sees("There is no event type nonsense. Types: ")
        assert [each for each in seen.errors if "502" not in each] == []
        seen.errors.clear()


@pytest.mark.spec(
    "issue: each page: light and dark, phone and desk; axe finds nothing serious; no errors"
)
@pytest.mark.parametrize(
    "scheme, width", [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_pages_are_accessible(site: Site, scheme: str, width: int) -> None:
    served, waiting = busy(site)
    node = site.bench.zuul.request(served)["nodes"][0]
    site.bench.store_image("noble", "fake-provider")
    with browser(
        site.address, color_scheme=scheme, viewport={"width": width, "height": 800}
    ) as seen:
        things = (
            f"request/{waiting}",
            f"request/{served}",
            f"node/{node}",
            "image/noble",
            "label/fake-label",
        )
        for path in (
            *PATHS,
            *things,
            "provider/fake-provider",
            "nodes?group=labels",
            "nodes?q=nothing",
            "nowhere",
            "leases",
        ):
            seen.open(f"/ui/{path}")
            seen.page.wait_for_load_state("domcontentloaded")
            assert seen.accessible(()) == [], path
            seen.errors[:] = [each for each in seen.errors if "404" not in each]
            assert seen.page.evaluate(
                "document.documentElement.scrollWidth <= window.innerWidth"
            ), f"/ui/{path} is too wide"


@pytest.mark.spec("issue: keyboard")
def test_pages_can_be_used_by_keyboard(site: Site) -> None:
    busy(site)
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        seen.page.keyboard.press("Tab")
        seen.page.keyboard.press("Enter")
        assert seen.page.evaluate("document.activeElement.id") == "main"
        header = seen.page.get_by_role("button", name="State")
        header.focus()
        seen.page.keyboard.press("Enter")
        seen.page.locator("th[aria-sort=ascending]").wait_for()
        assert "sort=state" in seen.page.url
        # The focus stays where it was.
        wait_for(
            lambda: "State" in str(seen.page.evaluate("document.activeElement.textContent")),
            what="the focus",
        )
        seen.page.keyboard.press("Enter")
        seen.page.locator("th[aria-sort=descending]").wait_for()


@pytest.mark.spec("issue: find, filters and what is unknown")
def test_find_and_unknown(site: Site) -> None:
    busy(site)
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        seen.page.get_by_label("Find").fill("no such thing")
        seen.page.locator("tbody").get_by_text("Nothing matches the filters.").wait_for()
        assert "q=no+such+thing" in seen.page.url
        seen.page.get_by_role("button", name="Clear filters").click()
        wait_for(lambda: seen.page.locator("tbody tr").count() == 2, what="all nodes")
        assert seen.page.url.endswith("/ui/nodes")
        seen.open("/ui/node/0000009999")
        seen.sees("node 0000009999 is not known")
        seen.page.get_by_role("link", name="Search for 0000009999").wait_for()
        seen.open("/ui/node")
        seen.sees("There is no page /ui/node")
        seen.page.locator("main").get_by_role("link", name="Nodes").click()
        seen.page.get_by_role("heading", name="Nodes").wait_for()
        # What the server refuses is an error in the console of the browser, and nothing else is.
        assert all("404" in each for each in seen.errors)
        seen.errors.clear()


@pytest.mark.spec("issue: empty states that teach: what would appear here, when, and the command")
def test_empty_tables_explain_what_would_appear_there(site: Site) -> None:
    with browser(site.address) as seen:
        for path, text in (
            ("requests", "nodepool request create LABEL"),
            ("images", "whether built or not"),
            ("builds", "nodepool image-build IMAGE"),
            ("hosts", "nodemanager"),
            ("tenants", "tenant-resource-limits"),
            ("problems", "until they work again"),
        ):
            seen.open(f"/ui/{path}")
            seen.page.locator("main").get_by_text(text).first.wait_for()
            assert seen.accessible() == [], path


@pytest.mark.spec("issue: error states that teach")
def test_page_loads_again_when_the_launcher_answers_again(site: Site) -> None:
    with browser(site.address) as seen:
        seen.page.route("**/api/v1/nodes?*", lambda route: route.abort(), times=1)
        seen.open("/ui/nodes")
        seen.sees("The launcher does not answer.")
        assert seen.accessible() == []
        seen.page.get_by_role("heading", name="Nodes").wait_for()
        assert [each for each in seen.errors if "ERR_FAILED" not in each] == []
        seen.errors.clear()


@pytest.mark.spec(
    "issue: nodes: filter; capacity, use and free per pool and label as bars; configuration as "
    "loaded"
)
def test_choose_bars_and_configuration(site: Site) -> None:
    served, waiting = busy(site)
    with browser(site.address) as seen:
        seen.open("/ui/requests")
        assert seen.page.locator("tbody tr").count() == 3
        seen.page.get_by_label("State").select_option("fulfilled")
        wait_for(lambda: seen.page.locator("tbody tr").count() == 2, what="two are fulfilled")
        assert "state=fulfilled" in seen.page.url and seen.page.get_by_text(served).count() == 1
        seen.page.get_by_label("Requestor").select_option(HOSTILE)
        wait_for(
            lambda: seen.page.locator("tbody tr").count() == 1,
            what="one of them is of that requestor",
        )
        seen.page.get_by_label("State").select_option("all")
        seen.page.get_by_label("Requestor").select_option("all")
        seen.sees(waiting)
        seen.open("/ui/")
        seen.sees("instances 2 of 2, full")
        seen.sees("2 nodes, no limit of the pool")
        bar = seen.page.get_by_role("img", name="fake-label: 1 ready")
        assert bar.locator("rect.ready").count() == 1
        seen.open("/ui/config")
        seen.sees(", in force since ")
        seen.sees("must not contain '/'")
        part = seen.page.locator("details").filter(has_text="Provider fake-provider")
        assert "name: fake-provider\n" in str(part.locator("pre").text_content())
        assert seen.accessible() == []
        part.locator("summary").click()
        assert not part.locator("pre").is_visible()


@pytest.mark.spec("issue: requests with the reason each one waits, live")
@pytest.mark.core
def test_reason_is_shown_without_a_request(site: Site) -> None:
    """The launcher reports why a request waits some time after it has come; nothing else happens
    then.
    """
    site.bench.fulfilled("fake-label")
    site.bench.fulfilled("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/requests?state=requested,pending")
        site.bench.submit("fake-label")
        seen.sees("instances: 1 needed, 0 of 2 left")


@pytest.mark.spec("issue: hostile records: a page shows what it can")
def test_page_shows_records_with_invalid_times(site: Site) -> None:
    site.bench.ready_node("fake-provider", "main", "fake-label", created_time=10**400)
    site.bench.submit("fake-label", created_time=10**400)
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        seen.sees("fake-provider")
        seen.open("/ui/requests")
        seen.sees("fake-label")
        seen.open("/ui/")
        seen.sees("Requests waiting")


@pytest.mark.spec("issue 49, 3: a page with charts of usage, in the same groups")
def test_usage_is_shown_in_the_chosen_group(site: Site) -> None:
    _request, [node] = site.bench.fulfilled("fake-label")
    kazoo = site.bench.zk.kazoo_client
    measured = {"memory_peak": 1 << 30, "memory_limit": 2 << 30, "oom_kills": 7}
    history.append(kazoo, "node-usage", {"node": node.id, "provider": node.provider, **measured})

    def written() -> bool:
        events = history.HistoryReader().read_all(kazoo)
        return any(event.get("state") == "ready" for event in events)

    wait_for(written)
    with browser(site.address) as seen:
        seen.open("/ui/usage?hours=4")
        assert seen.page.get_by_role("rowheader").all_inner_texts() == ["fake-label"]
        seen.sees("1 GiB, 1 GiB of 2 GiB")
        seen.page.get_by_role("link", name="provider", exact=True).click()
        seen.sees("fake-provider")
        assert "by=provider&hours=4" in seen.page.url
        assert seen.page.get_by_role("cell", name="7", exact=True).count() == 1
        assert seen.accessible() == []
