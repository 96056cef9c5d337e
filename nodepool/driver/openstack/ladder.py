"""The offers of a label: flavors and zones, in order (OST-1.8)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nodepool.driver.common.offers import one_or_more
from nodepool.driver.openstack.config import ProviderLabel


class Offer(NamedTuple):
    """One offer.

    :param az: None: the cloud chooses the zone.
    :param label: the label whose servers need more than the flavor; None: it has no such options.
    """

    flavor: str
    az: str | None
    label: str | None = None

    def describe(self) -> str:
        zone = f" in {self.az}" if self.az else ""
        return f"{self.flavor}{zone}{f' for label {self.label}' if self.label else ''}"


def offers_of(
    label: ProviderLabel, az: str | None, find: Callable[[str | None, int], Any]
) -> dict[Offer, Mapping[str, Any]]:
    """Return the label's own settings, then each alternative, with the flavors.

    The zone of the request comes first where it is a candidate; the label or the entry must name
    others. Without alternatives, there is one offer.

    :param az: zone of the request.
    :param find: returns the flavor for a name and MiB.
    """
    limited = label.name if label.server_group or label.scheduler_hints else None
    # The zone of the request, unless the label specifies others.
    zone = az if not label.azs or az in label.azs else random.choice(label.azs)
    own = [zone, *(other for other in label.azs or () if other != zone and label.alternatives)]
    found: dict[Offer, Mapping[str, Any]] = {}
    for entry in [{}, *label.alternatives]:
        named = one_or_more(entry, "availability-zone")
        named = named and sorted(named, key=lambda place: place != az)
        names: Sequence[str | None] = one_or_more(entry, "flavor-name") or [label.flavor_name]
        for flavor in [find(name, label.min_ram) for name in names]:
            for place in named or own:
                found.setdefault(Offer(str(flavor["name"]), place, limited), flavor)
    return found
