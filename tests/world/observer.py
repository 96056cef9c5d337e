"""Sees each transaction in ZooKeeper and each action of the clouds, and checks the invariants."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

from tests.world.images import ImageObserver
from tests.world.verifications import VERIFIER

if TYPE_CHECKING:
    from tests.world.world import World

#: Seconds from the end of its use to the deletion of a node, without faults.
LONGEST_DELETION = 5.0
NODES, REQUESTS = "/nodepool/nodes/", "/nodepool/requests/"
#: Requests of launchers for the ready nodes of labels: their nodes are set free.
MIN_READY = "NodePool:min-ready"
#: State transitions of nodes, besides the deletion of the record.
LEGAL = {
    None: {"building", "deleting", "init", "ready"},
    "init": {"building", "deleting"},
    "building": {"building", "ready", "deleting", "failed", "aborted"},
    "ready": {"ready", "in-use", "used", "deleting", "hold"},
    "in-use": {"in-use", "used", "deleting", "hold", "ready"},
    "used": {"used", "deleting", "ready"},
    "hold": {"hold", "deleting"},
    "failed": {"deleting", "failed"},
    "aborted": {"deleting", "aborted"},
    "deleting": {"deleting", "deleted"},
    "deleted": {"deleted"},
}
#: States of nodes that no longer count.
GONE = ("deleting", "deleted")


def machine_of(node: dict[str, Any]) -> str | None:
    """Return the id of the machine of a node: slivers have two names."""
    found = node.get("external_id")
    return (
        f"{found['host']}/{found['sliver']}"
        if isinstance(found, dict) and "sliver" in found
        else found
    )


class Observer:
    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        #: All requests that there have been.
        self.seen: dict[str, None] = {}
        #: Paths by session.
        self._ephemeral: dict[int, list[str]] = {}
        #: Since when nodes have been used up.
        self._used: dict[str, float] = {}
        #: Since when idle nodes, and nodes of builds, have been held.
        self._held: dict[str, float] = {}
        self.log: list[str] = []
        self.images = ImageObserver(world)

    # -- transactions

    def changed(self, _zxid: int, _time: int, changes: list[list[Any]]) -> None:
        fulfilled: list[str] = []
        for change in filter(None, changes):
            kind, path = change[0], change[1]
            self.images.changed(change)
            if kind == "close":
                for owned in self._ephemeral.pop(path, ()):
                    self._deleted(owned)
            elif kind == "delete":
                self._deleted(path)
            elif kind in ("create", "set") and change[2]:
                for prefix, records in ((NODES, self.nodes), (REQUESTS, self.requests)):
                    if path.startswith(prefix) and "/" not in path[len(prefix) :]:
                        if kind == "create" and change[4]:
                            self._ephemeral.setdefault(change[4], []).append(path)
                        self._written(
                            records, path[len(prefix) :], json.loads(change[2]), fulfilled
                        )
        for name in fulfilled:
            self._fulfilled(name, self.requests[name])

    def _deleted(self, path: str) -> None:
        for prefix, records in ((NODES, self.nodes), (REQUESTS, self.requests)):
            name = path.removeprefix(prefix)
            record = records.pop(name, None) if name != path else None
            if record is not None:
                self._world.note("delete", path)
                if records is self.requests:
                    self._world.history.withdrawn(name)
                if (
                    self._held.pop(name, None) is not None
                    and record.get("provider") not in self._world.operators.erased
                ):
                    self._world.violated(f"the record of the held node {name} was deleted")
                machine = (
                    machine_of(record)
                    if records is self.nodes and self._world.scenario.quiet
                    else None
                )
                if any(machine in host.machines for host in self._world.hosts):
                    self._world.violated(f"the record of node {name} was deleted before {machine}")
                used = self._used.pop(name, None) if records is self.nodes else None
                if (
                    used is not None
                    and self._world.scenario.quiet
                    and self._world.kernel.now - used > LONGEST_DELETION
                ):
                    self._world.violated(
                        f"node {name} was used for the last time "
                        f"{self._world.kernel.now - used:.1f} s ago"
                    )

    def _written(
        self,
        records: dict[str, dict[str, Any]],
        name: str,
        record: dict[str, Any],
        fulfilled: list[str],
    ) -> None:
        before = records.get(name)
        records[name] = record
        if records is self.requests:
            self.seen[name] = None
            self._world.history.requested(name)
        old = before["state"] if before else None
        if records is self.nodes:
            text = (
                f"{name} {old} -> {record['state']} {record.get('external_id')} for "
                f"{record.get('allocated_to')}"
            )
            self._world.note("node", text)
            if record["state"] == "used":
                self._used.setdefault(name, self._world.kernel.now)
            if (
                record["state"] not in LEGAL.get(old, ())
                and name not in self._world.operators.touched
                # A lease holds its machine, and returns it.
                and (old, record["state"], record["requestor"]) != ("hold", "used", VERIFIER)
            ):
                self._world.violated(f"node {name} went from {old} to {record['state']}")
            self._reassigned(name, before, record)
            self._holds(name, before, record)
            self._slivers(name, record)
            if before is None:
                self._within_limit(record)
                self._world.capacity.launched(record)
            if any(
                record.get(key) != (before or {}).get(key)
                for key in ("tenant_name", "allocated_to")
            ):
                self._within_tenant_limit(record["tenant_name"])
        elif old != record["state"]:
            self._world.note(
                "request", f"{name} {old} -> {record['state']} nodes {record.get('nodes')}"
            )
            if record["state"] == "fulfilled":
                fulfilled.append(name)

    def _reassigned(self, name: str, before: dict[str, Any] | None, record: dict[str, Any]) -> None:
        owner = before.get("allocated_to") if before else None
        request = self.requests.get(owner) if owner else None
        if request is None or request["state"] != "fulfilled" or request["requestor"] == MIN_READY:
            return
        # A launch may outlast the return of its request, which has other nodes then.
        if name in request["nodes"] and record.get("allocated_to") != owner:
            self._world.violated(f"node {name} was taken from the fulfilled request {owner}")
        touched = name in self._world.operators.touched
        if (
            name in request["nodes"]
            and record["state"] not in ("ready", "in-use", "used", "hold")
            and not touched
        ):
            self._world.violated(
                f"node {name} of the fulfilled request {owner} is {record['state']}"
            )

    def _holds(self, name: str, before: dict[str, Any] | None, record: dict[str, Any]) -> None:
        """A held node stays until an operator deletes it or its time has passed, and no longer."""
        now = self._world.kernel.now
        if record["state"] == "hold":
            self._used.pop(name, None)
            if before is not None and (
                before["state"] == "in-use" or not before.get("allocated_to")
            ):
                self._held.setdefault(name, now)
            return
        since = self._held.pop(name, None)
        if since is None or before is None or name in self._world.operators.deleted:
            return
        limit = self.hold_limit(before)
        if now - since < limit - 2 * self._world.skew - 0.1:
            self._world.violated(
                f"node {name}, held for {limit} s, is {record['state']} after {now - since:.1f} s"
            )
        if self._world.scenario.quiet and now - since > limit + LONGEST_DELETION:
            self._world.violated(f"node {name}, held for {limit} s, ends after {now - since:.1f} s")

    def hold_limit(self, node: dict[str, Any]) -> float:
        """Return after how many seconds a held node is deleted; infinity: not before an operator
        deletes it.
        """
        limits = (node.get("hold_expiration"), self._world.scenario.max_hold_age)
        return min((limit for limit in limits if limit), default=math.inf)

    def last_expiry(self) -> float:
        """Return when the last held node expires, in virtual seconds; operators delete those
        that do not.
        """
        limits = ((since, self.hold_limit(self.nodes[name])) for name, since in self._held.items())
        return max((since + limit for since, limit in limits if limit < math.inf), default=0.0)

    def _within_limit(self, record: dict[str, Any]) -> None:
        """No node beyond the slots of a static host or max-servers; launchers that create nodes
        in one moment may exceed it.
        """
        name = record["provider"]
        slots = (
            self._world.scenario.providers[int(name.rpartition("-")[2])]
            .get("hosts", {})
            .get(record["hostname"])
        )
        if slots is not None:
            nodes = [
                node for node in self.nodes.values() if node.get("hostname") == record["hostname"]
            ]
            taken = sorted(node["slot"] for node in nodes if node["state"] not in GONE)
            if len(taken) > slots or len(set(taken)) < len(taken):
                self._world.violated(
                    f"slots {taken} of {record['hostname']} are taken; there are {slots}"
                )
        if len(self._world.launchers) > 1:
            return
        limit = max(self._world.operators.limits(name), default=float("inf"))
        count = sum(
            node["provider"] == name and node["state"] not in GONE for node in self.nodes.values()
        )
        if count > limit:
            self._world.violated(f"{count} nodes at {name}, more than its limit of {limit}")

    def _within_tenant_limit(self, tenant: str | None) -> None:
        """No node beyond the limit of its tenant; as above."""
        limit = self._world.scenario.tenants.get(tenant or "")
        if limit is None or len(self._world.launchers) > 1:
            return
        count = sum(
            node.get("tenant_name") == tenant
            and node["state"] not in GONE
            and bool(node["state"] != "ready" or node.get("allocated_to"))
            for node in self.nodes.values()
        )
        if count > limit:
            self._world.violated(
                f"{count} nodes of tenant {tenant}, more than its limit of {limit}"
            )

    def _fulfilled(self, name: str, record: dict[str, Any]) -> None:
        if record["requestor"] not in (MIN_READY, VERIFIER):
            self._world.history.fulfilled(name, record["nodes"])
        if len(record["nodes"]) != len(record["node_types"]):
            self._world.violated(
                f"request {name} has {len(record['nodes'])} nodes for {len(record['node_types'])} "
                "labels"
            )
        for node_id, label in zip(record["nodes"], record["node_types"], strict=False):
            node = self.nodes.get(node_id)
            if (
                node is None
                or node["state"] != "ready"
                or node.get("allocated_to") != name
                or label not in node["type"]
            ):
                self._world.violated(
                    f"request {name} was fulfilled with node {node_id}, which is {node}"
                )
            elif record["requestor"] != VERIFIER:
                self._usable(name, node)
            for other, theirs in self.requests.items():
                if other != name and theirs["state"] == "fulfilled" and node_id in theirs["nodes"]:
                    self._world.violated(f"node {node_id} was given to {other} and to {name}")

    def _usable(self, request: str, node: dict[str, Any]) -> None:
        """Nobody but a verification gets a machine of an image that does not work."""
        if node["requestor"] == VERIFIER:
            self._world.violated(f"request {request} got a machine of a verification: {node}")
        for cloud in self._world.image_clouds:
            machine = cloud.machines.get(machine_of(node) or "")
            if machine is not None and machine.image is not None and machine.image.broken:
                self._world.violated(
                    f"request {request} got {machine.id} of {machine.image.id}, which is broken: "
                    f"{machine.image.broken}"
                )

    def contenders(self, node_id: str) -> list[str]:
        """Who holds the lock of a node, and who waits for it."""
        tree = self._world.zookeeper.server.tree
        node = tree.nodes.get(f"{NODES}{node_id}/lock")
        names = sorted(node.children if node else (), key=lambda child: child.rpartition("__")[2])
        return [
            (tree.nodes[f"{NODES}{node_id}/lock/{name}"].data or b"").decode() for name in names
        ]

    def holder(self, node_id: str) -> str | None:
        """The scheduler that holds the lock of a node."""
        names = self.contenders(node_id)
        return names[0] if names and names[0].startswith("zuul") else None

    # -- clouds

    def created(self, machine_id: str, hostname: str) -> None:
        self._world.note("cloud", f"create {machine_id} as {hostname}")

    def destroyed(self, machine_id: str) -> None:
        self._world.note("cloud", f"delete {machine_id}")
        for node_id, node in self.nodes.items():
            if machine_of(node) == machine_id and node_id in self._held:
                self._world.violated(f"machine {machine_id} of the held node {node_id} was deleted")
            if (
                machine_of(node) == machine_id
                and node["state"] == "in-use"
                and (holder := self.holder(node_id))
            ):
                self._world.violated(
                    f"machine {machine_id} of node {node_id} was deleted while {holder} used it"
                )

    def idle_on(self, machine_id: str) -> str | None:
        """Return the idle node on a machine if it is probed."""
        return next(
            (
                node_id
                for node_id, node in self.nodes.items()
                if machine_of(node) == machine_id
                and node["state"] == "ready"
                and not node.get("allocated_to")
                and node["type"][0] in self._world.scenario.probed
            ),
            None,
        )

    def logged_in(self, machine_id: str) -> None:
        """A launcher logs in: nothing is probed that somebody uses."""
        for node_id, node in self.nodes.items():
            if machine_of(node) == machine_id and (holder := self.holder(node_id)):
                self._world.violated(f"a launcher logs in to node {node_id}, which {holder} uses")

    def expired(self, machine_id: str) -> None:
        self._world.note("cloud", f"the lease of {machine_id} has ended")
        for node_id, node in self.nodes.items():
            if machine_of(node) == machine_id and node["state"] in ("ready", "in-use", "hold"):
                self._world.violated(
                    f"the lease of {machine_id} has ended; node {node_id} is {node['state']}"
                )

    def violated(self, text: str) -> None:
        self._world.violated(text)

    def _slivers(self, name: str, record: dict[str, Any]) -> None:
        """No two nodes have the same sliver, and those of ready nodes have started."""
        machine = machine_of(record)
        if not isinstance(record.get("external_id"), dict) or machine is None:
            return
        for other, node in self.nodes.items():
            if other != name and machine_of(node) == machine:
                self._world.violated(f"nodes {other} and {name} are both on {machine}")
        if record["state"] == "ready" and not any(
            machine in host.started for host in self._world.hosts
        ):
            self._world.violated(f"node {name} is ready, but {machine} never was")

    # -- log

    def logged(self, record: logging.LogRecord, text: str) -> None:
        self.log.append(f"{self._world.kernel.now:9.3f} {text}")
        if (
            self._world.scenario.quiet
            and record.levelno >= logging.WARNING
            and record.name.startswith("nodepool")
        ):
            self._world.violated(f"logged without any fault: {text}")
        if self._world.scenario.quiet and "its probe failed twice" in text:
            self._world.violated(f"all machines answer, and: {text}")

    # -- at rest

    def at_rest(self) -> list[str]:
        """What is not as it should be once all requests have ended."""
        wrong = [f"request {name} is {record['state']}" for name, record in self.requests.items()]
        backing = {
            provider["backing"]
            for provider in self._world.scenario.providers
            if "backing" in provider
        }
        ready = dict.fromkeys(self._world.scenario.labels, 0)
        used_machines = set()
        for node_id, node in self.nodes.items():
            used_machines.add(machine_of(node))
            label = node["type"][0] if node["type"] else "?"
            if node["state"] == "ready" and not node.get("allocated_to"):
                for name in node["type"]:  # static nodes serve several labels
                    ready[name] = ready.get(name, 0) + 1
            elif not (label in backing and node["state"] == "in-use"):
                text = (
                    f"node {node_id} of {label} is {node['state']} for {node.get('allocated_to')}"
                )
                wrong.append(f"{text}, locked by {self.contenders(node_id)}")
        for label, count in self._world.scenario.labels.items():
            if ready[label] < count and self.images.available(label) and self._room(label):
                wrong.append(f"{ready[label]} of {count} ready nodes of {label}")
        for provider in self._world.scenario.providers:
            slots = sum(provider.get("hosts", {}).values())
            if slots and ready[provider["labels"][0]] != slots:
                wrong.append(
                    f"{ready[provider['labels'][0]]} of {slots} slots of static hosts are ready"
                )
        for place in (*self._world.clouds, *self._world.hosts):
            wrong += [
                f"machine {machine} belongs to no node"
                for machine in place.machines
                if machine not in used_machines
            ]
        wrong += [
            f"the idle node {node_id} does not answer"
            for cloud in self._world.image_clouds
            for machine in cloud.machines.values()
            if machine.silent and (node_id := self.idle_on(machine.id)) is not None
        ]
        for host in self._world.hosts:
            wrong += host.at_rest()
        return wrong + self.images.at_rest()

    def _room(self, label: str) -> bool:
        """Whether a provider of a label is not full of nodes: idle ones of other labels stay."""
        held = [node["provider"] for node in self.nodes.values()]
        return any(
            label in provider["labels"]
            and held.count(f"provider-{number}") < provider.get("servers", float("inf"))
            for number, provider in enumerate(self._world.scenario.providers)
        )

    def at_end(self) -> None:
        for launcher in self._world.launchers:
            for ended in launcher.pool.watchdog.ended if launcher.pool is not None else ():
                self._world.violated(f"{launcher.name}: {ended}")
        self.images.at_end()
        for builder in self._world.builders:
            for ended in (
                builder.service.watchdog.ended if builder.service else ["it has not started"]
            ):
                self._world.violated(f"{builder.name}: {ended}")
