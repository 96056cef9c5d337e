"""Options of a provider at Google (GCE-4)."""

from __future__ import annotations

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
    texts,
)
from nodepool.driver.gce import schema
from nodepool.driver.provider import Driver


class GceCloudImage(CloudImage):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.image_id: str | None = options.get("image-id")
        self.image_project: str | None = options.get("image-project")
        self.image_family: str | None = options.get("image-family")
        self.key: str | None = options.get("key")
        if not self.image_id and not (self.image_project and self.image_family):
            raise ConfigError(f"cloud image {self.name} needs image-id, or image-project and image-family")

    @property
    def external_name(self) -> str:
        return self.image_id or f"{self.image_project}/{self.image_family}"


class GceDiskImage(ProviderDiskImage):
    def __init__(self, image_type: str, options: dict[str, Any], diskimage: DiskImage) -> None:
        super().__init__(image_type, options, diskimage)
        self.key: str | None = options.get("key")
        self.guest_os_features: list[str] = options.get("guest-os-features") or ["VIRTIO_SCSI_MULTIQUEUE", "UEFI_COMPATIBLE"]
        self.architecture: str | None = options.get("architecture")


class GceLabel(MachineLabel):
    def __init__(self, options: dict[str, Any], provider: GceProviderConfig, pool: GcePool) -> None:
        super().__init__(options, provider, pool)
        self.instance_type: str = required(options, "instance-type")
        self.volume_type: str = options.get("volume-type", "pd-standard")
        self.volume_size: int = options.get("volume-size", 10)
        self.use_spot = bool(options.get("use-spot", False))
        self.tags = texts(options.get("labels"))
        self.dynamic_tags: dict[str, str] = options.get("dynamic-labels") or {}
        self.network_tags: list[str] = options.get("network-tags") or []
        self.service_account: dict[str, Any] | None = options.get("service-account")
        self.user_data: str | None = options.get("user-data")
        self.console_log = bool(options.get("console-log", False))
        self.ladder = offers.offers(
            self.instance_type,
            offers.one_or_more(options, "zone") or [provider.zone],
            self.use_spot,
            options.get("alternatives") or [],
            "instance-type",
        )
        if trouble := schema.label_trouble(self.tags, self.dynamic_tags):
            raise ConfigError(trouble, where=("labels",))
        for offer in self.ladder:
            if (offer.place or "").rpartition("-")[0] != provider.region:
                raise ConfigError(f"zone {offer.place} is not in region {provider.region}")


class GcePool(MachinePool):
    provider: GceProviderConfig

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider
        self.network: str = pool_config.get("network", provider.network)
        self.subnetwork: str | None = pool_config.get("subnetwork", provider.subnetwork)
        self.public_ipv4 = bool(pool_config.get("public-ipv4", provider.public_ipv4))


class GceProviderConfig(MachineProviderConfig):
    cloud_image_class = GceCloudImage
    diskimage_class = GceDiskImage
    label_class = GceLabel
    pool_class = GcePool
    default_boot_timeout = 60
    default_rate = 2

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(driver, provider)
        self.project: str = ""
        self.region: str = ""
        self.zone: str = ""
        self.network = "global/networks/default"
        self.subnetwork: str | None = None
        self.public_ipv4 = True
        self.object_storage: dict[str, Any] | None = None
        self.image_import_timeout = 3600

    @property
    def manage_images(self) -> bool:
        return self.object_storage is not None

    @property
    def zones(self) -> list[str]:
        """All zones in which our machines may be."""
        places = [offer.place for pool in self.pools.values() for label in pool.labels.values() for offer in label.ladder]
        return list(dict.fromkeys([self.zone, *places]))

    def load_own(self, options: dict[str, Any]) -> None:
        self.project = required(options, "project")
        self.region = required(options, "region")
        self.zone = required(options, "zone")
        self.rate = options.get("rate", options.get("rate-limit", self.default_rate))
        self.network = options.get("network", self.network)
        self.subnetwork = options.get("subnetwork")
        self.public_ipv4 = bool(options.get("public-ipv4", True))
        self.object_storage = options.get("object-storage")
        self.image_import_timeout = options.get("image-import-timeout", self.image_import_timeout)
        if options.get("diskimages") and self.object_storage is None:
            raise ConfigError("diskimages need object-storage, through which images are imported", where=("diskimages",))

    def getSchema(self) -> v.Schema:
        return v.Schema(schema.provider())
