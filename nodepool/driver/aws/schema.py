"""Schema of the configuration, for ``nodepool config-validate`` (AWS-1)."""

from __future__ import annotations

import re
from typing import Any

import voluptuous as v

from nodepool.driver.common import options

IMAGE_FORMATS = ("ova", "vhd", "vhdx", "vmdk", "raw")
STRATEGIES = ("prioritized", "price-capacity-optimized", "capacity-optimized", "diversified", "lowest-price")

#: Format of keys in the EBS API, which differs from EC2's.
_KEY_ARN = re.compile(r"arn:aws[a-z-]*:kms:[^:]+:[0-9]{12}:key/.+")


def _connection() -> dict[Any, Any]:
    return {"connection-type": str, "connection-port": int, "python-path": str, "shell-type": str}


def cloud_image() -> Any:
    one_filter = v.Any(
        {v.Required("name"): str, v.Required("values"): [v.Any(str, int, float, bool)]},
        {v.Required("Name"): str, v.Required("Values"): [v.Any(str, int, float, bool)]},
    )

    def one_way(image: dict[str, Any]) -> dict[str, Any]:
        if not (image.get("image-id") or image.get("image-filters")):
            raise v.Invalid('Provide either "image-filters", or "image-id" keys')
        return image

    return v.All(
        {
            v.Required("name"): str,
            v.Required("username"): str,
            v.Exclusive("image-id", "image-id-or-filters"): str,
            v.Exclusive("image-filters", "image-id-or-filters"): [one_filter],
            **_connection(),
        },
        one_way,
    )


def key_trouble(image: dict[str, Any]) -> str | None:
    """Return why the image's key cannot work, which otherwise only the upload would show."""
    key = image.get("kms-key-id")
    if image.get("import-method") != "ebs-direct" or not key or _KEY_ARN.fullmatch(str(key)):
        return None
    return (
        "kms-key-id must be the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID) when import-method is ebs-direct, "
        f"which supports neither key ids nor aliases: {key}"
    )


def diskimage() -> Any:
    def key(image: dict[str, Any]) -> dict[str, Any]:
        if trouble := key_trouble(image):
            raise v.Invalid(trouble, path=["kms-key-id"])
        return image

    return v.All(_diskimage(), key)


def _diskimage() -> dict[Any, Any]:
    return {
        v.Required("name"): str,
        "username": str,
        "pause": bool,
        **_connection(),
        "architecture": str,
        "ena-support": bool,
        "volume-size": int,
        "volume-type": str,
        "iops": int,
        "throughput": int,
        "import-method": v.Any("snapshot", "ebs-direct", "image"),
        "imds-support": v.Any("v2.0", None),
        "encrypted": bool,
        "kms-key-id": str,
        "tags": dict,
    }


def _capacity_reservation() -> Any:
    return v.All(
        {
            v.Exclusive("id", "reservation"): str,
            v.Exclusive("resource-group-arn", "reservation"): str,
            v.Exclusive("preference", "reservation"): v.Any("open", "none", "capacity-reservations-only"),
        },
        v.Length(min=1),
    )


def _alternative() -> Any:
    return {
        v.Exclusive("instance-type", "types"): str,
        v.Exclusive("instance-types", "types"): [str],
        v.Exclusive("subnet-id", "subnets"): str,
        v.Exclusive("subnet-ids", "subnets"): [str],
        "availability-zone": str,
        "use-spot": bool,
        "capacity-reservation": _capacity_reservation(),
    }


def label() -> Any:
    def one_size(options: dict[str, Any]) -> dict[str, Any]:
        if "instance-type" not in options and "fleet" not in options:
            raise v.Invalid("one of instance-type and fleet is required")
        return options

    return v.All(
        {
            v.Required("name"): str,
            v.Exclusive("cloud-image", "label-image"): str,
            v.Exclusive("diskimage", "label-image"): str,
            v.Exclusive("instance-type", "label-size"): str,
            v.Exclusive("fleet", "label-size"): {
                v.Required("instance-types"): [str],
                v.Required("allocation-strategy"): v.Any(*STRATEGIES),
            },
            v.Required("key-name"): str,
            "ebs-optimized": bool,
            "volume-type": str,
            "volume-size": int,
            "iops": int,
            "throughput": int,
            "encrypted": bool,
            "kms-key-id": str,
            "userdata": str,
            "iam-instance-profile": {
                v.Exclusive("name", "iam_instance_profile_id"): str,
                v.Exclusive("arn", "iam_instance_profile_id"): str,
            },
            "tags": dict,
            "dynamic-tags": dict,
            "use-spot": bool,
            "imdsv2": v.Any(None, "required", "optional"),
            "dedicated-host": bool,
            "console-log": bool,
            "security-group-ids": [str],
            "capacity-reservation": _capacity_reservation(),
            "alternatives": [_alternative()],
        },
        one_size,
    )


def pool() -> object:
    return {
        **options.pool(label(), "public-ip-address", "public-ipv4", "public-ipv6"),
        "security-group-id": str,
        "security-group-ids": [str],
        "subnet-id": str,
        "subnet-ids": [str],
        "availability-zone": str,
    }


def provider() -> dict[Any, Any]:
    """Return the schema of the provider without the common options."""
    return {
        v.Required("region-name"): str,
        v.Required("pools"): [pool()],
        "profile-name": str,
        "rate": v.Any(int, float),
        "boot-timeout": int,
        "launch-timeout": int,
        "launch-retries": int,
        "object-storage": {v.Required("bucket-name"): str},
        "image-format": v.Any(*IMAGE_FORMATS),
        "image-import-timeout": int,
        "post-upload-hook": str,
        "cloud-images": [cloud_image()],
        "diskimages": [diskimage()],
        "max-servers": int,
        "max-cores": int,
        "max-ram": int,
        "max-resources": {str: int},
        "use-internal-ip": bool,
        "host-key-checking": bool,
        "public-ipv4": bool,
        "public-ipv6": bool,
    }
