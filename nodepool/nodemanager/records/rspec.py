"""Resources of a sliver: names, units, defaults, loans (NM-A.1, NM-B.2, NM-C.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
#: Maximum of every resource: the largest number for the kernel and SQLite.
MAXIMUM = 2**62
#: "Not limited", where 0 would mean "nothing at all".
UNLIMITED_RATE = 10**12
#: bit/s; the sum of many still fits into 64 bits.
MAXIMUM_RATE = 10**15
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


class RSpecError(ValueError):
    """A resource is invalid; the text has name, value and the valid values."""


@dataclass(frozen=True)
class Resource:
    name: str
    default: int
    meaning: str
    #: Resources that may be lent to other slivers.
    loanable: bool = False
    #: Minimum that a lender keeps.
    floor: int = 0
    minimum: int = 0
    maximum: int = MAXIMUM
    #: 0 means no limit: nothing can be lent or added.
    unlimited_at_zero: bool = False


_RESOURCES = (
    Resource("nm_enabled", 1, "0: no login, everything stopped", maximum=1),
    Resource(
        "nm_cpu_share",
        32,
        "weight among slivers without a guarantee",
        True,
        1,
        minimum=1,
        maximum=100_000,
    ),
    Resource(
        "nm_cpu_guaranteed_share",
        0,
        "per mille of the host's CPU; replaces nm_cpu_share",
        True,
        0,
        maximum=1000,
    ),
    Resource(
        "nm_cpu_limit",
        0,
        "per mille of the host's CPU that it never exceeds; 0: none",
        True,
        10,
        maximum=1000,
        unlimited_at_zero=True,
    ),
    Resource("nm_cpu_cores", 0, "dedicated whole cores; 0: none", maximum=4096),
    Resource("nm_mem_limit", 0, "MiB; 0: none", True, 64, maximum=2**40, unlimited_at_zero=True),
    Resource("nm_mem_guaranteed", 0, "MiB; 0: none", maximum=2**40),
    Resource("nm_pids_max", 1024, "processes and threads", True, 32, minimum=1, maximum=4_194_304),
    Resource("nm_io_read_bps", 0, "bytes per second; 0: no limit"),
    Resource("nm_io_write_bps", 0, "bytes per second; 0: no limit"),
    Resource("nm_disk_quota", 5_000_000, "KiB", minimum=4096),
    Resource("nm_net_min_rate", 8, "bit/s sent, guaranteed", maximum=MAXIMUM_RATE),
    Resource(
        "nm_net_max_rate", UNLIMITED_RATE, "bit/s sent, ceiling", True, 8, maximum=MAXIMUM_RATE
    ),
    Resource(
        "nm_net_exempt_min_rate",
        8,
        "bit/s to exempt destinations, guaranteed",
        maximum=MAXIMUM_RATE,
    ),
    Resource(
        "nm_net_exempt_max_rate",
        UNLIMITED_RATE,
        "bit/s to exempt destinations, ceiling",
        True,
        8,
        maximum=MAXIMUM_RATE,
    ),
    Resource("nm_net_max_kbyte", 0, "KiB sent per day before the ceiling is lowered; 0: no limit"),
    Resource(
        "nm_net_thresh_kbyte",
        0,
        "KiB sent per day from which the ceiling is lowered; 0: 80 % of the limit",
    ),
    Resource("nm_net_exempt_max_kbyte", 0, "KiB sent per day to exempt destinations; 0: no limit"),
    Resource(
        "nm_net_exempt_thresh_kbyte",
        0,
        "KiB per day from which that ceiling is lowered; 0: 80 % of the limit",
    ),
    Resource(
        "nm_net_share",
        1,
        "weight when slivers compete for spare bandwidth",
        True,
        1,
        minimum=1,
        maximum=10_000,
    ),
)
RESOURCES: dict[str, Resource] = {resource.name: resource for resource in _RESOURCES}
DEFAULT_RSPEC: dict[str, int] = {resource.name: resource.default for resource in _RESOURCES}
LOANABLE = frozenset(resource.name for resource in _RESOURCES if resource.loanable)
#: Of the loanable ones, those whose 0 means "no limit".
UNLIMITED_AT_ZERO = frozenset(
    resource.name for resource in _RESOURCES if resource.unlimited_at_zero
)
FLOORS: dict[str, int] = {
    resource.name: resource.floor for resource in _RESOURCES if resource.loanable
}
#: Names of the finished original (B.2) -> ours, and the factor between the units.
SYNONYMS: dict[str, tuple[str, int]] = {
    "enabled": ("nm_enabled", 1),
    "cpu_share": ("nm_cpu_share", 1),
    "cpu_pct": ("nm_cpu_guaranteed_share", 10),
    "cpu_cores": ("nm_cpu_cores", 1),
    "disk_max": ("nm_disk_quota", 1),
    "net_min_rate": ("nm_net_min_rate", 1000),
    "net_max_rate": ("nm_net_max_rate", 1000),
    "net_share": ("nm_net_share", 1),
    "net_max_kbyte": ("nm_net_max_kbyte", 1),
    "net_thresh_kbyte": ("nm_net_thresh_kbyte", 1),
    "net_i2_max_kbyte": ("nm_net_exempt_max_kbyte", 1),
    "net_i2_thresh_kbyte": ("nm_net_exempt_thresh_kbyte", 1),
    "net_i2_share": ("nm_net_share", 1),
    "net_i2_min_rate": ("nm_net_exempt_min_rate", 1000),
    "net_i2_max_rate": ("nm_net_exempt_max_rate", 1000),
}
_RATES = (
    ("nm_net_min_rate", "nm_net_max_rate"),
    ("nm_net_exempt_min_rate", "nm_net_exempt_max_rate"),
)
#: Adds the shared cores to the reserved ones (B.4): ``"2b"``.
BOTH_CORES = "nm_cpu_cores_both"


def check_name(name: object) -> str:
    """Return a sliver or delegate name that is valid in paths, host names and records.

    :raises ValueError: it is not valid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = (
            repr(name)
            if isinstance(name, str) and len(name) < 80 and name.isprintable()
            else "that"
        )
        raise ValueError(
            f"{shown} is not a name: use a lower-case letter, then up to 62 of a-z 0-9 _ -"
        )
    return name


def _amount(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise RSpecError(f"{name}: must be a whole number, not {type(value).__name__}")
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value.strip()):
            raise RSpecError(f"{name}: must be a whole number, not {value[:40]!r}")
        return int(value)
    return value


def validate(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the given resources by their current names.

    ``nm_cpu_cores`` may be ``"<n>b"``.  A ceiling of -1 means none.

    :raises RSpecError: an unknown resource, an invalid amount, or a guaranteed rate above its
        ceiling.
    """
    result = _amounts(given)
    for minimum, maximum in _RATES:
        if result.get(minimum, 0) > result.get(maximum, MAXIMUM_RATE):
            raise RSpecError(
                f"{minimum}: {result[minimum]} is more than {maximum} {result[maximum]}"
            )
    return result


def _amounts(given: Mapping[str, Any]) -> dict[str, int]:
    result: dict[str, int] = {}
    for key, value in given.items():
        name, factor = SYNONYMS.get(str(key), (str(key), 1))
        if name == BOTH_CORES:
            result[BOTH_CORES] = int(bool(_amount(name, value)))
            continue
        resource = RESOURCES.get(name)
        if resource is None:
            raise RSpecError(
                f"unknown resource {str(key)[:60]!r}; known are {', '.join(sorted(RESOURCES))}"
            )
        if name == "nm_cpu_cores" and isinstance(value, str) and value.endswith("b"):
            result[BOTH_CORES] = 1
            value = value[:-1]
        amount = _amount(str(key), value) * factor
        if name.endswith("_max_rate") and amount < 0:
            amount = UNLIMITED_RATE
        if not resource.minimum <= amount <= resource.maximum:
            raise RSpecError(
                f"{key}: {amount} is not between {resource.minimum} and {resource.maximum} "
                f"({resource.meaning})"
            )
        result[name] = amount
    return result


def overlay(defaults: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, int]:
    """Return the given amounts completed with defaults.

    A guaranteed rate from one of them is reduced to the other's ceiling.

    :param defaults: validated.
    :raises RSpecError: an unknown resource or an invalid amount.
    """
    own = _amounts(given)
    result = {**defaults, **own}
    for minimum, maximum in _RATES:
        if minimum in result and not {minimum, maximum} <= own.keys():
            result[minimum] = min(result[minimum], result.get(maximum, MAXIMUM_RATE))
    return result


def with_defaults(given: Mapping[str, Any]) -> dict[str, int]:
    """Return a complete RSpec; guaranteed rates above their ceiling are reduced to it.

    :raises RSpecError: an unknown resource or an invalid amount.
    """
    result = {**DEFAULT_RSPEC, **_amounts(given)}
    for minimum, maximum in _RATES:
        result[minimum] = min(result[minimum], result[maximum])
    return result
