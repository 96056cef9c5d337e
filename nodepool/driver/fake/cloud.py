"""An OpenStack cloud in memory; tests set quotas and faults (FAK-1.2, FAK-1.3)."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from nodepool import exceptions
from nodepool.driver.fake.objects import Dummy, ObjectList

CREATE_DELAY = 0.1  # seconds until a new object is usable

_UPLOAD_ARGUMENTS = {
    "name",
    "filename",
    "is_public",
    "wait",
    "md5",
    "sha256",
    "timeout",
    "disk_format",
}


def _http_error(name: str, message: str, status: int) -> Exception:
    # The SDK is large, and is imported only after an error.
    from openstack import exceptions as sdk

    error: Exception = getattr(sdk, name)(message)
    error.status_code = status  # type: ignore[attr-defined]
    return error


def _creation_error(resource_id: str) -> Exception:
    from openstack.cloud import exc

    return exc.OpenStackCloudCreateException("server", resource_id)


class FakeResponse:
    """Answer of a raw request."""

    status_code = 200
    links: dict[str, Any] = {}

    def __init__(self, data: object) -> None:
        self.data = data

    def json(self) -> Any:
        return self.data


class FakeCompute:
    """The compute proxy: raw server listing."""

    def __init__(self, cloud: FakeOpenStackCloud) -> None:
        self.cloud = cloud

    def get(self, url: str, headers: object = None, params: object = None) -> FakeResponse:
        if url != "/servers/detail":
            raise NotImplementedError(url)
        return FakeResponse({"servers": [server.raw() for server in self.cloud.list_servers()]})


class FakeOpenStackCloud:
    """Emulates the SDK's Connection; states are derived from the clock, there are no threads."""

    log = logging.getLogger("nodepool.FakeOpenStackCloud")

    @staticmethod
    def _get_quota() -> tuple[float, float, float]:
        """Return cores, instances, RAM in MiB."""
        return 100, 20, 1000000

    @staticmethod
    def _get_volume_quota() -> tuple[float, float]:
        """Return volumes, GB."""
        return 100, 1000000

    @staticmethod
    def _get_server_console(name_or_id: str) -> str | None:
        return None

    def __init__(
        self, images: list[Dummy] | None = None, networks: list[dict[str, Any]] | None = None
    ) -> None:
        self.pause_creates = False
        self._create_server_timeout = 0
        self._lock = threading.RLock()
        self.compute = FakeCompute(self)
        self._image_list = ObjectList(
            images
            if images is not None
            else [
                Dummy(
                    Dummy.IMAGE,
                    id="fake-image-id",
                    status="READY",
                    name="Fake Precise",
                    metadata={},
                )
            ]
        )
        self.networks = (
            networks
            if networks is not None
            else [
                {"id": "fake-public-network", "name": "fake-public-network-name"},
                {"id": "fake-private-network", "name": "fake-private-network-name"},
                {"id": "no-auto-ip-network", "name": "no-auto-ip-network-name"},
                {"id": "fake-ipv6-network", "name": "fake-ipv6-network-name"},
            ]
        )
        self._flavor_list = [
            Dummy(Dummy.FLAVOR, id="f1", ram=8192, name="Fake Flavor", vcpus=4),
            Dummy(Dummy.FLAVOR, id="f2", ram=8192, name="Unreal Flavor", vcpus=4),
        ]
        self._azs = ["az1", "az2"]
        self._server_list = ObjectList()
        self._down_ports = [
            Dummy(Dummy.PORT, id=uuid.uuid4().hex, status="DOWN", device_owner="compute:nova"),
            Dummy(Dummy.PORT, id=uuid.uuid4().hex, status="DOWN", device_owner=None),
        ]
        self._floating_ip_list: list[Any] = []
        self._volume_list: list[Any] = []

    # Images

    def create_image(self, **kwargs: object) -> Dummy:
        properties = {key: value for key, value in kwargs.items() if key not in _UPLOAD_ARGUMENTS}
        image = Dummy(Dummy.IMAGE, **{**kwargs, "id": uuid.uuid4().hex})
        image._kw = kwargs
        image["properties"] = image["metadata"] = properties
        image.status = "BUILD"
        image.becomes("READY", time.monotonic() + CREATE_DELAY)
        with self._lock:
            self._image_list.append(image)
        return image

    def get_image(self, name_or_id: str, filters: dict[str, Any] | None = None) -> Dummy | None:
        return self._image_list.find(name_or_id)

    def list_images(self) -> list[Dummy]:
        return list(self._image_list)

    def delete_image(self, name_or_id: str, **kwargs: object) -> bool:
        return self._delete(name_or_id, self._image_list)

    def create_image_snapshot(self, name: str, server: Dummy, **metadata: object) -> Dummy:
        return self.create_image(name=name, **metadata)

    # Servers

    def create_server(self, name: str = "", **kwargs: object) -> Dummy:
        zone = kwargs.get("availability_zone") or self._azs[0]
        if zone not in self._azs:
            raise _http_error(
                "BadRequestException", "The requested availability zone is not available", 400
            )
        with self._lock:
            limit = type(self)._get_quota()[1]
            full = 0 <= limit <= len(self._server_list)
            if full and sum(server.status != "DELETED" for server in self._server_list) >= limit:
                raise _http_error("ForbiddenException", "Quota exceeded for something", 403)
            server = self._make_server(name, zone, kwargs)
            self._server_list.append(server)
        return server

    def _make_server(self, name: str, zone: str, kwargs: dict[str, Any]) -> Dummy:
        networks = {self._network(nic["net-id"])["name"] for nic in kwargs.get("nics") or []}
        ipv6 = "fake-ipv6-network-name" in networks
        public = "no-auto-ip-network-name" not in networks
        volumes = []
        if kwargs.get("boot_from_volume"):
            volumes.append(
                Dummy("Volume", id=uuid.uuid4().hex, size=int(kwargs.get("volume_size", 50)))
            )
            self._volume_list.extend(volumes)
        flavor = kwargs.get("flavor") or self._flavor_list[0]
        server = Dummy(
            Dummy.INSTANCE,
            id=uuid.uuid4().hex,
            name=name,
            metadata=kwargs.get("meta") or {},
            flavor={"id": flavor["id"], "vcpus": flavor.get("vcpus"), "ram": flavor.get("ram")},
            image=kwargs.get("image"),
            key_name=kwargs.get("key_name"),
            security_groups=kwargs.get("security_groups") or [],
            userdata=kwargs.get("userdata"),
            config_drive=kwargs.get("config_drive"),
            adminPass="fake",
            addresses={
                "public": [{"version": 4, "addr": "fake"}],
                "private": [{"version": 4, "addr": "fake"}],
            }
            if public
            else {"private": [{"version": 4, "addr": "fake"}]},
            public_v4="fake" if public else "",
            public_v6="fake_v6" if ipv6 and public else "",
            private_v4="fake",
            interface_ip="fake_v6" if ipv6 and public else "fake",
            hostId="fake_host_id" if ipv6 else "fake",
        )
        server._kw = kwargs
        server["host_id"] = server["hostId"]
        server["location"] = Dummy(Dummy.LOCATION, zone=zone)
        server["OS-EXT-AZ:availability_zone"] = zone
        server["os-extended-volumes:volumes_attached"] = [{"id": volume.id} for volume in volumes]
        server.status = "BUILD"
        ready_at = time.monotonic() + CREATE_DELAY
        if self._create_server_timeout > 0:
            self._create_server_timeout -= 1
            ready_at = float("inf")
        server.becomes("ACTIVE", ready_at, paused=self.pause_creates)
        return server

    def get_server(self, name_or_id: str, **kwargs: object) -> Dummy | None:
        return self._server_list.find(name_or_id)

    def get_server_by_id(self, server_id: str) -> Dummy | None:
        return self._server_list.by_id(server_id)

    def list_servers(self, **kwargs: object) -> list[Dummy]:
        return list(self._server_list)

    def delete_server(self, name_or_id: str, **kwargs: object) -> bool:
        server = self._server_list.find(name_or_id)
        if not self._delete(name_or_id, self._server_list):
            return False
        attached = server.get("os-extended-volumes:volumes_attached") if server else None
        if attached:
            gone = {item["id"] for item in attached}
            with self._lock:
                self._volume_list = [
                    volume for volume in self._volume_list if volume.id not in gone
                ]
        return True

    def _delete(self, name_or_id: str, objects: ObjectList) -> bool:
        with self._lock:
            found = objects.find(name_or_id)
            # Those in status DELETED stay listed, as real clouds do for a while.
            if found is None or found.status == "DELETED":
                return False
            objects.remove(found)
        return True

    def get_server_console(self, name_or_id: str) -> str | None:
        return type(self)._get_server_console(name_or_id)

    # The rest

    def list_flavors(self, get_extra: bool | None = None) -> list[Dummy]:
        return list(self._flavor_list)

    def list_availability_zone_names(self) -> list[str]:
        return list(self._azs)

    def get_compute_limits(self) -> Dummy:
        cores, instances, ram = type(self)._get_quota()
        return Dummy(
            "Limits", max_total_cores=cores, max_total_instances=instances, max_total_ram_size=ram
        )

    def get_volume_limits(self) -> Dummy:
        volumes, gigabytes = type(self)._get_volume_quota()
        return Dummy(
            "Limits", absolute={"maxTotalVolumes": volumes, "maxTotalVolumeGigabytes": gigabytes}
        )

    def list_volumes(self) -> list[Any]:
        return list(self._volume_list)

    def list_floating_ips(self) -> list[Any]:
        return list(self._floating_ip_list)

    def create_floating_ip(self, server: Dummy, **kwargs: object) -> Dummy:
        fip = Dummy(
            "Fip",
            id=uuid.uuid4().hex,
            floating_ip_address="fake",
            status="ACTIVE",
            port_id="fake-port",
        )
        self._floating_ip_list.append(fip)
        return fip

    def delete_floating_ip(self, floating_ip_id: str, **kwargs: object) -> bool:
        self._floating_ip_list = [fip for fip in self._floating_ip_list if fip.id != floating_ip_id]
        return True

    def delete_unattached_floating_ips(self) -> int:
        return 0

    def _needs_floating_ip(self, server: Dummy, nat_destination: object = None) -> bool:
        return False

    def _has_floating_ips(self) -> bool:
        return False

    def list_ports(self, filters: dict[str, Any] | None = None) -> list[Dummy]:
        return list(self._down_ports) if filters and filters.get("status") == "DOWN" else []

    def delete_port(self, port_id: str) -> bool:
        self._down_ports = [port for port in self._down_ports if port["id"] != port_id]
        return True

    def _network(self, name_or_id: str) -> dict[str, Any]:
        return next(
            (item for item in self.networks if name_or_id in (item["id"], item["name"])),
            self.networks[0],
        )

    def get_network(self, name_or_id: str, filters: object = None) -> dict[str, Any]:
        return self._network(name_or_id)


class FakeUploadFailCloud(FakeOpenStackCloud):
    """Image uploads fail: always, *times_to_fail* times, or as *fail_callback* decides."""

    def __init__(
        self,
        *args: Any,
        times_to_fail: int | None = None,
        fail_callback: Callable[..., bool] | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.times_to_fail = times_to_fail
        self.times_failed = 0
        self.fail_callback = fail_callback

    def create_image(self, **kwargs: object) -> Dummy:
        if self.fail_callback:
            fails = self.fail_callback(**kwargs)
        else:
            fails = self.times_to_fail is None or self.times_failed < self.times_to_fail
        if fails:
            self.times_failed += 1
            raise exceptions.BuilderError("Test fail image upload.")
        return super().create_image(**kwargs)


class FakeLaunchAndGetFaultCloud(FakeOpenStackCloud):
    """A cloud whose servers fail immediately with a fault that names the quota."""

    def create_server(self, name: str = "", **kwargs: object) -> Dummy:
        server = super().create_server(name, **kwargs)
        server.status = "ERROR"
        server["fault"] = {"message": "quota server fault"}
        raise _creation_error(server["id"])


class FakeLaunchAndDeleteFailCloud(FakeOpenStackCloud):
    """Servers end in ERROR and cannot be deleted: *times_to_fail* times each, None for always."""

    def __init__(self, times_to_fail: int | None = None) -> None:
        super().__init__()
        self.times_to_fail_launch = times_to_fail
        self.times_to_fail_delete = times_to_fail
        self.times_failed_launch = 0
        self.times_failed_delete = 0
        self.launch_success = False
        self.delete_success = False

    def create_server(self, name: str = "", **kwargs: object) -> Dummy:
        server = super().create_server(name, **kwargs)
        if (
            self.times_to_fail_launch is not None
            and self.times_failed_launch >= self.times_to_fail_launch
        ):
            self.launch_success = True
        else:
            self.times_failed_launch += 1
            server.becomes("ERROR", time.monotonic() + CREATE_DELAY)
        return server

    def delete_server(self, name_or_id: str, **kwargs: object) -> bool:
        if (
            self.times_to_fail_delete is not None
            and self.times_failed_delete >= self.times_to_fail_delete
        ):
            self.delete_success = True
            return super().delete_server(name_or_id, **kwargs)
        self.times_failed_delete += 1
        raise Exception("fail delete")


class FakeDeleteImageFailCloud(FakeOpenStackCloud):
    """Deleting an image fails while ``_fail`` is set."""

    _fail = True

    def delete_image(self, name_or_id: str, **kwargs: object) -> bool:
        if self._fail:
            raise RuntimeError("Induced failure for testing")
        return super().delete_image(name_or_id, **kwargs)
