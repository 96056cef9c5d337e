"""The offers of a label: sizes, locations, spot or not (DRV-7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nodepool.base.option import exclusive, option

#: Keys of which one at most is given.
ZONES, SIZES = exclusive("zones"), exclusive("sizes")
#: Meaning of ``alternatives``.
ALTERNATIVES = "*new*: further offers, tried in order. Each inherits what it does not name"


class Offer(NamedTuple):
    """One offer; ``place`` None: the cloud chooses the location."""

    size: str
    place: str | None
    spot: bool

    def describe(self) -> str:
        return (
            f"{self.size} "
            f"({'spot' if self.spot else 'on-demand'}{f', {self.place}' if self.place else ''})"
        )


def one_or_more(options: dict[str, Any], single: str) -> list[str] | None:
    """Return the values of the option, or of the one of the same name with an s."""
    values = ([options[single]] if options.get(single) else []) + list(
        options.get(f"{single}s") or []
    )
    return list(dict.fromkeys(map(str, values))) or None


def offers(
    size: str,
    places: Sequence[str | None],
    spot: bool,
    alternatives: Sequence[dict[str, Any]],
    key: str,
) -> tuple[Offer, ...]:
    """Return the label's own settings, then each alternative, which inherits what it omits.

    Every size of an entry is tried in every location before the next size.

    :param key: name of the size option in the configuration.
    """
    own = list(places) or [None]
    found = [Offer(size, place, spot) for place in own]
    for entry in alternatives:
        sizes = one_or_more(entry, key) or [size]
        where: Sequence[str | None] = one_or_more(entry, "zone") or own
        found += [
            Offer(one, place, bool(entry.get("use-spot", spot))) for one in sizes for place in where
        ]
    return tuple(dict.fromkeys(found))


def alternatives(key: str, zone: object) -> list[dict[str, Any]]:
    """Return the declaration of the entries of ``alternatives``.

    :param key: name of the size option.
    :param zone: check of a zone.
    """
    return [
        {
            key: option(str, None, "as of the label", key=SIZES, shown="the label's"),
            f"{key}s": option([str], None, "several: an offer for each", key=SIZES),
            "zone": option(zone, None, "as of the label", key=ZONES, shown="the label's"),
            "zones": option([zone], None, "several: an offer for each", key=ZONES),
            "use-spot": option(bool, None, "as of the label", shown="the label's"),
        }
    ]
