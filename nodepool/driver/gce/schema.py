"""Schema of the configuration (GCE-4)."""

from __future__ import annotations

import re
from typing import Any

import voluptuous as v

from nodepool.driver.common import offers, options

#: Google's format for the key and the value of a label.
_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}\Z")


def label_trouble(labels: dict[str, str], dynamic: dict[str, Any]) -> str | None:
    """Return why Google would refuse these labels."""
    for key in (*labels, *dynamic):
        if not _LABEL_KEY.match(key):
            return f"{key!r} cannot be a label: lower-case letters, digits, '-' and '_' only, a letter first, at most 63"
    for key, value in labels.items():
        if not _LABEL_VALUE.match(value):
            return f"label {key}: {value!r} cannot be its value: lower-case letters, digits, '-' and '_' only, at most 63"
    return None


def cloud_image() -> Any:
    def one_way(image: dict[str, Any]) -> dict[str, Any]:
        if not image.get("image-id") and not (image.get("image-project") and image.get("image-family")):
            raise v.Invalid("a cloud image needs image-id, or image-project and image-family")
        return image

    return v.All(
        {
            v.Required("name"): str,
            "username": str,
            "key": str,
            "image-id": str,
            "image-project": str,
            "image-family": str,
            **options.CONNECTION,
        },
        one_way,
    )


def diskimage() -> dict[Any, Any]:
    return {
        v.Required("name"): str,
        "username": str,
        "pause": bool,
        "key": str,
        **options.CONNECTION,
        "tags": dict,
        "guest-os-features": [str],
        "architecture": v.Any("X86_64", "ARM64"),
    }


def label() -> Any:
    return v.All(
        {
            v.Required("name"): str,
            "cloud-image": str,
            "diskimage": str,
            v.Required("instance-type"): str,
            "volume-type": str,
            "volume-size": int,
            # Not in 11.0.0.
            "alternatives": offers.schema("instance-type"),
            v.Exclusive("zone", "zones"): str,
            v.Exclusive("zones", "zones"): [str],
            "use-spot": bool,
            "labels": dict,
            "dynamic-labels": {str: str},
            "network-tags": [str],
            "service-account": {v.Required("email"): str, "scopes": [str]},
            "user-data": str,
            "console-log": bool,
        },
        options.one_of("cloud-image", "diskimage", what="a label"),
    )


def pool() -> dict[Any, Any]:
    # Not in 11.0.0.
    return {**options.pool(label(), "public-ipv4"), "network": str, "subnetwork": str}


def provider() -> dict[Any, Any]:
    return {
        v.Required("project"): str,
        v.Required("region"): str,
        v.Required("zone"): str,
        v.Required("pools"): [pool()],
        **options.TIMES,
        **options.LIMITS,
        "rate": options.NUMBER,
        "rate-limit": options.NUMBER,
        "cloud-images": [cloud_image()],
        "use-internal-ip": bool,
        "host-key-checking": bool,
        # Not in 11.0.0.
        "network": str,
        "subnetwork": str,
        "public-ipv4": bool,
        "diskimages": [diskimage()],
        "object-storage": {v.Required("bucket-name"): str},
        "image-import-timeout": int,
        "post-upload-hook": str,
    }
