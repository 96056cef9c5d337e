"""One cloud of several, for tests that say the same of each: its stand-in, its words, and what
is left in it.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.launcher import NodePool
from tests.support.clouds.azure import GROUP, LOCATION, NETWORK, AzureCloud
from tests.support.clouds.gce import FAMILY, PROJECT, REGION, ZONES, GoogleCloud
from tests.support.clouds.ibm import REGION as IBM_REGION
from tests.support.clouds.ibm import VPC, IbmCloud
from tests.support.clouds.ibm import ZONES as IBM_ZONES
from tests.support.clouds.stand_in import Machine
from tests.support.fault_proxy import Request
from tests.support.launcher import LauncherBench

KEY = "ssh-ed25519 AAAAC3 zuul"


class CloudScene:
    """:ivar sizes: two sizes; :ivar zones: two zones."""

    driver: str
    sizes: tuple[str, str]
    zones: tuple[str, str]
    #: Calls of the launcher that change something, as operations of the fault proxy (a pattern).
    launcher_calls: tuple[str, ...]
    builder_calls: tuple[str, ...]
    image_format = "raw"
    cloud: Any

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    @property
    def proxy(self) -> Any:
        return self.cloud.proxy

    name = "the-cloud"

    def label(
        self, name: str = "small", size: str | None = None, image: str = "image", **options: Any
    ) -> dict[str, Any]:
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        raise NotImplementedError

    def provider(
        self, *labels: dict[str, Any], pool: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        return {
            "name": self.name,
            "driver": self.driver,
            "rate": 1000,
            "host-key-checking": False,
            **self.options(),
            "pools": [{"name": "main", "labels": list(labels) or [self.label()], **(pool or {})}],
            **options,
        }

    def config(
        self, *labels: dict[str, Any], top: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        made = list(labels) or [self.label()]
        return {
            "labels": [{"name": each["name"]} for each in made],
            "providers": [self.provider(*made, **options)],
            **(top or {}),
        }

    def alternative(self, size: str | None = None, zone: str | None = None) -> dict[str, Any]:
        """An entry of the option alternatives."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(self.cloud.environment())

    def machines(self) -> list[Machine]:
        with self.cloud.lock:
            return [each for each in self.cloud.now() if not each.ending]

    def leftovers(self) -> list[str]:
        """Everything that is there."""
        raise NotImplementedError

    def size_of(self, machine: Machine) -> str:
        raise NotImplementedError

    def where(self, machine: Machine) -> str:
        return machine.place

    def break_credentials(self) -> None:
        raise NotImplementedError

    def mend_credentials(self) -> None:
        raise NotImplementedError

    #: What operators see then.
    broken: str
    #: What must never be in a log.
    secrets: tuple[str, ...] = ()

    def diskimage(self, **options: Any) -> dict[str, Any]:
        return {"name": "fake-image", **options}

    def image_of(self, external_id: str) -> bytes | None:
        """Content of an uploaded image; None: it is not there."""
        raise NotImplementedError

    def fail_import(self) -> None:
        raise NotImplementedError

    def stray_image(self, metadata: dict[str, str]) -> str:
        """An image (or what it is made of) with this metadata; an entry of leftovers."""
        raise NotImplementedError

    def matches(self, operation: str) -> Any:
        pattern = re.compile(operation)

        def test(request: Request) -> bool:
            return pattern.search(f"{request.method} {request.path}") is not None

        return test

    def close(self) -> None:
        self.cloud.close()
        assert self.cloud.mistakes == []


class Google(CloudScene):
    driver = "gce"
    sizes = ("n1-standard-1", "n1-standard-4")
    zones = (ZONES[0], ZONES[1])
    launcher_calls = (
        r"POST .*/instances\?",
        r"GET .*/instances\?.*filter",
        r"DELETE .*/instances/",
    )
    builder_calls = (r"POST /upload", r"PUT /upload", r"POST .*/global/images", r"DELETE /storage")
    broken = "no credentials for Google"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.cloud = GoogleCloud(folder / "google")
        self._account = self.cloud.account.read_text()

    def label(
        self, name: str = "small", size: str | None = None, image: str = "image", **options: Any
    ) -> dict[str, Any]:
        used = {"diskimage": image} if image == "fake-image" else {"cloud-image": image}
        return {"name": name, "instance-type": size or self.sizes[0], **used, **options}

    def options(self) -> dict[str, Any]:
        return {
            "project": PROJECT,
            "region": REGION,
            "zone": ZONES[0],
            "object-storage": {"bucket-name": "bucket"},
            "cloud-images": [
                {
                    "name": "image",
                    "image-project": "images",
                    "image-family": FAMILY,
                    "username": "zuul",
                    "key": KEY,
                },
                {
                    "name": "by-id",
                    "image-id": "projects/images/global/images/debian",
                    "username": "zuul",
                    "shell-type": "csh",
                },
            ],
        }

    def alternative(self, size: str | None = None, zone: str | None = None) -> dict[str, Any]:
        return {**({"instance-type": size} if size else {}), **({"zone": zone} if zone else {})}

    def leftovers(self) -> list[str]:
        return [
            *(f"instance {each.name}" for each in self.machines()),
            *(f"image {name}" for name in self.cloud.images),
            *(f"object {name}" for name in self.cloud.objects),
        ]

    def size_of(self, machine: Machine) -> str:
        return str(machine.body["machineType"].rpartition("/")[2])

    def break_credentials(self) -> None:
        self.cloud.account.write_text("{}")

    def mend_credentials(self) -> None:
        self.cloud.account.write_text(self._account)

    def image_of(self, external_id: str) -> bytes | None:
        found = self.cloud.images.get(external_id)
        return None if found is None else self.cloud.disk_of(found["_data"])

    def fail_import(self) -> None:
        self.cloud.import_error = ("RESOURCE_INVALID", "the archive is damaged")

    def stray_image(self, metadata: dict[str, str]) -> str:
        name = f"stray-{metadata['nodepool_upload_id']}-{len(self.cloud.objects)}"
        self.cloud.objects[name] = {"data": b"", "metadata": metadata}
        return f"object {name}"


class Azure(CloudScene):
    driver = "azure"
    sizes = ("Standard_B1ls", "Standard_D2s_v5")
    zones = ("1", "2")
    launcher_calls = (
        r"PUT .*/virtualMachines/",
        r"GET .*/virtualMachines/\?",
        r"DELETE .*/virtualMachines/",
    )
    builder_calls = (
        r"PUT .*/disks/",
        r"beginGetAccess",
        r"PUT /blob",
        r"endGetAccess",
        r"PUT .*/images/",
        r"DELETE .*/disks/",
    )
    image_format = "vhd"
    broken = "Azure refuses the service principal of auth-path"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.cloud = AzureCloud(folder / "azure")
        self.secrets = (self.cloud.secret, "sig=secret", "pass-of-the-admin", "custom-s3cret")

    def label(
        self, name: str = "small", size: str | None = None, image: str = "image", **options: Any
    ) -> dict[str, Any]:
        used = {"diskimage": image} if image == "fake-image" else {"cloud-image": image}
        return {
            "name": name,
            "hardware-profile": {"vm-size": size or self.sizes[0]},
            **used,
            **options,
        }

    def options(self) -> dict[str, Any]:
        reference = {"sku": "s", "publisher": "p", "offer": "o", "version": "latest"}
        return {
            "location": LOCATION,
            "resource-group": GROUP,
            "resource-group-location": LOCATION,
            "auth-path": str(self.cloud.auth_path),
            "network": NETWORK,
            "cloud-images": [
                {
                    "name": "image",
                    "username": "zuul",
                    "key": KEY,
                    "shell-type": "sh",
                    "image-reference": reference,
                },
                {
                    "name": "by-id",
                    "username": "zuul",
                    "image-id": "/subscriptions/x/images/i",
                    "password": "pass-of-the-admin",
                },
            ],
        }

    def alternative(self, size: str | None = None, zone: str | None = None) -> dict[str, Any]:
        return {**({"vm-size": size} if size else {}), **({"zone": zone} if zone else {})}

    def leftovers(self) -> list[str]:
        return [
            *(f"instance {each.name}" for each in self.machines()),
            *(f"{kind} {name}" for kind, name in self.cloud.things),
        ]

    def size_of(self, machine: Machine) -> str:
        return str(machine.body["properties"]["hardwareProfile"]["vmSize"])

    def where(self, machine: Machine) -> str:
        return str((machine.body.get("zones") or [""])[0])

    def break_credentials(self) -> None:
        self.cloud.write_account(clientSecret="old")

    def mend_credentials(self) -> None:
        self.cloud.write_account()

    def image_of(self, external_id: str) -> bytes | None:
        if ("images", external_id) not in self.cloud.things:
            return None
        return bytes(self.cloud.blobs[external_id])

    def fail_import(self) -> None:
        self.cloud.fail_image = ("InvalidParameter", "the disk is no VHD")

    def stray_image(self, metadata: dict[str, str]) -> str:
        name = f"stray-{len(self.cloud.things)}"
        self.cloud.things["disks", name] = {
            "id": f"x/{name}",
            "name": name,
            "tags": metadata,
            "properties": {},
        }
        return f"disks {name}"


class Ibm(CloudScene):
    driver = "ibmvpc"
    sizes = ("cx2-2x4", "bx2-4x16")
    zones = (IBM_ZONES[0], IBM_ZONES[1])
    launcher_calls = (
        r"POST /v1/floating_ips",
        r"POST /v1/instances",
        r"GET /v1/instances\?.*name",
        r"PUT /v1/instances",
        r"DELETE /v1/instances",
        r"DELETE /v1/floating_ips",
    )
    builder_calls = (r"PUT /cos/", r"POST /v1/images", r"DELETE /cos/")
    image_format = "qcow2"
    broken = "IBM refuses the credentials of credentials-file"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.cloud = IbmCloud(folder / "ibm")
        self._credentials = self.cloud.credentials.read_text()
        self.secrets = ("the-api-key",)

    def label(
        self, name: str = "small", size: str | None = None, image: str = "image", **options: Any
    ) -> dict[str, Any]:
        used = {"diskimage": image} if image == "fake-image" else {"cloud-image": image}
        return {"name": name, "profile": size or self.sizes[0], **used, **options}

    def options(self) -> dict[str, Any]:
        return {
            "vpc": VPC,
            "region": IBM_REGION,
            "zone": IBM_ZONES[0],
            "subnet": f"net-{IBM_ZONES[0]}",
            "credentials-file": str(self.cloud.credentials),
            "public-ipv4": True,
            "object-storage": {
                "instance-name": "storage",
                "endpoint": f"{self.cloud.url}/cos",
                "bucket-name": self.cloud.bucket,
            },
            "cloud-images": [
                {"name": "image", "username": "zuul", "keys": ["zuul"], "image-name": "debian-1"},
                {"name": "by-id", "username": "zuul", "image-id": "i-2", "shell-type": "csh"},
            ],
        }

    def alternative(self, size: str | None = None, zone: str | None = None) -> dict[str, Any]:
        return {
            **({"profile": size} if size else {}),
            **({"zone": zone, "subnet": f"net-{zone}"} if zone else {}),
        }

    def leftovers(self) -> list[str]:
        made = [each["name"] for each in self.cloud.images.values() if each["owner_type"] == "user"]
        return [
            *(f"instance {each.name}" for each in self.machines()),
            *(f"address {each['name']}" for each in self.cloud.addresses.values()),
            *(f"image {name}" for name in made),
            *(f"object {name}" for name in self.cloud.objects()),
            *(f"parts {name}" for name in self.cloud.unfinished()),
        ]

    def size_of(self, machine: Machine) -> str:
        return str(machine.body["profile"]["name"])

    def break_credentials(self) -> None:
        self.cloud.credentials.write_text(self._credentials.replace("the-api-key", "another-key"))

    def mend_credentials(self) -> None:
        self.cloud.credentials.write_text(self._credentials)

    def diskimage(self, **options: Any) -> dict[str, Any]:
        return {"name": "fake-image", "operating-system": "debian-12-amd64", **options}

    def image_of(self, external_id: str) -> bytes | None:
        found = self.cloud.images.get(external_id)
        return None if found is None else self.cloud.imported.get(found["_file"])

    def fail_import(self) -> None:
        self.cloud.import_error = "the image has no partition table"

    def stray_image(self, metadata: dict[str, str]) -> str:
        group = f"npimages_{metadata['nodepool_provider_name']}"
        self.cloud.groups.setdefault(f"g-{group}", group)
        name = f"npimage{metadata['nodepool_build_id']}-{metadata['nodepool_upload_id']}"
        key = f"i-stray-{len(self.cloud.images)}"
        self.cloud.images[key] = {
            "id": key,
            "name": name,
            "status": "available",
            "owner_type": "user",
            "operating_system": {},
            "resource_group": {"id": f"g-{group}", "name": group},
            "created_at": "",
            "_file": "",
        }
        return f"image {name}"


def launcher(bench: LauncherBench, path: str, cleanup_interval: float) -> Any:
    """One that is not started yet, for a configuration that is there."""
    pool = NodePool(None, path)
    pool.cleanup_interval, pool.delete_interval = cleanup_interval, 0.2
    bench.pools.append(pool)
    return pool


SCENES: tuple[type[CloudScene], ...] = (Google, Azure, Ibm)


@pytest.fixture(params=SCENES, ids=lambda scene: scene.driver)
def scene(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[CloudScene]:
    yield from opened(request.param, monkeypatch, tmp_path)


def opened(
    kind: type[CloudScene], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[Any]:
    made = kind(tmp_path / "clouds")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    try:
        yield made
    finally:
        made.close()
