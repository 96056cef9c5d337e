"""What an operator reads on a day: who has a node, since when something fails, and how bad it
is.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import Any

import pytest

from nodepool.reasons import Code, because
from nodepool.status import causes
from nodepool.zk.mirror.progress import BuildProgress, ProgressStore
from tests.conftest import wait_for
from tests.integration.web.conftest import HOSTILE, Site
from tests.support.browser import browser

MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{3})? [A-Z]")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", 0.2)


def get(site: Site, path: str) -> Any:
    return json.loads(urllib.request.urlopen(f"{site.address}/api/v1/{path}", timeout=30).read())


def test_list_of_nodes_shows_who_has_each(site: Site) -> None:
    lease = {"lease": {"owner": "alice", "via": "token", "purpose": "bisect"}}
    made = [
        ({"state": "hold", "user_data": lease, "comment": "lease alice"}, "alice"),
        (
            {
                "tenant_name": "acme",
                "user_data": {"project_name": "nova", "job_name": "unit", "build": "b1"},
            },
            "acme, nova, unit",
        ),
        ({"state": "hold", "hold_job": "unit", "comment": "autohold"}, "unit"),
        ({"state": "hold", "comment": "mine"}, "mine"),
        ({"allocated_to": "200-0000000009"}, "request 200-0000000009"),
        ({}, None),
    ]
    nodes = {
        site.bench.ready_node("other", "main", "fake-label", **values).id: user
        for values, user in made
    }
    listed = wait_for(
        lambda: len(rows := get(site, "nodes")["rows"]) == len(made) and rows, what="all nodes"
    )
    assert {row["id"]: row["user"] for row in listed} == nodes
    assert [column["title"] for column in get(site, "nodes")["columns"]][-3:] == [
        "Used by",
        "Locked",
        "Address",
    ]


def test_problems_have_a_severity_and_an_age(site: Site) -> None:
    began = time.time()
    problems = site.pool.getProviderManager("fake-provider").label_problems
    for label in ("fake-label", HOSTILE):
        problems.note(label, "launch", "no such image")
    rows = wait_for(
        lambda: len(found := get(site, "problems")["rows"]) == 2 and found, what="the problems"
    )
    assert {row["severity"] for row in rows} == {"degraded"}
    assert [row["since"] for row in rows if not began - 1 <= row["since"] <= time.time() + 1] == []
    for _number in range(2):
        site.bench.fulfilled("fake-label")
    site.bench.submit("fake-label")  # a request that waits for the label makes its problem worse
    problems.note("fake-label", "launch", "no such image")
    wait_for(
        lambda: (
            {row["label"]: row["severity"] for row in get(site, "problems")["rows"]}
            == {"fake-label": "failing", HOSTILE: "degraded"}
        ),
        what="worse",
    )
    with browser(site.address) as seen:
        seen.open("/ui/problems")
        titles = seen.page.locator("thead th").all_text_contents()
        assert [title.strip(" \u25b2\u25bc") for title in titles][:2] == ["Severity", "Age"]


def test_problem_that_stays_keeps_its_age(site: Site) -> None:
    problems = site.pool.getProviderManager("fake-provider").label_problems
    problems.note("fake-label", "launch", "no such image")
    (first,) = wait_for(lambda: get(site, "problems")["rows"], what="the problem")
    problems.note(HOSTILE, "launch", "another one")
    later = wait_for(
        lambda: len(rows := get(site, "problems")["rows"]) == 2 and rows, what="both problems"
    )
    assert [row["since"] for row in later if "no such image" in row["problem"]] == [first["since"]]
    assert max(row["since"] for row in later) > first["since"]


def test_all_moments_of_a_page_have_one_form(site: Site) -> None:
    _request, [node] = site.bench.fulfilled("fake-label")
    site.bench.zuul.write_node(node.id, state="hold", hold_expiration=3600)
    with browser(site.address, locale="en-US", timezone_id="America/New_York") as seen:
        seen.open(f"/ui/node/{node.id}")
        seen.page.get_by_text("hold ends").wait_for()
        assert MOMENT.search(seen.page.locator("dl").inner_text())
        times = seen.page.locator("ol.history time").all_text_contents()
        assert times and [text for text in times if not MOMENT.match(text)] == []


def test_busy_tenant_limit_is_no_problem_that_needs_help() -> None:
    def limited(needed: int) -> bool:
        reason = because(
            Code.TENANT_LIMIT, tenant="acme", resource="instances", limit=2, used=2, needed=needed
        )
        return causes.needs_help(
            causes.Cause(str(reason), reason.suggestion, Code.TENANT_LIMIT.word)
        )

    assert (limited(1), limited(3)) == (False, True)


def test_page_of_an_image_does_not_suggest_itself(site: Site) -> None:
    ended = BuildProgress(
        "noble",
        "b1",
        "nb01",
        state="failed",
        reason="exit status 1",
        started=time.time(),
        ended=time.time(),
        tail=["E: no space left"],
    )
    ProgressStore(site.bench.zk.kazoo_client).write(ended)
    site.bench.store_image("noble", "elsewhere", state="failed")
    found = wait_for(
        lambda: (each := get(site, "explain/image/noble"))["logs"] and each, what="the log"
    )
    assert found["suggestion"] == "repair what the end of its log says; the build is retried"


def test_reason_is_in_sight_on_a_phone(site: Site) -> None:
    site.bench.fulfilled("fake-label")
    site.bench.fulfilled("fake-label")
    site.bench.submit("fake-label")
    with browser(site.address, viewport={"width": 390, "height": 800}) as seen:
        seen.open("/ui/requests?state=requested,pending")
        reason = seen.page.locator("tbody td").filter(has_text="0 of 2 left").first
        reason.wait_for()
        box = reason.bounding_box()
        assert box is not None and box["x"] < 200


def test_columns_of_providers_have_plain_titles(site: Site) -> None:
    titles = [column["title"] for column in get(site, "providers")["columns"]]
    assert titles[-3:] == ["Call rate", "Last failed call", "Age of failure"]
