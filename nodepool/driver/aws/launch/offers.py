"""The offers of a label, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Offer(NamedTuple):
    """One offer; None: not given."""

    instance_type: str | None
    subnet_id: str | None
    az: str | None
    spot: bool
    capacity_reservation: tuple[tuple[str, str], ...] | None = None

    def describe(self) -> str:
        held = [value for key, value in self.capacity_reservation or () if key != "preference"]
        parts = ["spot" if self.spot else "on-demand", self.subnet_id or self.az, *held]
        return f"{self.instance_type} ({', '.join(filter(None, parts))})"


def _one_or_more(options: dict[str, Any], single: str, several: str) -> list[str] | None:
    values = ([options[single]] if options.get(single) else []) + list(options.get(several) or [])
    return list(dict.fromkeys(values)) or None


def build(
    instance_type: str | None,
    subnets: Sequence[str],
    az: str | None,
    spot: bool,
    capacity_reservation: dict[str, str] | None,
    alternatives: Sequence[dict[str, Any]],
) -> tuple[Offer, ...]:
    """Return the label's own settings, then each alternative, which inherits what it omits.

    For lists in one entry, every instance type is tried in every subnet before the next type.
    """

    def reservation(value: dict[str, str] | None) -> tuple[tuple[str, str], ...] | None:
        return tuple(sorted(value.items())) if value else None

    inherited: list[str | None] = [*subnets] if subnets else [None]
    offers = [
        Offer(instance_type, subnet, az, spot, reservation(capacity_reservation))
        for subnet in inherited
    ]
    for entry in alternatives:
        types: list[str | None] = [
            *(_one_or_more(entry, "instance-type", "instance-types") or ())
        ] or [instance_type]
        named = _one_or_more(entry, "subnet-id", "subnet-ids")
        zone = entry.get("availability-zone")
        # An entry with its own zone or subnet does not inherit the other one.
        places: list[str | None] = [*named] if named else [None] if zone else inherited
        if zone is None and named is None:
            zone = az
        held = entry.get("capacity-reservation", capacity_reservation)
        for one in types:
            offers += [
                Offer(one, place, zone, bool(entry.get("use-spot", spot)), reservation(held))
                for place in places
            ]
    return tuple(dict.fromkeys(offers))
