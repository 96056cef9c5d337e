"""Scarce capacity without faults, and the invariants of waiting: no request waits, or overflows,
while there is capacity.

Some seeds without faults have providers with limits and priorities, with labels and separate
requests.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tests.world.explain import CLIENTS, calm
from tests.world.operators import DISTURBING, LIMITS

if TYPE_CHECKING:
    from tests.world.world import Scenario, World

#: Seconds between two checks of all requests.
INTERVAL = 1.0
#: The part of the seeds without faults that has scarce capacity.
SHARE = 0.6
#: Seconds that a request may wait while there is capacity for it.
LONGEST_WAIT = 6.0
#: Seconds that it may wait in addition at each pool of better priority that is full.
PATIENCE = 10.0
#: Seconds that launchers with equal pools may leave it to each other before: 2, 4 and 8.
TURNS = 14.0
#: Seconds that a pool of better priority has had capacity for when a worse one must not be used.
SEEN = 7
#: A pool without a priority has this one.
PRIORITY = 100
#: What limits a pool: an option, or the quota of its cloud.
QUOTA = "quota"
#: The part of these seeds that has static hosts, too; what limits their pool are its slots.
STATIC_SHARE, SLOTS = 0.5, "slots"


def extend(scenario: Scenario) -> None:
    """Add scarce providers, and requests for their labels, to some scenarios without faults."""
    choice = random.Random(f"capacity {scenario.seed}")
    if scenario.seed % 4 or choice.random() >= SHARE:
        return
    labels = {"scarce": choice.choice((0, 1)), "scarcer": 0}
    scenario.labels |= labels
    for number in range(choice.choice((1, 2, 2, 3))):
        scenario.providers.append(
            {
                # One request of three nodes fits alongside the idle nodes.
                "servers": choice.choice((4, 5)),
                "labels": sorted(labels)
                if number == 0
                else choice.choice((["scarce"], ["scarce", "scarcer"])),
                "limit": choice.choice((*LIMITS, QUOTA)),
                "priority": choice.choice((None, 10, 20)),
                "concurrency": choice.choice((-1, -1, 1, 3)),
            }
        )
    _add_hosts(scenario, labels)
    scenario.tenants |= {"green": choice.choice((4, 6))}
    for _ in range(choice.choice((16, 24))):
        request = scenario.request(
            choice, scenario.duration, sorted(labels), scenario.demand[0].scheduler
        )
        request.lasts = choice.choice((5.0, 20.0, 40.0))
        request.tenant = choice.choice((None, "green"))
        scenario.demand.append(request)
    scenario.operations = [
        operation for operation in scenario.operations if operation.kind not in DISTURBING
    ]


def _add_hosts(scenario: Scenario, labels: dict[str, int]) -> None:
    """Add static hosts to some of these scenarios, alone for their label, or together with the
    clouds.
    """
    choice = random.Random(f"static capacity {scenario.seed}")
    if choice.random() < STATIC_SHARE:
        scenario.labels["iron"] = labels["iron"] = 0
        hosts = {
            f"iron-{number}": choice.choice((1, 2)) for number in range(1, choice.choice((3, 4)))
        }
        hosts["iron-0"] = 2
        scenario.providers.append(
            {
                "hosts": hosts,
                "labels": choice.choice((["iron"], ["iron", "scarce"])),
                "limit": SLOTS,
                "priority": choice.choice((None, 10, 20)),
            }
        )


def configure(provider: dict[str, Any], entry: dict[str, Any], pool: dict[str, Any]) -> None:
    """Add the limits and the priority of a scarce provider to its configuration."""
    del pool["max-servers"]
    if provider["limit"] != QUOTA:
        pool[provider["limit"]] = provider["servers"] * LIMITS[provider["limit"]]
    entry["max-concurrency"] = provider["concurrency"]
    if provider["priority"] is not None:
        entry["priority"] = provider["priority"]


class Capacity:
    """Compares each second what the pools have capacity for with what is waited for, from
    outside.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        #: Since when a pool has had capacity for a waiting request, by both.
        self._since: dict[tuple[str, str], float] = {}
        #: By the second: capacity of each pool beyond all that waits for it.
        self._spare: deque[dict[str, int]] = deque(maxlen=SEEN)
        #: When requests got their first node, and of which pool.
        self._began: dict[str, float] = {}
        scenario = world.scenario
        pools = enumerate(scenario.providers)
        self._pools = {
            f"provider-{n}": pool
            for n, pool in pools
            if ("servers" in pool and "slivers" not in pool) or pool.get("limit") == SLOTS
        }
        disturbing = [
            operation for operation in scenario.operations if operation.kind in DISTURBING
        ]
        self._events = [*scenario.faults, *disturbing]
        self._tick()

    def _tick(self) -> None:
        self._world.kernel.call_at(self._world.kernel.now + INTERVAL, self._tick)
        if calm(self._world, self._events):
            self._look()
        else:
            self._since.clear()
            self._spare.clear()

    def _look(self) -> None:
        """Check all requests that wait."""
        now, names = self._world.kernel.now, list(self._waiting())
        self._spare.append(
            {name: self._free(name, idle=False) - self._demand(name, names) for name in self._pools}
        )
        possible = [(name, pool) for name in names if (pool := self._could_serve(name, names))]
        self._since = {key: self._since.get(key, now) for key in possible}
        for (name, pool), since in self._since.items():
            better = [
                other
                for other in self._offering(name)
                if self._priority(other) < self._priority(pool)
            ]
            longest = (
                LONGEST_WAIT
                + PATIENCE * len(better)
                + (TURNS if better and self._world.scenario.launchers > 1 else 0.0)
            )
            if longest <= now - since < longest + INTERVAL:
                self._world.violated(
                    f"request {name} waits although {pool} has had capacity for {now - since:.0f} s"
                )

    def launched(self, node: dict[str, Any]) -> None:
        """A node was created: no pool of better priority may have had capacity."""
        name, observer = node.get("allocated_to") or "", self._world.observer
        known = name in observer.requests and node["provider"] in self._pools
        if not known or len(self._spare) < SEEN or not calm(self._world, self._events):
            return
        now = self._world.kernel.now
        self._began.setdefault(name, now)
        # Requests that other launchers and pools have just accepted may still be expected at the
        # better pool.
        just_begun = [
            other for other, when in self._began.items() if other != name and now - when < INTERVAL
        ]
        others = [other for other in self._waiting() if other != name]
        needed = len(observer.requests[name]["node_types"])
        for pool in self._offering(name):
            if self._priority(pool) < self._priority(node["provider"]):
                spare = [
                    *(sample[pool] for sample in self._spare),
                    self._free(pool, idle=False) - self._demand(pool, others),
                ]
                expected = sum(
                    len(observer.requests[other]["node_types"])
                    for other in just_begun
                    if other in observer.requests and pool in self._offering(other)
                )
                if min(spare) - expected >= needed:
                    self._world.violated(
                        f"request {name} gets a node of {node['provider']} although {pool} has "
                        "capacity"
                    )

    # -- what there is

    def _priority(self, pool: str) -> int:
        return self._pools[pool].get("priority") or PRIORITY

    def _nodes(self, pool: str) -> list[dict[str, Any]]:
        return [node for node in self._world.observer.nodes.values() if node["provider"] == pool]

    def _free(self, pool: str, idle: bool = True) -> int:
        """Return how many nodes there is capacity for; idle ones are used, or deleted to free it
        if no pool is open.
        """
        nodes = self._nodes(pool)
        if (
            self._pools[pool].get("limit") == SLOTS
        ):  # a free slot is a ready node, and serves each label of its host
            return sum(node["state"] == "ready" and not node.get("allocated_to") for node in nodes)
        [quota] = [
            cloud.quota
            for cloud in self._world.clouds
            if cloud.name.replace("cloud", "provider") == pool
        ]
        limit = min([quota, *self._world.operators.limits(pool)])
        return int(limit) - sum(
            not idle or node["state"] != "ready" or bool(node.get("allocated_to")) for node in nodes
        )

    # -- what is waited for

    def _waiting(self) -> Iterator[str]:
        """Requests without all of their nodes, the first to be served first."""
        requests = self._world.observer.requests
        order = sorted(
            requests, key=lambda name: (name[:3], requests[name]["relative_priority"], name)
        )
        for name in order:
            waiting = requests[name]["state"] in ("requested", "pending")
            if waiting and len(self._has(name)) < len(requests[name]["node_types"]):
                yield name

    def _offering(self, name: str) -> list[str]:
        """Return the pools that can serve the request, those of the best priority first."""
        request, images = self._world.observer.requests[name], self._world.observer.images
        declined = set(re.findall(r"provider-[0-9]+", " ".join(request.get("declined_by") or ())))
        wanted = set(request["node_types"])
        found = [
            pool
            for pool in self._pools
            if wanted <= set(self._pools[pool]["labels"]) and pool not in declined
        ]
        return sorted(found, key=self._priority) if all(map(images.available, wanted)) else []

    def _has(self, name: str) -> list[str]:
        """Return the pools of the nodes that the request has got."""
        return [
            node["provider"]
            for node in self._world.observer.nodes.values()
            if node.get("allocated_to") == name
        ]

    def _missing(self, name: str, pool: str) -> int:
        """Return how many more nodes the request needs if this pool serves it: all of them come
        from one pool.
        """
        return len(self._world.observer.requests[name]["node_types"]) - self._has(name).count(pool)

    def _demand(self, pool: str, names: Iterable[str]) -> int:
        """Return how many nodes these requests need of the pool; those with nodes of another one
        wait there.
        """
        mine = [
            name
            for name in names
            if pool in self._offering(name) and set(self._has(name)) <= {pool}
        ]
        return sum(self._missing(name, pool) for name in mine)

    def _could_serve(self, name: str, names: list[str]) -> str | None:
        """Return the pool that has capacity for the request beyond what comes first, the one of
        the best priority.
        """
        requests = self._world.observer.requests
        if not requests[name]["requestor"].startswith(CLIENTS):
            return None
        place = names.index(name)
        first = [
            *names[:place],
            *(other for other in names[place + 1 :] if requests[other]["state"] == "pending"),
        ]
        if not self._within_tenant_limit(name, first):
            return None
        for pool in self._offering(name):
            missing = self._missing(name, pool)
            if self._free(pool) - self._demand(pool, first) >= missing:
                limit = self._pools[pool].get("concurrency", -1)
                launching = sum(node["state"] in ("init", "building") for node in self._nodes(pool))
                return pool if limit < 0 or launching < limit else None
        return None

    def _within_tenant_limit(self, name: str, first: list[str]) -> bool:
        requests, tenant = (
            self._world.observer.requests,
            self._world.observer.requests[name].get("tenant_name"),
        )
        limit = self._world.scenario.tenants.get(tenant or "", float("inf"))
        promised = sum(
            len(requests[other]["node_types"])
            for other in (*first, name)
            if requests[other].get("tenant_name") == tenant
        )
        return (
            promised
            + sum(node.get("tenant_name") == tenant for node in self._world.observer.nodes.values())
            <= limit
        )
