"""Schema of the configuration (AZU-4)."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.driver.common import offers, options

#: Of a cloud image, exactly one.
IMAGE_SOURCES = ("image-reference", "image-id", "image-filter", "shared-gallery-image", "community-gallery-image")
LOGINS = ("certificate", "workload-identity", "managed-identity", "cli", "default")
CLOUDS = ("public", "china", "us-government")
_ADDRESSES: dict[Any, Any] = dict.fromkeys(
    ("ipv4", "ipv6", "public-ipv4", "public-ipv6", "use-internal-ip", "host-key-checking"), bool
)  # fmt: skip
_GALLERY: dict[Any, Any] = {v.Required("gallery-name"): str, v.Required("name"): str, "version": str}


def cloud_image() -> Any:
    return v.All(
        {
            v.Required("name"): str,
            v.Required("username"): str,
            "password": str,
            "generate-password": bool,
            "key": str,
            **options.CONNECTION,
            "image-reference": {v.Required(key): str for key in ("sku", "publisher", "offer", "version")},
            "image-id": str,
            "image-filter": {"name": str, "location": str, "tags": dict},
            "shared-gallery-image": _GALLERY,
            "community-gallery-image": _GALLERY,
        },
        options.one_of(*IMAGE_SOURCES, what="a cloud image"),
    )


def diskimage() -> dict[Any, Any]:
    return {
        v.Required("name"): str,
        "username": str,
        "password": str,
        "generate-password": bool,
        "pause": bool,
        "key": str,
        **options.CONNECTION,
        "tags": dict,
    }


def label() -> Any:
    return v.All(
        {
            v.Required("name"): str,
            "cloud-image": str,
            "diskimage": str,
            v.Required("hardware-profile"): {v.Required("vm-size"): str},
            "tags": dict,
            "dynamic-tags": {str: str},
            "user-data": str,
            "custom-data": str,
            "volume-size": int,
            # Not in 11.0.0.
            "alternatives": offers.schema("vm-size"),
            v.Exclusive("zone", "zones"): v.Any(str, int),
            v.Exclusive("zones", "zones"): [v.Any(str, int)],
            "use-spot": bool,
            "volume-type": str,
            "ephemeral-os-disk": bool,
            "trusted-launch": bool,
            "identities": [str],
            "console-log": bool,
        },
        options.one_of("cloud-image", "diskimage", what="a label"),
    )


def pool() -> dict[Any, Any]:
    return {**options.pool(label(), *_ADDRESSES), "network-security-group-id": str}


def auth() -> dict[Any, Any]:
    return {
        v.Required("type"): v.Any(*LOGINS),
        v.Required("subscription-id"): str,
        "tenant-id": str,
        "client-id": str,
        "certificate-path": str,
        "cloud": v.Any(*CLOUDS),
    }


def provider() -> dict[Any, Any]:
    network = {v.Required("network"): str, "resource-group": str, "subnet": str}
    return {
        v.Required("location"): str,
        v.Required("resource-group"): str,
        v.Required("resource-group-location"): str,
        "auth-path": str,
        "subnet-id": str,
        "network": v.Any(str, network),
        **_ADDRESSES,
        v.Required("pools"): [pool()],
        **options.TIMES,
        **options.LIMITS,
        "rate": options.NUMBER,
        "post-upload-hook": str,
        "zuul-public-key": str,
        "cloud-images": [cloud_image()],
        "diskimages": [diskimage()],
        # Not in 11.0.0.
        "auth": auth(),
        "network-security-group-id": str,
        "image-import-timeout": int,
    }
