"""Options of a provider at Google (GCE-4)."""

from __future__ import annotations

import re
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, changed, derived, option
from nodepool.driver.common import offers
from nodepool.driver.common.options import (
    NUMBER,
    PROVIDER,
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
    texts,
)
from nodepool.exceptions import ConfigError

#: Google's format for the key and the value of a label.
_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}\Z")


def label_trouble(labels: dict[str, str], dynamic: dict[str, Any]) -> str | None:
    """Return why Google would refuse these labels."""
    for key in (*labels, *dynamic):
        if not _LABEL_KEY.match(key):
            return (
                f"{key!r} cannot be a label: lower-case letters, digits, '-' and '_' only, a "
                "letter first, at most 63"
            )
    for key, value in labels.items():
        if not _LABEL_VALUE.match(value):
            return (
                f"label {key}: {value!r} cannot be its value: lower-case letters, digits, '-' "
                "and '_' only, at most 63"
            )
    return None


def _one_way(image: dict[str, Any]) -> dict[str, Any]:
    if not image.get("image-id") and not (image.get("image-project") and image.get("image-family")):
        raise v.Invalid("a cloud image needs image-id, or image-project and image-family")
    return image


class GceCloudImage(CloudImage):
    checks = (_one_way,)
    username: str | None = changed(CloudImage.username, key=str)
    key: str | None = option(str, None, "SSH public key for the username")
    image_id: str | None = option(str, None, "URL of an image; or the next two")
    image_project: str | None = option(str, None, "project of the family")
    image_family: str | None = option(str, None, "selects its newest image; cached for 5 min")

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        if not self.image_id and not (self.image_project and self.image_family):
            raise ConfigError(
                f"cloud image {self.name} needs image-id, or image-project and image-family"
            )

    @property
    def external_name(self) -> str:
        return self.image_id or f"{self.image_project}/{self.image_family}"


class GceDiskImage(ProviderDiskImage):
    key: str | None = option(str, None, "SSH public key for the username")
    guest_os_features: list[str] = option(
        [str], ["VIRTIO_SCSI_MULTIQUEUE", "UEFI_COMPATIBLE"], "capabilities of the image"
    )
    architecture: str | None = option(
        v.Any("X86_64", "ARM64"), None, "of the image", shown="Google's"
    )


class GceLabel(MachineLabel):
    instance_type: str = option(str, REQUIRED, "machine type")
    volume_type: str = option(str, "pd-standard", "of the disk")
    volume_size: int = option(int, 10, "GiB of the disk")
    use_spot: bool = option(bool, False, "*new*: spot machines, which the cloud can reclaim")
    tags: dict[str, str] = option(
        dict, {}, "*new*: labels of the machine", name="labels", convert=texts
    )
    dynamic_tags: dict[str, str] = option(
        {str: str}, {}, "*new*: with ``{request...}`` replaced", name="dynamic-labels"
    )
    network_tags: list[str] = option([str], [], "*new*: for firewall rules")
    service_account: dict[str, Any] | None = option(
        {
            "email": option(str, None, "of the account", key=v.Required),
            "scopes": option([str], ["cloud-platform"], "subset of its rights"),
        },
        None,
        "*new*: gives its rights to programs in the machine",
    )
    user_data: str | None = option(
        str, None, "*new*: for cloud-init; every program in the machine can read it"
    )
    console_log: bool = option(
        bool, False, "*new*: log the serial port if a machine does not answer"
    )
    zone: object = option(
        str, None, "*new*: zone", key=offers.ZONES, stored=False, shown="the provider's"
    )
    zones: object = option(
        [str], None, "*new*: several: an offer for each", key=offers.ZONES, stored=False
    )
    alternatives: object = option(
        offers.alternatives("instance-type", v.Any(str, int)),
        None,
        offers.ALTERNATIVES,
        stored=False,
    )

    def __init__(self, options: dict[str, Any], provider: GceProviderConfig, pool: GcePool) -> None:
        super().__init__(options, provider, pool)
        self.offers = offers.offers(
            self.instance_type,
            offers.one_or_more(options, "zone") or [provider.zone],
            self.use_spot,
            options.get("alternatives") or [],
            "instance-type",
        )
        if trouble := label_trouble(self.tags, self.dynamic_tags):
            raise ConfigError(trouble, where=("labels",))
        for offer in self.offers:
            if (offer.place or "").rpartition("-")[0] != provider.region:
                raise ConfigError(f"zone {offer.place} is not in region {provider.region}")


class GcePool(MachinePool):
    provider: GceProviderConfig
    network: str = option(str, PROVIDER, "*new*: network")
    subnetwork: str | None = option(str, PROVIDER, "*new*: instead of the network")
    public_ipv4: bool = option(bool, PROVIDER, "*new*: assign a public address")


class GceProviderConfig(MachineProviderConfig):
    cloud_image_class = GceCloudImage
    diskimage_class = GceDiskImage
    label_class = GceLabel
    pool_class = GcePool

    project: str = option(str, REQUIRED, "project of machines and images")
    region: str = option(str, REQUIRED, "region whose quota applies")
    zone: str = option(str, REQUIRED, "default zone; must be in the region")
    boot_timeout = changed(MachineProviderConfig.boot_timeout, default=60)
    rate = changed(
        MachineProviderConfig.rate,
        default=derived("2", lambda config, _: config.provider.get("rate-limit", 2)),
    )
    rate_limit: object = option(NUMBER, None, "other name of ``rate``, which wins", stored=False)
    network: str = option(str, "global/networks/default", "*new*: default of the pools")
    subnetwork: str | None = option(str, None, "*new*: default of the pools")
    public_ipv4: bool = option(bool, True, "*new*: default of the pools")
    object_storage: dict[str, Any] | None = option(
        {"bucket-name": option(str, None, "bucket of Cloud Storage; must exist", key=v.Required)},
        None,
        "*new*: for imports; required by ``diskimages``",
    )
    image_import_timeout: int = option(
        int, 3600, "*new*: seconds until an uploaded image must be available"
    )

    @property
    def manage_images(self) -> bool:
        return self.object_storage is not None

    @property
    def zones(self) -> list[str]:
        """All zones in which our machines may be."""
        places = [
            offer.place
            for pool in self.pools.values()
            for label in pool.labels.values()
            for offer in label.offers
        ]
        return list(dict.fromkeys([self.zone, *places]))

    def load_own(self, options: dict[str, Any]) -> None:
        if options.get("diskimages") and self.object_storage is None:
            raise ConfigError(
                "diskimages need object-storage, through which images are imported",
                where=("diskimages",),
            )
