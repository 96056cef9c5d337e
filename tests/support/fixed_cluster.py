"""A cluster whose ids, times and numbers never change, and the pages over it."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from typing import Any

import pytest

from nodepool.zk import paths, reports
from nodepool.zk.mirror.feed import Feed
from nodepool.zk.mirror.progress import BuildProgress, ProgressStore, UploadFailure

NOW = 1793613600.0
"""2026-11-02 10:00 UTC, for the server and the browser."""
HOST, PID = "nl01", 4242
IN_USE_NODE, HELD_NODE, WAITING_REQUEST, LEASE = (
    "0000000102",
    "0000000105",
    "200-0000000204",
    "200-0000000190",
)
IMAGE, BUILD, FAILED_BUILD = "noble", "4f1c" * 8, "b2d9" * 8
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
LABELS = ("noble-small", "noble-large", "sliver")
LAUNCHER = f"{HOST}-PoolWorker.{{}}-main-11112222333344445555666677778888"
QUOTA = "Quota of east: 20 of 20 instances in use"


def stop_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all of the product see :data:`NOW`, including functions whose default clock is the
    real one.
    """
    real = time.time

    def fixed() -> float:
        return NOW

    functions = [
        function
        for name, module in list(sys.modules.items())
        if name.startswith("nodepool.")
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type)))
        for function in list(vars(owner).values())
        if isinstance(function, types.FunctionType) and real in (function.__defaults__ or ())
    ]
    for function in functions:
        defaults = tuple(fixed if value is real else value for value in function.__defaults__ or ())
        monkeypatch.setattr(function, "__defaults__", defaults)
    monkeypatch.setattr(time, "time", fixed)


def points() -> list[dict[str, Any]]:
    """Return the points of the charts: 24 hours in steps of 5 minutes."""
    rows = []
    for number in range(288):
        wave = 1 + math.sin(number / 20)
        rows.append(
            {
                "time": int(NOW) - 300 * (287 - number),
                "ready": int(6 * wave),
                "failed": int(number % 40 == 0),
                "launch": 30 + 20 * wave,
                "wait": 12 + 30 * wave,
                "wait_p95": 60 + 120 * wave,
                "nodes": {"in-use": int(9 * wave), "ready": 4, "building": number % 3},
                "waiting": {"Quota of east": int(8 * wave), "Tenant limit of acme": number % 4},
            }
        )
    return rows


class Launcher:
    """What the pages need of a launcher."""

    config = None

    def __init__(self, zk: Any) -> None:
        self.zk = zk
        times = iter(event["time"] for event in events())
        self.feed = Feed(lambda: next(times))
        for event in events():
            self.feed.note(
                event["type"],
                **{key: value for key, value in event.items() if key not in ("time", "type")},
            )
        self.trends = types.SimpleNamespace(chart=points)

    def getReadiness(self) -> tuple[bool, list[str]]:
        return True, []

    def getZK(self) -> Any:
        return self.zk

    def shown_config(self) -> dict[str, Any]:
        pool = {
            "name": "main",
            "max-servers": 20,
            "labels": [{"name": name, "diskimage": IMAGE} for name in LABELS[:2]],
        }
        east = {
            "name": "east",
            "driver": "openstack",
            "cloud": "east",
            "region-name": "e1",
            "rate": 0.1,
            "pools": [pool],
        }
        hosts = [
            {"name": "h1", "url": "https://h1.example.org:8443"},
            {"name": "h2", "url": "https://h2.example.org:8443"},
        ]
        lab = {"name": "lab", "driver": "nodemanager", "token": "(redacted)", "hosts": hosts}
        image = {
            "elements": ["ubuntu-minimal", "vm"],
            "formats": ["qcow2"],
            "release": "noble",
            "rebuild-age": 86400,
            "pause": False,
        }
        return {
            "hostname": HOST,
            "pid": PID,
            "in_force_since": NOW - 7200,
            "changes": ["providers[east].pools[main].max-servers: 16 -> 20"],
            "labels": {name: {"min-ready": 2 * (name == LABELS[0])} for name in LABELS},
            "diskimages": {IMAGE: image},
            "providers": {"east": east, "lab": lab},
            "tenant-resource-limits": {"acme": {"instances": 6}},
            **files(),
            "not_running": {"west": "the driver aws is not installed"},
        }


def files() -> dict[str, Any]:
    warning = (
        "/etc/nodepool/nodepool.yaml:31: label sliver is not offered by any pool of provider west"
    )
    return {
        "file": "/etc/nodepool/nodepool.yaml",
        "secure": "/etc/nodepool/secure.conf",
        "error": None,
        "stale_since": None,
        "warnings": [warning],
    }


def reason(
    code: str,
    pool: str,
    text: str,
    advice: str,
    root: str = "",
    blocker: str = "",
    headline: str = "",
) -> dict[str, str]:
    return {
        "code": code,
        "pool": pool,
        "text": text,
        "help": advice,
        "root": root,
        "request": "",
        "blocker": blocker,
        "headline": headline,
    }


def report() -> dict[str, Any]:
    full = reason(
        "paused",
        "east-main",
        "paused, provider east, instances: 1 needed, 0 of 20 left",
        "raise the cloud quota of provider east, or delete held and forgotten nodes",
        "provider-quota",
        "east instances",
        QUOTA,
    )
    limited = reason(
        "tenant-limit",
        "east-main",
        "tenant acme has 6 of 6 instances",
        "raise `max-servers` of tenant acme in `tenant-resource-limits`, or wait until it returns "
        "nodes",
        "",
        "acme instances",
        "Tenant limit of acme: 6 of 6 instances in use",
    )

    def group(label: str, since: float, ids: list[str], one: dict[str, str]) -> dict[str, Any]:
        return {
            "labels": [label],
            "state": "pending",
            "since": NOW - since,
            "count": len(ids),
            "ids": ids,
            "reasons": [one],
        }

    def entry(driver: str, labels: tuple[str, ...], **more: Any) -> dict[str, Any]:
        name = "east" if driver == "openstack" else "lab"
        pool = {
            "labels": sorted(labels),
            "max_servers": 20 if name == "east" else None,
            "id": LAUNCHER.format(name),
        }
        return {
            "driver": driver,
            "max_concurrency": -1,
            "pools": {"main": pool},
            "hosts": [],
            "launching": 1,
            **more,
        }

    error = {
        "operation": "create_server",
        "kind": "quota",
        "message": "Quota exceeded for instances",
        "time": NOW - 95,
    }
    host = {"limits": {"memory": 65536, "slivers": 8}, "used": {"memory": 24576, "slivers": 3}}
    return {
        "hostname": HOST,
        "pid": PID,
        "version": "12.0.0",
        "started": NOW - 90000,
        "ready": True,
        "details": [],
        "config": files(),
        "providers": {
            "east": entry(
                "openstack",
                LABELS[:2],
                limits={"cores": 100, "instances": 20, "ram": 1000000, "volumes": 0},
                used={"cores": 72, "instances": 20, "ram": 163840},
                calls={
                    "paces": {"read": "10/s", "write": "4/s"},
                    "throttled": False,
                    "last_error": error,
                },
            ),
            "lab": entry(
                "nodemanager",
                LABELS[2:],
                hosts=[
                    {"name": "h1", "usable": True, "problem": None, **host},
                    {"name": "h2", "usable": False, "problem": "no answer", **host},
                ],
            ),
        },
        "not_running": {"west": "the driver aws is not installed"},
        "not_running_labels": {},
        "labels": {name: {"min_ready": 2 * (name == LABELS[0]), "declined": []} for name in LABELS},
        "images": {
            IMAGE: {
                "paused": False,
                "rebuild_age": 86400,
                "labels": list(LABELS[:2]),
                "providers": ["east"],
            },
            "jammy": {"paused": True, "rebuild_age": 86400, "labels": [], "providers": ["east"]},
        },
        "lately": {LABELS[0]: {"launch": 38.2, "wait": 61.0}},
        "tenants": {"acme": {"limits": {"instances": 6}, "used": {"instances": 6}}},
        "waiting": [
            group(LABELS[1], 187, [f"200-00000002{number:02}" for number in range(4, 9)], full),
            group(LABELS[0], 620, ["200-0000000209", "200-0000000210"], limited),
        ],
    }


def request(**values: Any) -> dict[str, Any]:
    data = {
        "build_set_uuid": "bs",
        "tenant_name": "acme",
        "pipeline_name": "check",
        "job_name": "unit",
    }
    return {
        "node_types": [LABELS[1]],
        "requestor": "zuul",
        "requestor_data": data,
        "provider": None,
        "state": "pending",
        "created_time": NOW - 187,
        "state_time": NOW - 180,
        "relative_priority": 0,
        "event_id": "event",
        "tenant_name": "globex",
        "nodes": [],
        "declined_by": [],
        **values,
    }


def node(
    number: int, state: str, label: str, age: float, provider: str = "east", **values: Any
) -> dict[str, Any]:
    return {
        "state": state,
        "state_time": NOW - age,
        "created_time": NOW - age - 45,
        "provider": provider,
        "pool": "main",
        "type": [label],
        "cloud": provider,
        "region": "e1",
        "az": "e1a",
        "launcher": LAUNCHER.format(provider),
        "interface_ip": f"192.0.2.{number % 200}",
        "connection_port": 22,
        "username": "zuul",
        "connection_type": "ssh",
        "host_keys": [KEY],
        "image_id": IMAGE,
        "external_id": f"5b0c{number:04}a7e14d0f9c3e",
        "hostname": f"np{number:010}",
        **values,
    }


def nodes() -> dict[str, dict[str, Any]]:
    build = {"job_name": "unit", "project_name": "nova", "build": "8d21f0a7"}
    lease = {
        "lease": {
            "v": 1,
            "owner": "alice",
            "via": "token",
            "purpose": "bisect a crash",
            "created": NOW - 5400,
            "size": 1,
            "key": None,
            "secret": None,
            "renewed": 1,
            "notes": {},
            "longest": None,
        }
    }
    return {
        "0000000101": node(101, "ready", LABELS[0], 240),
        IN_USE_NODE: node(
            102,
            "in-use",
            LABELS[1],
            900,
            allocated_to="200-0000000180",
            tenant_name="acme",
            user_data=build,
        ),
        "0000000103": node(
            103,
            "in-use",
            LABELS[1],
            4000,
            allocated_to="200-0000000181",
            tenant_name="globex",
            user_data=build,
        ),
        "0000000104": node(
            104,
            "building",
            LABELS[1],
            20,
            allocated_to="200-0000000204",
            host_keys=[],
            interface_ip=None,
        ),
        HELD_NODE: node(
            105,
            "hold",
            LABELS[0],
            5000,
            allocated_to=LEASE,
            hold_expiration=14400,
            user_data=lease,
            comment="lease alice: bisect a crash",
        ),
        "0000000106": node(106, "deleting", LABELS[0], 65),
        "0000000107": node(
            107, "ready", LABELS[2], 7000, "lab", external_id={"host": "h1", "name": "np107"}
        ),
        "0000000108": node(108, "used", LABELS[1], 3, allocated_to=None),
    }


def requests() -> dict[str, dict[str, Any]]:
    waiting = {
        f"200-00000002{number:02}": request(created_time=NOW - 187 + number)
        for number in range(4, 9)
    }
    limited = {
        each: request(
            node_types=[LABELS[0]], tenant_name="acme", created_time=NOW - 620, state_time=NOW - 610
        )
        for each in ("200-0000000209", "200-0000000210")
    }
    terms = {
        "lease": {
            "v": 1,
            "owner": "bob",
            "via": "token",
            "purpose": "debug",
            "created": NOW - 100,
            "size": 1,
        }
    }
    leased = request(
        node_types=[LABELS[1]],
        requestor="nodepool-lease",
        requestor_data=terms,
        created_time=NOW - 100,
        tenant_name=None,
    )
    failed = request(
        node_types=["arm"], state="failed", created_time=NOW - 2000, state_time=NOW - 1990
    )
    return {**waiting, **limited, "200-0000000211": leased, "100-0000000150": failed}


def events() -> list[dict[str, Any]]:
    """Return what has happened, oldest first."""
    first = {"request": WAITING_REQUEST, "labels": [LABELS[1]], "requestor": "zuul"}
    of_node = {
        "node": "0000000104",
        "provider": "east",
        "pool": "main",
        "labels": [LABELS[1]],
        "request": WAITING_REQUEST,
    }
    of_use = {
        "node": IN_USE_NODE,
        "provider": "east",
        "pool": "main",
        "labels": [LABELS[1]],
        "request": "200-0000000180",
    }
    return [
        {"time": NOW - 990, "type": "node-created", **of_use, "state": "init"},
        {
            "time": NOW - 988,
            "type": "node-step",
            **of_use,
            "step": "attempt 1 of 3: server requested",
        },
        {
            "time": NOW - 950,
            "type": "node-changed",
            **of_use,
            "state": "ready",
            "before": "building",
        },
        {"time": NOW - 900, "type": "node-changed", **of_use, "state": "in-use", "before": "ready"},
        {"time": NOW - 183, "type": "request-submitted", **first, "state": "requested"},
        {
            "time": NOW - 180,
            "type": "request-changed",
            **first,
            "state": "pending",
            "before": "requested",
        },
        {"time": NOW - 140, "type": "node-created", **of_node, "state": "init"},
        {
            "time": NOW - 139,
            "type": "node-step",
            **of_node,
            "step": "attempt 1 of 3: server requested",
        },
        {
            "time": NOW - 95,
            "type": "launch-failed",
            **of_node,
            "reason": "Quota exceeded for instances",
            "attempt": 1,
        },
        {
            "time": NOW - 20,
            "type": "node-step",
            **of_node,
            "step": "attempt 2 of 3: server requested",
        },
    ]


def write(kazoo: Any) -> None:
    """Write all records."""

    def create(path: str, content: object) -> None:
        kazoo.create(path, json.dumps(content).encode(), makepath=True)

    for node_id, record in nodes().items():
        create(paths.node(node_id), record)
        if record["state"] in ("in-use", "building", "deleting"):
            kazoo.create(
                f"{paths.node_lock(node_id)}/{'a' * 32}__lock__",
                makepath=True,
                ephemeral=True,
                sequence=True,
            )
    for request_id, record in requests().items():
        create(paths.request(request_id), record)
    for build, age, state in ((BUILD, 40000, "ready"), (FAILED_BUILD, 3000, "failed")):
        create(
            paths.build(IMAGE, build),
            {
                "state": state,
                "state_time": NOW - age,
                "builder": "nb01",
                "builder_id": "b",
                "formats": "qcow2",
            },
        )
    upload = {
        "state": "ready",
        "state_time": NOW - 39000,
        "external_id": "1f0e7c52",
        "external_name": f"{IMAGE}-1793574600",
        "format": "qcow2",
    }
    create(paths.upload(IMAGE, BUILD, "east", "0000000001"), upload)
    store = ProgressStore(kazoo)
    tail = [
        "Get:1 http://archive.ubuntu.com noble InRelease",
        "E: Unable to fetch some archives",
        "exit status 100",
    ]
    store.write(
        BuildProgress(
            IMAGE,
            BUILD,
            "nb01",
            state="ready",
            started=NOW - 41000,
            ended=NOW - 40000,
            duration=1000.0,
            sizes={"qcow2": 3 << 30},
        )
    )
    store.write(
        BuildProgress(
            IMAGE,
            FAILED_BUILD,
            "nb01",
            state="failed",
            reason="exit status 100",
            exit_code=100,
            started=NOW - 3300,
            ended=NOW - 3000,
            log="/var/log/nodepool/builds/noble.log",
            tail=tail,
            next_try=NOW + 600,
        )
    )
    failure = UploadFailure(IMAGE, "lab", BUILD, "0000000002", "quota exceeded")
    failure.next_try = NOW + 600
    store.write(failure)
    problems = [
        {
            "provider": "east",
            "label": LABELS[1],
            "problem": "launch failed: Quota exceeded for instances",
        },
        {
            "provider": "lab",
            "label": None,
            "problem": "host h2 does not answer: connection refused",
        },
    ]
    components = {
        f"launcher/{HOST}": {"kind": "launcher", "hostname": HOST, "problems": problems},
        "builder/nb01": {"kind": "builder", "hostname": "nb01"},
        "pool/east": {
            "kind": "pool",
            "hostname": HOST,
            "name": "main",
            "id": LAUNCHER.format("east"),
            "paused": True,
            "priority": 100,
            "provider_name": "east",
            "supported_labels": list(LABELS[:2]),
        },
        "pool/lab": {
            "kind": "pool",
            "hostname": HOST,
            "name": "main",
            "id": LAUNCHER.format("lab"),
            "paused": False,
            "priority": 100,
            "provider_name": "lab",
            "supported_labels": list(LABELS[2:]),
        },
    }
    for name, content in components.items():
        create(
            f"{paths.COMPONENTS}/{name}0000000000",
            {"model_api": 0, "state": "running", "version": "12.0.0", **content},
        )
    reports.write(kazoo, reports.path(f"{HOST}-{PID}"), report())
