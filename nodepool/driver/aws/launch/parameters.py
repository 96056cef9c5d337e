"""Arguments of launch calls (AWS-2.2 to AWS-2.4), without any calls."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from typing import Any

from nodepool.driver.aws.config import AwsLabel
from nodepool.driver.aws.launch.offers import Offer
from nodepool.driver.aws.objects import tag_dict_to_list
from nodepool.driver.common.dynamic import formatted
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

LAUNCH_TEMPLATE_PREFIX = "nodepool-launch-template"


def node_tags(
    hostname: str, label: AwsLabel, metadata: dict[str, Any], request: NodeRequest, log: Log
) -> dict[str, str]:
    """Return tags of instance, volume and host; nodepool's keys cannot be overridden."""
    return {
        **label.tags,
        **formatted(label.dynamic_tags, request, log, "tag"),
        **{key: str(value) for key, value in metadata.items()},
        "Name": hostname,
    }


def _tag_specifications(tags: dict[str, str], *types: str) -> list[dict[str, Any]]:
    return [{"ResourceType": one, "Tags": tag_dict_to_list(tags)} for one in types]


def _volume(label: AwsLabel) -> dict[str, Any]:
    """Return the label's settings of the root volume."""
    options = {
        "VolumeSize": label.volume_size,
        "VolumeType": label.volume_type,
        "Iops": label.iops,
        "Throughput": label.throughput,
        "Encrypted": label.encrypted or None,
        "KmsKeyId": label.kms_key_id,
    }
    return {key: value for key, value in options.items() if value}


def root_device(image: dict[str, Any], label: AwsLabel) -> dict[str, Any] | None:
    """Return the root volume: the AMI's first mapping with the label's settings on top."""
    mappings = image.get("BlockDeviceMappings") or []
    if not mappings or "Ebs" not in mappings[0]:
        return None
    mapping = copy.deepcopy(mappings[0])
    mapping["Ebs"]["DeleteOnTermination"] = True
    # AWS refuses the encryption of the snapshot as a parameter; the volume inherits it.
    mapping["Ebs"].pop("Encrypted", None)
    mapping["Ebs"].update(_volume(label))
    return mapping  # type: ignore[no-any-return]


def _metadata_options(label: AwsLabel) -> dict[str, str] | None:
    if label.imdsv2 not in ("required", "optional"):
        return None
    return {"HttpTokens": label.imdsv2, "HttpEndpoint": "enabled"}


def _profile(label: AwsLabel) -> dict[str, str] | None:
    profile = label.iam_instance_profile
    if not profile:
        return None
    return {"Name": profile["name"]} if "name" in profile else {"Arn": profile["arn"]}


def _reservation(pairs: tuple[tuple[str, str], ...] | None) -> dict[str, Any] | None:
    options = dict(pairs or ())
    if "preference" in options:
        return {"CapacityReservationPreference": options["preference"]}
    if "id" in options:
        return {"CapacityReservationTarget": {"CapacityReservationId": options["id"]}}
    if "resource-group-arn" in options:
        return {
            "CapacityReservationTarget": {
                "CapacityReservationResourceGroupArn": options["resource-group-arn"]
            }
        }
    return None


def _interface(label: AwsLabel, subnet_id: str | None) -> dict[str, Any]:
    pool = label.pool
    interface: dict[str, Any] = {"AssociatePublicIpAddress": pool.public_ipv4, "DeviceIndex": 0}
    if label.security_group_ids:
        interface["Groups"] = list(label.security_group_ids)
    if subnet_id:
        interface["SubnetId"] = subnet_id
    if pool.public_ipv6:
        interface["Ipv6AddressCount"] = 1
    return interface


def _common(label: AwsLabel, offer: Offer, subnet_id: str | None) -> dict[str, Any]:
    """Return the arguments that a launch and a launch template have in common."""
    optional = {
        "IamInstanceProfile": _profile(label),
        "MetadataOptions": _metadata_options(label),
        "CapacityReservationSpecification": _reservation(offer.capacity_reservation),
    }
    given = {key: value for key, value in optional.items() if value}
    return {"KeyName": label.key_name, "NetworkInterfaces": [_interface(label, subnet_id)], **given}


def run_instances(
    label: AwsLabel,
    offer: Offer,
    image_id: str,
    image: dict[str, Any],
    tags: dict[str, str],
    host_id: str | None,
) -> dict[str, Any]:
    args: dict[str, Any] = {
        **_common(label, offer, offer.subnet_id),
        "ImageId": image_id,
        "MinCount": 1,
        "MaxCount": 1,
        "EbsOptimized": label.ebs_optimized,
        "InstanceType": offer.instance_type,
        "TagSpecifications": _tag_specifications(tags, "instance", "volume"),
    }
    if label.userdata:
        args["UserData"] = label.userdata
    if mapping := root_device(image, label):
        args["BlockDeviceMappings"] = [mapping]
    if offer.spot:
        args["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            },
        }
    placement: dict[str, str] = {}
    if host_id:
        placement.update(Tenancy="host", HostId=host_id, Affinity="host")
    if offer.az:
        placement["AvailabilityZone"] = offer.az
    if placement:
        args["Placement"] = placement
    return args


def allocate_host(label: AwsLabel, tags: dict[str, str]) -> dict[str, Any]:
    return {
        "AutoPlacement": "off",
        "AvailabilityZone": label.pool.az,
        "InstanceType": label.instance_type,
        "Quantity": 1,
        "HostRecovery": "off",
        "HostMaintenance": "off",
        "TagSpecifications": _tag_specifications(tags, "dedicated-host"),
    }


def template_data(label: AwsLabel) -> dict[str, Any]:
    """Return contents of the launch template of a fleet label."""
    # Each override has its own subnet.
    data = _common(label, label.offers[0], None)
    if label.ebs_optimized:
        data["EbsOptimized"] = True
    data["BlockDeviceMappings"] = [
        {"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": True, **_volume(label)}}
    ]
    if label.userdata:
        data["UserData"] = base64.b64encode(label.userdata.encode()).decode()
    return data


def template_name(data: dict[str, Any]) -> str:
    """Return a name derived from the settings: equal ones share a template, across restarts."""
    return (
        f"{LAUNCH_TEMPLATE_PREFIX}-"
        f"{hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()}"
    )


def create_fleet(label: Any, template: str, image_id: str, tags: dict[str, str]) -> dict[str, Any]:
    strategy = label.fleet["allocation-strategy"]
    overrides: list[dict[str, Any]] = []
    for priority, instance_type in enumerate(label.fleet["instance-types"]):
        for subnet_id in label.pool.subnet_ids or [None]:
            override: dict[str, Any] = {"ImageId": image_id, "InstanceType": instance_type}
            if subnet_id:
                override["SubnetId"] = subnet_id
            elif label.pool.az:
                override["AvailabilityZone"] = label.pool.az
            if strategy == "prioritized":
                # Without it AWS treats all types as equal.
                override["Priority"] = float(priority)
            overrides.append(override)
    return {
        "Type": "instant",
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": 1,
            "DefaultTargetCapacityType": "spot" if label.use_spot else "on-demand",
        },
        "SpotOptions" if label.use_spot else "OnDemandOptions": {"AllocationStrategy": strategy},
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateName": template,
                    "Version": "$Latest",
                },
                "Overrides": overrides,
            }
        ],
        "TagSpecifications": _tag_specifications(tags, "instance", "volume"),
    }
