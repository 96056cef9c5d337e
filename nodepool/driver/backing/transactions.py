"""The atomic writes of the metastatic driver.

Each contains the conditions that it was computed from: of two launchers with one provider only one
succeeds, and a crash leaves nothing half done.
"""

from __future__ import annotations

import re
import time
import uuid

from nodepool.driver.backing.records import BackingNodeRecord, encode_user_data
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.zk import locks, paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.records import NodeRequest
from nodepool.zk.writer import Txn
from nodepool.zk.zookeeper import ZooKeeper

_PRECEDENCE = re.compile(r"^\d{3}$")


def backing_request(
    facade: ZooKeeper, label: DriverLabel, owner: str, request: NodeRequest
) -> tuple[zk.NodeRequest, Txn]:
    """Create a request for a backing node, which ends with our session.

    It has the priority of the user's ``request``; the first result is its path.
    """
    backing = zk.NodeRequest()
    backing.node_types = [label.backing_label]
    backing.state = zk.REQUESTED
    backing.requestor = owner
    backing.created_time = time.time()
    backing.tenant_name = request.tenant_name
    backing.event_id = request.event_id or uuid.uuid4().hex
    backing.relative_priority = request.relative_priority or 0
    precedence = (request.id or "").partition("-")[0]
    txn = Txn(facade.kazoo_client)
    txn.create(
        f"{paths.REQUESTS}/{precedence if _PRECEDENCE.match(precedence) else '100'}-",
        backing.serialize(),
        ephemeral=True,
        sequence=True,
        tree=facade.request_tree,
        record=backing,
    )
    return backing, txn


def _node(txn: Txn, facade: ZooKeeper, node: zk.Node, **values: object) -> None:
    changed = node.copy()
    for name, value in values.items():
        setattr(changed, name, value)
    version = node.version
    txn.set(
        paths.node(node.id or ""),
        changed.serialize(),
        version,
        tree=facade.node_tree,
        record=changed,
    )


def take_over(
    facade: ZooKeeper,
    node: zk.Node,
    request_id: str,
    record: BackingNodeRecord,
    owner: str,
    lock_exists: bool,
) -> Txn:
    """Lock the fulfilled backing node for good, sign it, and delete the request.

    It fails when anybody else contends for the lock.
    """
    txn = Txn(facade.kazoo_client)
    locks.add_lock(txn, paths.node_lock(node.id or ""), lock_exists, owner)
    _node(txn, facade, node, state=zk.IN_USE, user_data=encode_user_data(record, owner))
    txn.delete(paths.request(request_id))
    return txn


def store_slots(facade: ZooKeeper, node: zk.Node, record: BackingNodeRecord, owner: str) -> Txn:
    """Write the slots of the record; fails if the node changed since it was read."""
    txn = Txn(facade.kazoo_client)
    _node(txn, facade, node, user_data=encode_user_data(record, owner))
    return txn


def release(facade: ZooKeeper, node: zk.Node, contender: str | None) -> Txn:
    """Mark the backing node for deletion; fails if a slot was assigned since it was read."""
    txn = Txn(facade.kazoo_client)
    _node(txn, facade, node, state=zk.USED)
    if contender is not None:
        txn.delete(f"{paths.node_lock(node.id or '')}/{contender}")
    return txn
