#!/usr/bin/env python3
"""Measures what a node and a list of servers cost with our requests, and with methods of the SDK.

  tools/openstack run -- .venv/bin/python -m tests.benchmark.openstack_calls
  [--nodes 5] [--servers 200]

``ours`` (our requests) and ``proxy`` (the SDK's typed methods) poll a server every 0.4 s.
``driver`` (our state machines) polls when it expects a change, ``layer`` (the SDK's cloud layer) at
the SDK's intervals. The listed servers stay in the cloud. For a list of 1,000, a separate process
repeats the cloud's answer. Figures: median (lowest to highest).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import wait
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import yaml

from nodepool.config import loadConfig
from nodepool.driver.openstack.adapter import OpenStackAdapter
from nodepool.zk.records import NodeRequest
from tests.benchmark.harness import log
from tests.benchmark.openstack_driver import config
from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request
from tests.support.openstack.cloud import connection

POLL = 0.4
BATCH = 50
LISTS = 3
REPEATED = 1000
UNITS = ("calls", "client CPU, ms", "wall, s")


class Ways:
    """Methods that create and delete one node. No proxy delays the requests to the cloud."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({**config(), "zookeeper-servers": [{"host": "none"}]}, file)
            file.flush()
            provider: Any = loadConfig(file.name).providers["cloud-1"]
        self.label = provider.pools["main"].labels["small"]
        self.adapter: Any = OpenStackAdapter(provider)
        self.api, self.sdk, self.calls = self.adapter._api, connection(), 0
        for client in (self.adapter._client, self.sdk):
            client.session.session.hooks["response"].append(self._count)
        self.image = self.sdk.image.find_image("base")
        self.flavor = self.sdk.compute.find_flavor("tiny")
        self.network = self.sdk.network.find_network("private")

    def _count(self, *_: object, **_options: object) -> None:
        self.calls += 1

    def driver(self, name: str) -> None:
        given: Any = (name, self.label, None, {}, NodeRequest(), None)
        logger = logging.getLogger("benchmark")
        creation = self.adapter.getCreateStateMachine(*given, logger)
        self._run(creation)
        self._run(self.adapter.getDeleteStateMachine(creation.external_id, logger))

    @staticmethod
    def _run(machine: Any) -> None:
        woken = threading.Event()
        machine.wake = woken.set
        while not machine.complete:
            woken.clear()
            machine.advance()
            if machine.waiting_future is not None:
                wait([machine.waiting_future])
            elif not machine.complete:
                woken.wait(1)

    def ours(self, name: str) -> None:
        nics = [{"net-id": self.network.id}]
        server = self.api.create_server(name, self.image, self.flavor, nics=nics)["id"]
        while (self.api.get_server_by_id(server) or {}).get("status") != "ACTIVE":
            time.sleep(POLL)
        self.api.delete_server(server)
        while (found := self.api.get_server_by_id(server)) and found["status"] != "DELETED":
            time.sleep(POLL)

    def proxy(self, name: str) -> None:
        compute, networks = self.sdk.compute, [{"uuid": self.network.id}]
        server = compute.create_server(
            name=name, image_id=self.image.id, flavor_id=self.flavor.id, networks=networks
        )
        compute.wait_for_server(server, interval=POLL)
        compute.delete_server(server)
        compute.wait_for_delete(server, interval=POLL)

    def layer(self, name: str) -> None:
        given = {"image": self.image, "flavor": self.flavor, "network": self.network}
        server = self.sdk.create_server(name, **given, auto_ip=False, wait=True)
        self.sdk.delete_server(server.id, wait=True)

    def fill(self, servers: int) -> None:
        """Create servers, many with each request, until the cloud has this many."""
        began, nets = time.monotonic(), [{"uuid": self.network.id}]
        body = {"name": "listed", "imageRef": self.image.id, "flavorRef": self.flavor.id}
        while (missing := servers - len(self.api.list_servers())) > 0:
            many = {**body, "networks": nets, "min_count": 1, "max_count": min(missing, BATCH)}
            self.sdk.compute.post("/servers", json={"server": many})
            while self.sdk.compute.get("/servers?status=BUILD&limit=1").json()["servers"]:
                time.sleep(2)
            log(f"created servers for {time.monotonic() - began:.0f} s; {missing} were missing")

    def repeat(self, servers: int) -> None:
        """Let a separate process answer lists from now on, with this many servers."""
        real = urllib.parse.urlsplit(self.sdk.compute.get_endpoint())
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = ((real.hostname, real.port), servers, there)
        context.Process(target=serve, args=arguments, daemon=True).start()
        url = here.recv() + real.path
        for client in (self.adapter._client, self.sdk):
            client.compute.endpoint_override = url


def serve(cloud: tuple[str, int], servers: int, url: Connection) -> None:
    """Answer lists with the servers that the cloud listed first, repeated; forward the rest."""
    answers: dict[str | None, Reply] = {}

    def repeated(request: Request, forward: Forward) -> Reply | None:
        if "/servers/detail" not in request.path:
            return None
        version = request.headers.get("openstack-api-version")
        if version not in answers:
            answer = answers[version] = forward(request)
            found = json.loads(answer.body)["servers"] * servers
            many = [{**item, "id": f"{n:032x}"} for n, item in enumerate(found[:servers])]
            answer.body = json.dumps({"servers": many}).encode()
        return answers[version]

    url.send(FaultProxy(cloud, repeated).url)
    threading.Event().wait()


def measure(ways: Ways, what: str, work: dict[str, Callable[[str], object]], turns: int) -> None:
    """Print the figures of all ways, which take turns. The first turn is not counted."""
    figures: dict[str, list[tuple[float, ...]]] = {way: [] for way in work}
    for turn in range(turns + 1):
        for way, act in work.items():
            calls, cpu, began = ways.calls, time.process_time(), time.monotonic()
            act(f"{way}-{turn}")
            spent = (time.process_time() - cpu) * 1000
            figures[way].append((ways.calls - calls, spent, time.monotonic() - began))
    for way, rows in figures.items():
        for unit, row in zip(UNITS, zip(*rows[1:], strict=True), strict=True):
            values = f"{median(row):9.2f} ({min(row):.2f} to {max(row):.2f})"
            print(f"{what:13} {way:7} {unit:15} {values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--servers", type=int, default=200)
    args = parser.parse_args()
    admin = connection("admin")
    admin.set_compute_quotas("nodepool", instances=-1, cores=-1, ram=-1)
    admin.set_network_quotas("nodepool", port=-1)
    ways = Ways()
    try:
        ways.fill(args.servers)
        lives = {way: getattr(ways, way) for way in ("driver", "ours", "proxy", "layer")}
        measure(ways, "node", lives, args.nodes)
        lists: dict[str, Callable[[str], object]] = {
            "ours": lambda _: ways.api.list_servers(),
            "proxy": lambda _: list(ways.sdk.compute.servers(details=True)),
        }
        layer: dict[str, Callable[[str], object]] = {"layer": lambda _: ways.sdk.list_servers()}
        measure(ways, f"list of {args.servers}", lists | layer, LISTS)
        ways.repeat(REPEATED)
        measure(ways, f"list of {REPEATED}", lists, LISTS)
    finally:
        ways.adapter.stop()


if __name__ == "__main__":
    main()
