"""Slivers as resources of the leak search."""

from __future__ import annotations

import pytest

from nodepool.driver.nodemanager.machines import NodeManagerResource

SLIVER = {"name": "np0000000001", "metadata": {"nodepool_node_id": "0000000001"}}


@pytest.mark.parametrize(
    ("external_id", "belongs"),
    [
        ({"host": "h1", "sliver": "np0000000001"}, True),
        ({"host": "h2", "sliver": "np0000000001"}, False),
        ({"host": "h1", "sliver": "np0000000002"}, False),
        # Of another driver that the provider had: it is not known what the node uses.
        ("i-123", True),
    ],
)
def test_sliver_belongs_to_the_node_whose_record_names_it(
    external_id: object, belongs: bool
) -> None:
    assert NodeManagerResource("h1", SLIVER).belongs_to(external_id) is belongs
