"""Options of a provider at Azure (AZU-4)."""

from __future__ import annotations

import os
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, option, required
from nodepool.driver.common import offers
from nodepool.driver.common.options import (
    PROVIDER,
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
    one_of,
    texts,
)
from nodepool.exceptions import ConfigError

AUTH_LOCATION = "AZURE_AUTH_LOCATION"
#: Of a cloud image, exactly one.
IMAGE_SOURCES = (
    "image-reference",
    "image-id",
    "image-filter",
    "shared-gallery-image",
    "community-gallery-image",
)
_GALLERY = {
    "gallery-name": option(str, None, "name of the gallery", key=v.Required),
    "name": option(str, None, "name of the image definition", key=v.Required),
    "version": option(str, None, "version of the image", shown="the latest"),
}
_ZONE = v.Any(str, int)


class AzureCloudImage(CloudImage):
    checks = (one_of(*IMAGE_SOURCES, what="a cloud image"),)
    password: str | None = option(str, None, "of the user")
    generate_password: bool = option(
        bool, False, "generate 64 letters and digits, not stored anywhere"
    )
    key: str | None = option(
        str, None, "SSH public key of the user", shown="that of ``zuul-public-key``"
    )
    image_reference: dict[str, str] | None = option(
        {
            "sku": option(str, None, "SKU of the image", key=v.Required),
            "publisher": option(str, None, "publisher of the image", key=v.Required),
            "offer": option(str, None, "offer of the publisher", key=v.Required),
            "version": option(str, None, "for example ``latest``", key=v.Required),
        },
        None,
        "from the marketplace; one of five",
    )
    image_id: str | None = option(str, None, "full id; one of five")
    image_filter: dict[str, Any] | None = option(
        {
            "name": option(str, None, "name of the image"),
            "location": option(str, None, "region of the image"),
            "tags": option(dict, None, "tags of the image, all of them"),
        },
        None,
        "selects the last match by name; cached for 5 min; one of five",
    )
    shared_gallery_image: dict[str, str] | None = option(
        _GALLERY, None, "image of a shared gallery; one of five"
    )
    community_gallery_image: dict[str, str] | None = option(
        _GALLERY, None, "image of a community gallery; one of five"
    )

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        if len([key for key in IMAGE_SOURCES if options.get(key) is not None]) != 1:
            raise ConfigError(
                f"cloud image {self.name} needs exactly one of {', '.join(IMAGE_SOURCES)}"
            )

    @property
    def external_name(self) -> str:
        return self.image_id or self.name


class AzureDiskImage(ProviderDiskImage):
    key: str | None = option(str, None, "SSH public key of the user")
    password: str | None = option(str, None, "of the user")
    generate_password: bool = option(
        bool, False, "generate 64 letters and digits, not stored anywhere"
    )


class AzureLabel(MachineLabel):
    hardware_profile: dict[str, str] = option(
        {"vm-size": option(str, REQUIRED, "name of the size")}, REQUIRED, "size of the machine"
    )
    tags: dict[str, str] = option(dict, {}, "of the machine", convert=texts)
    dynamic_tags: dict[str, str] = option(
        {str: str}, {}, "the same, with ``{request...}`` replaced"
    )
    user_data: str | None = option(str, None, "readable by programs in the machine")
    custom_data: str | None = option(str, None, "for cloud-init")
    volume_size: int | None = option(int, None, "GiB of the system disk", shown="the image's")
    volume_type: str | None = option(
        str, None, "*new*: for example ``Premium_LRS``", shown="Azure's"
    )
    ephemeral_os_disk: bool = option(
        bool, False, "*new*: put the system disk on the physical machine: faster, and free"
    )
    trusted_launch: bool = option(bool, False, "*new*: secure boot and a virtual TPM")
    identities: list[str] = option(
        [str], [], "*new*: ids of user-assigned identities for programs in the machine"
    )
    console_log: bool = option(bool, False, "*new*: log the console if a machine does not answer")
    use_spot: bool = option(bool, False, "*new*: spot machines, which the cloud can reclaim")
    zone: object = option(_ZONE, None, "*new*: zone", key=offers.ZONES, stored=False)
    zones: object = option(
        [_ZONE], None, "*new*: several: an offer for each", key=offers.ZONES, stored=False
    )
    alternatives: object = option(
        offers.alternatives("vm-size", _ZONE), None, offers.ALTERNATIVES, stored=False
    )

    def __init__(
        self, options: dict[str, Any], provider: AzureProviderConfig, pool: AzurePool
    ) -> None:
        super().__init__(options, provider, pool)
        if bool(self.cloud_image) == bool(self.diskimage):
            raise ConfigError(f"label {self.name} needs one of cloud-image and diskimage")
        self.vm_size = self.hardware_profile["vm-size"]
        self.offers = offers.offers(
            self.vm_size,
            offers.one_or_more(options, "zone") or [None],
            self.use_spot,
            options.get("alternatives") or [],
            "vm-size",
        )


class AzurePool(MachinePool):
    provider: AzureProviderConfig
    ipv4: bool = option(bool, PROVIDER, "private address; the default family")
    ipv6: bool = option(bool, PROVIDER, "private address")
    public_ipv4: bool = option(bool, PROVIDER, "public address; implies a private one")
    public_ipv6: bool = option(bool, PROVIDER, "public address; implies a private one")
    network_security_group_id: str | None = option(
        str,
        PROVIDER,
        "*new*: of the interfaces. Public addresses accept no connections without a group here or "
        "at the subnet",
    )

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        self.ipv6 = self.ipv6 or self.public_ipv6
        self.ipv4 = self.ipv4 or self.public_ipv4 or not self.ipv6


def _network(value: str | dict[str, str] | None) -> dict[str, str] | None:
    return {"network": value} if isinstance(value, str) else value or None


class AzureProviderConfig(MachineProviderConfig):
    cloud_image_class = AzureCloudImage
    diskimage_class = AzureDiskImage
    label_class = AzureLabel
    pool_class = AzurePool
    image_type = "vhd"

    location: str = option(str, REQUIRED, "region")
    resource_group: str = option(
        str, REQUIRED, "resource group of everything that Nodepool creates; must exist"
    )
    resource_group_location: str = option(str, REQUIRED, "accepted for 11.0.0, without effect")
    #: One of the two is set.
    auth_path: str | None = option(
        str,
        None,
        "file of a service principal, see below; or ``auth``",
        shown=f"the variable ``{AUTH_LOCATION}``",
    )
    auth: dict[str, Any] | None = option(
        {
            "type": option(
                v.Any("certificate", "workload-identity", "managed-identity", "cli", "default"),
                None,
                "``certificate``, ``workload-identity``, ``managed-identity``, ``cli`` (that of "
                "``az login``) or ``default``"
                " (the first that works)",
                key=v.Required,
            ),
            "subscription-id": option(str, None, "id of the subscription", key=v.Required),
            "tenant-id": option(str, None, "id of the tenant"),
            "client-id": option(str, None, "of the service principal or managed identity"),
            "certificate-path": option(str, None, "PEM file with key and certificate"),
            "cloud": option(
                v.Any("public", "china", "us-government"),
                "public",
                "Azure cloud of the subscription",
            ),
        },
        None,
        "*new*: other login methods",
    )
    zuul_public_key: str | None = option(str, None, "old default of ``key``")
    subnet_id: str | None = option(str, None, "full id of the subnet; or ``network``")
    network: dict[str, str] | None = option(
        v.Any(
            str,
            {
                "network": option(str, REQUIRED, "name"),
                "resource-group": option(str, None, "of the network", shown="the provider's"),
                "subnet": option(str, "default", "name of the subnet"),
            },
        ),
        None,
        "name of the virtual network, whose subnet ``default`` is used, or the keys below; or "
        "``subnet-id``",
        convert=_network,
    )
    image_import_timeout: int = option(
        int, 3600, "*new*: seconds until an uploaded image must be available"
    )
    ipv4: bool = option(bool, False, "default of the pools")
    ipv6: bool = option(bool, False, "default of the pools")
    public_ipv4: bool = option(bool, True, "default of the pools")
    public_ipv6: bool = option(bool, False, "default of the pools")
    network_security_group_id: str | None = option(str, None, "*new*: default of the pools")

    def load_own(self, options: dict[str, Any]) -> None:
        if self.network:
            self.network = {
                "resource-group": self.resource_group,
                "subnet": "default",
                **self.network,
            }
        elif not self.subnet_id:
            raise ConfigError("one of network and subnet-id is required")
        if self.auth and self.auth_path:
            raise ConfigError("auth-path and auth cannot be used together", where=("auth",))
        if not self.auth:
            self.auth_path = self.auth_path or os.environ.get(AUTH_LOCATION)
            if not self.auth_path:
                raise ConfigError(
                    f"one of auth-path and auth is required (or the variable {AUTH_LOCATION})"
                )
        elif self.auth.get("type") == "certificate":
            for key in ("tenant-id", "client-id", "certificate-path"):
                required(self.auth, key, ("auth",))

    def _cloud_image(self, options: dict[str, Any]) -> AzureCloudImage:
        return AzureCloudImage({"key": self.zuul_public_key, **options})
