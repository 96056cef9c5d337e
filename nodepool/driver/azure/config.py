"""Options of a provider at Azure (AZU-4)."""

from __future__ import annotations

import os
from typing import Any

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError
from nodepool.driver.azure import schema
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
from nodepool.driver.provider import Driver

AUTH_LOCATION = "AZURE_AUTH_LOCATION"


class AzureCloudImage(CloudImage):
    def __init__(self, options: dict[str, Any], default_key: str | None) -> None:
        super().__init__(options)
        self.key: str | None = options.get("key", default_key)
        self.password: str | None = options.get("password")
        self.generate_password = bool(options.get("generate-password", False))
        self.image_reference: dict[str, str] | None = options.get("image-reference")
        self.image_id: str | None = options.get("image-id")
        self.image_filter: dict[str, Any] | None = options.get("image-filter")
        self.shared_gallery_image: dict[str, str] | None = options.get("shared-gallery-image")
        self.community_gallery_image: dict[str, str] | None = options.get("community-gallery-image")
        given = [key for key in schema.IMAGE_SOURCES if options.get(key) is not None]
        if len(given) != 1:
            raise ConfigError(f"cloud image {self.name} needs exactly one of {', '.join(schema.IMAGE_SOURCES)}")

    @property
    def external_name(self) -> str:
        return self.image_id or self.name


class AzureDiskImage(ProviderDiskImage):
    def __init__(self, image_type: str, options: dict[str, Any], diskimage: DiskImage) -> None:
        super().__init__(image_type, options, diskimage)
        self.key: str | None = options.get("key")
        self.password: str | None = options.get("password")
        self.generate_password = bool(options.get("generate-password", False))


class AzureLabel(MachineLabel):
    def __init__(self, options: dict[str, Any], provider: AzureProviderConfig, pool: AzurePool) -> None:
        super().__init__(options, provider, pool)
        if bool(self.cloud_image) == bool(self.diskimage):
            raise ConfigError(f"label {self.name} needs one of cloud-image and diskimage")
        profile = required(options, "hardware-profile")
        self.hardware_profile: dict[str, str] = profile
        self.vm_size: str = required(profile, "vm-size", ("hardware-profile",))
        self.tags = texts(options.get("tags"))
        self.dynamic_tags: dict[str, str] = options.get("dynamic-tags") or {}
        self.user_data: str | None = options.get("user-data")
        self.custom_data: str | None = options.get("custom-data")
        self.volume_size: int | None = options.get("volume-size")
        self.volume_type: str | None = options.get("volume-type")
        self.ephemeral_os_disk = bool(options.get("ephemeral-os-disk", False))
        self.trusted_launch = bool(options.get("trusted-launch", False))
        self.identities: list[str] = options.get("identities") or []
        self.console_log = bool(options.get("console-log", False))
        self.use_spot = bool(options.get("use-spot", False))
        self.ladder = offers.offers(
            self.vm_size,
            offers.one_or_more(options, "zone") or [None],
            self.use_spot,
            options.get("alternatives") or [],
            "vm-size",
        )


class AzurePool(MachinePool):
    provider: AzureProviderConfig

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider

        self.public_ipv4 = bool(pool_config.get("public-ipv4", provider.public_ipv4))
        self.public_ipv6 = bool(pool_config.get("public-ipv6", provider.public_ipv6))
        self.ipv4 = bool(pool_config.get("ipv4", provider.ipv4)) or self.public_ipv4
        self.ipv6 = bool(pool_config.get("ipv6", provider.ipv6)) or self.public_ipv6
        if not (self.ipv4 or self.ipv6):
            self.ipv4 = True
        self.network_security_group_id: str | None = pool_config.get(
            "network-security-group-id", provider.network_security_group_id
        )


class AzureProviderConfig(MachineProviderConfig):
    cloud_image_class = AzureCloudImage
    diskimage_class = AzureDiskImage
    label_class = AzureLabel
    pool_class = AzurePool

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(driver, provider)
        self.image_type = "vhd"
        self.location: str = ""
        self.resource_group: str = ""
        self.resource_group_location: str = ""
        #: One of the two is set.
        self.auth_path: str | None = None
        self.auth: dict[str, Any] | None = None
        self.zuul_public_key: str | None = None
        self.subnet_id: str | None = None
        self.network: dict[str, str] | None = None
        self.image_import_timeout = 3600
        self.ipv4 = self.ipv6 = False
        self.public_ipv4, self.public_ipv6 = True, False
        self.network_security_group_id: str | None = None

    def load_own(self, options: dict[str, Any]) -> None:
        self.location = required(options, "location")
        self.resource_group = required(options, "resource-group")
        self.resource_group_location = required(options, "resource-group-location")
        self.zuul_public_key = options.get("zuul-public-key")
        self.subnet_id = options.get("subnet-id")
        self.image_import_timeout = options.get("image-import-timeout", self.image_import_timeout)
        self.ipv4, self.ipv6 = bool(options.get("ipv4", False)), bool(options.get("ipv6", False))
        self.public_ipv4 = bool(options.get("public-ipv4", True))
        self.public_ipv6 = bool(options.get("public-ipv6", False))
        self.network_security_group_id = options.get("network-security-group-id")
        network = options.get("network")
        if isinstance(network, str):
            network = {"network": network}
        if network:
            required(network, "network", ("network",))
            self.network = {"resource-group": self.resource_group, "subnet": "default", **network}
        if not self.network and not self.subnet_id:
            raise ConfigError("one of network and subnet-id is required")
        self._load_login(options)

    def _load_login(self, options: dict[str, Any]) -> None:
        self.auth = options.get("auth")
        self.auth_path = options.get("auth-path")
        if self.auth and self.auth_path:
            raise ConfigError("auth-path and auth cannot be used together", where=("auth",))
        if not self.auth:
            self.auth_path = self.auth_path or os.environ.get(AUTH_LOCATION)
            if not self.auth_path:
                raise ConfigError(f"one of auth-path and auth is required (or the variable {AUTH_LOCATION})")
        elif self.auth.get("type") == "certificate":
            for key in ("tenant-id", "client-id", "certificate-path"):
                required(self.auth, key, ("auth",))

    def _cloud_image(self, options: dict[str, Any]) -> AzureCloudImage:
        return AzureCloudImage(options, self.zuul_public_key)

    def getSchema(self) -> v.Schema:
        return v.Schema(schema.provider())
