"""A host that cannot be used is reported wherever an operator looks."""

from __future__ import annotations

import json
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk
from tests.integration.nodemanager.daemon.test_launcher import config as daemon_config
from tests.support.nodemanager.scene import NmDaemon, make_daemon


def node_manager(tmp: pathlib.Path) -> dict[str, Any]:
    """A provider whose only host does not answer."""
    return {
        "labels": [{"name": "small"}],
        "providers": [
            {
                "name": "metal",
                "driver": "nodemanager",
                "ssh-keys": "ssh-ed25519 "
                "AAAAC3NzaC1lZDI1NTE5AAAAIJ1aJf2aW3cFQmYk5mC1q1vLZfBqk1c6m7j0tq0J8s9u me@here",
                "hosts": [{"name": "h0", "url": f"unix:{tmp}/dead"}],
                "cloud-images": [{"name": "host"}],
                "pools": [
                    {
                        "name": "main",
                        "labels": [{"name": "small", "cloud-image": "host", "ram": 128}],
                    }
                ],
            }
        ],
    }


def test_dead_node_manager_is_reported_everywhere(desk: Desk, tmp_path: pathlib.Path) -> None:
    desk.start(node_manager(tmp_path))
    wait_for(
        lambda: any(text.startswith("host h0: ") for text in desk.problems()),
        what="the host in problem-list",
    )
    assert "provider metal: host h0: " in desk.ready()
    (host,) = json.loads(desk.run("hosts", "--format", "json")[1])
    assert (host["host"], host["provider"], host["state"]) == (
        "h0",
        "metal",
        "not usable",
    ) and host["problem"]
    assert desk.run("explain", "h0")[1].startswith("host h0: not usable: ")
    request = desk.bench.submit("small")
    wait_for(
        lambda: any("no host can be used: h0: " in text for text in desk.problems()),
        what="the stalled launch",
    )
    assert desk.bench.zuul.request(request)["state"] in ("requested", "pending")


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


@pytest.mark.timeout(180)
def test_killed_node_manager_is_reported_and_forgotten_when_it_is_back(
    desk: Desk, nm: NmDaemon
) -> None:
    desk.start(daemon_config(nm))
    assert nm.process is not None
    nm.process.kill()
    nm.process.wait()
    try:
        # Nobody asks for a node: the launcher notices it automatically.
        wait_for(
            lambda: any(text.startswith("host h0: ") for text in desk.problems()),
            40,
            "the host in problem-list",
        )
        assert "host h0: " in desk.ready()
        request = desk.bench.submit("small")
        wait_for(
            lambda: "no host" in desk.explain("request", request)["answer"],
            30,
            "the cause of the request",
        )
        found = desk.explain("request", request)
        assert found["suggestion"] == "start the node manager on one of its hosts"
        (node,) = [node for node in desk.bench.nodes() if node.allocated_to == request]
        assert (
            "the launch is stalled: no host of provider metal can be used"
            in desk.explain("node", node.id)["answer"]
        )
        assert "host h0: " in desk.explain("label", "small")["answer"]
        assert "h0: unix:" in desk.explain("provider", "metal")["answer"]
    finally:
        nm.start()
    desk.bench.wait_request(request, "fulfilled", timeout=40)
    wait_for(lambda: desk.problems() == [], 40, "nothing is reported any more")


def static_hosts(dead: int, *others: dict[str, Any]) -> dict[str, Any]:
    """Two hosts: nobody listens at the port of one, the other one is not connected to before it
    is used.
    """
    common = {"name": "127.0.0.1", "labels": ["metal"], "timeout": 1}
    nodes = [
        {**common, "username": "dead", "connection-port": dead, "host-key-checking": True},
        {
            **common,
            "username": "alive",
            "connection-port": 22022,
            "host-key-checking": False,
            "max-parallel-jobs": 3,
        },
    ]
    rack = {
        "name": "rack",
        "driver": "static",
        "pools": [{"name": "main", "nodes": [*nodes, *others]}],
    }
    return {"labels": [{"name": "metal"}, {"name": "other"}], "providers": [rack]}


def test_static_hosts_are_listed_with_their_slots_and_problems(desk: Desk) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        desk.start(
            static_hosts(
                port, {"name": "127.0.0.3", "labels": ["other"], "host-key-checking": False}
            )
        )
        nodes = [
            node
            for node in desk.bench.wait_nodes(4, provider="rack", state="ready")
            if node.username == "alive"
        ]
        held = nodes[0]
        held.state = "hold"
        desk.bench.zk.storeNode(held)

        def listed() -> dict[str, dict[str, Any]]:
            return {
                row["host"]: row for row in json.loads(desk.run("hosts", "--format", "json")[1])
            }

        dead, alive = f"dead@127.0.0.1 port {port}", "alive@127.0.0.1 port 22022"
        wait_for(
            lambda: dead in listed() and listed()[dead]["state"] == "not usable",
            what="the check of the host",
        )
        found = listed()
        assert (found[alive]["state"], found[alive]["used"], found[alive]["problem"]) == (
            "usable",
            "slots 1/3",
            None,
        )
        assert found[alive]["nodes"] == sorted(str(node.id) for node in nodes)
        assert (found["127.0.0.3"]["used"], len(found["127.0.0.3"]["nodes"])) == ("slots 0/1", 1)
        assert (found[dead]["used"], found[dead]["nodes"]) == ("slots 0/1", [])
        assert found[dead]["problem"].startswith(f"{dead} cannot be used now: ")
        # The list of hosts is asked for, and problems are published.
        desk.reported(f"host {found[dead]['problem']}")
        assert len([text for text in desk.problems() if text.startswith("host ")]) == 1
        (trouble,) = [
            each
            for each in json.loads(desk.get("/api/v1/overview"))["health"]["problems"]
            if dead in each["text"]
        ]
        assert (trouble["kind"], trouble["level"]) == ("hosts", "amber")
        assert desk.run("explain", dead)[1].startswith(f"host {dead}: not usable: ")
