"""Google Compute Engine behind the state machine framework (GCE-5 to GCE-10)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.cloud.http import HttpRefused, NoAnswer
from nodepool.driver.common.adapter import (
    DEADLINE,
    Job,
    Leftover,
    MachineAdapter,
    MachineInstance,
    Step,
)
from nodepool.driver.common.offers import Offer
from nodepool.driver.gce import bodies, client
from nodepool.driver.gce.config import GceLabel, GceProviderConfig
from nodepool.driver.gce.errors import classify, kind_of_code
from nodepool.driver.gce.images import GceImages
from nodepool.driver.statemachine.model import ExternalId, Instance, Resource
from nodepool.driver.utils import QuotaInformation
from nodepool.zk.cluster import same_owner

FAMILY_TTL = 300.0
"""Seconds for which the newest image of a family is cached."""
PAGE = 500
NAMES = 40
"""Maximum names in one filter, because of the length of the URL; for more the whole zone is
listed.
"""
FIELDS = (
    "kind,nextPageToken,"
    "items(name,status,statusMessage,zone,machineType,networkInterfaces,metadata(items(key,value)),"
    "creationTimestamp)"
)
Query = Mapping[str, str] | None
"""Query parameters of a URL."""
ENDING = ("STOPPING", "SUSPENDING", "SUSPENDED", "TERMINATED", "STOPPED")


class View(NamedTuple):
    """A machine in Google's cloud, and the operation that creates it."""

    instance: dict[str, Any] | None
    operation: dict[str, Any] | None


class GceAdapter(MachineAdapter):
    provider: GceProviderConfig

    TAG = "label"

    def __init__(self, provider_config: GceProviderConfig) -> None:
        super().__init__(provider_config, classify)
        self.transport = client.Transport()
        self.images = GceImages(self)
        #: Machines in creation: zone and insert operation.
        self._making: dict[str, tuple[str, str]] = {}

    def stop(self) -> None:
        super().stop()
        self.transport.close()

    @property
    def problem(self) -> str | None:
        return self.transport.problem

    # -- calls

    def compute_raw(
        self,
        method: str,
        *path: str,
        project: str | None = None,
        query: Query = None,
        body: object = None,
    ) -> dict[str, Any]:
        """Call Compute Engine in this thread, without pace and repetition.

        :param path: below the project.
        :raises HttpRefused, NoAnswer, NoAccess:
        """
        return self.transport.compute(
            method, ["projects", project or self.provider.project, *path], query, body
        )

    def compute_call(
        self,
        name: str,
        method: str,
        *path: str,
        lane: str = "read",
        repeat: bool | None = None,
        project: str | None = None,
        query: Query = None,
        body: object = None,
    ) -> dict[str, Any]:
        """:param name: of the call, for metrics."""
        return self.calls.call(
            name,
            lambda: self.compute_raw(method, *path, project=project, query=query, body=body),
            lane=lane,
            idempotent=repeat,
            deadline=DEADLINE,
        )

    def _pages(self, name: str, *path: str, query: Query = None) -> Iterator[dict[str, Any]]:
        def fetch() -> dict[str, Any]:
            answer = self.compute_raw("GET", *path, query=query)
            # An empty list has no items; do not mistake other answers for one.
            if "items" not in answer and not str(answer.get("kind")).endswith("List"):
                raise NoAnswer(f"{name}: the answer is not a list from Google")
            return answer

        while True:
            answer = self.calls.call(name, fetch, deadline=DEADLINE)
            yield from answer.get("items") or []
            if not answer.get("nextPageToken"):
                return
            query = {**(query or {}), "pageToken": answer["nextPageToken"]}

    def _instances(self, zone: str, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Return all instances of the zone, or those of these names."""
        query = {"fields": FIELDS, "maxResults": str(PAGE)}
        if names:
            query["filter"] = _any_of(names)
        return self._pages("instances_list", "zones", zone, "instances", query=query)

    # -- launching

    def _image(self, job: Job) -> str:
        image = job.label.cloud_image
        if image is None:
            return f"projects/{self.provider.project}/global/images/{job.image}"
        if image.image_id:
            return str(image.image_id)
        project, family = image.image_project, image.image_family

        def fetch() -> str:
            answer = self.compute_call(
                "images_getFromFamily", "GET", "global", "images", "family", family, project=project
            )
            return str(answer["selfLink"])

        try:
            return str(self.memo.get("family", f"{project}/{family}", fetch, FAMILY_TTL))
        except HttpRefused as error:
            if error.status == 404:
                raise exceptions.LaunchNodepoolException(
                    f"image family {family} does not exist in project {project} (cloud-images, "
                    f"{image.name})"
                ) from error
            raise

    def _machine_type(self, name: str, zone: str) -> dict[str, Any]:
        def fetch() -> dict[str, Any]:
            return self.compute_call("machineTypes_get", "GET", "zones", zone, "machineTypes", name)

        return self.memo.get("type", f"{zone}/{name}", fetch)

    def start(self, job: Job, offer: Offer) -> None:
        zone = offer.place or self.provider.zone
        image = self._image(job)
        body = bodies.instance(
            job, offer, self.provider, str(self._machine_type(offer.size, zone)["selfLink"]), image
        )
        job.begun = True
        request_id = str(uuid.uuid4())
        try:
            # One machine is created, however often the request is repeated.
            operation = self.compute_call(
                "instances_insert",
                "POST",
                "zones",
                zone,
                "instances",
                lane="write",
                repeat=True,
                body=body,
                query={"requestId": request_id},
            )
        except HttpRefused as error:
            if error.status != 409 or not self._adopt(job, zone):
                raise
            operation = {}
        # An adopted machine has none.
        self._making[job.name] = (
            zone,
            str(operation.get("name") or "") if is_operation(operation) else "",
        )

    def _adopt(self, job: Job, zone: str) -> bool:
        """Return whether the existing machine is of an earlier attempt for the same node."""
        found = next(iter(self._instances(zone, [job.name])), None)
        metadata = bodies.metadata_of(found or {})
        if same_owner(metadata, job.tags):
            return True
        job.begun = False  # it is of others
        return False

    def observe(self, keys: Sequence[str]) -> dict[str, View]:
        """Return the instances of these names, or the operations that create them."""
        instances: dict[str, dict[str, Any]] = {}
        for zone in self.provider.zones:
            for found in self._instances(zone, keys if len(keys) <= NAMES else ()):
                instances[str(found.get("name"))] = found
        waiting: dict[str, list[str]] = {}
        for key in keys:
            zone, operation = self._making.get(key, ("", ""))
            if operation and (instances.get(key) or {}).get("status") != "RUNNING":
                waiting.setdefault(zone, []).append(operation)
        operations: dict[str, dict[str, Any]] = {}
        for zone, names in waiting.items():
            for start in range(0, len(names), NAMES):
                for found in self._pages(
                    "zoneOperations_list",
                    "zones",
                    zone,
                    "operations",
                    query={"filter": _any_of(names[start : start + NAMES])},
                ):
                    operations[str(found.get("name"))] = found
        views = {}
        for key in keys:
            view = View(instances.get(key), operations.get(self._making.get(key, ("", ""))[1]))
            if view != (None, None):
                views[key] = view
        return views

    def progress(self, job: Job, view: View | None) -> Instance | Step | None:
        view = view or View(None, None)
        errors = ((view.operation or {}).get("error") or {}).get("errors") or []
        if errors:
            code, message = str(errors[0].get("code") or ""), str(errors[0].get("message") or "")
            raise self.failed(
                job,
                kind_of_code(code, message) or ErrorKind.OTHER,
                f"Google could not create {job.name}: {code}: {message}",
            )
        found = view.instance
        if found is None:
            self.seen(
                job,
                "instance",
                view.operation is not None and view.operation.get("status") != "DONE",
            )
            return None
        self.seen(job, "instance", True)
        status = str(found.get("status") or "")
        if status in ENDING:
            spot = job.offer is not None and job.offer.spot
            text = (
                f"instance {job.name} is {status}: "
                f"{found.get('statusMessage') or 'no reason given'}"
            )
            raise self.failed(job, ErrorKind.CAPACITY if spot else ErrorKind.OTHER, text)
        if status != "RUNNING":
            return None
        instance = self._instance(found, job.quota)
        pool = job.label.pool
        wanted = (
            instance.private_ipv4
            if pool.use_internal_ip or not pool.public_ipv4
            else instance.public_ipv4
        )
        if not wanted:
            return None
        self._making.pop(job.name, None)
        self.made_here[job.name] = _last(found.get("zone"))
        if pool.use_internal_ip:
            instance.interface_ip = instance.private_ipv4
        return instance

    def _instance(self, found: dict[str, Any], quota: QuotaInformation) -> MachineInstance:
        zone = _last(found.get("zone"))
        instance = MachineInstance(str(found["name"]), bodies.metadata_of(found), quota)
        interface = (found.get("networkInterfaces") or [{}])[0]
        access = (interface.get("accessConfigs") or [{}])[0]
        instance.private_ipv4, instance.public_ipv4 = (
            interface.get("networkIP"),
            access.get("natIP"),
        )
        instance.interface_ip = instance.public_ipv4 or instance.private_ipv4
        instance.cloud = "Google"
        instance.az, instance.region = zone, zone.rpartition("-")[0]
        return instance

    # -- deleting

    def remove(self, key: str) -> bool:
        self._making.pop(key, None)
        zone = self.made_here.pop(key, None)
        if zone is not None:
            return self._delete_in(zone, key)
        there = [
            zone
            for zone in self.provider.zones
            for found in self._instances(zone, [key])
            if found.get("name") == key and self.is_ours(key, bodies.metadata_of(found))
        ]
        asked = [self._delete_in(zone, key) for zone in there]
        return any(asked)

    def _delete_in(self, zone: str, key: str) -> bool:
        return self.delete(
            "instances_delete", lambda: self.compute_raw("DELETE", "zones", zone, "instances", key)
        )

    def is_deleted(self, view: View | None) -> bool:
        return view is None or view.instance is None or view.instance.get("status") == "TERMINATED"

    def is_lost(self, view: View | None) -> bool:
        return view is None or view.instance is None or view.instance.get("status") in ENDING

    # -- lists

    def listInstances(self) -> Iterator[Instance]:
        gone = self.gone.recent()
        for zone in self.provider.zones:
            for found in self._instances(zone):
                if found.get("name") not in gone and found.get("status") != "TERMINATED":
                    yield self._instance(
                        found, self.known_size(_last(found.get("machineType")), zone)
                    )

    def listResources(self) -> Iterable[Leftover]:
        kinds = [("instance", self._leftover_instances)]
        if self.provider.manage_images:
            kinds += [("image", self._leftover_images), ("object", self._leftover_objects)]
        return self.list_for_leaks(kinds)

    def _leftover_instances(self) -> Iterator[Leftover]:
        for zone in self.provider.zones:
            for found in self._instances(zone):
                if found.get("status") != "TERMINATED":
                    yield Leftover(bodies.metadata_of(found), "instance", str(found["name"]))

    def _leftover_images(self) -> Iterator[Leftover]:
        for found in self._pages("images_list", "global", "images"):
            yield Leftover(bodies.described(found), "image", str(found["name"]))

    def _leftover_objects(self) -> Iterator[Leftover]:
        for found in self.images.objects():
            yield Leftover(found.get("metadata") or {}, "object", str(found["name"]))

    def deleteResource(self, resource: Resource) -> None:
        self.log.info("Deleting leaked %s: %s", resource.type, resource.id)
        if resource.type == "image":
            self.images.delete(resource.id)
        elif resource.type == "object":
            self.images.delete_object(resource.id)
        else:
            self.remove(resource.id)

    def _listImages(self) -> list[dict[str, Any]]:
        """List the images for ``nodepool alien-image-list``."""
        found = self._pages("images_list", "global", "images")
        return [
            {"id": each["name"], "name": each["name"], "properties": bodies.described(each)}
            for each in found
        ]

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        answer = self.compute_call("regions_get", "GET", "regions", self.provider.region)
        limits = {each.get("metric"): each.get("limit") for each in answer.get("quotas") or []}
        metrics = {"cores": "CPUS", "instances": "INSTANCES"}
        return self.limits(limits, metrics, "Google", f"region {self.provider.region}")

    def size_of(self, size: str) -> QuotaInformation:
        try:
            return self._getQuotaForMachineType(size)
        except KeyError as error:
            raise exceptions.RuntimeConfigurationException(
                f"Google reports no size of instance-type {size}"
            ) from error

    def known_size(self, size: str, zone: str | None = None) -> QuotaInformation:
        try:
            return self._getQuotaForMachineType(size, zone)
        except (exceptions.RuntimeConfigurationException, KeyError, HttpRefused) as error:
            self.warn_once(
                f"size {size}",
                "Machine type %s is not known, it counts without cores and memory: %s",
                size,
                error,
            )
            return QuotaInformation(instances=1)

    def _getQuotaForMachineType(
        self, machine_type: str, zone: str | None = None
    ) -> QuotaInformation:
        """Return the usage of a type. KeyError: the answer has no size; the cache is cleared."""
        try:
            found = self._machine_type(machine_type, zone or self.provider.zone)
        except HttpRefused as error:
            if error.status in (400, 404):
                raise exceptions.RuntimeConfigurationException(
                    f"instance-type {machine_type} does not exist in zone "
                    f"{zone or self.provider.zone}: {error.message}"
                ) from error
            raise
        try:
            return QuotaInformation(cores=found["guestCpus"], instances=1, ram=found["memoryMb"])
        except KeyError:
            self.log.error("Google reports no size of machine type %s: %s", machine_type, found)
            self.memo.forget({"type"})
            raise

    def getConsoleLog(self, label: GceLabel, external_id: ExternalId) -> str | None:
        if not label.console_log or not external_id:
            return None
        for zone in self.provider.zones:
            try:
                answer = self.compute_call(
                    "instances_getSerialPortOutput",
                    "GET",
                    "zones",
                    zone,
                    "instances",
                    str(external_id),
                    "serialPort",
                )
            except HttpRefused as error:
                if error.status != 404:
                    raise
            else:
                return str(answer.get("contents") or "")
        return None


def is_operation(answer: Mapping[str, object]) -> bool:
    return str(answer.get("kind", "")).endswith("#operation")


def _last(url: object) -> str:
    return str(url or "").rpartition("/")[2]


def _any_of(names: Sequence[str]) -> str:
    return " OR ".join(f'(name = "{name}")' for name in names)
