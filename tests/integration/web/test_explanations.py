"""Answers of the pages of single objects, over a cluster that never changes."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.support.fixed_cluster import HELD_NODE


def explained(address: str, kind: str, name: str) -> Any:
    return json.loads(
        urllib.request.urlopen(f"{address}/api/v1/explain/{kind}/{name}", timeout=30).read()
    )


def test_answers_can_be_copied_and_name_the_reason(fixed_address: str) -> None:
    assert (
        explained(fixed_address, "node", HELD_NODE)["answer"]
        == f"held; `nodepool delete {HELD_NODE}` releases it"
    )
    assert (
        explained(fixed_address, "provider", "west")["answer"]
        == "does not run: the driver aws is not installed"
    )
    facts = explained(fixed_address, "provider", "east")["facts"]
    assert facts["launcher nl01"] == "driver openstack, launching 1 node"
    assert {key for key in facts if key.startswith("limit of ")} == {
        "limit of cores",
        "limit of instances",
        "limit of ram",
    }
