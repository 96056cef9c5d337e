"""Planted defects that the world does not find: each takes one guard away, and one quick test
fails.
"""

from __future__ import annotations

from tests.world.guards import adapters, images, launches, leases, probes, rotations, slivers
from tests.world.mutation import Mutation

GUARDS: dict[str, Mutation] = {
    **leases.GUARDS,
    **launches.GUARDS,
    **adapters.GUARDS,
    **images.GUARDS,
    **rotations.GUARDS,
    **slivers.GUARDS,
    **probes.GUARDS,
}
