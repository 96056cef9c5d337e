"""Manifests of ``etc`` and the manual, checked by a real API server."""

from __future__ import annotations

import copy

import pytest

from tests import REPOSITORY
from tests.support.kubernetes import manifests
from tests.support.kubernetes.cluster import KubernetesCluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

MANIFESTS = sorted((REPOSITORY / "etc" / "manifests").glob("*.yaml"))


@pytest.mark.core
def test_api_server_accepts_all_manifests_without_a_warning(cluster: KubernetesCluster) -> None:
    documents = manifests.read(*MANIFESTS)
    # The fixture has created the namespace.
    assert {each["metadata"].get("namespace", "nodepool") for each in documents} == {"nodepool"}
    assert manifests.complaints(cluster.admin, documents) == []


@pytest.mark.core
def test_api_server_names_unknown_fields_of_a_manifest(cluster: KubernetesCluster) -> None:
    """Otherwise the test above proves nothing."""
    (launcher,) = [
        each
        for each in manifests.read(*MANIFESTS)
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "nodepool-launcher"
    ]
    wrong = copy.deepcopy(launcher)
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    (found,) = manifests.complaints(cluster.admin, [wrong])
    assert "readynessProbe" in found and "field not declared in schema" in found, found
