"""Asks the product why requests wait, as ``nodepool explain request`` does, and checks the
answers from outside.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import KazooException

if TYPE_CHECKING:
    from tests.world.faults import Fault
    from tests.world.world import World

#: Seconds between two questions; a request is asked for once it has waited as long.
INTERVAL = 15.0
#: Seconds that a launcher may take to notice that a cause has ended: reports are written every 2 s.
LAG = 20
#: Seconds after which reports of all launchers show a request that has just moved.
REPORTED = 5.0
#: A fault explains wrong answers until this many seconds after its end.
AFTERMATH = 60.0
#: Other requestors are launchers, which ask for nodes that are ready or carry others.
CLIENTS = "zuul-"
_REQUEST, _PROVIDER = re.compile(r"[0-9]{3}-[0-9]{10}"), re.compile(r"provider-([0-9]+)")


def calm(world: World, events: Iterable[Fault]) -> bool:
    """Whether none of these faults and operations can explain what happens now."""
    now, duration = world.kernel.now, world.scenario.duration
    return all(
        event.at > now or min(event.at + event.lasts, duration) + AFTERMATH < now
        for event in events
    )


class Explainer:
    def __init__(self, world: World) -> None:
        self._world = world
        #: By the second: free capacity of providers, clouds and tenants, and the requests with
        #: nodes.
        self._samples: deque[dict[str, float]] = deque(maxlen=LAG)
        self._since: dict[str, float] = {}
        self._asked = 0.0
        self._tick()

    def _tick(self) -> None:
        kernel, observer = self._world.kernel, self._world.observer
        self._samples.append(self._sample())
        for name, request in observer.requests.items():
            if request["state"] in ("requested", "pending") and request["requestor"].startswith(
                CLIENTS
            ):
                self._since.setdefault(name, kernel.now)
        for name in [name for name in self._since if name not in observer.requests]:
            del self._since[name]
        oldest = self._oldest()
        if oldest is not None and kernel.now - self._asked >= INTERVAL:
            self._asked = kernel.now
            process = kernel.process("explainer")
            kernel.spawn(
                threading.Thread(target=self._ask, args=(oldest,), name="main").start,
                process=process,
            )
        kernel.call_at(kernel.now + 1.0, self._tick)

    def _oldest(self) -> str | None:
        requests = self._world.observer.requests
        waiting = [
            name for name in self._since if requests[name]["state"] in ("requested", "pending")
        ]
        name = min(waiting, key=self._since.__getitem__, default=None)
        return name if name and self._world.kernel.now - self._since[name] >= INTERVAL else None

    def _sample(self) -> dict[str, float]:
        world, nodes = self._world, self._world.observer.nodes.values()
        found: dict[str, float] = {}
        for number in range(len(world.scenario.providers)):
            name = f"provider-{number}"
            limit = min(world.operators.limits(name), default=0.0)
            found[f"pool {name}"] = limit - sum(node["provider"] == name for node in nodes)
        for cloud in world.clouds:
            used = max(
                len(cloud.machines),
                sum(node["provider"] == cloud.name.replace("cloud", "provider") for node in nodes),
            )
            found[f"provider {cloud.name.replace('cloud', 'provider')}"] = cloud.quota - used
        for tenant, limit in world.scenario.tenants.items():
            # Nodes of accepted requests are promised; those that exist count twice here.
            accepted = [
                request
                for request in world.observer.requests.values()
                if request["state"] == "pending"
            ]
            promised = sum(
                len(request["node_types"])
                for request in accepted
                if request.get("tenant_name") == tenant
            )
            found[f"tenant {tenant}"] = (
                limit - promised - sum(node.get("tenant_name") == tenant for node in nodes)
            )
        for node in nodes:
            found[f"launch {node.get('allocated_to')}"] = 1.0
            if node["state"] == "ready" and not node.get("allocated_to"):
                for label in node["type"]:
                    found[f"label {label}"] = found.get(f"label {label}", 0.0) + 1.0
        return found

    def _calm(self) -> bool:
        """Whether neither a fault nor an operator can explain a wrong answer."""
        scenario = self._world.scenario
        return len(self._samples) == LAG and calm(
            self._world, [*scenario.faults, *scenario.operations]
        )

    def _ask(self, name: str, doubtful: bool = False) -> None:
        """Check an answer; one is wrong if the next one is, too."""
        from nodepool.cmd import nodepoolcmd
        from nodepool.cmd.commands.context import Context
        from nodepool.exceptions import ConfigurationError
        from nodepool.status.causes import of_request
        from nodepool.status.once import Once

        world = self._world
        arguments = ["-c", world.config_file, "--connect-timeout", "60", "explain", "request", name]
        context = Context(nodepoolcmd.create_parser().parse_args(arguments))
        try:
            request = context.zk.getNodeRequest(name)
            if request is None or request.state not in ("requested", "pending"):
                return
            cause = of_request(Once(context.zk), request)
        except (KazooException, OSError, ConfigurationError):
            return
        except Exception as error:
            world.violated(f"the cause of request {name} cannot be computed: {error!r}")
            return
        finally:
            context.close()
        world.note("explain", f"request {name}: {cause.text} [{cause.code}]")
        found = self._wrong(name, request, cause)
        if found and not doubtful:
            time.sleep(REPORTED)
            self._ask(name, doubtful=True)
            return
        for wrong in found:
            world.violated(f"request {name} is explained with {cause.text!r}, but {wrong}")

    # -- what is wrong with an answer

    def _wrong(self, name: str, request: Any, cause: Any) -> list[str]:
        world, text = self._world, str(cause.text)
        found = []
        if not text:
            found.append("that is no cause")
        seen = world.observer.seen
        found += [
            f"there has never been a request {other}"
            for other in _REQUEST.findall(text)
            if other not in seen
        ]
        count = len(world.scenario.providers)
        found += [
            f"there is no provider-{number}"
            for number in _PROVIDER.findall(text)
            if int(number) >= count
        ]
        if not self._calm() or world.observer.requests.get(name, {}).get("state") not in (
            "requested",
            "pending",
        ):
            return found
        needed = len(request.node_types)
        pool = re.match(r"(provider-[0-9]+)-main: ", text)
        place = {
            "pool-limit": f"pool {pool[1]}" if pool else "",
            "provider-quota": f"provider {pool[1]}" if pool else "",
            "tenant-limit": f"tenant {request.tenant_name}",
            "no-free-node": f"label {request.node_types[0]}"
            if len(set(request.node_types)) == 1
            else "",
        }.get(cause.code, "")
        if place and all(sample.get(place, 0.0) >= needed for sample in self._samples):
            found.append(f"{place} has had at least {needed} free for {LAG} s")
        if cause.code == "launching" and all(
            f"launch {name}" not in sample for sample in self._samples
        ):
            found.append(f"it has had no node for {LAG} s")
        if cause.code == "not-offered" and any(
            set(request.node_types) <= set(provider["labels"])
            for provider in world.scenario.providers
        ):
            found.append("a provider offers these labels")
        if text.startswith("no launcher is running"):
            found.append("launchers are running")
        if (
            text.startswith("offered by")
            and world.kernel.now - self._since.get(name, world.kernel.now) > AFTERMATH
        ):
            found.append("that does not say why it waits")
        return found
