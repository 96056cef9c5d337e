"""Usage of Amazon's service quotas by instances, hosts and volumes (AWS-2.7)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from nodepool.cloud import ErrorKind, translate
from nodepool.config.model import ProviderConfig
from nodepool.driver.aws.api.errors import classify, code_of
from nodepool.driver.aws.config import AwsLabel
from nodepool.driver.aws.objects import is_spot
from nodepool.driver.aws.quota_codes import (
    HOST_QUOTA_CODES,
    INSTANCE_QUOTA_CODES,
    STORAGE_CODES,
    VOLUME_QUOTA_CODES,
)
from nodepool.driver.common.adapter import smallest
from nodepool.driver.utils import QuotaInformation

_FAMILY = re.compile(r"([a-z\-]+)\d")
GB_PER_TB = 1000


def instance_code(instance_type: str, spot: bool) -> str | None:
    """Return the quota code of an instance type; None when there is none or it is unknown."""
    match = _FAMILY.match(instance_type)
    pair = INSTANCE_QUOTA_CODES.get(match.group(1)) if match else None
    return None if pair is None else (pair.spot if spot else pair.on_demand)


def known_family(instance_type: str) -> bool:
    match = _FAMILY.match(instance_type)
    return match is not None and match.group(1) in INSTANCE_QUOTA_CODES


def host_code(instance_type: str) -> str | None:
    return HOST_QUOTA_CODES.get(instance_type.split(".")[0])


def volume_use(volume_type: str | None, size: float | None, iops: float | None) -> dict[str, float]:
    """Return the usage of one volume; ``size`` is in GiB, which count as GB as in AWS."""
    codes = VOLUME_QUOTA_CODES.get(volume_type or "")
    if codes is None:
        return {}
    use: dict[str, float] = {}
    if size:
        use[codes.storage] = size
    if codes.iops and iops:
        use[codes.iops] = iops
    return use


class AwsQuota:
    """The quota part of an adapter; ``cloud`` is its :class:`AwsLookups`."""

    def __init__(self, cloud: Any, warn_once: Callable[..., object]) -> None:
        self.cloud = cloud
        self._warn_once = warn_once

    # -- use

    def of_type(self, instance_type: str, spot: bool) -> QuotaInformation:
        """Return the usage of one instance of the type.

        :raises RuntimeConfigurationException: the type does not exist.
        """
        try:
            info = self.cloud.instance_type(instance_type)
        except Exception as error:
            if code_of(error) == "InvalidInstanceType":
                raise translate(error, classify, ErrorKind.CONFIGURATION) from error
            raise
        cpu = info.get("VCpuInfo") or {}
        cores, vcpus = cpu.get("DefaultCores"), cpu.get("DefaultVCpus")
        args: dict[str, Any] = {
            "cores": cores if cores is not None else vcpus,
            "ram": (info.get("MemoryInfo") or {}).get("SizeInMiB"),
            "instances": 1,
        }
        code = instance_code(instance_type, spot)
        if code:
            args[code] = vcpus
        elif not known_family(instance_type):
            self._warn_once(
                instance_type, "Unknown quota code for instance type: %s", instance_type
            )
        return QuotaInformation(**args)

    def of_host(self, instance_type: str) -> QuotaInformation:
        code = host_code(instance_type)
        if code is None:
            self._warn_once(
                "host " + instance_type, "Unknown quota code for dedicated host: %s", instance_type
            )
        return QuotaInformation(instances=1, **({code: 1} if code else {}))

    def of_label(self, label: Any) -> QuotaInformation:
        """Return the usage that is known before the launch."""
        quota: QuotaInformation
        if label.fleet:
            quota = QuotaInformation(instances=1)
        elif label.dedicated_host:
            self.of_type(
                label.instance_type, False
            )  # a type that does not exist disables the label
            quota = self.of_host(label.instance_type)
        else:
            quota = smallest(
                self.of_type(offer.instance_type, offer.spot) for offer in label.offers
            )
        quota.add(self.of_volume(label))
        return quota

    def of_volume(self, label: AwsLabel) -> QuotaInformation:
        """Return the usage of the root volume, if the label specifies it."""
        return QuotaInformation(**volume_use(label.volume_type, label.volume_size, label.iops))

    def of_instance(
        self, instance: dict[str, Any], volumes: Iterable[dict[str, Any]] = ()
    ) -> QuotaInformation:
        """Return the usage of an existing instance with these volumes."""
        instance_type = instance["InstanceType"]
        if (instance.get("Placement") or {}).get("HostId"):
            quota = self.of_host(instance_type)
        else:
            quota = self.of_type(instance_type, is_spot(instance))
        for volume in volumes:
            quota.add(
                QuotaInformation(
                    **volume_use(volume.get("VolumeType"), volume.get("Size"), volume.get("Iops"))
                )
            )
        return quota

    # -- limits

    def _wanted(self, provider: ProviderConfig) -> tuple[set[str], set[str]]:
        """Return the codes for EC2 and EBS that our labels use."""
        ec2: set[str | None] = set()
        ebs: set[str | None] = set()
        for pool in provider.pools.values():
            for label in pool.labels.values():
                if label.fleet:
                    ec2.update(
                        instance_code(one, label.use_spot) for one in label.fleet["instance-types"]
                    )
                elif label.dedicated_host:
                    ec2.add(host_code(label.instance_type))
                else:
                    ec2.update(
                        instance_code(offer.instance_type, offer.spot) for offer in label.offers
                    )
                if label.volume_type:
                    codes = VOLUME_QUOTA_CODES.get(label.volume_type)
                    if codes is None:
                        self._warn_once(
                            "volume " + label.volume_type,
                            "Unknown quota code for volume type: %s",
                            label.volume_type,
                        )
                    else:
                        ebs.update(codes)
        return {code for code in ec2 if code}, {code for code in ebs if code}

    def limits(self, provider: ProviderConfig) -> QuotaInformation:
        """Return the limits of the codes that our labels use; all others are infinite."""
        ec2, ebs = self._wanted(provider)
        values: dict[str, float] = {}
        for service, codes in (("ec2", ec2), ("ebs", ebs)):
            known = self.cloud.service_quotas(service) if codes else {}
            for code in codes:
                if code not in known:
                    self._warn_once(
                        "limit " + code, "AWS quota code %s is unknown, no limit is assumed", code
                    )
                    continue
                values[code] = known[code] * GB_PER_TB if code in STORAGE_CODES else known[code]
        return QuotaInformation(default=math.inf, **values)
