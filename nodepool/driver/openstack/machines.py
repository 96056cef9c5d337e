"""State machines for creating and deleting a server (OST-2.3 and OST-2.4).

Every API call runs on the adapter's threads: a slow cloud delays no other machine. While a machine
waits for a server, that server is queried when a change is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.driver.common.dynamic import formatted
from nodepool.driver.openstack.api.errors import (
    classify,
    is_full,
    is_quota,
    launch_error,
    sdk_error,
    tidy,
)
from nodepool.driver.openstack.api.networks import FLOATING, has_floating
from nodepool.driver.openstack.config import ProviderCloudImage
from nodepool.driver.openstack.ladder import Offer, offers_of
from nodepool.driver.openstack.servers import (
    NodepoolOpenStackServer,
    OpenStackInstance,
    fault_message,
    is_deleted,
    quota_from_flavor,
    volumes_of,
)
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.statemachine.steps import Deletion, SteppedMachine, Steps, Wait
from nodepool.logconfig import Log
from nodepool.zk.cluster import same_owner
from nodepool.zk.records import NodeRequest

FLOATING_IP_TIMEOUT = 60.0
"""Seconds for a floating IP to become active."""
DELETE_AGAIN = 30.0
"""Seconds after which a server whose deletion was accepted, but has not started, is deleted
again.
"""


class OpenStackDeleteStateMachine(Deletion):
    SERVER_DELETE = "delete server"
    SERVER_DELETING = "deleting server"

    def steps(self) -> Steps[None]:
        adapter, server_id, gone = self.adapter, self.external_id, False
        if not server_id:
            return
        if not isinstance(server_id, str):
            raise exceptions.NotFound(f"{server_id!r} is not the id of a server")
        yield from self.call(adapter._submitDelete(adapter.floating_ips.delete_of, server_id))
        while not gone:
            self.state = self.SERVER_DELETE
            existed = yield from self.call(adapter._submitDelete(adapter._deleteServer, server_id))
            gone = existed is False or (yield from self._wait_deleted())

    def _wait_deleted(self) -> Steps[bool]:
        """Wait until the server is deleted. Return False if that has to be requested again."""
        self.state = self.SERVER_DELETING
        watch = self.adapter.watched_servers.watch(self.external_id, self._wake, "delete")
        while True:
            look = yield from self.answer(watch)
            if look.value is None or is_deleted(look.value):
                watch.end()
                self.adapter._gone.add(self.external_id)
                return True
            if (
                look.value.get("OS-EXT-STS:task_state") != "deleting"
                and look.asked - watch.started > DELETE_AGAIN
            ):
                # Accepted and forgotten by the cloud, or failed inside it.
                self.log.warning(
                    "Server %s is still %s, deleting it again",
                    self.external_id,
                    look.value.get("status"),
                )
                watch.end(reached=False)
                return False


class OpenStackCreateStateMachine(SteppedMachine):
    SERVER_CREATING_SUBMIT = "submit creating server"
    SERVER_CREATING = "creating server"
    FLOATING_IP_CREATING = "creating floating ip"
    FLOATING_IP_ATTACHING = "attaching floating ip"

    def __init__(
        self,
        adapter: Any,
        hostname: str,
        label: DriverLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.log = log
        self.provider = adapter.provider
        self.hostname = hostname
        self.label = label
        self.server: Any = None
        if image_external_id:
            image_name = label.diskimage.name
            diskimage = self.provider.diskimages[image_name]
            self.config_drive = diskimage.config_drive
            self.image: Mapping[str, Any] = {"id": image_external_id}
        else:
            image_name = label.cloud_image.name
            self.config_drive = label.cloud_image.config_drive
            self.image = self._cloudImage(label.cloud_image)
        self.metadata = self._serverMetadata(image_name, metadata, request)
        self.offers = offers_of(label, az, adapter._findFlavor)
        self._choose(next(iter(self.offers)))

    def _choose(self, offer: Offer) -> None:
        self.offer, self.flavor, self.az = offer, self.offers[offer], offer.az
        self.quota = quota_from_flavor(self.flavor, label=self.label)

    def _call(
        self,
        api: Callable[..., Any],
        *args: object,
        undo: Callable[[Future[Any]], object] | None = None,
    ) -> Steps[Any]:
        return self.call(self.adapter._submitApi(self._translated, api, *args), undo)

    def _translated(self, api: Callable[..., Any], *args: object) -> Any:
        """Make a call on the executor, translating errors for the launcher."""
        try:
            return api(*args)
        except Exception as exc:
            tidy(exc)
            told = self._translate(exc)
            if told is exc:
                raise
            raise told from exc

    def _cloudImage(self, cloud_image: ProviderCloudImage) -> Any:
        if cloud_image.image_id:
            return {"id": cloud_image.image_id}
        image = self.adapter._findImage(cloud_image.external_name)
        if not image:
            raise exceptions.LaunchNodepoolException(
                f"Unable to find image {cloud_image.external_name} in provider {self.provider.name}"
            )
        return image

    def _serverMetadata(
        self, image_name: str, metadata: dict[str, str], request: NodeRequest
    ) -> dict[str, Any]:
        label = self.label
        return {
            "groups": ",".join([self.provider.name, image_name, label.name]),
            **label.instance_properties,
            **formatted(label.dynamic_instance_properties, request, self.log, "property"),
            # The nodepool keys identify the server and cannot be overridden.
            **metadata,
        }

    def _createServer(self) -> Any:
        """Create the server of the first offer that the cloud accepts, on the executor."""
        if len(self.offers) == 1:
            return self._attempt(self.offer)
        where = f"Provider {self.provider.name}, pool {self.label.pool.name}, label"
        server, _offer = self.adapter.sold_out.try_in_order(
            list(self.offers),
            self._attempt,
            self._kind_of,
            f"{where} {self.label.name}",
            self.log,
            settled=False,
        )
        return server

    def _kind_of(self, error: BaseException) -> ErrorKind:
        """Return the type of a refusal, OTHER if a server exists, which has to be deleted first."""
        tidy(error)  # it is logged
        told = self._translate(error) if isinstance(error, Exception) else error
        if self.external_id is not None:
            return ErrorKind.OTHER
        if isinstance(told, exceptions.QuotaException):
            return ErrorKind.QUOTA
        return classify(error)

    def _attempt(self, offer: Offer) -> Any:
        """Create the server of the offer. One that exists in spite of an error is remembered."""
        self._choose(offer)
        label, pool = self.label, self.label.pool
        try:
            server = self.adapter._createServer(
                self.hostname,
                image=self.image,
                flavor=self.flavor,
                key_name=label.key_name,
                az=self.az,
                config_drive=self.config_drive,
                networks=label.networks,
                security_groups=label.security_groups or pool.security_groups,
                boot_from_volume=label.boot_from_volume,
                volume_size=label.volume_size,
                instance_properties=self.metadata,
                userdata=label.userdata,
                **self._extras(),
            )
        except Exception as exc:
            self._noteFailedServer(exc)
            if sdk_error(exc, "BadRequestException"):
                # A stale zone, image, flavor or network. Renewed here: other launches do not wait
                # for it.
                self.adapter._refresh_related(label, str(exc))
            raise
        return server

    def _extras(self) -> dict[str, Any]:
        """Return the set options that 11.0.0 lacks: methods that tests replace do not know them."""
        label = self.label
        given = {
            "volume_type": label.volume_type,
            "server_group": label.server_group,
            "scheduler_hints": label.scheduler_hints,
        }
        return {key: value for key, value in given.items() if value}

    def _translate(self, exc: Exception) -> Exception:
        """Return the exception for the launcher after a failed call."""
        server_id = self.external_id if self.server is not None else None
        label, flavor = self.label, self.offer.flavor if len(self.offers) > 1 else None
        return launch_error(exc, self.provider.name, label, self.az, self.image, server_id, flavor)

    def _noteFailedServer(self, exc: Exception) -> None:
        extra = getattr(exc, "extra_data", None)
        created = extra.get("server") if isinstance(extra, dict) else None
        server_id = getattr(exc, "resource_id", None) or (created["id"] if created else None)
        if not server_id and classify(exc) is ErrorKind.TRANSIENT:
            try:
                server_id = self._lostServer()
            except Exception as error:
                self.log.warning(
                    "Creation of %s is unclear, leaving it to the leak cleanup: %s",
                    self.hostname,
                    error,
                )
            if server_id:
                self.log.warning(
                    "The cloud has created %s without a proper answer; removing it", self.hostname
                )
        if not server_id:
            return
        self.external_id = server_id
        try:
            server = self.adapter._api.get_server_by_id(server_id)
        except Exception as error:
            self.log.warning("The failed server %s cannot be read: %s", server_id, error)
            return
        fault = fault_message(server)
        if fault:
            self.log.error("Server %s failed: %s", server_id, fault)
        if "quota" in fault.lower():
            raise self._refused(exceptions.QuotaException("Quota exceeded")) from exc

    def _lostServer(self) -> str | None:
        """Return the id of a server whose creation was not answered properly, if it exists."""
        for server in self.adapter._api.find_servers(self.hostname):
            if same_owner(server.get("metadata") or {}, self.metadata):
                return str(server["id"])
        return None

    def _tagVolumes(self, server: NodepoolOpenStackServer) -> None:
        """Tag the volumes that nova created for the server as ours, for the leak cleanup."""
        tags = {key: value for key, value in self.metadata.items() if key.startswith("nodepool_")}
        for volume_id in volumes_of(server):
            try:
                self.adapter._api.tag_volume(volume_id, tags)
            except Exception as error:
                self.log.warning(
                    "Volume %s of server %s cannot be tagged: %s", volume_id, server["id"], error
                )

    def _inspect(self, server: NodepoolOpenStackServer) -> tuple[Any, bool]:
        """Read addresses and the need for a floating IP of an active server, on the executor."""
        adapter = self.adapter
        if self.label.boot_from_volume:
            self._tagVolumes(server)
        server = adapter._expandServer(server)
        needed = bool(
            self.label.pool.auto_floating_ip
            and adapter._api.needs_floating_ip(server, adapter._networks())
        )
        if not needed and not has_floating(server):
            adapter.floating_ips.note(server["id"], [])
        return server, needed

    def steps(self) -> Steps[OpenStackInstance]:
        self.state = self.SERVER_CREATING_SUBMIT
        self.server = yield from self._call(self._createServer, undo=self._removeLate)
        self.external_id = self.server["id"]
        self.state = self.SERVER_CREATING
        yield from self._active()
        self.adapter.sold_out.worked(self.offer)
        self.server, needs_floating_ip = yield from self._call(self._inspect, self.server)
        if needs_floating_ip:
            self.state = self.FLOATING_IP_CREATING
            floating_ip = yield from self._call(self._createFloatingIp)
            if floating_ip is None:
                self.log.info("No port of server %s can have a floating IP", self.external_id)
            else:
                self.state = self.FLOATING_IP_ATTACHING
                floating_ip = yield from self._attached(floating_ip)
                self.server = yield from self._call(self._showFloatingIp, floating_ip)
        return OpenStackInstance(self.provider, self.server, self.quota)

    def _createFloatingIp(self) -> Any:
        return self.adapter.floating_ips.create(self.server, self.adapter._networks())

    def _removeLate(self, future: Future[Any]) -> None:
        """Delete a server that an abandoned creation has created, perhaps in spite of an error."""
        server_id = (
            self.external_id
            if future.cancelled() or future.exception() is not None
            else future.result()["id"]
        )
        if server_id:
            self.log.warning(
                "Server %s was created after its launch was abandoned, deleting it", server_id
            )
            self.adapter._submitDelete(self.adapter._deleteServer, server_id)

    def _attached(self, floating_ip: Any) -> Steps[Any]:
        """Wait until the floating IP is active."""
        until = time.monotonic() + FLOATING_IP_TIMEOUT
        watch = self.adapter.watched_ips.watch(floating_ip["id"], self._wake, "attach")
        while True:
            yield Wait(watch=watch)
            look = watch.latest
            if look is not None and look.value is not None and look.value["status"] == "ACTIVE":
                watch.end()
                return look.value
            if time.monotonic() > until:
                raise exceptions.IPAddTimeoutException(
                    f"Floating IP {floating_ip['floating_ip_address']} of server "
                    f"{self.external_id} did not become active"
                    f" within {FLOATING_IP_TIMEOUT:.0f} s"
                )
            if look is not None and look.value is None:
                raise exceptions.LaunchNetworkException(
                    f"Floating IP {floating_ip['id']} has vanished"
                )

    def _showFloatingIp(self, floating_ip: Any) -> Any:
        """Return the server with its floating IP, which the compute service shows only later."""
        fixed, floating = floating_ip["fixed_ip_address"], floating_ip["floating_ip_address"]
        for interfaces in self.server["addresses"].values():
            for interface in list(interfaces):
                if interface["addr"] == fixed and floating not in [
                    known["addr"] for known in interfaces
                ]:
                    interfaces.append({**interface, "addr": floating, "OS-EXT-IPS:type": FLOATING})
        return self.adapter._expandServer(self.server)

    def _active(self) -> Steps[None]:
        """Wait until the server is active and has addresses. Raises when it failed."""
        watch = self.adapter.watched_servers.watch(
            self.external_id, self._wake, ("launch", self.label.name)
        )
        until: float | None = None
        while True:
            look = yield from self.answer(watch)
            if look.value is None:
                # Not visible yet, or deleted by others.
                if look.asked - watch.started > self.adapter.SETTLING:
                    raise exceptions.LaunchStatusException(
                        f"Server {self.external_id} has vanished"
                    )
                continue
            self.server = look.value
            status = str(self.server.get("status") or "").upper()
            if status in ("ERROR", "DELETED", "SOFT_DELETED"):
                raise self._failure(status)
            if status == "ACTIVE":
                until = until or time.monotonic() + self.adapter.SETTLING
                if self.server.get("addresses") or time.monotonic() >= until:
                    watch.end()
                    return

    def _refused(self, error: Exception) -> Exception:
        """Return the exception for a server that exists and was refused what it needs."""
        if self.adapter.sold_out.next_after(self.offer, list(self.offers)):
            return exceptions.OfferRefusedException(
                f"{self.offer.describe()}: {error}; another offer will be tried"
            )
        return error

    def _failure(self, status: str) -> Exception:
        fault = fault_message(self.server)
        self.log.error("Server %s in error state: %s", self.external_id, fault or "no fault given")
        if is_quota(fault):
            return self._refused(exceptions.QuotaException(f"Quota exceeded: {fault}"))
        if is_full(fault):
            return self._refused(
                exceptions.CapacityException(f"No capacity for the server: {fault}")
            )
        return exceptions.LaunchStatusException(
            "Server in error state" if status == "ERROR" else "Server was deleted"
        )
