"""Microsoft Azure behind the state machine framework (AZU-5 to AZU-12)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.cloud.http import Answer, HttpRefused, send
from nodepool.driver.azure import arm as api
from nodepool.driver.azure import bodies
from nodepool.driver.azure.config import AzureLabel, AzureProviderConfig
from nodepool.driver.azure.errors import classify, kind_of_code
from nodepool.driver.azure.images import AzureImages
from nodepool.driver.common.adapter import (
    DEADLINE,
    Job,
    Leftover,
    MachineAdapter,
    MachineInstance,
    Step,
)
from nodepool.driver.common.offers import Offer
from nodepool.driver.statemachine.model import ExternalId, Instance, Resource
from nodepool.driver.utils import QuotaInformation
from nodepool.zk.cluster import same_owner

SKUS_TTL = 6 * 3600.0
FILTER_TTL = 300.0
"""Seconds for which the image found by a filter is cached."""
LEFTOVERS = {
    "instance": api.VM,
    "nic": api.NIC,
    "pip": api.ADDRESS,
    "disk": api.DISK,
    "image": api.IMAGE,
}


class View(NamedTuple):
    """A machine in Azure, and during its creation its interface and public addresses."""

    machine: dict[str, Any]
    interface: dict[str, Any] | None = None
    addresses: dict[str, dict[str, Any]] | None = None
    """By id, in lower case."""


def state_of(thing: dict[str, Any]) -> str:
    return str((thing.get("properties") or {}).get("provisioningState") or "")


class AzureAdapter(MachineAdapter):
    provider: AzureProviderConfig

    def __init__(self, provider_config: AzureProviderConfig) -> None:
        super().__init__(provider_config, classify)
        self.arm = api.Arm(provider_config)
        self.images = AzureImages(self)
        #: Names of machines in creation: only their addresses are queried.
        self._making: set[str] = set()

    def stop(self) -> None:
        super().stop()
        self.arm.close()

    @property
    def problem(self) -> str | None:
        return self.arm.login.problem

    # -- calls

    def _ask(self, what: str, function: Callable[[], Answer]) -> Answer:
        return self.read(what.replace(" ", "_"), function)

    def _list(self, kind: api.Kind) -> Iterator[dict[str, Any]]:
        name = kind[0].rpartition("/")[2]
        return self.arm.pages(self.arm.path(kind), kind[1], f"list {name}", self._ask)

    # -- launching

    def _subnet_id(self) -> str:
        provider = self.provider
        if provider.subnet_id:
            return str(provider.subnet_id)
        network = provider.network or {}

        def fetch() -> str:
            path = (
                f"resourceGroups/{network['resource-group']}/providers/Microsoft.Network/"
                "virtualNetworks/"
                f"{network['network']}/subnets/{network['subnet']}"
            )
            what = f"get subnet {network['subnet']} of network {network['network']}"
            answer = self.read(
                "get_subnet", lambda: self.arm.send("GET", path, api.SUBNET_VERSION, what)
            )
            return str(answer.body["id"])

        try:
            return str(self.memo.get("subnet", None, fetch))
        except HttpRefused as error:
            if error.status == 404:
                raise exceptions.LaunchNodepoolException(f"option network: {error}") from error
            raise

    def _image(self, job: Job) -> dict[str, str]:
        image = job.label.cloud_image
        if image is None:
            name = str(job.image)
            found = self.memo.get(
                "image", name, lambda: self.read("get_image", lambda: self.arm.get(api.IMAGE, name))
            )
            return {"id": str(found["id"])}
        if image.image_reference:
            return dict(image.image_reference)
        if image.image_id:
            return {"id": image.image_id}
        if image.community_gallery_image:
            return {
                "communityGalleryImageId": bodies.gallery(
                    "Community", image.community_gallery_image
                )
            }
        if image.shared_gallery_image:
            return {"sharedGalleryImageId": bodies.gallery("Shared", image.shared_gallery_image)}
        return {
            "id": str(
                self.memo.get("filter", image.name, lambda: self._filtered(image), FILTER_TTL)
            )
        }

    def _filtered(self, image: Any) -> str:
        """Return the id of the matching image. Raises LaunchNodepoolException: none matches."""
        wanted = image.image_filter
        tags = {str(key): str(value) for key, value in (wanted.get("tags") or {}).items()}
        found = [
            each
            for each in self._list(api.IMAGE)
            if state_of(each) == "Succeeded"
            and wanted.get("name") in (None, each.get("name"))
            and wanted.get("location") in (None, each.get("location"))
            and tags.items() <= (each.get("tags") or {}).items()
        ]
        if not found:
            raise exceptions.LaunchNodepoolException(
                f"no image of resource group {self.provider.resource_group} matches the "
                f"image-filter of cloud image {image.name}"
            )
        return str(max(found, key=lambda each: str(each.get("name")))["id"])

    def start(self, job: Job, offer: Offer) -> None:
        label = job.label
        entry = label.cloud_image or self.provider.diskimages[label.diskimage.name]
        body = bodies.machine(
            job, offer, entry, self.provider.location, self._image(job), self._subnet_id()
        )
        what = f"create virtual machine {job.name}"
        self._refuse_others(job)
        job.begun = True
        answer = self.calls.call(
            "create_virtual_machine",
            lambda: self.arm.send("PUT", self.arm.path(api.VM, job.name), api.VM[1], what, body),
            lane="write",
            idempotent=True,  # a name is given once only
            deadline=DEADLINE,
        )
        self._making.add(job.name)
        job.facts["operation"] = self.arm.operation_of(answer)

    def _refuse_others(self, job: Job) -> None:
        """Check that the name is free: creating our machine would replace the tags of another one.

        :raises LaunchStatusException: a machine of another node has the name.
        """
        try:
            found = self.read(
                "get_virtual_machine", lambda: self.arm.get(api.VM, job.name), missing_ok=True
            )
        except HttpRefused as error:
            if error.status != 404:
                raise
            return
        if not same_owner(found.get("tags") or {}, job.tags):
            raise exceptions.LaunchStatusException(
                f"virtual machine {job.name} exists already and belongs to another node"
            )

    def observe(self, keys: Sequence[str]) -> dict[str, View]:
        """Return the machines from their list, and lists of interfaces and addresses for new
        ones.
        """
        wanted = set(keys)
        machines = {
            str(each["name"]): each for each in self._list(api.VM) if each.get("name") in wanted
        }
        views = {name: View(machine) for name, machine in machines.items()}
        made = [
            name
            for name, machine in machines.items()
            if name in self._making and state_of(machine) == "Succeeded"
        ]
        if not made:
            return views
        interfaces = {str(each.get("id", "")).lower(): each for each in self._list(api.NIC)}
        of_machine = {name: interfaces.get(_interface_id(machines[name])) for name in made}
        addresses: dict[str, dict[str, Any]] = {}
        if any(_public_ids(interface) for interface in of_machine.values()):
            addresses = {str(each.get("id", "")).lower(): each for each in self._list(api.ADDRESS)}
        return {
            **views,
            **{name: View(machines[name], of_machine[name], addresses) for name in made},
        }

    def progress(self, job: Job, view: View | None) -> Instance | Step | None:
        self.seen(job, "virtual machine", view is not None)
        if view is None:
            return None
        state = state_of(view.machine)
        if state in ("Failed", "Canceled", "Deleting"):
            return lambda: self._raise_failure(job, state)
        if state != "Succeeded" or view.interface is None:
            return None
        instance = self._instance(view, job.quota)
        pool = job.label.pool
        needed = {
            "private_ipv4": pool.ipv4,
            "private_ipv6": pool.ipv6,
            "public_ipv4": pool.public_ipv4,
            "public_ipv6": pool.public_ipv6,
        }
        if any(used and not getattr(instance, name) for name, used in needed.items()):
            return None
        if pool.use_internal_ip:
            instance.interface_ip = instance.private_ipv4 or instance.private_ipv6
        self._making.discard(job.name)
        self.made_here[job.name] = str(instance.az or "")
        return instance

    def _raise_failure(self, job: Job, state: str) -> None:
        """Raise the reason that Azure reports; on a thread of the lane "write"."""
        code, message, operation = state, "no reason given", job.facts.get("operation")
        if operation is not None:
            try:
                self.read(
                    "get_operation", lambda: self.arm.poll(operation, f"virtual machine {job.name}")
                )
            except api.OperationFailed as error:
                code, message = error.code, error.message
            except Exception as error:
                self.log.warning(
                    "Cannot query why virtual machine %s is %s: %s", job.name, state, error
                )
        text = f"virtual machine {job.name} is {state}: {code}: {message}"
        raise self.failed(job, kind_of_code(code, message) or ErrorKind.OTHER, text)

    def _instance(self, view: View, quota: QuotaInformation) -> MachineInstance:
        machine = view.machine
        instance = MachineInstance(str(machine["name"]), machine.get("tags") or {}, quota)
        instance.cloud = "Azure"
        instance.region = machine.get("location")
        instance.az = str((machine.get("zones") or [""])[0])
        for properties in _address_configurations(view.interface):
            version = "4" if properties.get("privateIPAddressVersion", "IPv4") == "IPv4" else "6"
            setattr(instance, f"private_ipv{version}", properties.get("privateIPAddress"))
            public_id = str((properties.get("publicIPAddress") or {}).get("id") or "").lower()
            public = (view.addresses or {}).get(public_id) or {}
            setattr(
                instance, f"public_ipv{version}", (public.get("properties") or {}).get("ipAddress")
            )
        instance.interface_ip = (
            instance.public_ipv4
            or instance.public_ipv6
            or instance.private_ipv4
            or instance.private_ipv6
        )
        return instance

    # -- deleting

    def remove(self, key: str) -> bool:
        self._making.discard(key)
        if self.made_here.pop(key, None) is None:
            found = next((each for each in self._list(api.VM) if each.get("name") == key), None)
            if found is not None and not self.is_ours(key, found.get("tags") or {}):
                return False
        what = f"delete virtual machine {key}"
        return self.delete(
            "delete_virtual_machine",
            lambda: (
                self.arm.send("DELETE", self.arm.path(api.VM, key), api.VM[1], what).status != 204
            ),
        )

    def is_lost(self, view: View | None) -> bool:
        return view is None or state_of(view.machine) == "Deleting"

    # -- lists

    def listInstances(self) -> Iterator[Instance]:
        gone = self.gone.recent()
        for machine in self._list(api.VM):
            if machine.get("name") not in gone:
                profile = (machine.get("properties") or {}).get("hardwareProfile") or {}
                yield self._instance(
                    View(machine), self.known_size(str(profile.get("vmSize") or ""))
                )

    def listResources(self) -> Iterable[Leftover]:
        return self.list_for_leaks(
            [(kind, functools.partial(self._leftovers, kind)) for kind in LEFTOVERS]
        )

    def _leftovers(self, kind: str) -> Iterator[Leftover]:
        for found in self._list(LEFTOVERS[kind]):
            yield Leftover(found.get("tags") or {}, kind, str(found["name"]))

    def deleteResource(self, resource: Resource) -> None:
        self.log.info("Deleting leaked %s: %s", resource.type, resource.id)
        kind = LEFTOVERS[resource.type]
        self.delete(
            f"delete_{resource.type}",
            lambda: self.arm.send(
                "DELETE",
                self.arm.path(kind, resource.id),
                kind[1],
                f"delete {resource.type} {resource.id}",
            ),
        )

    def _listImages(self) -> list[dict[str, Any]]:
        """List the images for ``nodepool alien-image-list``."""
        return [
            {"id": each["name"], "name": each["name"], "properties": each.get("tags") or {}}
            for each in self._list(api.IMAGE)
        ]

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        path = f"providers/Microsoft.Compute/locations/{self.provider.location}/usages"
        limits = {
            (each.get("name") or {}).get("value"): each.get("limit")
            for each in self.arm.pages(path, api.USAGES_VERSION, "list usages", self._ask)
        }
        metrics = {"cores": "cores", "instances": "virtualMachines"}
        return self.limits(limits, metrics, "Azure", self.provider.location)

    def _skus(self) -> dict[str, dict[str, float]]:
        """Return the numeric capabilities, by name of the size."""
        location = self.provider.location
        found: dict[str, dict[str, float]] = {}
        query = {"$filter": f"location eq '{location}'"}
        for sku in self.arm.pages(
            "providers/Microsoft.Compute/skus/", api.SKUS_VERSION, "list skus", self._ask, **query
        ):
            places = [str(each).lower() for each in sku.get("locations") or []]
            if sku.get("resourceType") in (None, "virtualMachines") and location.lower() in places:
                told = {
                    str(each.get("name")): api.number(each.get("value"))
                    for each in sku.get("capabilities") or []
                }
                found[str(sku.get("name"))] = {
                    name: value for name, value in told.items() if value is not None
                }
        return found

    def size_of(self, size: str) -> QuotaInformation:
        sku = self.memo.get("skus", None, self._skus, SKUS_TTL).get(size)
        if sku is None:
            self.warn_once(
                f"sku {size}",
                "Azure has no size %s in %s; it counts without cores and memory",
                size,
                self.provider.location,
            )
            return QuotaInformation(instances=1)
        args: dict[str, Any] = {"instances": 1}
        if "vCPUs" in sku:
            args["cores"] = int(sku["vCPUs"])
        if "MemoryGB" in sku:
            args["ram"] = int(sku["MemoryGB"] * 1024)
        return QuotaInformation(**args)

    def getConsoleLog(self, label: AzureLabel, external_id: ExternalId) -> str | None:
        if not label.console_log or not external_id:
            return None
        path = f"{self.arm.path(api.VM, str(external_id))}/retrieveBootDiagnosticsData"
        what = f"boot diagnostics of {external_id}"
        told = self.read(
            "retrieve_boot_diagnostics", lambda: self.arm.send("POST", path, api.VM[1], what)
        )
        url = (told.body or {}).get("serialConsoleLogBlobUri")
        if not url:
            return None
        return str(
            self.read(
                "get_console_log",
                lambda: send(self.arm.session, "GET", str(url), what, parse=False),
            ).body
        )


def _interface_id(machine: dict[str, Any]) -> str:
    interfaces = ((machine.get("properties") or {}).get("networkProfile") or {}).get(
        "networkInterfaces"
    ) or [{}]
    return str(interfaces[0].get("id") or "").lower()


def _address_configurations(interface: dict[str, Any] | None) -> list[dict[str, Any]]:
    found = ((interface or {}).get("properties") or {}).get("ipConfigurations") or []
    return [each.get("properties") or {} for each in found]


def _public_ids(interface: dict[str, Any] | None) -> list[str]:
    return [
        each["publicIPAddress"]["id"]
        for each in _address_configurations(interface)
        if each.get("publicIPAddress")
    ]
