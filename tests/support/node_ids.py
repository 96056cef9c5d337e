"""Node ids that were given to nodes that no longer exist."""

from __future__ import annotations

from typing import Any

from nodepool.zk import paths

#: Ids below this number are spent; resources of later ones count as those of a lost history.
SPENT = 100


def spend_node_ids(zk: Any) -> None:
    """Give `SPENT` node ids, so that resources tagged with one of them, and without a record,
    are leaked.
    """
    kazoo = zk.kazoo_client
    kazoo.ensure_path(paths.NODES)
    for answer in [kazoo.create_async(f"{paths.NODES}/", sequence=True) for _ in range(SPENT)]:
        kazoo.delete(answer.get(timeout=30))
