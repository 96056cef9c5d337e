"""Cached lookups in AWS (AWS-2.1)."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nodepool import exceptions
from nodepool.cloud import CloudCalls, ErrorKind
from nodepool.cloud.answer_cache import AnswerCache
from nodepool.driver.aws.api.errors import classify
from nodepool.driver.aws.objects import state_of, tag_list_to_dict

CACHE_TTL = 10
SERVICE_QUOTA_CACHE_TTL = 300
FILTER_TTL = 300
PAGE = 1000
READ_DEADLINE = 120.0
"""Seconds for a reading call with its retries: its callers have an older answer or retry."""
NEXT_TOKEN = {"NextToken": "NextToken"}


def all_pages(
    ask: Callable[..., Any], key: str, following: Mapping[str, str] = NEXT_TOKEN
) -> list[dict[str, Any]]:
    """Return what all pages of an answer have under *key*.

    :param following: argument of the next call -> field of the answer with its value.
    """
    found: list[dict[str, Any]] = []
    token: dict[str, Any] = {}
    while True:
        answer = ask(**token)
        found += answer.get(key) or []
        token = {name: answer[field] for name, field in following.items() if answer.get(field)}
        if not token or answer.get("IsTruncated") is False:
            return found


class AwsLookups:
    """The reading part of an adapter. Lists of a whole region serve quota and cleanup only."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.calls: CloudCalls = adapter.calls
        self._memo = AnswerCache()
        self._object_tags: dict[tuple[str, str], dict[str, str]] = {}

    # -- lists of the region

    def instances(self) -> list[dict[str, Any]]:
        """Return the instances from a fresh list; waits for a new list if the last is too old.

        For the quota, which is calculated so rarely that a cached list is useless: our own nodes
        that were deleted since then would count as not ours.
        """
        return self._memo.get("instances", None, self.list_instances, CACHE_TTL)

    def volumes(self) -> list[dict[str, Any]]:
        """Return the volumes, as fresh as instances."""
        return self._memo.get("volumes", None, self.list_volumes, CACHE_TTL)

    def paged(self, method: str, key: str, **kw: object) -> list[dict[str, Any]]:
        """Return what all pages of EC2's answer have under *key*."""
        return all_pages(functools.partial(self.adapter.ec2, method, **kw), key)

    def list_hosts(self) -> list[dict[str, Any]]:
        return self.paged("describe_hosts", "Hosts")

    def list_instances(self) -> list[dict[str, Any]]:
        return _instances(self.paged("describe_instances", "Reservations", MaxResults=PAGE))

    def list_volumes(self) -> list[dict[str, Any]]:
        return self.paged("describe_volumes", "Volumes", MaxResults=PAGE)

    def list_amis(self) -> list[dict[str, Any]]:
        return self.paged("describe_images", "Images", Owners=["self"])

    def list_snapshots(self) -> list[dict[str, Any]]:
        return self.paged("describe_snapshots", "Snapshots", OwnerIds=["self"], MaxResults=PAGE)

    def list_objects(self) -> list[dict[str, Any]]:
        """Return the objects of the bucket (``Key``, ``ETag``, ...); none without object
        storage.
        """
        storage = self.adapter.provider.object_storage
        if not storage:
            return []
        ask = functools.partial(
            self.calls.call,
            "list_objects_v2",
            self.adapter.s3_client.list_objects_v2,
            Bucket=storage["bucket-name"],
        )
        return all_pages(ask, "Contents", {"ContinuationToken": "NextContinuationToken"})

    def object_tags(self, entry: dict[str, Any]) -> dict[str, str]:
        """Return the tags of a listed object; one call per object until it changes."""
        key = (entry["Key"], f"{entry.get('ETag')} {entry.get('LastModified')}")
        known = self._object_tags.get(key)
        if known is not None:
            return known
        try:
            answer = self.calls.call(
                "get_object_tagging",
                self.adapter.s3_client.get_object_tagging,
                missing_ok=True,
                Bucket=self.adapter.provider.object_storage["bucket-name"],
                Key=entry["Key"],
            )
        except Exception as error:
            if classify(error) is ErrorKind.NOT_FOUND:
                return {}
            self.adapter.log.warning("Cannot read the tags of object %s: %s", entry["Key"], error)
            return {}
        tags = self._object_tags[key] = tag_list_to_dict(answer.get("TagSet"))
        return tags

    def forget_objects(self, present: Iterable[dict[str, Any]]) -> None:
        """Keep remembered tags of these objects only."""
        keys = {entry["Key"] for entry in present}
        for key in [key for key in self._object_tags if key[0] not in keys]:
            self._object_tags.pop(key, None)

    def volumes_by_instance(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for volume in self.volumes():
            for attachment in volume.get("Attachments") or []:
                found[attachment.get("InstanceId", "")].append(volume)
        return found

    def service_quotas(self, service: str) -> dict[str, float]:
        """Return the limits of ``ec2`` or ``ebs`` by quota code, cached for five minutes."""

        def fetch() -> dict[str, float]:
            ask = functools.partial(
                self.calls.call,
                "list_service_quotas",
                self.adapter.aws_quotas.list_service_quotas,
                lane="quota",
                idempotent=True,
                ServiceCode=service,
            )
            return {quota["QuotaCode"]: quota["Value"] for quota in all_pages(ask, "Quotas")}

        return self._memo.get("quotas", service, fetch, SERVICE_QUOTA_CACHE_TTL)

    # -- objects that are waited for

    def some_instances(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return these instances now; a filter, unlike ids, does not fail for missing ones."""
        answer = self.paged(
            "describe_instances",
            "Reservations",
            Filters=[{"Name": "instance-id", "Values": list(ids)}],
        )
        return {instance["InstanceId"]: instance for instance in _instances(answer)}

    def some_hosts(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return these hosts now. They cannot be filtered by id: missing ones are queried
        singly.
        """
        try:
            answer = self.adapter.ec2("describe_hosts", missing_ok=True, HostIds=list(ids))
        except Exception as error:
            if classify(error) is not ErrorKind.NOT_FOUND:
                raise
            if len(ids) == 1:
                return {}
            found: dict[str, dict[str, Any]] = {}
            for one in ids:
                found.update(self.some_hosts([one]))
            return found
        return {host["HostId"]: host for host in answer.get("Hosts") or []}

    def left_on_host(self, host_id: str) -> list[str]:
        """Return instances on the host for the same node of ours, including unrecorded ones."""
        host = self.some_hosts([host_id]).get(host_id) or {}
        owner = _made_for(host)
        ids = [
            instance["InstanceId"]
            for instance in host.get("Instances") or []
            if instance.get("InstanceId")
        ]
        if not ids or owner[0] != self.adapter.provider.name or owner[1] is None:
            return []
        return [
            key
            for key, instance in self.some_instances(ids).items()
            if _made_for(instance) == owner and state_of(instance) != "terminated"
        ]

    # -- facts that do not change

    def instance_type(self, name: str) -> dict[str, Any]:
        def fetch() -> Any:
            return self.adapter.ec2("describe_instance_types", InstanceTypes=[name])[
                "InstanceTypes"
            ][0]

        return self._memo.get("type", name, fetch)

    def image(self, ami_id: str) -> dict[str, Any]:
        """Return an AMI by id.

        :raises LaunchNodepoolException: it does not exist.
        """

        def fetch() -> Any:
            images = self.adapter.ec2("describe_images", ImageIds=[ami_id]).get("Images") or []
            if not images:
                raise exceptions.LaunchNodepoolException(
                    f"image {ami_id} does not exist in region {self.adapter.provider.region_name}"
                )
            return images[0]

        return self._memo.get("image", ami_id, fetch)

    def filtered_image(self, filters: list[dict[str, Any]]) -> str:
        """Return the id of the newest matching AMI, cached for five minutes.

        :raises LaunchNodepoolException: there is none.
        """
        key = json.dumps(filters)

        def fetch() -> str:
            images = self.paged("describe_images", "Images", Filters=filters)
            if not images:
                raise exceptions.LaunchNodepoolException(
                    f"no image matches the image-filters {key}"
                )
            return str(max(images, key=lambda image: image.get("CreationDate") or "")["ImageId"])

        return str(self._memo.get("filter", key, fetch, FILTER_TTL))


def _made_for(thing: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the provider and node in the tags."""
    tags = tag_list_to_dict(thing.get("Tags"))
    return tags.get("nodepool_provider_name"), tags.get("nodepool_node_id")


def _instances(reservations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        instance for reservation in reservations for instance in reservation.get("Instances") or []
    ]
