"""Used-up addresses and interfaces of a network do not count as a failed launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodepool.cloud import ErrorKind
from nodepool.driver.aws.api.errors import kind_of_code as of_aws
from nodepool.driver.azure.errors import kind_of_code as of_azure
from nodepool.driver.gce.errors import kind_of_code as of_google


@pytest.mark.parametrize(
    ("kind_of", "code"),
    [
        (of_aws, "AddressLimitExceeded"),
        (of_aws, "NetworkInterfaceLimitExceeded"),
        (of_azure, "SubnetIsFull"),
        (of_azure, "PublicIPCountLimitReached"),
        (of_azure, "StaticPublicIPCountLimitReached"),
        (of_azure, "NetworkInterfaceCountLimitReached"),
        (of_google, "IP_SPACE_EXHAUSTED"),
        (of_google, "IP_SPACE_EXHAUSTED_WITH_DETAILS"),
    ],
)
def test_limit_of_addresses_or_interfaces_is_a_quota(
    kind_of: Callable[[str], ErrorKind | None], code: str
) -> None:
    """The request waits until another machine is deleted."""
    assert kind_of(code) is ErrorKind.QUOTA


@pytest.mark.parametrize(
    "code", ["InsufficientFreeAddressesInSubnet", "InsufficientAddressCapacity"]
)
def test_addresses_that_aws_does_not_have_are_missing_capacity(code: str) -> None:
    assert of_aws(code) is ErrorKind.CAPACITY
