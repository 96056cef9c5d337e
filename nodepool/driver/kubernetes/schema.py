"""Options of providers, pools and labels whose nodes are containers (KUB-4, OSH-4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import voluptuous as v

from nodepool.config.model import ConfigPool

NUMBER = v.Any(int, float)
#: Valid names of namespaces and pods, and values of labels.
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?\Z")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
LONGEST_NAME, LONGEST_VALUE = 63, 63
#: Digits of a node id, and the dash before it.
ID_LENGTH = 11

#: Names of the label's own option, and of the pool's default for it.
LIMITS = ("cpu", "memory", "storage")

#: Options from which the pod is built.
MADE: dict[Any, Any] = {
    "image": str,
    "image-pull": str,
    "image-pull-secrets": [dict],
    **dict.fromkeys(LIMITS, int),
    **{f"{name}-limit": int for name in LIMITS},
    "gpu": NUMBER,
    "gpu-resource": str,
    "extra-resources": {str: int},
    "env": [{v.Required("name"): str, v.Required("value"): str}],
    "node-selector": dict,
    "scheduler-name": str,
    "privileged": bool,
    "volumes": list,
    "volume-mounts": list,
    "python-path": str,
    "shell-type": str,
    # Not in 11.0.0.
    "service-account": str,
    "automount-token": bool,
    "tolerations": [dict],
    "affinity": dict,
    "topology-spread": [dict],
    "priority-class": str,
    "security-context": dict,
    "pod-security-context": dict,
    "init-containers": [dict],
    "sidecars": [dict],
    "os": v.Any("linux", "windows"),
}
#: The pod's specification is given, and excludes other options.
GIVEN = "spec"
COMMON: dict[Any, Any] = {v.Required("name"): str, "labels": dict, "dynamic-labels": {str: str}, "annotations": dict}


def _one_shape(label: dict[str, Any]) -> dict[str, Any]:
    other = next((key for key in MADE if key in label), None)
    if GIVEN in label and other is not None:
        raise v.Invalid(f"{other} cannot be used together with spec; write it into the spec", path=[other])
    return label


def label(more: dict[Any, Any]) -> Any:
    return v.All({**COMMON, **MADE, GIVEN: dict, **more}, _one_shape)


def pool(label_schema: object) -> dict[Any, Any]:
    return {
        **ConfigPool.getCommonSchemaDict(),
        v.Required("name"): str,
        v.Required("labels"): [label_schema],
        "max-cores": int,
        "max-ram": int,
        "max-resources": {str: int},
        **{f"default-label-{name}": int for name in LIMITS},
        **{f"default-label-{name}-limit": int for name in LIMITS},
        "default-label-extra-resources": {str: int},
        "default-label-extra_resources": {str: int},
    }


def provider(pool_schema: dict[Any, Any], more: dict[Any, Any]) -> v.Schema:
    return v.Schema(
        {
            v.Required("pools"): [pool_schema],
            "launch-retries": int,
            "max-servers": int,
            "max-cores": int,
            "max-ram": int,
            "max-resources": {str: int},
            **more,
        }
    )


def name_trouble(name: str, longest: int = LONGEST_NAME) -> str | None:
    """Return why it cannot be the name of a namespace or pod."""
    if not _DNS_LABEL.match(name):
        return f"{name!r} cannot be a name in Kubernetes: lower-case letters, digits and dashes only, no dash at the ends"
    if len(name) > longest:
        return f"{name!r} is too long for a name in Kubernetes: at most {longest} characters here"
    return None


def value_trouble(value: str) -> str | None:
    """Return why it cannot be the value of a Kubernetes label."""
    if len(value) > LONGEST_VALUE or not _LABEL_VALUE.match(value):
        return (
            f"{value!r} cannot be the value of a Kubernetes label: at most {LONGEST_VALUE} letters, digits, '-', '_' and '.', "
            "of which the first and the last is a letter or digit"
        )
    return None


def labels_trouble(labels: dict[str, Any], only_keys: Iterable[str] = ()) -> str | None:
    """Return why these cannot be labels; values of *only_keys* are not known yet."""
    for key in (*labels, *only_keys):
        if not _LABEL_KEY.match(str(key)) or len(str(key).rpartition("/")[2]) > LONGEST_VALUE:
            return f"{key!r} cannot be the name of a Kubernetes label"
    return next((trouble for value in labels.values() if (trouble := value_trouble(str(value)))), None)
