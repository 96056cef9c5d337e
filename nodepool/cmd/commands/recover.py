"""``recover``: adopt, hold or delete resources of clouds that ZooKeeper does not have.

This happens after ZooKeeper was restored or emptied.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NodeExistsError

from nodepool import status
from nodepool.base.problems import one_line
from nodepool.cmd.commands.aliens import list_all
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_listing, running
from nodepool.exceptions import NotFound
from nodepool.process.program import describe
from nodepool.zk import paths
from nodepool.zk.cluster import CLUSTER_ID, NODE_CREATED, NODE_ID, number_of
from nodepool.zk.records import HOLD, READY, Node

if TYPE_CHECKING:
    from nodepool.config.model import ProviderConfig
    from nodepool.driver.statemachine.model import DriverLabel, Instance, Resource
    from nodepool.driver.statemachine.provider import StateMachineProvider


COMMENT = "recovered after a restore of ZooKeeper"
COLUMNS = {
    "provider": "Provider",
    "type": "Type",
    "id": "Node ID",
    "resource": "Resource",
    "cluster": "Cluster",
    "age": "Created",
    "address": "Address",
    "reason": "Unknown Because",
    "result": "Result",
}

log = logging.getLogger("nodepool.cmd.recover")


def register(subparsers: Subparsers) -> None:
    parser = add_listing(
        subparsers, "recover", recover, "adopt, hold or delete machines that ZooKeeper has lost"
    )
    parser.add_argument(
        "ids", metavar="NODE_ID", nargs="*", help="node id; leading zeros are optional"
    )
    parser.add_argument("--all", action="store_true", help="process everything that is listed")
    parser.add_argument("--provider", metavar="PROVIDER", dest="wanted", help="only this provider")
    parser.add_argument(
        "--label", metavar="LABEL", help="label of the nodes, for clouds that do not store it"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="only list; this is the default")
    for action, text in (
        ("adopt", "create records of ready nodes; for machines that no job has used"),
        ("hold", "create records of held nodes"),
        ("delete", "delete the resources in the cloud"),
    ):
        what.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=text
        )


@dataclass
class Lost:
    """A machine or other resource that ZooKeeper does not know."""

    manager: StateMachineProvider
    metadata: dict[str, Any]
    type: str
    id: object
    reason: str
    instance: Instance | None = None
    resource: Resource | None = None
    result: str = ""
    failed: bool = False

    @property
    def number(self) -> int | None:
        return number_of(self.metadata.get(NODE_ID))

    def row(self) -> dict[str, Any]:
        created = number_of(self.metadata.get(NODE_CREATED))
        return {
            "provider": self.manager.provider.name,
            "type": self.type,
            "id": self.metadata.get(NODE_ID),
            "resource": self.id,
            "cluster": self.metadata.get(CLUSTER_ID),
            "age": created / 1000 if created is not None else None,
            "address": self.instance.interface_ip if self.instance is not None else None,
            "reason": self.reason,
            "result": self.result
            or ("hold, adopt or delete" if self.instance is not None else "delete"),
        }


def recover(context: Context) -> int:
    args = context.args
    if args.action and bool(args.ids) == args.all:
        raise CommandError(f"--{args.action} needs either node ids or --all")
    if args.wanted:
        context.check_provider(args.wanted)
    with _providers(context) as managers:
        found, complete = _find(context, managers)
        chosen = [
            lost
            for lost in found
            if not args.ids or lost.number in {number_of(text) for text in args.ids}
        ]
        for text in args.ids:
            if number_of(text) not in {lost.number for lost in chosen}:
                context.refuse(f"node id {text} is not among the resources that ZooKeeper has lost")
        if args.action:
            # Before any effect: no new node may get the id of an existing machine.
            highest = max((lost.number for lost in found if lost.number is not None), default=-1)
            try:
                context.zk.cluster.skip_to(highest)
            except ValueError as error:
                if args.action != "delete":
                    raise CommandError(str(error)) from None
            for lost in chosen:
                _apply(context, args.action, lost)
    context.show(status.Results([lost.row() for lost in chosen], COLUMNS))
    return 0 if complete and not any(lost.failed for lost in chosen) else 1


@contextlib.contextmanager
def _providers(context: Context) -> Iterator[dict[str, StateMachineProvider | Exception]]:
    """Return started providers that create machines in clouds, or their exceptions."""
    from nodepool.driver import lifecycle
    from nodepool.driver.statemachine.provider import StateMachineProvider

    found: dict[str, StateMachineProvider | Exception] = {}
    with contextlib.ExitStack() as started:
        for name, config in sorted(context.whole_config.providers.items()):
            # Slots on backing nodes are not machines of a cloud.
            if (
                context.args.wanted and name != context.args.wanted
            ) or config.driver.name == "metastatic":
                continue
            try:
                manager = lifecycle.get_provider(config)
                if isinstance(manager, StateMachineProvider):
                    started.enter_context(running(manager, context.zk))
                    found[name] = manager
            except Exception as error:
                found[name] = error
        yield found


def _find(
    context: Context, managers: dict[str, StateMachineProvider | Exception]
) -> tuple[list[Lost], bool]:
    """Return resources that only the providers have, and whether all could be listed."""
    listed, complete = [], True
    for name, answer in list_all(
        {name: functools.partial(_list, manager) for name, manager in managers.items()}
    ).items():
        if isinstance(answer, BaseException):
            complete = False
            log.error("Cannot list resources of provider %s: %s", name, describe(answer))
        else:
            listed += answer
    # The records are read after the clouds: machines created in the meantime are not lost.
    view = context.zk.cluster.peek()
    nodes = {node.id: node for node in context.zk.nodeIterator(cached=False)}
    uploads = {(upload.build_id, upload.id) for upload in context.zk.readImages().uploads}
    found = []
    for lost in listed:
        metadata = lost.metadata
        if (
            NODE_ID not in metadata
            and (metadata.get("nodepool_build_id"), metadata.get("nodepool_upload_id")) in uploads
        ):
            continue
        reason = view.foreign(metadata, nodes.get(metadata.get(NODE_ID)))
        if reason is not None:
            lost.reason = reason
            found.append(lost)
    return sorted(
        found, key=lambda lost: (lost.manager.provider.name, lost.number or 0, str(lost.id))
    ), complete


def _list(manager: StateMachineProvider | Exception) -> list[Lost]:
    """Return all resources of the provider, each machine once."""
    if isinstance(manager, Exception):
        raise manager
    instances = {
        part: instance
        for instance in manager.adapter.listInstances()
        for part in _ids(instance.external_id)
    }
    alone = {id(instance): instance for instance in instances.values()}
    found = []
    for resource in manager.adapter.listResources():
        name = resource.id
        instance = alone.pop(id(instances.get(str(name))), None)
        found.append(
            Lost(manager, resource.metadata or {}, resource.type, name, "", instance, resource)
        )
    for instance in alone.values():
        metadata = getattr(instance, "metadata", None) or {}
        found.append(Lost(manager, metadata, "instance", instance.external_id, "", instance))
    return [
        lost
        for lost in found
        if lost.metadata.get("nodepool_provider_name") == manager.provider.name
    ]


def _ids(external_id: object) -> set[str]:
    """Return possible ids of an instance; some drivers combine several ids in one value."""
    return {
        str(part)
        for part in (external_id.values() if isinstance(external_id, dict) else [external_id])
        if part
    }


def _apply(context: Context, action: str, lost: Lost) -> None:
    """Process one resource; errors affect only this one."""
    try:
        if action == "delete":
            if lost.resource is None:
                raise CommandError(
                    "its driver does not list it as a resource; hold it, then use `nodepool delete`"
                )
            try:
                lost.manager.adapter.deleteResource(lost.resource)
                lost.result = "deleted"
            except NotFound:  # since it was listed; a launcher may have deleted it
                lost.result = "no longer exists"
        elif lost.instance is not None:
            _create_record(context, action, lost, lost.instance)
        else:
            lost.result = (
                "unchanged: not a machine; it belongs to the one with this node id, or "
                "can be deleted"
            )
    except Exception as error:
        lost.failed = True
        lost.result = one_line(f"failed: {describe(error)}")


def _create_record(context: Context, action: str, lost: Lost, instance: Instance) -> None:
    """Create the record of a node for a machine.

    :raises CommandError: the machine cannot be a node.
    """
    from nodepool.driver.statemachine.node_fields import copy_image, copy_instance

    provider, metadata = lost.manager.provider, lost.metadata
    node = Node(f"{lost.number:010}")
    node.provider = provider.name
    pool = provider.pools.get(metadata.get("nodepool_pool_name") or "")
    if pool is None:
        raise CommandError(
            f"pool {metadata.get('nodepool_pool_name')} is not configured; configure it, or delete "
            "the machine"
        )
    node.pool = pool.name
    name = context.args.label or metadata.get("nodepool_node_label")
    label = pool.labels.get(name)
    if label is None and (name or action == "adopt"):
        known = ", ".join(sorted(pool.labels))
        raise CommandError(
            f"label {name or 'unknown'} is not in pool {pool.name} of the provider; specify "
            f"--label, one of: {known}"
        )
    node.type = name
    if label is not None:
        image = (label.diskimage and provider.diskimages[label.diskimage.name]) or label.cloud_image
        node.image_id = image.name
        copy_image(node, image)
    copy_instance(node, instance, pool)
    created = number_of(metadata.get(NODE_CREATED))
    # The leak search compares this with the time stamp of the machine.
    node.created_time = created / 1000 if created is not None else time.time()
    node.comment = COMMENT
    if action == "adopt":
        _scan(node, label, provider)
    node.state = READY if action == "adopt" else HOLD
    try:
        context.kazoo.create(paths.node(node.id or ""), node.serialize())
    except NodeExistsError:
        raise CommandError(
            f"another node has id {node.id} now; the machine can only be deleted"
        ) from None
    lost.result = "adopted" if action == "adopt" else "held"


def _scan(node: Node, label: DriverLabel, provider: ProviderConfig) -> None:
    """Read the host keys, as during a launch.

    :raises ConnectionTimeoutException: the machine does not answer.
    """
    from nodepool.nodescan import NodescanRequest, NodescanWorker

    timeout = provider.boot_timeout or 60
    request = NodescanRequest(node, label.host_key_checking, timeout, log)
    NodescanWorker(f"recover-{node.id}").run_one(request)
    node.host_keys = request.result() or node.host_keys
