"""Helpers of the OpenStack tests: a launcher whose provider is a real OpenStack behind the fault
proxies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.support.fault_proxy import Action, Reply, Request
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud, shape

PROVIDER = "cloud-1"


def label(name: str = "small", **options: Any) -> dict[str, Any]:
    """Options with underscores for dashes."""
    found = {key.replace("_", "-"): value for key, value in options.items()}
    if not found.keys() & {"cloud-image", "diskimage"}:
        found["cloud-image"] = "base"
    if not found.keys() & {"flavor-name", "min-ram"}:
        found["flavor-name"] = "tiny"
    return {"name": name, **found}


def provider(
    *labels: dict[str, Any],
    name: str = PROVIDER,
    pool: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """``pool`` and ``options`` are laid over an ordinary provider's."""
    return {
        "name": name,
        "driver": "openstack",
        "cloud": "test",
        "rate": 0,
        "launch-retries": 1,
        "port-cleanup-interval": 0,
        "cloud-images": [{"name": "base", "username": "zuul"}],
        "pools": [
            {
                "name": "main",
                "networks": ["private"],
                "auto-floating-ip": False,
                "host-key-checking": False,
                "labels": list(labels) or [label()],
                **(pool or {}),
            }
        ],
        **{key.replace("_", "-"): value for key, value in options.items()},
    }


def config(*providers: dict[str, Any], **top: Any) -> dict[str, Any]:
    names = dict.fromkeys(
        item["name"] for entry in providers for pool in entry["pools"] for item in pool["labels"]
    )
    return {"labels": [{"name": name} for name in names], "providers": list(providers), **top}


def start(
    bench: LauncherBench,
    cloud: OpenStackCloud,
    *providers: dict[str, Any],
    top: dict[str, Any] | None = None,
    clouds: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A launcher; leaks are looked for by hand."""
    bench.write_clouds({"clouds": clouds or {"test": cloud.entry}})
    return bench.start(
        config(*(providers or (provider(),)), **(top or {})), **{"cleanup_interval": 600, **options}
    )


def one(bench: LauncherBench, name: str = "small", **fields: Any) -> tuple[str, Any]:
    request_id = bench.submit(name, **fields)
    record = bench.wait_request(request_id, "fulfilled", timeout=60)
    return request_id, bench.node(record["nodes"][0])


def failed(bench: LauncherBench, name: str = "small", timeout: float = 60) -> dict[str, Any]:
    return bench.wait_request(bench.submit(name), "failed", timeout=timeout)


def recovers(bench: LauncherBench, name: str, seconds: float = 30) -> None:
    """Requests for the label fail for a while, then one is served."""
    deadline = time.monotonic() + seconds
    while True:
        record = bench.wait_request(bench.submit(name), timeout=60)
        if record["state"] == "fulfilled":
            return
        assert time.monotonic() < deadline, f"{name} did not recover"


def use_up(bench: LauncherBench, *request_ids: str, timeout: float = 60) -> None:
    for request_id in request_ids:
        node_ids = bench.zuul.accept(request_id)
        bench.zuul.give_back(*node_ids)
        bench.wait_gone(*node_ids, timeout=timeout)


def manager(bench: LauncherBench, name: str = PROVIDER) -> Any:
    return bench.pools[0].getProviderManager(name)


def cleanup(bench: LauncherBench, times: int = 1, name: str = PROVIDER) -> None:
    """Passes of the leak cleanup, on this thread."""
    for _ in range(times):
        manager(bench, name).cleanupLeakedResources()


def is_call(wanted: str) -> Callable[[Request], bool]:
    """For :meth:`FaultProxy.fail`: as ``GET /servers/{id}``."""
    return lambda request: shape(request) == wanted


def throttled(status: int = 429, seconds: float | None = 0.5) -> Action:
    """A refusal of too many calls; without Retry-After when ``seconds`` is None."""

    def act(_request: Request, _forward: Any) -> Reply:
        body = json.dumps(
            {"overLimit": {"code": status, "message": "too many requests", "retryAfter": seconds}}
        )
        wait = [] if seconds is None else [("Retry-After", str(seconds))]
        return Reply(status, body.encode(), [("Content-Type", "application/json"), *wait])

    return act


class Zone:
    """The only host of the cloud, in a zone of another name."""

    def __init__(self, admin: Any, name: str) -> None:
        self.compute = admin.compute
        self.id = self._ask(
            "POST",
            "/os-aggregates",
            {"aggregate": {"name": "nodepool-test", "availability_zone": name}},
        )["id"]
        (self.host,) = {item.host for item in admin.compute.services(binary="nova-compute")}
        self._ask("POST", f"/os-aggregates/{self.id}/action", {"add_host": {"host": self.host}})

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.compute.request(path, method, json=body)
        assert answer.status_code < 300, answer.text
        return dict(answer.json()["aggregate"])

    def rename(self, name: str) -> None:
        self._ask("PUT", f"/os-aggregates/{self.id}", {"aggregate": {"availability_zone": name}})

    def remove(self) -> None:
        self._ask("POST", f"/os-aggregates/{self.id}/action", {"remove_host": {"host": self.host}})
        self.compute.delete(f"/os-aggregates/{self.id}")
