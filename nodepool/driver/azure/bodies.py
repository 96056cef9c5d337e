"""Request bodies for Azure (AZU-6, AZU-11), without any calls."""

from __future__ import annotations

import base64
import secrets
import string
from typing import Any

from nodepool.driver.azure.arm import NIC
from nodepool.driver.azure.config import AzureLabel
from nodepool.driver.common.adapter import Job
from nodepool.driver.common.offers import Offer

PASSWORD_LENGTH = 64


def password() -> str:
    """Return random letters and digits, at least one of each class."""
    classes = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    while True:
        found = "".join(secrets.choice("".join(classes)) for _ in range(PASSWORD_LENGTH))
        if all(any(letter in each for letter in found) for each in classes):
            return found


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def gallery(kind: str, image: dict[str, str]) -> str:
    path = f"/{kind}Galleries/{image['gallery-name']}/Images/{image['name']}"
    return f"{path}/Versions/{image['version']}" if image.get("version") else path


def _login(job: Job, entry: Any) -> dict[str, Any]:
    profile: dict[str, Any] = {"computerName": job.name}
    if entry.username:
        profile["adminUsername"] = entry.username
    if entry.password or entry.generate_password:
        profile["adminPassword"] = entry.password or password()
    if entry.key:
        profile["linuxConfiguration"] = {
            "disablePasswordAuthentication": True,
            "ssh": {
                "publicKeys": [
                    {"path": f"/home/{entry.username}/.ssh/authorized_keys", "keyData": entry.key}
                ]
            },
        }
    if job.label.custom_data:
        profile["customData"] = base64_of(job.label.custom_data)
    return profile


def _disk(label: AzureLabel) -> dict[str, Any]:
    disk: dict[str, Any] = {"createOption": "FromImage", "deleteOption": "Delete"}
    if label.volume_size:
        disk["diskSizeGB"] = label.volume_size
    if label.volume_type:
        disk["managedDisk"] = {"storageAccountType": label.volume_type}
    if label.ephemeral_os_disk:
        disk |= {"diffDiskSettings": {"option": "Local"}, "caching": "ReadOnly"}
    return disk


def _interface(job: Job, subnet_id: str) -> dict[str, Any]:
    pool = job.label.pool
    addresses = []
    for number, used, public in (
        (4, pool.ipv4, pool.public_ipv4),
        (6, pool.ipv6, pool.public_ipv6),
    ):
        if not used:
            continue
        address: dict[str, Any] = {
            "privateIPAddressVersion": f"IPv{number}",
            "subnet": {"id": subnet_id},
        }
        if number == 4 and pool.ipv4:
            address["primary"] = True
        if public:
            address["publicIPAddressConfiguration"] = {
                "name": f"{job.name}-v{number}-ip",
                "sku": {"name": "Standard"},
                "properties": {
                    "publicIPAddressVersion": f"IPv{number}",
                    "publicIPAllocationMethod": "Static",
                    "deleteOption": "Delete",
                },
            }
        addresses.append({"name": f"{job.name}-v{number}-config", "properties": address})
    properties: dict[str, Any] = {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": addresses,
    }
    if pool.network_security_group_id:
        properties["networkSecurityGroup"] = {"id": pool.network_security_group_id}
    return {"name": f"{job.name}-nic", "properties": properties}


def machine(
    job: Job, offer: Offer, entry: Any, location: str, image: dict[str, str], subnet_id: str
) -> dict[str, Any]:
    """:param entry: of the image, in the configuration."""
    label = job.label
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": offer.size},
        "osProfile": _login(job, entry),
        "storageProfile": {"imageReference": image, "osDisk": _disk(label)},
        "networkProfile": {
            "networkApiVersion": NIC[1],
            "networkInterfaceConfigurations": [_interface(job, subnet_id)],
        },
    }
    if label.user_data:
        properties["userData"] = base64_of(label.user_data)
    if offer.spot:
        properties |= {
            "priority": "Spot",
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": -1},
        }
    if label.trusted_launch:
        properties["securityProfile"] = {
            "securityType": "TrustedLaunch",
            "uefiSettings": {"secureBootEnabled": True, "vTpmEnabled": True},
        }
    if label.console_log:
        properties["diagnosticsProfile"] = {"bootDiagnostics": {"enabled": True}}
    body: dict[str, Any] = {"location": location, "tags": job.tags, "properties": properties}
    if offer.place:
        body["zones"] = [offer.place]
    if label.identities:
        body["identity"] = {
            "type": "UserAssigned",
            "userAssignedIdentities": {each: {} for each in label.identities},
        }
    return body


def upload_disk(location: str, tags: dict[str, str], size: int) -> dict[str, Any]:
    creation = {"createOption": "Upload", "uploadSizeBytes": size}
    return {"location": location, "tags": tags, "properties": {"creationData": creation}}


def image(location: str, tags: dict[str, str], disk_id: str) -> dict[str, Any]:
    disk = {"osType": "Linux", "osState": "Generalized", "managedDisk": {"id": disk_id}}
    return {
        "location": location,
        "tags": tags,
        "properties": {
            "hyperVGeneration": "V2",
            "storageProfile": {"osDisk": disk, "zoneResilient": True},
        },
    }
