"""State machines for creating and deleting a server (driver-openstack.md 2.3 and 2.4).

Every API call runs on the adapter's executor: a slow cloud delays no other machine.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.driver import statemachine
from nodepool.driver.openstack.servers import OpenStackInstance, is_deleted, quota_from_flavor, sdk_error


class _ApiMachine(statemachine.StateMachine):
    """Runs one API call at a time and wakes when it is done."""

    def __init__(self, adapter: Any, log: Any) -> None:
        super().__init__()
        self.adapter = adapter
        self.log = log
        self.future: Future[Any] | None = None

    def submit(self, api: Any, *args: Any, **kw: Any) -> None:
        self.future = self.adapter._submitApi(api, *args, **kw)
        self.waiting_future = self.future

    def finished(self) -> bool:
        """True when the call under way is done; its error is raised by :meth:`result`."""
        return self.future is not None and self.future.done()

    def result(self) -> Any:
        future, self.future, self.waiting_future = self.future, None, None
        assert future is not None
        return future.result()


class OpenStackDeleteStateMachine(_ApiMachine):
    FLOATING_IP_DELETING = "deleting floating ip"
    SERVER_DELETE_SUBMIT = "submit delete server"
    SERVER_DELETE = "delete server"
    SERVER_DELETING = "deleting server"
    COMPLETE = "complete"

    def __init__(self, adapter: Any, external_id: Any, log: Any) -> None:
        super().__init__(adapter, log)
        self.external_id = external_id
        self.floating_ips: set[Any] = set()
        self.server: Any = None

    def _deleteFloatingIps(self) -> set[Any]:
        """Ids of the floating IPs whose deletion was asked for."""
        server = self.adapter._getServer(self.external_id)
        self.server = server
        if not server or not server.get("addresses") or not self.adapter._hasFloatingIps():
            return set()
        addresses = {
            interface["addr"]
            for interfaces in server["addresses"].values()
            for interface in interfaces
            if interface.get("OS-EXT-IPS:type") == "floating"
        }
        if not addresses:
            return set()
        found = {
            fip["id"] for fip in self.adapter._listFloatingIps() if fip["floating_ip_address"] in addresses
        }
        for fip_id in found:
            self.adapter._deleteFloatingIp(fip_id)
        return found

    def _floatingIpsLeft(self) -> bool:
        return any(
            fip["id"] in self.floating_ips and fip["status"] != "DOWN" for fip in self.adapter._listFloatingIps()
        )

    def advance(self) -> None:
        if not self.external_id:
            self.complete = True
            return
        if self.state == self.START:
            if self.future is None:
                self.submit(self._deleteFloatingIps)
            if not self.finished():
                return
            self.floating_ips = self.result()
            self.state = self.FLOATING_IP_DELETING if self.floating_ips else self.SERVER_DELETE_SUBMIT

        if self.state == self.FLOATING_IP_DELETING:
            if self._floatingIpsLeft():
                return
            self.state = self.SERVER_DELETE_SUBMIT

        if self.state == self.SERVER_DELETE_SUBMIT:
            self.submit(self.adapter._deleteServer, self.external_id)
            self.state = self.SERVER_DELETE

        if self.state == self.SERVER_DELETE:
            if not self.finished():
                return
            self.result()
            self.state = self.SERVER_DELETING if self.server else self.COMPLETE

        if self.state == self.SERVER_DELETING:
            server = self.adapter._getServer(self.external_id)
            if server and not is_deleted(server):
                return
            self.state = self.COMPLETE

        if self.state == self.COMPLETE:
            self.complete = True


class OpenStackCreateStateMachine(_ApiMachine):
    SERVER_CREATING_SUBMIT = "submit creating server"
    SERVER_CREATING = "creating server"
    FLOATING_IP_CREATING = "creating floating ip"
    FLOATING_IP_ATTACHING = "attaching floating ip"
    COMPLETE = "complete"

    def __init__(
        self, adapter: Any, hostname: str, label: Any, image_external_id: Any, metadata: dict[str, str],
        request: Any, az: str | None, log: Any,
    ) -> None:  # fmt: skip
        super().__init__(adapter, log)
        self.provider = adapter.provider
        self.hostname = hostname
        self.label = label
        self.az = az
        self.server: Any = None
        self.floating_ip: Any = None
        if image_external_id:
            image_name = label.diskimage.name
            diskimage = self.provider.diskimages[image_name]
            self.config_drive = diskimage.config_drive
            self.image: Any = {"id": image_external_id}
        else:
            image_name = label.cloud_image.name
            self.config_drive = label.cloud_image.config_drive
            self.image = self._cloudImage(label.cloud_image)
        self.metadata = self._serverMetadata(image_name, metadata, request)
        self.flavor = adapter._findFlavor(label.flavor_name, label.min_ram)
        self.quota = quota_from_flavor(self.flavor, label=label)

    def _cloudImage(self, cloud_image: Any) -> Any:
        if cloud_image.image_id:
            return {"id": cloud_image.image_id}
        image = self.adapter._findImage(cloud_image.external_name)
        if not image:
            raise exceptions.LaunchNodepoolException(
                f"Unable to find image {cloud_image.external_name} in provider {self.provider.name}"
            )
        return image

    def _serverMetadata(self, image_name: str, metadata: dict[str, str], request: Any) -> dict[str, Any]:
        result: dict[str, Any] = {"groups": ",".join([self.provider.name, image_name, self.label.name])}
        result.update(self.label.instance_properties)
        if self.label.dynamic_instance_properties and request is not None:
            attributes = request.getSafeAttributes()
            for key, template in self.label.dynamic_instance_properties.items():
                try:
                    result[key] = template.format(request=attributes)
                except Exception:
                    self.log.exception("Dynamic property %s of label %s cannot be formatted", key, self.label.name)
        # The nodepool keys find the server again, nothing may hide them.
        result.update(metadata)
        return result

    def _createServer(self) -> Any:
        """Runs on the executor. A server that came into being in spite of an error is remembered for deletion."""
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
                security_groups=pool.security_groups,
                boot_from_volume=label.boot_from_volume,
                volume_size=label.volume_size,
                instance_properties=self.metadata,
                userdata=label.userdata,
            )
            self._look(server["id"])
            return server
        except Exception as exc:
            if sdk_error(exc, "BadRequestException"):
                # A stale zone, image, flavor or network; the next attempt looks again.
                self.adapter._forget()
            self._noteFailedServer(exc)
            message = str(exc).lower()
            if "quota exceeded" in message or "number of ports exceeded" in message:
                raise exceptions.QuotaException("Quota exceeded") from exc
            raise

    def _look(self, server_id: str) -> Any:
        """The server as listed. A failing list call does not end a healthy launch; the launch time-out limits it."""
        try:
            server = self.adapter._getServer(server_id)
        except Exception as exc:
            if not self._listing_failed:
                self.log.warning("Listing servers of %s failed, will look again: %s", self.provider.name, exc)
            self._listing_failed = True
            return None
        self._listing_failed = False
        return server

    _listing_failed = False

    def _noteFailedServer(self, exc: Exception) -> None:
        server_id = getattr(exc, "resource_id", None)
        if not server_id:
            extra = getattr(exc, "extra_data", None)
            created = extra.get("server") if isinstance(extra, dict) else None
            server_id = created.get("id") if isinstance(created, dict) else getattr(created, "id", None)
        if not server_id:
            return
        self.external_id = server_id
        try:
            server = self.adapter._getServerById(server_id)
        except Exception:
            self.log.exception("The failed server %s cannot be looked at", server_id)
            return
        fault = _fault_message(server)
        if fault:
            self.log.error("Server %s failed: %s", server_id, fault)
        if "quota" in fault.lower():
            raise exceptions.QuotaException("Quota exceeded") from exc

    def _inspect(self, server: Any) -> tuple[Any, bool]:
        """On the executor: addresses of an active server, and whether it needs a floating IP."""
        server = self.adapter._expandServer(server)
        needed = bool(self.label.pool.auto_floating_ip and self.adapter._needsFloatingIp(server))
        return server, needed

    def _attach(self) -> bool:
        """On the executor: True when the floating IP is in place and the server shows it."""
        current = next((fip for fip in self.adapter._listFloatingIps() if fip["id"] == self.floating_ip["id"]), None)
        if current is not None:
            self.floating_ip = current
        if self.floating_ip.get("port_id", None):
            if self.floating_ip["status"] != "ACTIVE":
                return False
        elif not self._attached:
            self.adapter._attachIpToServer(self.server, self.floating_ip)
            self._attached = True
        server = self.adapter._getServer(self.external_id)
        if server is None:
            return False
        self.server = self.adapter._expandServer(server)
        shown = {
            interface["addr"]
            for interfaces in (self.server.get("addresses") or {}).values()
            for interface in interfaces
            if interface.get("OS-EXT-IPS:type") == "floating"
        }
        return self.floating_ip["floating_ip_address"] in shown

    _attached = False

    def advance(self) -> OpenStackInstance | None:
        if self.state == self.START:
            self.submit(self._createServer)
            self.state = self.SERVER_CREATING_SUBMIT

        if self.state == self.SERVER_CREATING_SUBMIT:
            if not self.finished():
                return None
            self.server = self.result()
            self.external_id = self.server["id"]
            self.next_wake = self.adapter._activeAt(self.server)
            self.state = self.SERVER_CREATING

        if self.state == self.SERVER_CREATING:
            needs_floating_ip = self._waitForActive()
            if needs_floating_ip is None:
                return None
            if needs_floating_ip:
                self.submit(self.adapter._createFloatingIp, self.server)
                self.state = self.FLOATING_IP_CREATING
            else:
                self.state = self.COMPLETE

        if self.state == self.FLOATING_IP_CREATING:
            if not self.finished():
                return None
            self.floating_ip = self.result()
            self.state = self.FLOATING_IP_ATTACHING

        if self.state == self.FLOATING_IP_ATTACHING:
            if self.future is None:
                self.submit(self._attach)
            if not self.finished() or not self.result():
                return None
            self.state = self.COMPLETE

        if self.state == self.COMPLETE:
            self.complete = True
            return OpenStackInstance(self.provider, self.server, self.quota)
        return None

    def _waitForActive(self) -> bool | None:
        """None while waiting; then whether a floating IP is needed. Raises when the server failed."""
        if self.future is None:
            self.server = self._look(self.external_id) or self.server
            status = str(self.server.get("status") or "").upper()
            if status == "ERROR":
                fault = _fault_message(self.server)
                self.log.error("Server %s in error state: %s", self.external_id, fault or "no fault given")
                if "exceeds" in fault.lower() and "quota" in fault.lower():
                    raise exceptions.QuotaException("Quota exceeded")
                raise exceptions.LaunchStatusException("Server in error state")
            if status != "ACTIVE":
                return None
            self.next_wake = None
            self.submit(self._inspect, self.server)
        if not self.finished():
            return None
        self.server, needed = self.result()
        return bool(needed)


def _fault_message(server: Any) -> str:
    fault = server.get("fault") if server is not None and hasattr(server, "get") else None
    if not fault:
        return ""
    message = fault.get("message") if hasattr(fault, "get") else getattr(fault, "message", None)
    return str(message or "")
