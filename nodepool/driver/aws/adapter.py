"""Amazon EC2 behind the state machine framework (AWS-2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from typing import Any

from nodepool import exceptions
from nodepool.cloud import AdaptiveRate, CallsStopped, CloudCalls, DeleteBatches, ErrorKind, Poller
from nodepool.cloud.calls import DEADLINE
from nodepool.cloud.recently_gone import RecentlyGone
from nodepool.driver.aws.api import clients
from nodepool.driver.aws.api.errors import AwsError, check_answer, classify, needs_credentials
from nodepool.driver.aws.api.lookups import (
    CACHE_TTL,
    READ_DEADLINE,
    SERVICE_QUOTA_CACHE_TTL,
    AwsLookups,
)
from nodepool.driver.aws.config import AwsLabel, AwsProviderConfig
from nodepool.driver.aws.images.ebs_direct import EBSSnapshotUploader
from nodepool.driver.aws.images.imports import AwsImages
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.launch.launching import Launching
from nodepool.driver.aws.launch.machines import (
    INSTANCE_FAILED,
    AwsCreateStateMachine,
    AwsDeleteStateMachine,
)
from nodepool.driver.aws.launch.templates import LaunchTemplates
from nodepool.driver.aws.leaks import AwsLeaks
from nodepool.driver.aws.objects import (
    AwsInstance,
    AwsResource,
    instance_id_of,
    state_of,
    tag_dict_to_list,
    tag_list_to_dict,
)
from nodepool.driver.aws.quota import AwsQuota
from nodepool.driver.aws.quota_codes import (
    HOST_QUOTA_CODES,
    INSTANCE_QUOTA_CODES,
    VOLUME_QUOTA_CODES,
)
from nodepool.driver.common.adapter import CloudAdapter
from nodepool.driver.purpose import images_only
from nodepool.driver.statemachine.model import ExternalId
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

__all__ = [
    "CACHE_TTL",
    "HOST_QUOTA_CODES",
    "INSTANCE_QUOTA_CODES",
    "SERVICE_QUOTA_CACHE_TTL",
    "VOLUME_QUOTA_CODES",
    "AwsAdapter",
    "AwsCreateStateMachine",
    "AwsDeleteStateMachine",
    "AwsInstance",
    "AwsResource",
    "EBSSnapshotUploader",
    "tag_dict_to_list",
    "tag_list_to_dict",
]

DELETE_BATCH = 50
WATCH_BATCH = 100
READ_FACTOR = 10
"""Factor by which reading calls may be more frequent than changing ones."""


class AwsAdapter(CloudAdapter):
    provider: AwsProviderConfig
    LAUNCH_TEMPLATE_PREFIX = parameters.LAUNCH_TEMPLATE_PREFIX
    #: Seconds without a byte from AWS after which a call has failed.
    READ_TIMEOUT = clients.READ_TIMEOUT
    #: Minimum seconds between two readings of refused credentials.
    CREDENTIALS_INTERVAL = 10.0
    #: Minimum seconds between two polls of what is waited for.
    LOOK_FLOOR = 0.5
    #: Seconds that a deletion waits for others to share a call: short compared with the shutdown of
    #: an instance.
    DELETE_GATHER = 1.0
    #: Seconds that a poll for deletions waits for the next poll for something else.
    DELETE_PATIENCE = 2.0
    #: Seconds that the start of a provider waits for its launch templates.
    TEMPLATE_WAIT = 1.0

    def __init__(self, provider_config: AwsProviderConfig) -> None:
        super().__init__(provider_config)
        self._connect()
        name, rate = f"aws-{provider_config.name}", provider_config.rate
        self.rate_limiter = AdaptiveRate(f"{name}-write", rate)
        self.non_mutating_rate_limiter = AdaptiveRate(f"{name}-read", READ_FACTOR * rate)
        self.quota_service_rate_limiter = AdaptiveRate(f"{name}-quota", rate)
        self.calls: CloudCalls = CloudCalls(
            provider_config.name,
            self._classify,
            {
                "read": self.non_mutating_rate_limiter,
                "write": self.rate_limiter,
                "quota": self.quota_service_rate_limiter,
                "delete": AdaptiveRate(f"{name}-delete", rate),
                "upload": AdaptiveRate(f"{name}-upload", None),
            },
            threads={"read": 10, "write": max(min(int(4 * rate), 8), 1), "delete": 4},
            log=self.log,
        )
        self.deletes = DeleteBatches(
            name,
            classify,
            lambda function: self.calls.run(function, lane="delete"),
            self.calls.timers,
            log=self.log,
        )
        self.deletes.add_kind(
            "instance", self._terminate, batch=DELETE_BATCH, gather=self.DELETE_GATHER
        )
        self.deletes.add_kind("host", self._release, batch=DELETE_BATCH, gather=self.DELETE_GATHER)
        self.cloud = AwsLookups(self)
        self.gone = RecentlyGone()
        self.watched_instances: Poller[dict[str, Any]] = Poller(
            f"instances of {provider_config.name}",
            self.cloud.some_instances,
            self.calls.run,
            self.calls.timers,
            batch=WATCH_BATCH,
            floor=self.LOOK_FLOOR,
            narrow=True,
            log=self.log,
        )
        self.watched_hosts: Poller[dict[str, Any]] = Poller(
            f"hosts of {provider_config.name}",
            self.cloud.some_hosts,
            self.calls.run,
            self.calls.timers,
            batch=DELETE_BATCH,
            floor=self.LOOK_FLOOR,
            log=self.log,
        )
        self.quota = AwsQuota(self.cloud, self.warn_once)
        self.templates = LaunchTemplates(self)
        self.launching = Launching(self)
        self.sold_out = self.launching.sold_out
        self.images = AwsImages(self)
        self.leaks = AwsLeaks(self)
        # A builder launches nothing: it neither creates nor removes templates.
        if not images_only.get():
            self.templates.start()
            if self.templates.wanted:
                self._prepare_templates()

    def _connect(self) -> None:
        """Create the clients, with the credentials that are stored now.

        :raises ConfigurationError: the profile does not exist.
        """
        self._connected = time.monotonic()
        self.ec2_client, self.s3, self.s3_client, self.aws_quotas, self.ebs_client = clients.make(
            self.provider, self.READ_TIMEOUT
        )

    def _classify(self, error: BaseException) -> ErrorKind:
        """Return the kind of an error; if credentials caused it, read them again.

        The library does so for roles only.
        """
        if (
            needs_credentials(error)
            and time.monotonic() - self._connected >= self.CREDENTIALS_INTERVAL
        ):
            self.log.info("Reading the credentials again: %s", error)
            try:
                self._connect()
            except Exception as unusable:
                self.log.warning(
                    "The credentials cannot be read, keeping the previous ones: %s", unusable
                )
        return classify(error)

    def _prepare_templates(self) -> None:
        """Start creating templates in the background; a failure is repaired by the next launch."""

        def prepare() -> None:
            try:
                self.templates.ensure(clean=True)
            except CallsStopped:
                pass
            except Exception as error:
                self.log.error(
                    "Preparing launch templates failed, retrying when one is needed: %s", error
                )

        wait([self.calls.run(prepare, lane="write")], self.TEMPLATE_WAIT)

    def stop(self) -> None:
        self._stopping.set()
        self.templates.stop()
        self.deletes.stop()
        self.calls.stop()
        for client in (
            self.ec2_client,
            self.s3.meta.client,
            self.s3_client,
            self.aws_quotas,
            self.ebs_client,
        ):
            client.close()

    # -- calls

    def ec2(
        self, method: str, /, *, lane: str = "read", idempotent: bool | None = None, **kw: Any
    ) -> Any:
        """Call EC2 in this thread, through :class:`CloudCalls`."""
        function = getattr(self.ec2_client, method)

        def ask(**params: object) -> Any:
            answer = function(**params)
            check_answer(method, answer)
            return answer

        return self.calls.call(
            method,
            ask,
            lane=lane,
            idempotent=idempotent,
            deadline=READ_DEADLINE if lane == "read" else DEADLINE,
            **kw,
        )

    def tag(self, ids: list[str], tags: dict[str, str]) -> None:
        self.ec2(
            "create_tags", lane="write", idempotent=True, Resources=ids, Tags=tag_dict_to_list(tags)
        )

    def upload_object(self, bucket: str, key: str, filename: str, tagging: str) -> None:
        """Send a file to the bucket; ``tagging`` is URL-encoded."""

        def send() -> None:
            # Opened for each attempt: the library leaves a file in the middle, or closed.
            with open(filename, "rb") as image:
                self.s3.Bucket(bucket).upload_fileobj(image, key, ExtraArgs={"Tagging": tagging})

        self.calls.call("upload_object", send, lane="upload", idempotent=False)

    def delete_object(self, bucket: str, key: str) -> None:
        self.calls.call(
            "delete_object", self.s3_client.delete_object, lane="delete", Bucket=bucket, Key=key
        )

    def _terminate(self, ids: Iterable[str]) -> None:
        self.ec2("terminate_instances", lane="delete", InstanceIds=list(ids))

    def _release(self, ids: Iterable[str]) -> dict[str, Exception]:
        answer = self.ec2("release_hosts", lane="delete", HostIds=list(ids))
        return {
            item["ResourceId"]: AwsError(item.get("Error") or {})
            for item in answer.get("Unsuccessful") or []
        }

    def _release_one(self, host_id: str) -> None:
        for refusal in self._release([host_id]).values():
            raise refusal

    # -- the framework's side

    def getCreateStateMachine(
        self,
        hostname: str,
        label: AwsLabel,
        image_external_id: Any,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> AwsCreateStateMachine:
        return AwsCreateStateMachine(
            self, hostname, label, image_external_id, metadata, request, log
        )

    def getDeleteStateMachine(self, external_id: ExternalId, log: Log) -> AwsDeleteStateMachine:
        return AwsDeleteStateMachine(self, external_id, log)

    def listInstances(self) -> Iterator[AwsInstance]:
        volumes = self.cloud.volumes_by_instance()
        instances, gone = self.cloud.instances(), self.gone.recent()
        for instance in instances:
            if state_of(instance) == "terminated" or instance["InstanceId"] in gone:
                continue
            try:
                quota = self.quota.of_instance(instance, volumes.get(instance["InstanceId"], ()))
            except exceptions.RuntimeConfigurationException:
                quota = QuotaInformation(instances=1)  # of a type that is not offered any more
            yield AwsInstance(
                self.provider,
                instance,
                (instance.get("Placement") or {}).get("HostId"),
                quota,
                None,
            )

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return the missing ones, by queries for just these; those not shown are queried twice."""
        wanted = {
            instance_id: each for each in external_ids if (instance_id := instance_id_of(each))
        }
        found: dict[str, dict[str, Any]] = {}
        for _ in range(2):
            left = [instance_id for instance_id in wanted if instance_id not in found]
            for start in range(0, len(left), WATCH_BATCH):
                found.update(self.cloud.some_instances(left[start : start + WATCH_BATCH]))
        return [
            each
            for instance_id, each in wanted.items()
            if instance_id not in found or state_of(found[instance_id]) in INSTANCE_FAILED
        ]

    def listResources(self) -> Iterator[AwsResource]:
        yield from self.leaks.resources()

    def deleteResource(self, resource: AwsResource) -> None:
        self.log.info("Deleting leaked %s: %s", resource.type, resource.id)
        self.remove(resource.type, resource.id)

    def remove(self, kind: str, key: str) -> None:
        """Delete a resource now, if it still exists.

        :param kind: type of :class:`AwsResource`.
        """
        calls: dict[str, Callable[[], Any]] = {
            AwsResource.TYPE_HOST: lambda: self._release_one(key),
            AwsResource.TYPE_INSTANCE: lambda: self._terminate([key]),
            AwsResource.TYPE_VOLUME: lambda: self.ec2("delete_volume", lane="delete", VolumeId=key),
            AwsResource.TYPE_AMI: lambda: self.ec2("deregister_image", lane="delete", ImageId=key),
            AwsResource.TYPE_SNAPSHOT: lambda: self.ec2(
                "delete_snapshot", lane="delete", SnapshotId=key
            ),
            AwsResource.TYPE_OBJECT: lambda: self.delete_object(
                (self.provider.object_storage or {})["bucket-name"], key
            ),
        }
        try:
            calls[kind]()
        except Exception as error:
            if classify(error) is not ErrorKind.NOT_FOUND:
                raise
            self.log.warning("%s %s no longer exists", kind.capitalize(), key)

    def getQuotaLimits(self) -> QuotaInformation:
        return self.quota.limits(self.provider)

    def getQuotaForLabel(self, label: AwsLabel) -> QuotaInformation:
        return self.quota.of_label(label)

    def removeUnfinishedUpload(self, image_name: str, since: float) -> None:
        """Remove the parts of an interrupted upload, which no list of images or objects shows."""
        self.images.remove_parts(image_name, since)

    def getConsoleLog(self, label: AwsLabel, external_id: ExternalId) -> str | None:
        if not label.console_log:
            return None
        instance_id = instance_id_of(external_id)
        if not instance_id:
            return None
        choices: list[dict[str, Any]] = [{"Latest": True}, {}]
        for options in choices:
            # Older instance types do not support the latest output.
            try:
                answer = self.ec2("get_console_output", InstanceId=instance_id, **options)
            except Exception as error:
                if classify(error) in (ErrorKind.THROTTLED, ErrorKind.TRANSIENT) or not options:
                    self.log.info("No console log of %s: %s", instance_id, error)
                    return None
                continue
            if answer.get("Output"):
                return str(answer["Output"])
        return None

    # -- names that are used from outside

    def _getImportImageTask(self, task_id: str) -> Any:
        return self.images.task("image", task_id)

    def _listAmis(self) -> list[dict[str, Any]]:
        return self.cloud.list_amis()

    def _listSnapshots(self) -> list[dict[str, Any]]:
        return self.cloud.list_snapshots()

    def _listImages(self) -> list[dict[str, Any]]:
        """List the images for ``nodepool alien-image-list``."""
        return [
            {
                "id": ami["ImageId"],
                "name": ami.get("Name"),
                "properties": tag_list_to_dict(ami.get("Tags")),
            }
            for ami in self.cloud.list_amis()
        ]
