"""The Helm chart: rendered by the real Helm, applied to a real API server."""

from __future__ import annotations

import base64
import json
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.adapters.github.program import SCHEMA
from nodepool.adapters.runners.program import read_config
from nodepool.nodemanager import config as nodemanager
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.kubernetes import manifests
from tests.support.kubernetes.cluster import PROGRAM, KubernetesCluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

CHART = REPOSITORY / "etc" / "helm" / "nodepool"
MANIFESTS = REPOSITORY / "etc" / "manifests" / "nodepool.yaml"
#: Values files of the manual.
EXAMPLES = sorted((REPOSITORY / "doc" / "examples").glob("helm-*.yaml"))
#: The defaults, and the manual's.
VALUES = [pytest.param([], id="defaults")]
VALUES += [pytest.param(["-f", str(path)], id=path.stem) for path in EXAMPLES]


class Helm:
    """The command, with the administrator's access to the cluster."""

    def __init__(self, program: str, folder: pathlib.Path) -> None:
        self.program = program
        self.folder = folder
        self.access: list[str] = []

    def attempt(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *words, *self.access],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env={"HOME": str(self.folder)},
        )

    def __call__(self, *words: str) -> str:
        done = self.attempt(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def template(self, *words: str, name: str = "nodepool", namespace: str = "nodepool") -> str:
        return self("template", name, str(CHART), "--namespace", namespace, *words)


@pytest.fixture(scope="module", params=["3", pytest.param("4", marks=pytest.mark.exhaustive)])
def line(request: pytest.FixtureRequest) -> str:
    """The line of Helm."""
    return str(request.param)


@pytest.fixture(scope="module")
def program(line: str) -> str:
    """The Helm of tools/kubernetes: others may print the same objects differently."""
    built = subprocess.run(
        [sys.executable, str(PROGRAM), "helm", "--line", line],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if built.returncode != 0:
        pytest.skip(f"Helm does not build here: {built.stderr.strip().splitlines()[-1]}")
    return built.stdout.strip()


@pytest.fixture
def helm(program: str, tmp_path: pathlib.Path) -> Helm:
    return Helm(program, tmp_path)


@pytest.mark.core
def test_manifests_are_what_the_chart_prints(helm: Helm, line: str) -> None:
    expected, printed = MANIFESTS.read_text(), helm.template()
    assert manifests.parse(expected) == manifests.parse(printed)
    # Helm 4 prints more empty lines.
    assert line != "3" or expected == printed, (
        "run: helm template nodepool etc/helm/nodepool --namespace nodepool "
        "> etc/manifests/nodepool.yaml"
    )


@pytest.mark.parametrize("values", VALUES)
def test_chart_passes_strict_lint(helm: Helm, values: list[str]) -> None:
    helm("lint", "--strict", str(CHART), *values)


@pytest.mark.parametrize("values", VALUES)
def test_api_server_accepts_the_chart_without_a_warning(
    helm: Helm, cluster: KubernetesCluster, values: list[str]
) -> None:
    documents = manifests.parse(helm.template(*values))
    assert manifests.complaints(cluster.admin, documents) == []


@pytest.mark.parametrize("values", VALUES)
def test_daemons_accept_the_configuration_of_the_chart(
    helm: Helm, tmp_path: pathlib.Path, values: list[str]
) -> None:
    documents = manifests.parse(helm.template(*values))
    data = files(documents)
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    if "nodepool.yaml" in data:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "nodepool.cmd.nodepoolcmd"),
                *("-c", str(tmp_path / "nodepool.yaml"), "config-validate"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
    if "nodemanager.yaml" in data:
        nodemanager.load(str(tmp_path / "nodemanager.yaml"))
    if "github.yaml" in data:
        read_config(str(tmp_path / "github.yaml"), SCHEMA)


def test_values_in_the_form_of_numbers_or_templates_arrive_unchanged(helm: Helm) -> None:
    """Helm holds numbers as floating point, and YAML takes some strings for numbers."""
    labels = [
        {"name": "0022", "min-ready": 12345678},
        {"name": "{{ .Release.Name }}", "max-ready-age": 1.5},
        {"name": "yes", "min-ready": 0},
    ]
    (helm.folder / "values.yaml").write_text(yaml.safe_dump({"configuration": {"labels": labels}}))
    documents = manifests.parse(helm.template("-f", str(helm.folder / "values.yaml")))
    assert yaml.safe_load(files(documents)["nodepool.yaml"])["labels"] == labels


def files(documents: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each file in a secret."""
    secrets = [each["stringData"] for each in documents if each["kind"] == "Secret"]
    return {name: text for each in secrets for name, text in each.items()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("launcher.replicas=two", "at '/launcher/replicas': got string, want integer"),
        ("lancher.replicas=2", "additional properties 'lancher' not allowed"),
        ("image.tag=12", "at '/image/tag': got number, want string"),
        ("configuration.webapp=null", "at '/configuration': missing property 'webapp'"),
        ("configuration.zookeeper-servers=null", "missing property 'zookeeper-servers'"),
        ("configuration.images-dir=/srv", "at '/configuration/images-dir': '/srv' does not match"),
        ("builder.storage.size=200GB", "at '/builder/storage/size': '200GB' does not match"),
        ("github.enabled=true", "at '/github/configuration': minProperties: got 0, want 1"),
        ("tlsSecret=", "set tlsSecret to the name of a secret, or configuration.zookeeper-tls to"),
    ],
)
def test_wrong_values_are_reported_with_their_place(helm: Helm, wrong: str, message: str) -> None:
    done = helm.attempt("template", "nodepool", str(CHART), "--set", wrong)
    assert done.returncode != 0 and message in done.stderr, done.stderr


def test_too_long_name_of_a_release_is_refused(helm: Helm) -> None:
    """Kubernetes puts the name of a pod into a label, which has at most 63 characters."""
    for length, refused in ((40, False), (41, True)):
        done = helm.attempt("template", length * "n", str(CHART))
        assert ("is longer than 40 characters" in done.stderr) is refused, done.stderr


@pytest.fixture
def namespace(helm: Helm, cluster: KubernetesCluster, tmp_path: pathlib.Path) -> Iterator[str]:
    """An own namespace in the cluster, with volumes, for the user of Helm."""
    name = f"chart-{uuid.uuid4().hex[:8]}"
    helm.access = ["--kubeconfig", str(cluster.dir / "admin.kubeconfig"), "--namespace", name]
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    machine = {"metadata": {"labels": {"nodepool/nodemanager": "true"}}}
    cluster.admin.call("PATCH", "/api/v1/nodes/node-0", machine)
    for part in ("launcher-0", "launcher-1", "builder-0"):
        cluster.apply(volume(name, f"state-nodepool-{part}"))
    yield name
    cluster.admin.call("DELETE", f"/api/v1/namespaces/{name}")
    for part in ("launcher-0", "launcher-1", "builder-0"):
        cluster.admin.call("DELETE", f"/api/v1/persistentvolumes/{name}-state-nodepool-{part}")


def volume(namespace: str, claim: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/nonexistent"},
            "claimRef": {"namespace": namespace, "name": claim},
        },
    }


@pytest.mark.core
def test_chart_is_installed_updated_and_removed(
    helm: Helm, cluster: KubernetesCluster, namespace: str
) -> None:
    def objects(kind: str, group: str = "/api/v1") -> dict[str, Any]:
        items = cluster.admin.call("GET", f"{group}/namespaces/{namespace}/{kind}")["items"]
        return {each["metadata"]["name"]: each for each in items}

    def selected(selector: dict[str, str]) -> set[str]:
        return {
            name
            for name, pod in objects("pods").items()
            if selector.items() <= pod["metadata"]["labels"].items()
        }

    # Returns when Kubernetes calls all of it ready.
    helm("install", "nodepool", str(CHART), "--wait", "--timeout", "120s")
    pods = set(objects("pods"))
    assert {"nodepool-launcher-0", "nodepool-builder-0"} < pods and len(pods) == 3, pods
    (agent,) = pods - {"nodepool-launcher-0", "nodepool-builder-0"}
    assert objects("pods")[agent]["spec"]["nodeName"] == "node-0"
    (service,) = objects("services").values()
    assert selected(service["spec"]["selector"]) == {"nodepool-launcher-0"}
    wait_for(
        lambda: (
            (objects("poddisruptionbudgets", "/apis/policy/v1")["nodepool-launcher"]["status"])[
                "currentHealthy"
            ]
            == 1
        ),
        60,
        "the budget to count the launcher",
    )

    helm(
        *("upgrade", "nodepool", str(CHART), "--wait", "--timeout", "120s"),
        *("--set", "launcher.replicas=2,nodeManager.enabled=false"),
        *("--set", "configuration.zookeeper-servers[0].host=other"),
    )
    wait_for(
        lambda: (
            set(objects("pods"))
            == {"nodepool-launcher-0", "nodepool-launcher-1", "nodepool-builder-0"}
        ),
        60,
        "pods of the new values",
    )
    secrets = objects("secrets")
    assert "nodepool-nodemanager" not in secrets
    text = base64.b64decode(secrets["nodepool-configuration"]["data"]["nodepool.yaml"])
    assert b"host: other" in text

    helm("uninstall", "nodepool", "--wait", "--timeout", "120s")
    wait_for(lambda: not objects("pods"), 60, "pods to end")
    # ZooKeeper sessions and images are the operator's.
    assert len(objects("persistentvolumeclaims")) == 3
    assert json.loads(helm("list", "--output", "json")) == []
