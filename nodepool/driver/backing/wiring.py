"""Connects the parts of the bookkeeping of backing nodes."""

from __future__ import annotations

from typing import TypeVar

from nodepool.driver.backing.housekeeping import Housekeeping
from nodepool.driver.backing.requests import BackingRequests
from nodepool.driver.backing.slots import BackingSlots

Slots = TypeVar("Slots", bound=BackingSlots)


def wire(slots: Slots) -> Slots:
    """Connect the parts that request and maintain backing nodes; return the slots."""
    slots.requests = BackingRequests(slots)
    slots.housekeeping = Housekeeping(slots)
    return slots
