"""IBM Cloud VPC behind the state machine framework (IBM-5 to IBM-13)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from nodepool.driver.ibmvpc import names
from nodepool.driver.ibmvpc.client import VpcClient
from nodepool.driver.ibmvpc.config import IBMVPCProviderConfig
from nodepool.driver.ibmvpc.errors import classify, kind_of_code
from nodepool.driver.ibmvpc.images import IBMVPCImages
from nodepool.driver.statemachine.model import Instance, Resource
from nodepool.driver.utils import QuotaInformation

FACTS_TTL = 3600.0
IMAGE_TTL = 300.0
"""Seconds for which the image found by a name or filter is cached."""
ENDED = ("failed", "stopping", "stopped", "deleting")


class View(NamedTuple):
    """A server and its floating address, as IBM has them now."""

    server: dict[str, Any] | None
    address: dict[str, Any] | None = None


class IBMVPCAdapter(MachineAdapter):
    provider: IBMVPCProviderConfig

    def __init__(self, provider_config: IBMVPCProviderConfig) -> None:
        super().__init__(provider_config, classify)
        self.client = VpcClient(provider_config.credentials_file, provider_config.region)
        self.images = IBMVPCImages(self)

    def stop(self) -> None:
        super().stop()
        self.client.close()
        self.images.close()

    @property
    def problem(self) -> str | None:
        return self.client.problem

    @property
    def _floating(self) -> bool:
        """Return whether any pool uses floating addresses."""
        return any(pool.public_ipv4 for pool in self.provider.pools.values())

    # -- calls

    def change(
        self,
        operation: str,
        method: str,
        path: str,
        what: str,
        body: object = None,
        repeat: bool = False,
    ) -> dict[str, Any]:
        """Make a changing call and return the created object."""

        def ask() -> dict[str, Any]:
            found = self.client.send(method, "VPC", path, what, body)
            if "id" not in found:
                raise NoAnswer(f"{what}: the answer is not from IBM")
            return found

        return self.calls.call(operation, ask, lane="write", idempotent=repeat, deadline=DEADLINE)

    def _list(self, path: str, key: str, **params: str) -> list[dict[str, Any]]:
        """Return all entries of a list; its pages count as one call."""
        return self.read(f"list_{key}", lambda: list(self.client.pages(path, key, **params)))

    def _servers(self, names_wanted: Sequence[str] = ()) -> list[dict[str, Any]]:
        one = {"name": names_wanted[0]} if len(names_wanted) == 1 else {}
        return self._list("/instances", "instances", **one)

    def _addresses(self) -> list[dict[str, Any]]:
        return self._list("/floating_ips", "floating_ips")

    # -- facts

    def _named(self, path: str, key: str, name: str, option: str) -> dict[str, Any]:
        """Return an entry of a list that rarely changes, refreshing the list if it is missing.

        :raises LaunchNodepoolException: no entry has this name.
        """

        def fetch() -> dict[str, dict[str, Any]]:
            return {str(each["name"]): each for each in self._list(path, key)}

        if name not in self.memo.get(key, None, fetch, FACTS_TTL):
            self.memo.renew({key}, (), pause=10.0)
        found = self.memo.get(key, None, fetch, FACTS_TTL).get(name)
        if found is None:
            raise exceptions.LaunchNodepoolException(
                f"option {option}: {name} does not exist in region {self.provider.region}"
            )
        return dict(found)

    def _groups(self) -> dict[str, str]:
        """Return the ids of the resource groups, by name."""

        def fetch() -> dict[str, str]:
            told = self.client.send(
                "GET", "RESOURCE_MANAGER", "/v2/resource_groups", "list resource groups"
            )
            return {str(each["name"]): str(each["id"]) for each in told.get("resources") or []}

        return self.memo.get(
            "groups", None, lambda: self.read("list_resource_groups", fetch), FACTS_TTL
        )

    def group_id(self, name: str) -> str:
        """Return the id of our resource group, creating it if needed."""
        if name not in self._groups():
            self.memo.forget({"groups"})
        found = self._groups().get(name)
        if found is None:
            try:
                made = self.calls.call(
                    "create_resource_group",
                    lambda: self.client.send(
                        "POST",
                        "RESOURCE_MANAGER",
                        "/v2/resource_groups",
                        f"create resource group {name}",
                        {"name": name},
                    ),
                    lane="write",
                    deadline=DEADLINE,
                )
            except HttpRefused as error:
                if error.status != 409:
                    raise
                made = {}  # created concurrently
            self.memo.forget({"groups"})
            found = str(made.get("id") or "") or self._groups().get(name)
        if found is None:
            raise exceptions.LaunchNodepoolException(
                f"resource group {name} exists, but IBM does not list it"
            )
        return found

    def _metadata(self, thing: dict[str, Any]) -> dict[str, str]:
        group = thing.get("resource_group") or {}
        name = group.get("name")
        if name is None:
            name = next(
                (known for known, key in self._groups().items() if key == group.get("id")), None
            )
        return names.metadata(name, str(thing.get("name") or ""))

    def _is_ours(self, thing: dict[str, Any]) -> bool:
        provider: str = self.provider.name
        return self._metadata(thing).get("nodepool_provider_name") == provider

    def _image(self, job: Job) -> dict[str, str]:
        image = job.label.cloud_image
        if image is None:
            return {"id": str(job.image)}
        if image.image_id:
            return {"id": image.image_id}
        if image.image_href:
            return {"href": image.image_href}
        return {
            "id": str(
                self.memo.get("image", image.name, lambda: self._wanted_image(image), IMAGE_TTL)
            )
        }

    def _wanted_image(self, image: Any) -> str:
        """Return the image. Raises LaunchNodepoolException: it does not exist."""
        if image.image_name:
            found = self._list("/images", "images", name=image.image_name)
            found = [each for each in found if each.get("name") == image.image_name]
            what = f"image-name {image.image_name}"
        else:
            found = [
                each
                for each in self._list("/images", "images")
                if _matches(each, image.image_filter)
            ]
            found.sort(key=lambda each: str(each.get("created_at") or ""), reverse=True)
            what = "its image-filter"
        if not found:
            raise exceptions.LaunchNodepoolException(
                f"cloud image {image.name}: no image is found by {what}"
            )
        return str(found[0]["id"])

    # -- launching

    def start(self, job: Job, offer: Offer) -> None:
        pool, zone = job.label.pool, str(offer.place)
        group = {"id": self.group_id(names.group(self.provider.name, pool.name))}
        body = self._server_body(job, offer, group)
        job.begun = True
        if pool.public_ipv4:
            address = {"name": job.name, "resource_group": group, "zone": {"name": zone}}
            made = self.change(
                "create_floating_ip",
                "POST",
                "/floating_ips",
                f"create floating address {job.name}",
                address,
            )
            job.facts["address"] = str(made["id"])
        try:
            self.change("create_instance", "POST", "/instances", f"create server {job.name}", body)
        except HttpRefused:
            if "address" in job.facts:
                self._delete_thing("floating_ips", job.facts.pop("address"), job.name)
            raise

    def _server_body(self, job: Job, offer: Offer, group: dict[str, str]) -> dict[str, Any]:
        label = job.label
        subnet = self._named("/subnets", "subnets", label.subnets[offer.place], "subnet")
        zone = (subnet.get("zone") or {}).get("name")
        if zone != offer.place:
            raise exceptions.LaunchNodepoolException(
                f"option subnet: {subnet['name']} is in zone {zone}, not in {offer.place}"
            )
        entry = label.cloud_image or self.provider.diskimages[label.diskimage.name]
        body: dict[str, Any] = {
            "keys": [
                {"id": str(self._named("/keys", "keys", key, "keys")["id"])} for key in entry.keys
            ],
            "name": job.name,
            "profile": {"name": offer.size},
            "resource_group": group,
            "vpc": {"id": str(self._named("/vpcs", "vpcs", self.provider.vpc, "vpc")["id"])},
            "image": self._image(job),
            "primary_network_interface": {"name": "eth0", "subnet": {"id": str(subnet["id"])}},
            "zone": {"name": offer.place},
            "boot_volume_attachment": {
                "volume": {"name": job.name, "profile": {"name": "general-purpose"}},
                "delete_volume_on_instance_delete": True,
            },
        }
        if label.user_data:
            body["user_data"] = label.user_data
        return body

    def observe(self, keys: Sequence[str]) -> dict[str, View]:
        wanted = set(keys)
        servers = {
            str(each["name"]): each
            for each in self._servers(list(keys))
            if each.get("name") in wanted and self._is_ours(each)
        }
        addresses = {}
        if self._floating:
            addresses = {
                str(each["name"]): each
                for each in self._addresses()
                if each.get("name") in wanted and self._is_ours(each)
            }
        return {
            name: View(servers.get(name), addresses.get(name))
            for name in servers.keys() | addresses.keys()
        }

    def progress(self, job: Job, view: View | None) -> Instance | Step | None:
        view = view or View(None)
        server, address = view.server, view.address
        self.seen(job, "server", server is not None)
        if server is None:
            return None
        status = str(server.get("status") or "")
        if status in ENDED:
            reason = (server.get("status_reasons") or [{}])[0]
            code, message = (
                str(reason.get("code") or ""),
                str(reason.get("message") or "no reason given"),
            )
            text = f"server {job.name} is {status}: {code}: {message}"
            raise self.failed(job, kind_of_code(code, message) or ErrorKind.OTHER, text)
        wants_address = "address" in job.facts
        if wants_address and address is not None and address.get("status") == "failed":
            raise exceptions.LaunchStatusException(f"floating address {job.name} is failed")
        if status != "running":
            return None
        if wants_address:
            if address is None or address.get("status") != "available":
                return None
            if not address.get("target"):
                return lambda: self._attach(job, server)
        instance = self._instance(view, job.tags, job.quota)
        if not instance.interface_ip:
            return None
        if job.label.pool.use_internal_ip:
            instance.interface_ip = instance.private_ipv4
        return instance

    def _attach(self, job: Job, server: dict[str, Any]) -> View | None:
        interface = (server.get("primary_network_interface") or {}).get("id")
        path = (
            f"/instances/{server['id']}/network_interfaces/{interface}/floating_ips/"
            f"{job.facts['address']}"
        )
        address = self.change(
            "attach_floating_ip", "PUT", path, f"attach floating address {job.name}", repeat=True
        )
        return View(server, address) if address.get("target") else None

    def _instance(
        self, view: View, metadata: dict[str, str], quota: QuotaInformation
    ) -> MachineInstance:
        server = view.server or {}
        interface = server.get("primary_network_interface") or {}
        instance = MachineInstance(str(server.get("name")), metadata, quota)
        instance.cloud = "IBM"
        instance.region = self.provider.region
        instance.az = (server.get("zone") or {}).get("name")
        # API versions before 2022 use the other name.
        instance.private_ipv4 = (interface.get("primary_ip") or {}).get("address") or interface.get(
            "primary_ipv4_address"
        )
        instance.public_ipv4 = (view.address or {}).get("address")
        instance.interface_ip = instance.public_ipv4 or instance.private_ipv4
        return instance

    # -- deleting

    def _delete_thing(self, kind: str, thing_id: str, name: str) -> bool:
        what = f"delete {kind} {name}"
        return self.delete(
            f"delete_{kind}", lambda: self.client.send("DELETE", "VPC", f"/{kind}/{thing_id}", what)
        )

    def remove(self, key: str) -> bool:
        view = self.observe([key]).get(key)
        if view is None:
            return False
        asked = []
        if view.server is not None:
            asked.append(self._delete_thing("instances", str(view.server["id"]), key))
        if view.address is not None:
            asked.append(self._delete_thing("floating_ips", str(view.address["id"]), key))
        return any(asked)

    def is_lost(self, view: View | None) -> bool:
        return view is None or view.server is None or str(view.server.get("status")) in ENDED

    # -- lists

    def listInstances(self) -> Iterator[Instance]:
        gone = self.gone.recent()
        for server in self._servers():
            if server.get("name") not in gone:
                size = str((server.get("profile") or {}).get("name") or "")
                yield self._instance(View(server), self._metadata(server), self.known_size(size))

    def listResources(self) -> Iterable[Leftover]:
        kinds = [
            ("instance", lambda: self._leftovers("instance", self._servers())),
            ("floatingip", lambda: self._leftovers("floatingip", self._addresses())),
            ("image", lambda: self._leftovers("image", self._own_images())),
        ]
        if self.provider.object_storage:
            kinds += [("object", self._leftover_objects), ("parts", self._leftover_parts)]
        return self.list_for_leaks(kinds)

    def _own_images(self) -> list[dict[str, Any]]:
        return [
            each for each in self._list("/images", "images") if each.get("owner_type") == "user"
        ]

    def _leftovers(self, kind: str, things: Iterable[dict[str, Any]]) -> Iterator[Leftover]:
        for thing in things:
            yield Leftover(self._metadata(thing), kind, str(thing["id"]))

    def _leftover_objects(self) -> Iterator[Leftover]:
        for key in self.images.objects():
            group, _, name = key.rpartition("/")
            yield Leftover(names.metadata(group, name), "object", key)

    def _leftover_parts(self) -> Iterator[Leftover]:
        for key, upload_id in self.images.unfinished():
            group, _, name = key.rpartition("/")
            yield Leftover(names.metadata(group, name), "parts", f"{key}?{upload_id}")

    def deleteResource(self, resource: Resource) -> None:
        self.log.info("Deleting leaked %s: %s", resource.type, resource.id)
        if resource.type == "object":
            self.images.delete_object(resource.id)
        elif resource.type == "parts":
            self.images.remove_parts(*resource.id.split("?", 1))
        elif resource.type == "image":
            self.images.delete(resource.id)
        else:
            self._delete_thing(
                "instances" if resource.type == "instance" else "floating_ips",
                resource.id,
                resource.id,
            )

    def _listImages(self) -> list[dict[str, Any]]:
        """List the images for ``nodepool alien-image-list``."""
        return [
            {"id": each["id"], "name": each.get("name"), "properties": self._metadata(each)}
            for each in self._own_images()
        ]

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        return QuotaInformation(default=float("inf"), **self.provider.quota)

    def size_of(self, size: str) -> QuotaInformation:
        def fetch() -> dict[str, dict[str, Any]]:
            return {
                str(each["name"]): each for each in self._list("/instance/profiles", "profiles")
            }

        found = self.memo.get("profiles", None, fetch, FACTS_TTL).get(size)
        if found is None:
            self.warn_once(
                f"profile {size}", "IBM has no profile %s; it counts without cores and memory", size
            )
            return QuotaInformation(instances=1)
        args = {"instances": 1}
        for name, key, factor in (("cores", "vcpu_count", 1), ("ram", "memory", 1024)):
            value = (found.get(key) or {}).get("value")
            if isinstance(value, int):
                args[name] = value * factor
        return QuotaInformation(**args)


def _matches(image: dict[str, Any], wanted: dict[str, Any]) -> bool:
    system = image.get("operating_system") or {}
    for option, value in (wanted.get("operating-system") or {}).items():
        if system.get(option.replace("-", "_")) != value:
            return False
    return all(
        image.get(key.replace("-", "_")) == wanted[key]
        for key in ("owner-type", "status")
        if key in wanted
    )
