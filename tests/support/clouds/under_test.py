"""A stand-in as the conformance suite disturbs it. An instance is known by its number: a further
attempt has the same name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from nodepool.zk.zookeeper import BUILDING
from tests.conformance.cloud import CloudUnderTest
from tests.conformance.suite import CrashConformance
from tests.support.clouds.stand_in import Machine, StandIn
from tests.support.fault_proxy import Action, Fault, Request, html

#: The names of the machines are known, and written, before the cloud is asked.
PLANNED: dict[str, Callable[[dict[str, Any]], bool]] = {
    **CrashConformance.STATES,
    "before the cloud has answered": lambda node: (
        node.get("state") == BUILDING and bool(node.get("external_id"))
    ),
}


class StandInUnderTest(CloudUnderTest):
    outside = True
    #: The answer to a throttled call.
    busy: Action

    def __init__(self, cloud: Any) -> None:
        self.cloud = cloud
        self._down: Fault | None = None
        self._throttling: Fault | None = None
        self._strays = 0

    @property
    def stand_in(self) -> StandIn:
        found: StandIn = self.cloud
        return found

    def environment(self) -> dict[str, str]:
        return dict(self.cloud.environment())

    def instances(self) -> set[str]:
        return self.stand_in.living()

    def machine(self, instance: str) -> Machine:
        found = self.stand_in.by_id(instance)
        assert found is not None
        return found

    def instance_of(self, external_id: Any) -> str:  # type: ignore[override]
        with self.stand_in.lock:
            return next(
                (
                    each.id
                    for each in self.stand_in.now()
                    if each.name == external_id and not each.ending
                ),
                "",
            )

    def remove(self, instance: str) -> None:
        with self.stand_in.lock:
            self.machine(instance).gone = time.monotonic()

    def halt(self, instance: str) -> None:
        with self.stand_in.lock:
            self.machine(instance).halted = True

    def limit(self, instances: int | None) -> None:
        self.stand_in.allowed = math.inf if instances is None else instances

    def sold_out(self, yes: bool) -> None:
        self.stand_in.sold_out = yes

    def down(self, yes: bool) -> None:
        if yes:
            self._down = self.stand_in.proxy.fail(lambda _request: True, html(502), math.inf)
        elif self._down is not None:
            self._down.left = 0

    def unanswered(self) -> int:
        return self._down.used if self._down is not None else 0

    def counts(self, request: Request) -> bool:
        """Whether the call can be throttled."""
        return "token" not in request.path

    def throttle(self, calls: int) -> int:
        self._throttling = self.stand_in.proxy.fail(self.counts, self.busy, calls)
        return calls

    def throttled(self) -> int:
        return self._throttling.used if self._throttling is not None else 0

    def pause(self, yes: bool) -> None:
        self.stand_in.paused = yes

    def close(self) -> None:
        self.stand_in.close()
        assert self.stand_in.mistakes == []
