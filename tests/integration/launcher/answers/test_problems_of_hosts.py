"""A host that cannot be used is reported wherever an operator looks."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk


def node_manager(tmp: pathlib.Path) -> dict[str, Any]:
    """A provider whose only host does not answer."""
    return {
        "labels": [{"name": "small"}],
        "providers": [
            {
                "name": "metal",
                "driver": "nodemanager",
                "ssh-keys": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1aJf2aW3cFQmYk5mC1q1vLZfBqk1c6m7j0tq0J8s9u me@here",
                "hosts": [{"name": "h0", "url": f"unix:{tmp}/dead"}],
                "cloud-images": [{"name": "host"}],
                "pools": [{"name": "main", "labels": [{"name": "small", "cloud-image": "host", "ram": 128}]}],
            }
        ],
    }


def test_dead_node_manager_is_reported_everywhere(desk: Desk, tmp_path: pathlib.Path) -> None:
    desk.start(node_manager(tmp_path))
    wait_for(lambda: any(text.startswith("host h0: ") for text in desk.problems()), what="the host in problem-list")
    assert "provider metal: host h0: " in desk.ready()
    request = desk.bench.submit("small")
    wait_for(lambda: any("no host can be used: h0: " in text for text in desk.problems()), what="the stalled launch")
    assert desk.bench.zuul.request(request)["state"] in ("requested", "pending")
