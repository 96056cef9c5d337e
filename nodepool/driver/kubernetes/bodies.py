"""Request bodies for the API server: namespaces, tokens, roles and pods (KUB-5, KUB-7)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from nodepool.driver.common import dynamic
from nodepool.driver.kubernetes import names
from nodepool.driver.kubernetes.api.kinds import POD, Kind
from nodepool.driver.kubernetes.config import KubernetesLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

USER = "zuul-worker"
"""Name of the service account, of its token, and of the user that Zuul sees."""
PROVIDER_LABEL, NODE_LABEL = "nodepool_provider_name", "nodepool_node_id"

PAUSE = "registry.k8s.io/pause:3.10"
"""Does nothing, in little memory."""

#: Seconds that Kubernetes grants a pod to end if nobody chose a number, and that we grant it.
_DEFAULT_GRACE, GRACE = 30, 1

#: Endless loops; the pod ends when it is deleted.
_IDLE = {
    "linux": (["/bin/sh", "-c"], ["while true; do sleep 30; done;"]),
    "windows": (["powershell.exe", "-Command"], ["while ($true) { Start-Sleep -Seconds 30 }"]),
}
#: Option -> key of the pod's specification, verbatim.
_SPEC = {
    "node-selector": "nodeSelector",
    "scheduler-name": "schedulerName",
    "volumes": "volumes",
    "service-account": "serviceAccountName",
    "automount-token": "automountServiceAccountToken",
    "tolerations": "tolerations",
    "affinity": "affinity",
    "topology-spread": "topologySpreadConstraints",
    "priority-class": "priorityClassName",
    "pod-security-context": "securityContext",
    "init-containers": "initContainers",
    "image-pull-secrets": "imagePullSecrets",
}
_FALSE_COUNTS = ("automount-token",)
_ALL = ["create", "delete", "get", "list", "patch", "update", "watch"]
#: What Zuul may use of its pod, and in its namespace.
_OF_POD = ("pods/exec", "pods/logs", "pods/log", "pods/portforward")
_OF_NAMESPACE = [
    "pods",
    "pods/exec",
    "pods/log",
    "pods/portforward",
    "services",
    "endpoints",
    "crontabs",
    "jobs",
    "deployments",
    "replicasets",
    "configmaps",
    "secrets",
]


def _dynamic(templates: dict[str, str], request: NodeRequest | None, log: Log) -> dict[str, str]:
    """Return the dynamic labels, without values that are not valid."""
    found = dynamic.formatted(templates, request, log, "label")
    for key, value in list(found.items()):
        if trouble := names.value_trouble(value):
            log.warning("Omitting dynamic label %s: %s", key, trouble)
            del found[key]
    return found


def labels_of(
    label: KubernetesLabel, metadata: dict[str, str], request: NodeRequest | None, log: Log
) -> dict[str, str]:
    """Return the labels of a node's objects; ours identify them and cannot be overridden."""
    return {
        **label.labels,
        **_dynamic(label.dynamic_labels, request, log),
        **metadata,
        "nodepool_node_label": label.name,
    }


def namespace(name: str, labels: dict[str, str], annotations: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def service_account(name: str = USER, labels: dict[str, str] | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def token(labels: dict[str, str]) -> dict[str, Any]:
    """Return a secret for the server to fill: since Kubernetes 1.24 no token is automatic."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {
            "name": USER,
            "labels": labels,
            "annotations": {"kubernetes.io/service-account.name": USER},
        },
    }


def role(pod: bool) -> dict[str, Any]:
    """Return the role of Zuul: for its own namespace, or for the one pod."""
    if pod:
        name, rules = (
            "zuul-restricted",
            [_rule(["pods"], ["get", "list"]), *(_rule([what], _ALL) for what in _OF_POD)],
        )
    else:
        name, rules = "zuul", [_rule(_OF_NAMESPACE, _ALL)]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": rules,
    }


def _rule(resources: list[str], verbs: list[str]) -> dict[str, Any]:
    return {"apiGroups": [""], "resources": resources, "verbs": verbs}


def role_binding(namespace_name: str, role_name: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "zuul-role"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role_name},
        "subjects": [{"kind": "ServiceAccount", "name": USER, "namespace": namespace_name}],
    }


def applied(kind: str, version: str, number: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return a configured network policy or limit range, which is its ``spec`` or has it."""
    metadata = dict(given.get("metadata") or {})
    metadata.setdefault("name", f"nodepool-{number}")
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": metadata,
        "spec": given.get("spec", given),
    }


def pod(
    name: str, label: KubernetesLabel, labels: dict[str, str], pull_secrets: bool = False
) -> dict[str, Any]:
    """:param pull_secrets: they are always written, also when there are none (OSH-4)."""
    if label.spec is not None:
        spec = label.spec
    else:
        spec = _spec(label)
        if pull_secrets:
            spec.setdefault("imagePullSecrets", [])
    annotations = dict(label.annotations)
    if label.options["sidecars"]:
        # The default container of kubectl.
        annotations.setdefault("kubectl.kubernetes.io/default-container", label.name)
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _spec(label: KubernetesLabel) -> dict[str, Any]:
    options = label.options
    system = options["os"] or "linux"
    command, arguments = _IDLE[system]
    container: dict[str, Any] = {
        "name": label.name,
        "image": options["image"],
        "imagePullPolicy": options["image-pull"],
        "command": command,
        "args": arguments,
        "env": options["env"],
    }
    if resources := _resources(label):
        container["resources"] = resources
    if options["volume-mounts"]:
        container["volumeMounts"] = options["volume-mounts"]
    security = dict(options["security-context"])
    if options["privileged"] is not None:
        security["privileged"] = options["privileged"]
    if security:
        container["securityContext"] = security
    spec: dict[str, Any] = {"containers": [container, *options["sidecars"]]}
    for option, key in _SPEC.items():
        if options[option] or (option in _FALSE_COUNTS and options[option] is not None):
            spec[key] = options[option]
    if options["os"]:
        spec["os"] = {"name": system}
        spec["nodeSelector"] = {"kubernetes.io/os": system, **(spec.get("nodeSelector") or {})}
    return spec


def _resources(label: KubernetesLabel) -> dict[str, Any]:
    names = (
        ("cpu", "cpu", "{}"),
        ("memory", "memory", "{}Mi"),
        ("storage", "ephemeral-storage", "{}M"),
    )
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for name, key, form in names:
        for target, value in (
            (requests, getattr(label, name)),
            (limits, getattr(label, f"{name}_limit")),
        ):
            if value:
                target[key] = value if key == "cpu" else form.format(value)
    if label.gpu_resource and label.gpu:
        requests[label.gpu_resource] = limits[label.gpu_resource] = f"{label.gpu:.2f}"
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def grace(kind: Kind, found: dict[str, Any]) -> int | None:
    """Return the seconds in which a deleted pod must end; None: as many as it says itself.

    The idle loop ignores SIGTERM, as the first process of a container does without a handler.
    """
    chosen = (found.get("spec") or {}).get("terminationGracePeriodSeconds", _DEFAULT_GRACE)
    return GRACE if kind is POD and chosen == _DEFAULT_GRACE else None


def images(label: KubernetesLabel) -> list[str]:
    """Return the images of all containers of the label's pod."""
    spec = label.spec if label.spec is not None else _spec(label)
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return [
        str(each["image"]) for each in containers if isinstance(each, dict) and each.get("image")
    ]


def pull(wanted: list[str], labels: dict[str, str], selector: dict[str, Any]) -> dict[str, Any]:
    """Return a daemon set that starts each image once per machine; its name is a hash of it."""
    told = json.dumps([wanted, labels, selector], sort_keys=True)
    name = f"nodepool-pull-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    nothing = ["/bin/sh", "-c", "exit 0"]
    containers = [
        {
            "name": f"image-{number}",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": nothing,
        }
        for number, image in enumerate(wanted)
    ]
    mark = {"nodepool_pull": name}
    spec: dict[str, Any] = {
        "initContainers": containers,
        "containers": [{"name": "rest", "image": PAUSE}],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    if selector:
        spec["nodeSelector"] = selector
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": mark},
            "template": {"metadata": {"labels": mark}, "spec": spec},
        },
    }


def quota(label: KubernetesLabel) -> QuotaInformation:
    """Return the usage of a node of the label (KUB-9)."""
    more: dict[str, float] = {}
    if label.storage:
        more["ephemeral-storage"] = label.storage
    if label.gpu_resource and label.gpu:
        more[label.gpu_resource] = label.gpu
    found = QuotaInformation(cores=label.cpu or 0, ram=label.memory or 0, instances=1, **more)
    found.get_resources().update(label.extra_resources)
    return found
