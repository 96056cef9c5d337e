"""The offers of a label: sizes, locations, spot or not (DRV-7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import voluptuous as v


class Offer(NamedTuple):
    """One offer; ``place`` None: the cloud chooses the location."""

    size: str
    place: str | None
    spot: bool

    def describe(self) -> str:
        return f"{self.size} ({'spot' if self.spot else 'on-demand'}{f', {self.place}' if self.place else ''})"


def one_or_more(options: dict[str, Any], single: str) -> list[str] | None:
    """Return the values of the option, or of the one of the same name with an s."""
    values = ([options[single]] if options.get(single) else []) + list(options.get(f"{single}s") or [])
    return list(dict.fromkeys(map(str, values))) or None


def offers(size: str, places: Sequence[str | None], spot: bool, alternatives: Sequence[dict[str, Any]], key: str) -> tuple[
    Offer, ...
]:  # fmt: skip
    """Return the label's own settings, then each alternative, which inherits what it omits.

    Every size of an entry is tried in every location before the next size.

    :param key: name of the size option in the configuration.
    """
    own = list(places) or [None]
    found = [Offer(size, place, spot) for place in own]
    for entry in alternatives:
        sizes = one_or_more(entry, key) or [size]
        where: Sequence[str | None] = one_or_more(entry, "zone") or own
        found += [Offer(one, place, bool(entry.get("use-spot", spot))) for one in sizes for place in where]
    return tuple(dict.fromkeys(found))


def schema(key: str, spot: bool = True) -> list[Any]:
    """Return the schema of the option ``alternatives``."""
    entry: dict[Any, Any] = {
        v.Exclusive(key, "sizes"): str,
        v.Exclusive(f"{key}s", "sizes"): [str],
        v.Exclusive("zone", "zones"): v.Any(str, int),
        v.Exclusive("zones", "zones"): [v.Any(str, int)],
    }
    if spot:
        entry["use-spot"] = bool
    return [entry]
