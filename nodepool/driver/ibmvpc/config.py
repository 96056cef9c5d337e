"""Options of a provider at IBM (IBM-4)."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, changed, option
from nodepool.driver.common import offers
from nodepool.driver.common.options import (
    PROVIDER,
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
    one_of,
)
from nodepool.exceptions import ConfigError

#: Of a cloud image, exactly one.
IMAGE_SOURCES = ("image-id", "image-href", "image-name", "image-filter")
_OPERATING_SYSTEM = {
    "architecture": "for example ``amd64``",
    "display-name": "name for people",
    "family": "for example ``Debian GNU/Linux``",
    "href": "URL of the operating system",
    "name": "for example ``debian-12-amd64``",
    "vendor": "for example ``Debian``",
    "version": "for example ``12 bookworm``",
}
_PLACE = functools.partial(v.Inclusive, group_of_inclusion="place")
#: Parts of resource group names, from which they are parsed.
_NAME = re.compile(r"[A-Za-z0-9-]+\Z")


def check_name(name: str, what: str) -> None:
    if not _NAME.match(name):
        raise ConfigError(
            f"the name of {what} {name!r} may have letters, digits and dashes only", where=("name",)
        )


class IBMVPCCloudImage(CloudImage):
    checks = (one_of(*IMAGE_SOURCES, what="a cloud image"),)
    keys: list[str] = option([str], [], "names of SSH keys in the VPC")
    image_id: str | None = option(str, None, "id of the image; one of four")
    image_href: str | None = option(str, None, "URL of the image; one of four")
    image_name: str | None = option(str, None, "name of the image; one of four")
    image_filter: dict[str, Any] | None = option(
        {
            "operating-system": option(
                {
                    **{key: option(str, None, doc) for key, doc in _OPERATING_SYSTEM.items()},
                    "dedicated-host-only": option(
                        bool, None, "whether it runs on dedicated hosts only"
                    ),
                },
                None,
                "all of these",
            ),
            "owner-type": option(str, None, "``provider`` or ``user``"),
            "status": option(str, None, "for example ``available``"),
        },
        None,
        "selects the newest match; cached for 5 min; one of four",
    )

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        if len([key for key in IMAGE_SOURCES if options.get(key) is not None]) != 1:
            raise ConfigError(
                f"cloud image {self.name} needs exactly one of {', '.join(IMAGE_SOURCES)}"
            )

    @property
    def external_name(self) -> str:
        return self.image_id or self.image_name or self.name


class IBMVPCDiskImage(ProviderDiskImage):
    operating_system: str = option(str, REQUIRED, "IBM's name, for example ``debian-12-amd64``")
    username: str = changed(ProviderDiskImage.username, hidden=True)
    meta: dict[str, Any] = changed(ProviderDiskImage.meta, hidden=True)
    keys: list[str] = option([str], [], "", hidden=True)


class IBMVPCLabel(MachineLabel):
    profile: str = option(str, REQUIRED, "for example ``cx2-2x4``")
    user_data: str | None = option(str, None, "for cloud-init")
    alternatives: list[dict[str, Any]] = option(
        [
            {
                "profile": option(
                    str, None, "as of the label", key=offers.SIZES, shown="the label's"
                ),
                "profiles": option([str], None, "several: an offer for each", key=offers.SIZES),
                "zone": option(
                    str, None, "together with ``subnet``", key=_PLACE, shown="the pool's"
                ),
                "subnet": option(
                    str, None, "together with ``zone``", key=_PLACE, shown="the pool's"
                ),
            }
        ],
        [],
        offers.ALTERNATIVES,
        stored=False,
    )
    # The API does not support tags at the creation of a machine.
    tags: dict[str, str] = {}
    dynamic_tags: dict[str, str] = {}

    def __init__(
        self, options: dict[str, Any], provider: IBMVPCProviderConfig, pool: IBMVPCPool
    ) -> None:
        super().__init__(options, provider, pool)
        if bool(self.cloud_image) == bool(self.diskimage):
            raise ConfigError(f"label {self.name} needs one of cloud-image and diskimage")
        alternatives = options.get("alternatives") or []
        self.offers = offers.offers(self.profile, [pool.zone], False, alternatives, "profile")
        #: By zone.
        self.subnets: dict[str | None, str] = {pool.zone: pool.subnet}
        self.subnets.update(
            {entry["zone"]: entry["subnet"] for entry in alternatives if entry.get("zone")}
        )


class IBMVPCPool(MachinePool):
    provider: IBMVPCProviderConfig
    name: str = changed(MachinePool.name, doc="letters, digits and dashes")
    zone: str = option(str, PROVIDER, "zone")
    subnet: str = option(str, PROVIDER, "subnet in the zone")
    public_ipv4: bool = option(
        bool, PROVIDER, "assign a floating address to each node, billed by the month"
    )

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        check_name(str(self.name), "pool")
        for key in ("zone", "subnet"):
            if not getattr(self, key):
                raise ConfigError(
                    f"pool {self.name} needs {key}, here or in its provider", where=(key,)
                )


class IBMVPCProviderConfig(MachineProviderConfig):
    cloud_image_class = IBMVPCCloudImage
    diskimage_class = IBMVPCDiskImage
    label_class = IBMVPCLabel
    pool_class = IBMVPCPool

    vpc: str = option(str, REQUIRED, "name of the VPC")
    region: str = option(str, REQUIRED, "for example ``us-south``")
    zone: str | None = option(str, None, "default of the pools")
    subnet: str | None = option(str, None, "default of the pools")
    credentials_file: str | None = option(
        str, None, "lines ``NAME=value``, see below", shown="the environment"
    )
    object_storage: dict[str, str] | None = option(
        {
            "instance-name": option(str, None, "instance of Cloud Object Storage", key=v.Required),
            "endpoint": option(str, None, "its address", key=v.Required),
            "bucket-name": option(str, None, "bucket; must exist", key=v.Required),
        },
        None,
        "for imports; required by ``diskimages``",
    )
    quota: dict[str, float] = option(
        {str: int},
        {},
        "``instances``, ``cores`` and ``ram`` (MiB) limits of the account, which IBM does not "
        "report",
        convert=lambda given: {"instances": math.inf, "cores": math.inf, "ram": math.inf, **given},
        shown="no limits",
    )
    public_ipv4: bool = option(bool, False, "default of the pools")
    image_type: str = option(v.Any("qcow2", "vhd"), "qcow2", "or ``vhd``", name="image-format")
    image_import_timeout: int = option(
        int, 3600, "*new*: seconds until an uploaded image must be available"
    )

    def load_own(self, options: dict[str, Any]) -> None:
        check_name(self.name, "provider")
        if options.get("diskimages") and self.object_storage is None:
            raise ConfigError(
                "diskimages need object-storage, through which images are imported",
                where=("diskimages",),
            )
