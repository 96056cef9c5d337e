"""Schema of the configuration (IBM-4)."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.driver.common import options

#: Of a cloud image, exactly one.
IMAGE_SOURCES = ("image-id", "image-href", "image-name", "image-filter")
_OPERATING_SYSTEM = ("architecture", "display-name", "family", "href", "name", "vendor", "version")


def cloud_image() -> Any:
    system = {**dict.fromkeys(_OPERATING_SYSTEM, str), "dedicated-host-only": bool}
    return v.All(
        {
            v.Required("name"): str,
            v.Required("username"): str,
            "keys": [str],
            **options.CONNECTION,
            "image-id": str,
            "image-href": str,
            "image-name": str,
            "image-filter": {"operating-system": system, "owner-type": str, "status": str},
        },
        options.one_of(*IMAGE_SOURCES, what="a cloud image"),
    )


def diskimage() -> dict[Any, Any]:
    return {v.Required("name"): str, v.Required("operating-system"): str, "pause": bool, **options.CONNECTION}


def label() -> Any:
    return v.All(
        {
            v.Required("name"): str,
            "cloud-image": str,
            "diskimage": str,
            v.Required("profile"): str,
            "user-data": str,
            # Not in 11.0.0.
            "alternatives": [
                {
                    v.Exclusive("profile", "sizes"): str,
                    v.Exclusive("profiles", "sizes"): [str],
                    v.Inclusive("zone", "place"): str,
                    v.Inclusive("subnet", "place"): str,
                }
            ],
        },
        options.one_of("cloud-image", "diskimage", what="a label"),
    )


def pool() -> dict[Any, Any]:
    return {**options.pool(label(), "public-ipv4"), "zone": str, "subnet": str}


def provider() -> dict[Any, Any]:
    return {
        v.Required("vpc"): str,
        v.Required("region"): str,
        "zone": str,
        "subnet": str,
        "credentials-file": str,
        "object-storage": {v.Required("instance-name"): str, v.Required("endpoint"): str, v.Required("bucket-name"): str},
        "quota": {str: int},
        "public-ipv4": bool,
        "use-internal-ip": bool,
        "host-key-checking": bool,
        v.Required("pools"): [pool()],
        **options.TIMES,
        **options.LIMITS,
        "rate": options.NUMBER,
        "image-format": v.Any("qcow2", "vhd"),
        "post-upload-hook": str,
        "cloud-images": [cloud_image()],
        "diskimages": [diskimage()],
        # Not in 11.0.0.
        "image-import-timeout": int,
    }
