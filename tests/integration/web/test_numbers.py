"""Each number on a page equals one computed from the raw records of the same moment."""

from __future__ import annotations

import json
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from nodepool.web.server import WebApp
from tests.conftest import wait_for
from tests.integration.web.conftest import Site
from tests.support.browser import browser
from tests.support.launcher import LauncherBench, config, provider

OPEN = ("requested", "pending")
STATIC = {
    "name": "127.0.0.1",
    "labels": ["metal"],
    "host-key-checking": False,
    "max-parallel-jobs": 3,
}
#: Ids, ports, moments, durations and estimates: no counts.
NO_COUNTS = frozenset(
    (
        "ids",
        "id",
        "port",
        "since",
        "oldest",
        "age",
        "expected",
        "created",
        "time",
        "priority",
        "error_time",
        "calls",
    )
)


class Records:
    """The znodes of one moment, read without the product."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.nodes = self._below("/nodepool/nodes")
        self.requests = self._below("/nodepool/requests")
        self.pools = self._below("/nodepool/components/pool")
        self.reports = [
            json.loads(zlib.decompress(client.get(f"/nodepool/launcher-reports/{name}")[0]))
            for name in client.get_children("/nodepool/launcher-reports")
        ]
        self.builds: list[dict[str, Any]] = []
        self.uploads: list[dict[str, Any]] = []
        for image in client.get_children("/nodepool/images"):
            for build, record in self._below(f"/nodepool/images/{image}/builds").items():
                self.builds.append({**record, "image": image})
                where = f"/nodepool/images/{image}/builds/{build}/providers"
                for name in self._children(where):
                    found = self._below(f"{where}/{name}/images").values()
                    self.uploads += [{**each, "image": image, "provider": name} for each in found]

    def _children(self, path: str) -> list[str]:
        return list(self._client.get_children(path)) if self._client.exists(path) else []

    def _below(self, path: str) -> dict[str, dict[str, Any]]:
        found = {name: self._client.get(f"{path}/{name}")[0] for name in self._children(path)}
        return {name: json.loads(data) for name, data in found.items() if data}

    def states(self, **values: Any) -> dict[str, int]:
        """Numbers of nodes by state, of those whose fields have these values."""
        return dict(Counter(node["state"] for node in self.of(**values)))

    def of(self, **values: Any) -> list[dict[str, Any]]:
        return [
            node
            for node in self.nodes.values()
            if all(node[key] == value for key, value in values.items())
        ]

    @property
    def open(self) -> list[dict[str, Any]]:
        return [request for request in self.requests.values() if request["state"] in OPEN]

    @property
    def explained(self) -> set[str]:
        """Requests whose reasons are published."""
        return {
            name for report in self.reports for group in report["waiting"] for name in group["ids"]
        }

    def used(self, nodes: Iterable[dict[str, Any]]) -> dict[str, float]:
        found: Counter[str] = Counter()
        for node in nodes:
            found.update(node["resources"] or {})
        return dict(found)


def counts(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row, and its dictionaries of numbers."""
    return {
        key: value
        for key, value in row.items()
        if key not in NO_COUNTS
        and (type(value) in (int, float) or (isinstance(value, dict) and value))
    }


def listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(numbers.items())) or "none"


@pytest.fixture
def busy(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Records of many kinds: nodes in each state, tenants, static slots, waiting and failed
    requests, images.
    """
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", 0.2)
    bench.quota(instances=9, cores=100, ram=200000)
    cloud = provider(labels=["small", "large"], pool={"max-servers": 7})
    rack = {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [STATIC]}]}
    limits = [{"tenant-name": "acme", "max-servers": 2}]
    made = config(cloud, labels={"large": {"min-ready": 1}}, **{"tenant-resource-limits": limits})
    made = {**made, "labels": [*made["labels"], {"name": "metal"}], "providers": [cloud, rack]}
    pool = bench.start(made, cleanup_interval=None, delete_interval=None)
    app = WebApp(pool, port=0, listen_address="127.0.0.1")
    app.start()
    try:
        bench.wait_nodes(1, type=["large"], state="ready")
        bench.wait_nodes(3, provider="rack", state="ready")
        used, _nodes = bench.fulfilled("small", tenant_name="acme")
        bench.zuul.accept(used)
        bench.fulfilled("small", tenant_name="acme")
        _metal, [slot] = bench.fulfilled("metal", tenant_name="globex")
        assert slot.provider == "rack"
        for state in ("building", "deleting", "failed", "used", "hold"):
            values = {
                "resources": {"cores": 4, "ram": 8192, "instances": 1},
                "tenant_name": "globex",
            }
            node = bench.ready_node("fake-provider", "main", "small", state="hold", **values)
            bench.zuul.lock(node.id)  # before its state lets the launcher delete it
            bench.zuul.write_node(node.id, state=state)
        bench.ready_node("former", "main", "small", tenant_name="globex")
        limited = bench.submit("small", tenant_name="acme")
        full = [bench.submit("small", "large", tenant_name="globex"), bench.submit("large")]
        bench.wait_request(bench.submit("nobody-offers-it"), "failed")
        for image in ("noble", "noble", "jammy"):
            bench.store_image(image, "fake-provider")
        site = Site(bench, pool, app)
        wait_for(
            lambda: {limited, *full} <= Records(bench.zuul.client).explained,
            30,
            "the reasons of all requests",
        )
        yield site
    finally:
        app.stop()


def page(site: Site, path: str) -> Any:
    return json.loads(urllib.request.urlopen(f"{site.address}/api/v1/{path}", timeout=30).read())


def rows(site: Site, table: str, *key: str) -> dict[Any, dict[str, Any]]:
    found = page(site, f"{table}?limit=20000")
    assert found["total"] == len(found["rows"])
    return {
        tuple(row[each] for each in key) if len(key) > 1 else row[key[0]]: row
        for row in found["rows"]
    }


@pytest.mark.spec(
    "issue: each number on a page equals one computed from the records of the same moment"
)
def test_numbers_of_tables_and_overview_equal_those_of_the_records(busy: Site) -> None:
    before = Records(busy.bench.zuul.client)
    overview, found = (
        page(busy, "overview"),
        {name: expected(before) for name, expected in EXPECTED.items()},
    )
    shown = {name: rows(busy, name, *KEYS[name]) for name in EXPECTED}
    after = Records(busy.bench.zuul.client)
    for each in (before, after):  # the launcher writes its report again, with another time
        for report in each.reports:
            report.pop("time")
    assert vars(before) | {"_client": None} == vars(after) | {"_client": None}, (
        "nothing changed meanwhile"
    )
    for name, expected in found.items():
        assert {key: counts(row) for key, row in shown[name].items()} == expected, name
    assert overview["nodes"] == before.states()
    assert overview["requests"] == dict(Counter(each["state"] for each in before.requests.values()))
    launched = [node for node in before.of(provider="fake-provider") if node["launcher"] != "bench"]
    assert overview["launches"] == {"ready": len(launched), "failed": 0}
    for name in ("providers", "pools", "labels", "waiting"):
        of_table = [counts(row) for row in shown[name].values()]
        assert sorted(map(str, map(counts, overview[name]))) == sorted(map(str, of_table)), name


def labels_of(records: Records) -> dict[str, Any]:
    """Numbers of each label; medians of launches and waits are those that the launcher reports."""
    (report,) = records.reports
    found = {}
    for name, entry in report["labels"].items():
        nodes = [node for node in records.nodes.values() if name in node["type"]]
        free = [node for node in nodes if node["state"] == "ready" and node["allocated_to"] is None]
        found[name] = {
            "min_ready": entry["min_ready"],
            "ready": len(free),
            "states": dict(Counter(node["state"] for node in nodes)),
            "waiting": sum(name in request["node_types"] for request in records.open),
            "problems": 0,
            **{
                key: value
                for key, value in report["lately"][name].items()
                if key != "a_minute" and value is not None
            },
        }
    return found


def providers_of(records: Records) -> dict[str, Any]:
    (report,) = records.reports
    found = {}
    for name in {*report["providers"], *(node["provider"] for node in records.nodes.values())}:
        entry = report["providers"].get(name, {"launching": None, "hosts": [], "limits": {}})
        row = {
            "states": records.states(provider=name),
            "limit": entry["limits"],
            "launching": entry["launching"],
            "problems": int(name not in report["providers"]),  # nobody has it
            "used": records.used(records.of(provider=name)),
            "hosts": len(entry["hosts"]),
            "hosts_down": 0,
        }
        found[name] = {key: value for key, value in row.items() if value not in (None, {})}
    return found


def pools_of(records: Records) -> dict[Any, Any]:
    return {
        (pool["provider_name"], pool["name"]): {
            "nodes": len(records.of(provider=pool["provider_name"], pool=pool["name"])),
            **({"max_servers": 7} if pool["provider_name"] == "fake-provider" else {}),
        }
        for pool in records.pools.values()
    }


def waiting_of(records: Records) -> dict[str, Any]:
    """Numbers by cause: the tenant limit for requests of acme, the limit of the pool for the
    others.
    """
    found = {}
    for cause, mine in (("tenant-limit", True), ("pool-limit", False)):
        requests = [
            request for request in records.open if (request["tenant_name"] == "acme") is mine
        ]
        labels = Counter(label for request in requests for label in set(request["node_types"]))
        tenants = Counter(request["tenant_name"] for request in requests if request["tenant_name"])
        found[cause] = {
            "count": len(requests),
            "label_counts": dict(labels),
            "tenants": dict(tenants),
        }
    return found


def requests_of(records: Records) -> dict[str, Any]:
    """The queue position: earlier open requests that share a label, plus one."""
    found: dict[str, Any] = {
        name: {"relative_priority": each["relative_priority"]}
        for name, each in records.requests.items()
    }
    queue = sorted(name for name, request in records.requests.items() if request["state"] in OPEN)
    for number, name in enumerate(queue):
        labels = set(records.requests[name]["node_types"])
        found[name]["place"] = 1 + sum(
            bool(labels & set(records.requests[each]["node_types"])) for each in queue[:number]
        )
    return found


def images_of(records: Records) -> dict[str, Any]:
    return {
        image: {
            "builds": dict(
                Counter(each["state"] for each in records.builds if each["image"] == image)
            ),
            "uploads": dict(
                Counter(each["state"] for each in records.uploads if each["image"] == image)
            ),
        }
        for image in {each["image"] for each in records.builds}
    }


def tenants_of(records: Records) -> dict[str, Any]:
    return {
        "acme": {"limit": {"instances": 2}, "used": records.used(records.of(tenant_name="acme"))}
    }


EXPECTED: dict[str, Any] = {
    "nodes": lambda records: {name: {} for name in records.nodes},
    "requests": requests_of,
    "labels": labels_of,
    "providers": providers_of,
    "pools": pools_of,
    "waiting": waiting_of,
    "images": images_of,
    "tenants": tenants_of,
}
KEYS = {
    "nodes": ("id",),
    "requests": ("id",),
    "labels": ("label",),
    "providers": ("provider",),
    "pools": ("provider", "pool"),
    "waiting": ("code",),
    "images": ("image",),
    "tenants": ("tenant",),
}


@pytest.mark.spec(
    "issue: each number on a page equals one computed from the records of the same moment"
)
def test_numbers_that_pages_draw_equal_those_of_the_records(busy: Site) -> None:
    records = Records(busy.bench.zuul.client)
    fake, rack = (records.of(provider=name) for name in ("fake-provider", "rack"))
    small = labels_of(records)["small"]
    used = len([node for node in rack if node["allocated_to"]])
    texts = {
        "": (
            f"Nodes\n{len(records.nodes)}\n",
            f"Requests waiting\n{len(records.open)}\n",
            f"instances {len(fake)} of 9, 89 %",
            f"nodes {len(fake)} of 7, full",
            f"{len(rack)} slots, 1 of 1 host usable",
            *(
                f"{row['count']} request{'s' * (row['count'] != 1)}: Limit of"
                for row in waiting_of(records).values()
            ),
        ),
        "hosts": ("1 row", f"slots {used} of {len(rack)}"),
        "nodes": (f"{len(records.nodes)} rows",),
        "nodes?labels=small": (
            f"{sum('small' in node['type'] for node in records.nodes.values())} rows",
        ),
        "requests": (f"{len(records.requests)} rows",),
        "requests?state=requested,pending": (f"{len(records.open)} rows",),
        "builds": (f"{len(records.builds)} rows",),
        "uploads": (f"{len(records.uploads)} rows",),
        "tenants": ("instances 2 of 2",),
        "label/small": (listed(small["states"]), f"requests waiting\n{small['waiting']}\n"),
        "label/large": (f"min-ready\n{labels_of(records)['large']['ready']} of 1 ready",),
        "provider/fake-provider": (
            listed(records.states(provider="fake-provider")),
            f"{len(fake)} of 9 used by our nodes",
        ),
        "image/noble": ("2 uploads can be used",),
        "find?q=small": (
            "Labels: 1",
            f"Nodes: {sum('small' in str(node) for node in records.nodes.values())}",
        ),
    }
    with browser(busy.address) as seen:
        missing = {}
        for path, expected in texts.items():
            seen.open(f"/ui/{path}")
            seen.page.locator("main h1").wait_for()
            text = seen.page.locator("main").inner_text()
            if lacking := [each for each in expected if each.lower() not in text.lower()]:
                missing[path] = (lacking, text)
        assert missing == {}
