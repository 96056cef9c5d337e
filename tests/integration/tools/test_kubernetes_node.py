"""tools/kubernetes up --node: nothing of the machine remains after it was stopped."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.conftest import wait_for
from tests.support.kubernetes.cluster import REAL_IMAGE, Server, require_real_node, running

PODS = "/api/v1/namespaces/default/pods"


def remains(directory: pathlib.Path, name: str) -> list[str]:
    """Return what there is of a machine outside of its directory."""
    found = [line for line in pathlib.Path("/proc/mounts").read_text().splitlines() if name in line]
    found += [str(path) for path in pathlib.Path("/sys/fs/cgroup").glob(f"*/{name}")]
    found += [str(path) for path in pathlib.Path("/sys/class/net").glob(name)]
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(directory / "node") in words:
            found.append(words)
    return found


@pytest.mark.kubernetes
@pytest.mark.slow
def test_stopped_node_leaves_no_process_cgroup_mount_or_interface() -> None:
    require_real_node()
    with running("--node") as (directory, url, token):
        port = json.loads((directory / "state.json").read_text())["port"]
        api = Server(url, str(directory / "ca.crt"), token)
        wait_for(
            lambda: api.get("/api/v1/namespaces/default/serviceaccounts/default"), 30, "account"
        )
        spec = {
            "nodeName": "real-0",
            "containers": [{"name": "main", "image": REAL_IMAGE, "imagePullPolicy": "Never"}],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        api.call("POST", PODS, pod)
        wait_for(lambda: api.call("GET", f"{PODS}/pod")["status"]["phase"] == "Running", 60, "pod")
        assert remains(directory, f"npk8s{port}")
    assert remains(directory, f"npk8s{port}") == []
