"""Ownership by names: IBM cannot tag objects at their creation (IBM-6)."""

from __future__ import annotations

import re

_GROUP = re.compile(r"np_([^_]+)_([^_]+)\Z")
_IMAGE_GROUP = re.compile(r"npimages_([^_]+)\Z")
_NODE = re.compile(r"np(\d+)\Z")
_UPLOAD = re.compile(r"npimage([0-9a-f]{32})-(\d+)(?:\.\w+)?\Z")


def group(provider: str, pool: str) -> str:
    return f"np_{provider}_{pool}"


def image_group(provider: str) -> str:
    return f"npimages_{provider}"


def image(build_id: str, upload_id: str) -> str:
    """Return the image name, with both ids because upload ids restart with each build."""
    return f"npimage{build_id.replace('-', '').lower()}-{upload_id}"


def metadata(group_name: str | None, name: str) -> dict[str, str]:
    """Return the metadata encoded in the names of a group and its member; empty: not ours."""
    if match := _GROUP.match(group_name or ""):
        found = {"nodepool_provider_name": match[1], "nodepool_pool_name": match[2]}
        if node := _NODE.match(name):
            found["nodepool_node_id"] = node[1]
        return found
    if match := _IMAGE_GROUP.match(group_name or ""):
        found = {"nodepool_provider_name": match[1]}
        if upload := _UPLOAD.match(name):
            found |= {"nodepool_build_id": upload[1], "nodepool_upload_id": upload[2]}
        return found
    return {}
