"""Request bodies for Google (GCE-5), without any calls."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from nodepool.driver.common.adapter import Job
from nodepool.driver.common.offers import Offer
from nodepool.driver.gce.config import GceDiskImage, GceProviderConfig
from nodepool.zk.cluster import CLUSTER_ID, NODE_CREATED

OWNERSHIP = (
    "nodepool_node_id",
    "nodepool_pool_name",
    "nodepool_provider_name",
    CLUSTER_ID,
    NODE_CREATED,
)
_DEFAULT_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]


def as_label(value: str) -> str:
    """Return the value with invalid characters replaced; the exact one is in the metadata."""
    return re.sub(r"[^-_a-z0-9]", "-", str(value).lower())[:63]


def metadata_of(instance: dict[str, Any]) -> dict[str, str]:
    items = (instance.get("metadata") or {}).get("items") or []
    return {
        str(item["key"]): str(item.get("value") or "")
        for item in items
        if isinstance(item, dict) and "key" in item
    }


def instance(
    job: Job, offer: Offer, provider: GceProviderConfig, machine_type: str, image: str
) -> dict[str, Any]:
    label, pool = job.label, job.label.pool
    entry = label.cloud_image or provider.diskimages[label.diskimage.name]
    items = [{"key": key, "value": value} for key, value in job.tags.items() if key in OWNERSHIP]
    if entry.key:
        items.append({"key": "ssh-keys", "value": f"{entry.username}:{entry.key}"})
    if label.user_data:
        items.append({"key": "user-data", "value": label.user_data})
    interface: dict[str, Any] = {"network": pool.network}
    if pool.subnetwork:
        interface = {"subnetwork": pool.subnetwork}
    if pool.public_ipv4:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    body: dict[str, Any] = {
        "name": job.name,
        "machineType": machine_type,
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": image,
                    "diskType": f"zones/{offer.place}/diskTypes/{label.volume_type}",
                    "diskSizeGb": str(label.volume_size),
                },
            }
        ],
        "networkInterfaces": [interface],
        "serviceAccounts": [],
        "metadata": {"items": items},
        "labels": {key: as_label(value) for key, value in job.tags.items()},
    }
    if label.service_account:
        account = label.service_account
        body["serviceAccounts"] = [
            {"email": account["email"], "scopes": account.get("scopes") or _DEFAULT_SCOPES}
        ]
    if label.network_tags:
        body["tags"] = {"items": label.network_tags}
    if offer.spot:
        body["scheduling"] = {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
            "automaticRestart": False,
            "onHostMaintenance": "TERMINATE",
        }
    return body


def image_name(name: str) -> str:
    """Return the name as a valid image name.

    A name that had to be cut ends with a hash of the whole, so that the time at its end still makes
    it unique.
    """
    found = re.sub(r"[^-a-z0-9]", "-", name.lower()).strip("-")
    if not found[:1].isalpha():
        found = f"i-{found}"
    if len(found) > 63:
        found = f"{found[:50].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return found


def image(name: str, source: str, entry: GceDiskImage, metadata: dict[str, str]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": name,
        # Labels cannot contain the exact values.
        "description": json.dumps(metadata, sort_keys=True),
        "labels": {key: as_label(value) for key, value in metadata.items()},
        "rawDisk": {"source": source},
        "guestOsFeatures": [{"type": feature} for feature in entry.guest_os_features],
    }
    if entry.architecture:
        body["architecture"] = entry.architecture
    return body


def described(thing: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of an image of ours."""
    try:
        found = json.loads(thing.get("description") or "{}")
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
