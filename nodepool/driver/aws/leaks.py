"""Finds and removes our leaked resources in the account (AWS-2.9)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from nodepool.driver.aws.launch.machines import HOST_GONE
from nodepool.driver.aws.objects import AwsResource, state_of, tag_list_to_dict

_IMPORT = re.compile(r"import-ami-[0-9a-zA-Z]+")


class AwsLeaks:
    """The cleanup part of an adapter; used by one thread."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.cloud = adapter.cloud
        self.log = adapter.log
        #: AMIs and snapshots without tags that are not ours.
        self._foreign: set[str] = set()
        self._tasks: list[dict[str, Any]] | None = None

    def resources(self) -> Iterator[AwsResource]:
        """Return everything that may be ours from fresh lists, skipping lists that fail."""
        try:
            self.copy_tags()
        except Exception as error:
            self.log.warning("Cannot copy tags of import tasks: %s", error)
        cloud = self.cloud
        kinds: tuple[tuple[str, Callable[[], list[dict[str, Any]]], str, tuple[str, ...]], ...] = (
            (AwsResource.TYPE_HOST, cloud.list_hosts, "HostId", HOST_GONE),
            (AwsResource.TYPE_INSTANCE, cloud.list_instances, "InstanceId", ("terminated",)),
            (AwsResource.TYPE_VOLUME, cloud.list_volumes, "VolumeId", ("deleted",)),
            (AwsResource.TYPE_AMI, cloud.list_amis, "ImageId", ("deleted", "deregistered")),
            (AwsResource.TYPE_SNAPSHOT, cloud.list_snapshots, "SnapshotId", ("deleted",)),
        )
        for kind, fetch, key, gone in kinds:
            for thing in self._list(kind, fetch):
                if state_of(thing) not in gone:
                    yield AwsResource(tag_list_to_dict(thing.get("Tags")), kind, thing[key])
        if self.adapter.provider.object_storage:
            objects = self._list(AwsResource.TYPE_OBJECT, cloud.list_objects)
            for entry in objects:
                yield AwsResource(cloud.object_tags(entry), AwsResource.TYPE_OBJECT, entry["Key"])
            cloud.forget_objects(objects)

    def _list(self, kind: str, fetch: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            return fetch()
        except Exception as error:
            self.log.warning(
                "Cannot list %ss of provider %s: %s", kind, self.adapter.provider.name, error
            )
            return []

    # -- tags that an import does not copy

    def copy_tags(self) -> None:
        """Copy the tags of our import tasks to AMI and snapshot, which imports leave untagged."""
        self._tasks = None
        untagged = [
            (ami["ImageId"], self._ami_tags(ami))
            for ami in self.cloud.list_amis()
            if self._unknown(ami, "ImageId")
        ]
        untagged += [
            (snapshot["SnapshotId"], self._snapshot_tags(snapshot))
            for snapshot in self.cloud.list_snapshots()
            if self._unknown(snapshot, "SnapshotId")
        ]
        for key, tags in untagged:
            if tags and tags.get("nodepool_provider_name") == self.adapter.provider.name:
                self.adapter.tag([key], tags)
            elif tags is not None:
                self._foreign.add(key)
        self._tasks = None

    def _unknown(self, thing: dict[str, Any], key: str) -> bool:
        return not thing.get("Tags") and thing[key] not in self._foreign

    def _ami_tags(self, ami: dict[str, Any]) -> dict[str, str] | None:
        """Return the tags of the AMI's import task, {} if it has none, None to retry next time."""
        if match := _IMPORT.match(ami.get("Name") or ""):
            return self._task_tags(self.adapter.images.task("image", match.group(0)))
        mappings = ami.get("BlockDeviceMappings") or []
        snapshot_id = ((mappings[0].get("Ebs") or {}) if mappings else {}).get("SnapshotId")
        return self._tags_by_snapshot(snapshot_id)

    def _snapshot_tags(self, snapshot: dict[str, Any]) -> dict[str, str] | None:
        if match := _IMPORT.search(snapshot.get("Description") or ""):
            return self._task_tags(self.adapter.images.task("image", match.group(0)))
        if state_of(snapshot) == "pending":
            return None  # its task may still be working on it
        return self._tags_by_snapshot(snapshot["SnapshotId"])

    def _tags_by_snapshot(self, snapshot_id: str | None) -> dict[str, str]:
        if self._tasks is None:
            self._tasks = self.cloud.paged("describe_import_snapshot_tasks", "ImportSnapshotTasks")
        for task in self._tasks:
            if (
                snapshot_id
                and (task.get("SnapshotTaskDetail") or {}).get("SnapshotId") == snapshot_id
            ):
                return self._task_tags(task)
        return {}

    @staticmethod
    def _task_tags(task: dict[str, Any] | None) -> dict[str, str]:
        return tag_list_to_dict((task or {}).get("Tags"))
