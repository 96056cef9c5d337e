"""Instances and other resources as seen by the launcher (AWS-2.2)."""

from __future__ import annotations

from typing import Any

from nodepool.driver.aws.config import AwsProviderConfig
from nodepool.driver.common.adapter import Leftover, MachineInstance
from nodepool.driver.statemachine.model import ExternalId
from nodepool.driver.utils import QuotaInformation


def tag_dict_to_list(tagdict: dict[str, Any] | None) -> list[dict[str, str]]:
    """Return tags in the format of AWS; values become strings."""
    return [{"Key": str(key), "Value": str(value)} for key, value in (tagdict or {}).items()]


def tag_list_to_dict(taglist: list[dict[str, str]] | None) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in taglist or []}


def is_spot(instance: dict[str, Any]) -> bool:
    return instance.get("InstanceLifecycle") == "spot"


def state_of(thing: dict[str, Any]) -> str:
    """Return the state of an instance (nested), host, volume or snapshot (plain)."""
    state = thing.get("State")
    return str(state.get("Name") if isinstance(state, dict) else state or "")


def instance_id_of(external_id: ExternalId) -> str | None:
    """Return the instance id; records of old releases have only that."""
    return external_id.get("instance") if isinstance(external_id, dict) else external_id


def host_id_of(host: Any) -> str | None:
    return host.get("HostId") if isinstance(host, dict) else host


class AwsResource(Leftover):
    """A resource that may leak; ``id`` is its id, or the key of an object in S3."""

    TYPE_HOST = "host"
    TYPE_INSTANCE = "instance"
    TYPE_AMI = "ami"
    TYPE_SNAPSHOT = "snapshot"
    TYPE_VOLUME = "volume"
    TYPE_OBJECT = "object"

    def belongs_to(self, external_id: ExternalId) -> bool:
        if self.type == self.TYPE_INSTANCE:
            return instance_id_of(external_id) in (self.id, None)
        if self.type == self.TYPE_HOST and isinstance(external_id, dict):
            return bool(external_id.get("host") == self.id)
        return True  # a volume goes with its instance


class AwsInstance(MachineInstance):
    """An instance, the host that was allocated for it, or both.

    :param label: if given, ``node_properties`` inform Zuul about spot and fleet.
    """

    def __init__(
        self,
        provider: AwsProviderConfig,
        instance: dict[str, Any],
        host: object,
        quota: QuotaInformation | None,
        label: Any,
    ) -> None:
        ids = {"host": host_id_of(host)} if host else {}
        super().__init__(
            {**ids, "instance": instance["InstanceId"]},
            tag_list_to_dict(instance.get("Tags")),
            quota,
        )
        self.private_ipv4 = instance.get("PrivateIpAddress") or None
        self.public_ipv4 = instance.get("PublicIpAddress") or None
        self.public_ipv6 = _first_ipv6(instance)
        self.cloud = "AWS"
        self.region = provider.region_name
        self.az = (instance.get("Placement") or {}).get("AvailabilityZone")
        self.interface_ip = self.public_ipv4 or self.public_ipv6 or self.private_ipv4
        if label:
            spot = label.use_spot if len(label.offers) < 2 else is_spot(instance)
            self.node_properties = {"fleet": bool(label.fleet), "spot": spot}


def _first_ipv6(instance: dict[str, Any]) -> str | None:
    for interface in (instance.get("NetworkInterfaces") or [])[:1]:
        for address in interface.get("Ipv6Addresses") or []:
            return str(address["Ipv6Address"])
    return None
