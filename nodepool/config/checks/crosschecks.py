"""Find options that have the right type and cannot work (CFG-12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

#: Dictionaries whose keys are chosen by users.
_FOREIGN = frozenset(
    {
        "env-vars",
        "metadata",
        "meta",
        "node-attributes",
        "tags",
        "dynamic-tags",
        "instance-properties",
        "dynamic-instance-properties",
        "scheduler-hints",
        "rspec",
        "backing-config",
        "zookeeper-tls",
        "max-resources",
        "spec",
    }
)
_PORTS = frozenset({"port", "connection-port", "ssh-port"})
#: With negative values images are built, or builds, uploads and launches are abandoned, repeatedly.
_NEVER_NEGATIVE = frozenset(
    {
        "rebuild-age",
        "build-timeout",
        "boot-timeout",
        "launch-timeout",
        "image-import-timeout",
        "image-upload-timeout",
        "zookeeper-timeout",
    }
)
#: Negative values mean the same as 0, or nothing.
_BETTER_NOT_NEGATIVE = frozenset(
    {
        "min-ready",
        "max-ready-age",
        "max-servers",
        "max-cores",
        "max-ram",
        "max-volumes",
        "max-volume-gb",
        "max-projects",
        "max-pods",
        "max-parallel-jobs",
        "launch-retries",
        "timeout",
        "rate",
        "rate-limit",
        "port-cleanup-interval",
        "grace-time",
        "min-retention-time",
        "max-age",
        "min-ram",
        "volume-size",
        "build-log-retention",
        "failed-build-retention",
        "build-min-free",
    }
)
#: Negative values have another meaning, such as no limit.
_MAY_BE_NEGATIVE = frozenset(
    {"priority", "max-concurrency", "max-hold-age", "max-launch-failures-per-hour"}
)
#: What a machine of a label has. No cloud and no node manager accepts negative values.
_SIZES = frozenset(
    {
        "cpus",
        "ram",
        "disk",
        "pids",
        "net-min",
        "net-max",
        "gpu",
        "iops",
        "throughput",
        *(
            f"{default}{what}{limit}"
            for default in ("", "default-label-")
            for what in ("cpu", "memory", "storage")
            for limit in ("", "-limit")
        ),
    }
)
_WAITS = frozenset(
    {"timeout", "boot-timeout", "launch-timeout", "build-timeout", "zookeeper-timeout"}
)
_NUMBERS = _PORTS | _NEVER_NEGATIVE | _BETTER_NOT_NEGATIVE | _MAY_BE_NEGATIVE | _SIZES


@dataclasses.dataclass(frozen=True)
class Finding:
    """See ``Problem`` of nodepool.config.checks.validation."""

    text: str
    where: tuple[Any, ...]
    error: bool = True
    fatal: bool = True


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def options_of(
    data: object, where: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Yield position and value of each option at any depth.

    Options whose names users choose are omitted.
    """
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    ):
        yield (*where, key), value
        if key not in _FOREIGN:
            yield from options_of(value, (*where, key))


def numbers(data: object) -> Iterator[Finding]:
    """Ports, and numbers that cannot be negative."""
    for place, value in options_of(data):
        *where, key = place
        if isinstance(value, bool) and key in _NUMBERS:
            text = f"{str(value).lower()} is taken as the number {int(value)}; write a number"
            yield Finding(text, place, error=False, fatal=False)
        number = _number(value)
        if number is None:
            continue
        if key in _PORTS:
            if not 0 <= number <= 65535:
                yield Finding(f"{value} is not a valid port (1 to 65535)", place)
            elif number == 0 and where != ["webapp"]:  # there: any free port
                yield Finding("0 is not a valid port (1 to 65535)", place, error=False, fatal=False)
        elif number < 0 and (
            key in _NEVER_NEGATIVE or (key in _SIZES and where[:1] == ["providers"])
        ):
            yield Finding(f"{value} is negative", place)
        elif number < 0 and key in _BETTER_NOT_NEGATIVE and where[:1] != ["tenant-resource-limits"]:
            yield Finding(
                f"{value} is negative, which has no meaning here", place, error=False, fatal=False
            )
        elif number == 0 and key == "zookeeper-timeout":
            yield Finding("0 seconds are too short", place)
        elif number == 0 and key in _WAITS and key != "build-timeout":  # there: the default
            yield Finding(
                "0 seconds are too short for anything to answer", place, error=False, fatal=False
            )


@dataclasses.dataclass(frozen=True)
class OfferedLabel:
    """A label that a pool offers; ``backing`` is the label of its backing nodes."""

    label: str
    where: tuple[Any, ...]
    backing: str | None = None


def backing_labels(offers: list[OfferedLabel], defined: set[Any]) -> Iterator[Finding]:
    """Find labels that would be their own backing nodes, and missing backing labels."""
    backed: dict[str, set[str]] = {}
    for offer in offers:
        if offer.backing is not None:
            backed.setdefault(offer.label, set()).add(offer.backing)
    real = {offer.label for offer in offers if offer.backing is None}
    for offer in offers:
        if offer.backing is None:
            continue
        place = (*offer.where, "backing-label")
        chain = _way_back(offer.label, offer.backing, backed)
        if chain:
            # A pool whose machines need no backing nodes may end the cycle.
            fatal = not real.intersection(chain)
            yield Finding(f"backing labels form a cycle: {' -> '.join(chain)}", place, fatal=fatal)
        elif offer.backing not in backed and offer.backing not in real:
            more = "" if offer.backing in defined else ", and the top-level labels do not have it"
            text = (
                f"backing-label {offer.backing} of label {offer.label}: no pool here offers "
                f"it{more}"
            )
            yield Finding(text, place, error=False, fatal=False)


def _way_back(label: str, first: str, backed: dict[str, set[str]]) -> list[str]:
    """Return the path from *label* through *first* back to *label*; [] if there is none."""
    ways = [[label, first]]
    seen = set()
    while ways:
        way = ways.pop()
        if way[-1] == label:
            return way
        if way[-1] not in seen:
            seen.add(way[-1])
            ways += [[*way, following] for following in sorted(backed.get(way[-1], ()))]
    return []


def nobody_offers(labels: object, offers: list[OfferedLabel]) -> Iterator[Finding]:
    """Find labels with min-ready that no pool offers; another launcher may offer them."""
    offered = {offer.label for offer in offers}
    for index, label in enumerate(labels if isinstance(labels, list) else ()):
        if not isinstance(label, dict) or label.get("name") in offered:
            continue
        if (_number(label.get("min-ready")) or 0) > 0:
            text = f"label {label.get('name')} has min-ready, but no pool here offers it"
            yield Finding(text, ("labels", index, "min-ready"), error=False, fatal=False)
