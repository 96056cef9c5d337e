"""The line that names the worst problems."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nodepool.zk.records import Node
from tests.support.mirror import NOW, Mirror, report


@pytest.fixture
def mirror() -> Mirror:
    made = Mirror()
    made.report()
    return made


def test_cluster_without_problems_is_green(mirror: Mirror) -> None:
    assert str(mirror.health()) == "No problems"
    assert mirror.health().record() == {
        "level": "green",
        "word": "No problems",
        "problems": [],
        "more": 0,
    }


@pytest.mark.parametrize(
    ("text", "provider", "label", "expected"),
    [
        (
            "host rack1: refused",
            "east",
            None,
            ("red", "hosts", "", "provider east: host rack1: refused"),
        ),
        (
            "not running: no such cloud",
            "east",
            None,
            ("red", "provider", "east", "provider east: not running: no such cloud"),
        ),
        (
            "cannot read hosts",
            "east",
            None,
            ("amber", "provider", "east", "provider east: cannot read hosts"),
        ),
        (
            "401 Unauthorized",
            "east",
            "label-1",
            ("amber", "label", "label-1", "provider east: label label-1: 401 Unauthorized"),
        ),
        (
            "deletion of node 0000000007 fails",
            "east",
            None,
            ("amber", "node", "0000000007", "deletion of node 0000000007 fails"),
        ),
        (
            "image noble: the last build failed: x",
            None,
            None,
            ("red", "image", "noble", "image noble: the last build failed: x"),
        ),
        (
            "ZooKeeper record /x is ignored",
            None,
            None,
            ("amber", "problems", "", "ZooKeeper record /x is ignored"),
        ),
    ],
)
def test_problem_has_a_level_and_the_page_that_explains_it(
    mirror: Mirror, text: str, provider: str | None, label: str | None, expected: tuple[str, ...]
) -> None:
    mirror.problem(text, provider, label)
    (found,) = mirror.health().troubles
    assert (found.level, found.kind, found.name, found.text) == expected


def test_broken_label_is_red_while_a_request_waits_for_it(mirror: Mirror) -> None:
    mirror.problem("401 Unauthorized", "east", "label-1")
    mirror.ask("label-1")
    assert mirror.health().level == "red"


def test_dead_host_is_amber_while_another_one_is_usable(mirror: Mirror) -> None:
    mirror.problem("host rack1: refused", "east")
    hosts = [{"name": "rack1", "usable": False}, {"name": "rack2", "usable": True}]
    mirror.reports[0] = report(providers={"east": {"hosts": hosts}})
    assert mirror.health().level == "amber"


@pytest.mark.parametrize(("held_back", "level"), [(False, "amber"), (True, "red")])
def test_failing_image_is_amber_while_an_upload_is_usable(
    mirror: Mirror, held_back: bool, level: str
) -> None:
    mirror.problem("image noble: the last build failed: x")
    mirror.uploads.append(
        SimpleNamespace(
            image_name="noble",
            state="ready",
            provider_name="east",
            rolled_back=None,
            held_back=held_back,
        )
    )
    assert mirror.health().level == level


def test_launcher_that_is_not_ready_or_has_an_old_configuration_is_named(mirror: Mirror) -> None:
    mirror.reports[0].update(ready=False, details=["ZooKeeper: not connected"])
    mirror.reports[0]["config"] = {"stale_since": NOW, "error": "line 7"}
    assert [(found.level, found.kind) for found in mirror.health().troubles] == [
        ("red", "daemons"),
        ("amber", "config"),
    ]
    assert str(mirror.health()) == (
        "Failing: launcher nl0 is not ready: ZooKeeper: not connected; launcher nl0 uses an older "
        "configuration: line 7"
    )


def test_starting_launcher_is_amber(mirror: Mirror) -> None:
    mirror.reports[0].update(ready=False, details=["starting: the first pass is not complete"])
    assert mirror.health().level == "amber"


def test_min_ready_that_is_not_reached_is_amber(mirror: Mirror) -> None:
    mirror.reports[0] = report(labels={"missing": {"min_ready": 2}})
    (found,) = mirror.health().troubles
    assert (found.level, found.kind, found.name) == (
        "amber",
        "label",
        "missing",
    ) and "0 of 2 ready" in found.text


def test_stuck_nodes_are_one_problem(mirror: Mirror) -> None:
    for number in range(3):
        node = Node(f"{number:010}")
        node.state, node.provider, node.pool, node.state_time, node.type = (
            "used",
            "east",
            "main",
            NOW - 1000,
            ["label-1"],
        )
        mirror.nodes.append(node)
    (found,) = mirror.health().troubles
    assert found.text.endswith("(and 2 more nodes)") and found.kind == "problems"


def test_three_worst_problems_are_named_and_the_others_counted(mirror: Mirror) -> None:
    for number in range(4):
        mirror.problem("cannot read hosts", f"p{number}")
    mirror.problem("not running: x", "east")
    record = mirror.health().record()
    assert (record["level"], len(record["problems"]), record["more"]) == ("red", 3, 2)
    assert record["problems"][0] == {
        "level": "red",
        "text": "provider east: not running: x",
        "kind": "provider",
        "name": "east",
    }
    assert str(mirror.health()).endswith("; 2 more")
