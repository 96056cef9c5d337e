"""SIGKILL of the launcher around each call that changes something in the cluster: nothing is lost,
nothing stays.

The proxy kills: before the call reaches the API server, or when it is done and nobody knows.
"""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for
from tests.integration.kubernetes.test_openshift import RIGHTS as OPENSHIFT_RIGHTS
from tests.support.fault_proxy import Request
from tests.support.kill import Daemon, killing
from tests.support.kubernetes.cluster import CONTEXT, KubernetesCluster
from tests.support.kubernetes.openshift_api import OpenShiftApi
from tests.support.launcher import LauncherBench

pytestmark = [pytest.mark.kubernetes, pytest.mark.fault, pytest.mark.timeout(300)]

POD = {"name": "pod", "image": "an/image"}
#: Driver -> its label, what is made for a node, and what is deleted.
DRIVERS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "kubernetes": (
        {**POD, "type": "pod"},
        ("namespaces", "serviceaccounts", "secrets", "pods", "roles", "rolebindings"),
        "namespaces",
    ),
    "openshift": (
        {**POD, "type": "pod"},
        ("projectrequests", "serviceaccounts", "secrets", "rolebindings", "pods"),
        "projects",
    ),
    "openshiftpods": (POD, ("pods",), "pods"),
}


def matches(method: str, plural: str) -> Callable[[Request], bool]:
    place = -1 if method == "POST" else -2
    return lambda request: (
        request.method == method and request.path.partition("?")[0].split("/")[place] == plural
    )


@pytest.mark.spec(
    "issue: SIGKILL of the launcher at every step leaves nothing in the cluster after clean-up"
)
@pytest.mark.parametrize("driver", DRIVERS)
def test_killed_launcher_leaves_nothing_in_the_cluster(
    bench: LauncherBench, cluster: KubernetesCluster, tmp_path: pathlib.Path, driver: str
) -> None:
    label, made, deleted = DRIVERS[driver]
    admin, pool = cluster.admin, f"k{uuid.uuid4().hex[:8]}"
    user = {}
    api = None
    if driver == "openshift":
        cluster.apply(*yaml.safe_load_all(OPENSHIFT_RIGHTS.read_text()))
        user = {"token": cluster.token_of("nodepool-openshift", "nodepool-launcher")}
        api = OpenShiftApi(admin, cluster.dir)
    elif driver == "openshiftpods":
        assert admin.status("POST", "/api/v1/namespaces", {"metadata": {"name": pool}}) == 200

    def left() -> dict[str, Any]:
        return cluster.pods(pool) if driver == "openshiftpods" else cluster.namespaces(f"{pool}-")

    provider = {
        "name": f"kube-{pool}",
        "driver": driver,
        "context": CONTEXT,
        "pools": [{"name": pool, "labels": [label]}],
    }
    config = bench.config(
        {"labels": [{"name": "pod"}], "providers": [provider], "zookeeper-timeout": 2.0}
    )
    daemons: list[Daemon] = []
    faults = [
        cluster.proxy.fail(matches(method, plural), killing(daemons, when))
        for method, plural in [*(("POST", each) for each in made), ("DELETE", deleted)]
        for when in ("before", "after")
    ]
    kubeconfig = cluster.kubeconfig(tmp_path, **user)
    daemon = Daemon(
        tmp_path, "serve.py", config, NODEPOOL_FAULT_CLEANUP="0.5", KUBECONFIG=kubeconfig
    )
    daemons.append(daemon)
    try:
        request = bench.submit("pod")

        def fulfilled() -> bool:
            daemon.again()
            return bool(bench.zuul.request(request)["state"] == "fulfilled")

        wait_for(fulfilled, 150, "request fulfilled")
        bench.zuul.give_back(*bench.zuul.accept(request))

        def nothing_left() -> bool:
            daemon.again()
            return not bench.nodes() and not left()

        wait_for(nothing_left, 100, "no node, and nothing in the cluster")
        assert [fault.used for fault in faults] == [1] * len(faults)
    finally:
        daemon.stop()
        if api is not None:
            api.close()
