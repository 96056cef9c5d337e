"""Waiting requests grouped by cause."""

from __future__ import annotations

import time
from collections import Counter

from nodepool.reasons import Code, Reason, because
from nodepool.zk.records import Node
from tests.support.mirror import NOW, Mirror


def published(reason: Reason, code: str = "") -> dict[str, str]:
    """A reason as launchers publish it."""
    blocker = dict(reason.root.parameters).get("request")
    return {
        "code": code or reason.code.word,
        "root": reason.root.code.word,
        "pool": reason.pool,
        "text": str(reason.at("")),
        "help": reason.suggestion,
        "request": str(blocker or ""),
        "blocker": reason.blocker,
        "headline": reason.headline,
    }


def quota(
    needed: int, provider: str = "east", left: int = 0, pool: str = "east-main"
) -> dict[str, str]:
    reason = because(
        Code.PROVIDER_QUOTA,
        provider=provider,
        resource="instances",
        needed=needed,
        left=left,
        limit=20,
    )
    return published(reason.at(pool))


def tenant_limit(tenant: str) -> dict[str, str]:
    return published(
        because(Code.TENANT_LIMIT, tenant=tenant, limit=3, resource="instances", used=3, needed=1)
    )


def test_requests_of_different_labels_sizes_and_launchers_are_counted_under_one_quota() -> None:
    mirror = Mirror()
    one, two = (
        mirror.ask("label-0", tenant="acme", age=300),
        mirror.ask("label-0", "label-0", tenant="bolt"),
    )
    three = mirror.ask("label-1", tenant="acme")
    mirror.report(([one], [quota(1)]), ([two], [quota(2)]))
    mirror.report(([three], [quota(1)]))
    (row,) = mirror.rows()
    assert row["cause"] == "Quota of east: 20 of 20 instances in use"
    assert (row["count"], row["ids"], row["problem"]) == (3, [one, two, three], False)
    assert (row["label_counts"], row["tenants"]) == (
        {"label-0": 2, "label-1": 1},
        {"acme": 2, "bolt": 1},
    )
    assert (row["oldest"], row["since"], row["suggestion"][:35]) == (
        NOW - 300,
        "5 min",
        "raise the quota of provider east, o",
    )


def test_request_reported_by_two_launchers_counts_once_under_the_most_informative_cause() -> None:
    mirror = Mirror()
    request = mirror.ask("label-0")
    mirror.report(([request], [published(because(Code.OTHER_LAUNCHER))]))
    mirror.report(([request], [quota(1)]))
    assert [(row["count"], row["code"]) for row in mirror.rows()] == [(1, "provider-quota")]


def test_paused_pool_counts_under_what_its_first_request_lacks() -> None:
    mirror = Mirror()
    first, second = mirror.ask("label-0"), mirror.ask("label-1")
    why = because(
        Code.PROVIDER_QUOTA, provider="east", resource="instances", needed=1, left=0, limit=20
    )
    paused = published(because(Code.PAUSED, why=why).at("east-main"))
    behind = published(because(Code.POOL_PAUSED, request=first).at("east-main"))
    mirror.report(([first], [paused]), ([second], [behind]))
    (row,) = mirror.rows()
    assert (row["cause"], row["ids"]) == (
        "Quota of east: 20 of 20 instances in use",
        [first, second],
    )


def test_causes_that_need_help_come_before_larger_ones_that_flow() -> None:
    mirror = Mirror()
    full = [mirror.ask("label-0") for _number in range(5)]
    limited, typo = mirror.ask("label-1", tenant="acme"), mirror.ask("labl-1")
    mirror.report((full, [quota(1)]), ([limited], [tenant_limit("acme")]))
    rows = mirror.rows()
    assert [(row["count"], row["problem"]) for row in rows] == [(1, True), (5, False), (1, False)]
    assert "did you mean" in rows[0]["cause"] and rows[0]["ids"] == [typo]
    # A busy tenant limit ends when the tenant returns nodes.
    assert rows[2]["cause"] == "Limit of tenant acme: 3 of 3 instances in use"


def test_dead_host_is_the_cause_of_requests_for_its_provider() -> None:
    mirror = Mirror()
    requests = [mirror.ask("label-0"), mirror.ask("label-1")]
    mirror.problems.append(
        {
            "provider": "east",
            "label": None,
            "problem": "host rack1: connection refused",
            "help": None,
        }
    )
    free = {
        name: published(because(Code.NO_FREE_NODE, labels=name).at("east-main"))
        for name in ("label-0", "label-1")
    }
    mirror.report(
        *(([request], [free[f"label-{number}"]]) for number, request in enumerate(requests))
    )
    # Another host of the provider can be used: its node is in use.
    node = Node("0000000001")
    node.state, node.provider, node.pool, node.type = (
        "in-use",
        "east",
        "main",
        ["label-0", "label-1"],
    )
    mirror.nodes.append(node)
    (row,) = mirror.rows()
    assert (row["cause"], row["count"], row["problem"]) == (
        "host rack1: connection refused",
        2,
        True,
    )
    assert "no free node of label-" in row["reason"]


def test_requests_that_a_large_report_does_not_list_count_under_its_reason() -> None:
    mirror = Mirror()
    ids = [mirror.ask("label-0") for _number in range(10)]
    mirror.report((ids[:2], [quota(1)]), unlisted=8)
    (row,) = mirror.rows()
    assert row["ids"] == ids and row["code"] == "provider-quota"


def test_requests_that_ended_since_the_report_do_not_count() -> None:
    mirror = Mirror()
    request = mirror.ask("label-0")
    mirror.report(([request], [quota(1)]))
    mirror.requests[0].state = "fulfilled"
    assert mirror.rows() == []


def test_memory_is_shown_in_gib() -> None:
    reason = because(
        Code.POOL_LIMIT, name="main", resource="ram", needed=8192, left=0, limit=163840
    ).at("east-main")
    assert reason.headline == "Limit of pool east-main: 160 of 160 GiB of RAM in use"


def test_ten_thousand_requests_are_grouped_in_a_fraction_of_a_second() -> None:
    mirror = Mirror()
    ids = [mirror.ask(f"label-{number % 400}") for number in range(10_000)]
    for launcher in ("east", "west"):
        mirror.report(
            *(
                (ids[number::400], [quota(1, launcher, pool=f"{launcher}-main")])
                for number in range(400)
            )
        )
    begin = time.process_time()
    rows = mirror.rows()
    assert time.process_time() - begin < 2.0  # measured: 0.1 s
    assert sum(row["count"] for row in rows) == 10_000
    assert Counter(row["cause"] for row in rows) == {"Quota of east: 20 of 20 instances in use": 1}
