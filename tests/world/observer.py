"""Sees each transaction in ZooKeeper and each action of the clouds, and checks the invariants."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from tests.world.images import ImageObserver

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
    "deleting": {"deleting"},
}


class Observer:
    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        #: Paths by session.
        self._ephemeral: dict[int, list[str]] = {}
        #: Since when nodes have been used up.
        self._used: dict[str, float] = {}
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
                        self._written(records, path[len(prefix) :], json.loads(change[2]), fulfilled)
        for name in fulfilled:
            self._fulfilled(name, self.requests[name])

    def _deleted(self, path: str) -> None:
        for prefix, records in ((NODES, self.nodes), (REQUESTS, self.requests)):
            name = path.removeprefix(prefix)
            if name != path and records.pop(name, None) is not None:
                self._world.note("delete", path)
                used = self._used.pop(name, None) if records is self.nodes else None
                if used is not None and self._world.scenario.quiet and self._world.kernel.now - used > LONGEST_DELETION:
                    self._world.violated(f"node {name} was used for the last time {self._world.kernel.now - used:.1f} s ago")

    def _written(self, records: dict[str, dict[str, Any]], name: str, record: dict[str, Any], fulfilled: list[str]) -> None:
        before = records.get(name)
        records[name] = record
        old = before["state"] if before else None
        if records is self.nodes:
            text = f"{name} {old} -> {record['state']} {record.get('external_id')} for {record.get('allocated_to')}"
            self._world.note("node", text)
            if record["state"] == "used":
                self._used.setdefault(name, self._world.kernel.now)
            if record["state"] not in LEGAL.get(old, ()):
                self._world.violated(f"node {name} went from {old} to {record['state']}")
            self._reassigned(name, before, record)
            if before is None:
                self._within_limit(record)
        elif old != record["state"]:
            self._world.note("request", f"{name} {old} -> {record['state']} nodes {record.get('nodes')}")
            if record["state"] == "fulfilled":
                fulfilled.append(name)

    def _reassigned(self, name: str, before: dict[str, Any] | None, record: dict[str, Any]) -> None:
        owner = before.get("allocated_to") if before else None
        request = self.requests.get(owner) if owner else None
        if request is None or request["state"] != "fulfilled" or request["requestor"] == MIN_READY:
            return
        if record.get("allocated_to") != owner:
            self._world.violated(f"node {name} was taken from the fulfilled request {owner}")

    def _within_limit(self, record: dict[str, Any]) -> None:
        """No node beyond max-servers. Two launchers that create nodes in the same moment may exceed it."""
        if len(self._world.launchers) > 1:
            return
        name = record["provider"]
        provider = self._world.scenario.providers[int(name.rpartition("-")[2])]
        count = sum(node["provider"] == name and node["state"] != "deleting" for node in self.nodes.values())
        if count > provider.get("servers", count):
            self._world.violated(f"{count} nodes at {name}, more than its limit of {provider['servers']}")

    def _fulfilled(self, name: str, record: dict[str, Any]) -> None:
        if len(record["nodes"]) != len(record["node_types"]):
            self._world.violated(f"request {name} has {len(record['nodes'])} nodes for {len(record['node_types'])} labels")
        for node_id, label in zip(record["nodes"], record["node_types"], strict=False):
            node = self.nodes.get(node_id)
            if node is None or node["state"] != "ready" or node.get("allocated_to") != name or label not in node["type"]:
                self._world.violated(f"request {name} was fulfilled with node {node_id}, which is {node}")
            for other, theirs in self.requests.items():
                if other != name and theirs["state"] == "fulfilled" and node_id in theirs["nodes"]:
                    self._world.violated(f"node {node_id} was given to {other} and to {name}")

    def contenders(self, node_id: str) -> list[str]:
        """Who holds the lock of a node, and who waits for it."""
        tree = self._world.zookeeper.server.tree
        node = tree.nodes.get(f"{NODES}{node_id}/lock")
        names = sorted(node.children if node else (), key=lambda child: child.rpartition("__")[2])
        return [(tree.nodes[f"{NODES}{node_id}/lock/{name}"].data or b"").decode() for name in names]

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
            if node.get("external_id") == machine_id and node["state"] == "in-use" and (holder := self.holder(node_id)):
                self._world.violated(f"machine {machine_id} of node {node_id} was deleted while {holder} used it")

    # -- log

    def logged(self, record: logging.LogRecord, text: str) -> None:
        self.log.append(f"{self._world.kernel.now:9.3f} {text}")
        if self._world.scenario.quiet and record.levelno >= logging.WARNING and record.name.startswith("nodepool"):
            self._world.violated(f"logged without any fault: {text}")
        if record.name == "nodepool.SafetyNet":
            self._world.violated(f"the safety net had to act: {record.getMessage()}")

    # -- at rest

    def at_rest(self) -> list[str]:
        """What is not as it should be once all requests have ended."""
        wrong = [f"request {name} is {record['state']}" for name, record in self.requests.items()]
        backing = {provider["backing"] for provider in self._world.scenario.providers if "backing" in provider}
        ready = dict.fromkeys(self._world.scenario.labels, 0)
        used_machines = set()
        for node_id, node in self.nodes.items():
            used_machines.add(node.get("external_id"))
            label = node["type"][0] if node["type"] else "?"
            if node["state"] == "ready" and not node.get("allocated_to"):
                ready[label] = ready.get(label, 0) + 1
            elif not (label in backing and node["state"] == "in-use"):
                text = f"node {node_id} of {label} is {node['state']} for {node.get('allocated_to')}"
                wrong.append(f"{text}, locked by {self.contenders(node_id)}")
        for label, count in self._world.scenario.labels.items():
            if ready[label] < count and self.images.available(label):
                wrong.append(f"{ready[label]} of {count} ready nodes of {label}")
        for cloud in self._world.clouds:
            wrong += [f"machine {machine} belongs to no node" for machine in cloud.machines if machine not in used_machines]
        return wrong + self.images.at_rest()

    def at_end(self) -> None:
        for launcher in self._world.launchers:
            for ended in launcher.pool.watchdog.ended:
                self._world.violated(f"{launcher.name}: {ended}")
        self.images.at_end()
        for builder in self._world.builders:
            for ended in builder.service.watchdog.ended if builder.service else ["it has not started"]:
                self._world.violated(f"{builder.name}: {ended}")
