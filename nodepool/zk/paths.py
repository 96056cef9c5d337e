"""Paths in ZooKeeper (ZK-3)."""

from __future__ import annotations

import re

ROOT = "/nodepool"
NODES = "/nodepool/nodes"
REQUESTS = "/nodepool/requests"
REQUEST_LOCKS = "/nodepool/requests-lock"
IMAGES = "/nodepool/images"
COMPONENTS = "/nodepool/components"
ELECTIONS = "/nodepool/elections"
CLUSTER = "/nodepool/cluster"
DECLINES = "/nodepool/request-declines"
NOTES = "/nodepool/notes"
#: Directories that exist as long as the store has not been emptied, parents first.
DIRECTORIES = (
    NODES,
    REQUESTS,
    REQUEST_LOCKS,
    IMAGES,
    COMPONENTS,
    f"{COMPONENTS}/pool",
    f"{COMPONENTS}/launcher",
    DECLINES,
    NOTES,
)

_CONTENDER = re.compile(r"__lock__(\d{10})$")


def are_names(*names: str) -> bool:
    """Return whether these can be names of znodes; kazoo refuses others."""
    return all(
        name not in ("", ".", "..") and "/" not in name and name.isprintable() for name in names
    )


def node(node_id: str) -> str:
    return f"/nodepool/nodes/{node_id}"


def node_lock(node_id: str) -> str:
    return f"/nodepool/nodes/{node_id}/lock"


def request(request_id: str) -> str:
    return f"/nodepool/requests/{request_id}"


def request_lock(request_id: str) -> str:
    return f"/nodepool/requests-lock/{request_id}"


def image(name: str) -> str:
    return f"/nodepool/images/{name}"


def builds(image_name: str) -> str:
    return f"/nodepool/images/{image_name}/builds"


def build(image_name: str, build_id: str) -> str:
    return f"/nodepool/images/{image_name}/builds/{build_id}"


def build_providers(image_name: str, build_id: str) -> str:
    return f"/nodepool/images/{image_name}/builds/{build_id}/providers"


def uploads(image_name: str, build_id: str, provider: str) -> str:
    return f"/nodepool/images/{image_name}/builds/{build_id}/providers/{provider}/images"


def upload(image_name: str, build_id: str, provider: str, upload_id: str) -> str:
    return f"{uploads(image_name, build_id, provider)}/{upload_id}"


def contender_number(name: str) -> int | None:
    """Return the number of a lock contender; None if it is not one (schema section 6)."""
    match = _CONTENDER.search(name)
    return int(match.group(1)) if match else None
