"""Options of a provider at IBM (IBM-4)."""

from __future__ import annotations

import math
import re
from typing import Any

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError
from nodepool.driver.common import offers
from nodepool.driver.common.options import (
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
    required,
)
from nodepool.driver.ibmvpc import schema
from nodepool.driver.provider import Driver

#: Parts of resource group names, from which they are parsed.
_NAME = re.compile(r"[A-Za-z0-9-]+\Z")


def check_name(name: str, what: str) -> None:
    if not _NAME.match(name):
        raise ConfigError(f"the name of {what} {name!r} may have letters, digits and dashes only", where=("name",))


class IBMVPCCloudImage(CloudImage):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.keys: list[str] = options.get("keys") or []
        self.image_id: str | None = options.get("image-id")
        self.image_href: str | None = options.get("image-href")
        self.image_name: str | None = options.get("image-name")
        self.image_filter: dict[str, Any] | None = options.get("image-filter")
        if len([key for key in schema.IMAGE_SOURCES if options.get(key) is not None]) != 1:
            raise ConfigError(f"cloud image {self.name} needs exactly one of {', '.join(schema.IMAGE_SOURCES)}")

    @property
    def external_name(self) -> str:
        return self.image_id or self.image_name or self.name


class IBMVPCDiskImage(ProviderDiskImage):
    def __init__(self, image_type: str, options: dict[str, Any], diskimage: DiskImage) -> None:
        super().__init__(image_type, options, diskimage)
        self.operating_system: str = required(options, "operating-system")
        self.keys: list[str] = []


class IBMVPCLabel(MachineLabel):
    def __init__(self, options: dict[str, Any], provider: IBMVPCProviderConfig, pool: IBMVPCPool) -> None:
        super().__init__(options, provider, pool)
        if bool(self.cloud_image) == bool(self.diskimage):
            raise ConfigError(f"label {self.name} needs one of cloud-image and diskimage")
        self.profile: str = required(options, "profile")
        self.user_data: str | None = options.get("user-data")
        # The API does not support tags at the creation of a machine.
        self.tags: dict[str, str] = {}
        self.dynamic_tags: dict[str, str] = {}
        alternatives = options.get("alternatives") or []
        self.ladder = offers.offers(self.profile, [pool.zone], False, alternatives, "profile")
        #: By zone.
        self.subnets: dict[str | None, str] = {pool.zone: pool.subnet}
        self.subnets.update({entry["zone"]: entry["subnet"] for entry in alternatives if entry.get("zone")})


class IBMVPCPool(MachinePool):
    provider: IBMVPCProviderConfig

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider
        check_name(str(self.name), "pool")
        self.zone: str = pool_config.get("zone", provider.zone or "")
        self.subnet: str = pool_config.get("subnet", provider.subnet or "")
        self.public_ipv4 = bool(pool_config.get("public-ipv4", provider.public_ipv4))
        for key in ("zone", "subnet"):
            if not getattr(self, key):
                raise ConfigError(f"pool {self.name} needs {key}, here or in its provider", where=(key,))


class IBMVPCProviderConfig(MachineProviderConfig):
    cloud_image_class = IBMVPCCloudImage
    diskimage_class = IBMVPCDiskImage
    label_class = IBMVPCLabel
    pool_class = IBMVPCPool

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(driver, provider)
        self.vpc: str = ""
        self.region: str = ""
        self.zone: str | None = None
        self.subnet: str | None = None
        self.credentials_file: str | None = None
        self.object_storage: dict[str, str] | None = None
        self.quota: dict[str, float] = {}
        self.public_ipv4 = False
        self.image_import_timeout = 3600

    def load_own(self, options: dict[str, Any]) -> None:
        check_name(self.name, "provider")
        self.vpc = required(options, "vpc")
        self.region = required(options, "region")
        self.zone = options.get("zone")
        self.subnet = options.get("subnet")
        self.credentials_file = options.get("credentials-file")
        self.object_storage = options.get("object-storage")
        self.public_ipv4 = bool(options.get("public-ipv4", False))
        self.image_type = options.get("image-format", "qcow2")
        self.image_import_timeout = options.get("image-import-timeout", self.image_import_timeout)
        self.quota = {"instances": math.inf, "cores": math.inf, "ram": math.inf, **(options.get("quota") or {})}
        if options.get("diskimages") and self.object_storage is None:
            raise ConfigError("diskimages need object-storage, through which images are imported", where=("diskimages",))

    def getSchema(self) -> v.Schema:
        return v.Schema(schema.provider())
