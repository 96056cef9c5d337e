"""Leases: nodes for people, scripts and CI systems, with an owner and an end.

A lease has no separate record: it is one or more nodes in state ``hold`` that were handed over from
one request, with an owner in ``user_data`` and an end in ``hold_expiration``. Each launcher ends
it, those of 11.0.0, too.

:mod:`.record`  what is stored about a lease, and a lease as its users see it
:mod:`.leases`  ask, hand over, renew, return, list
"""

from __future__ import annotations

from nodepool.lease.leases import Leases
from nodepool.lease.record import Lease, LeaseError, LeaseState, Reason, Terms

__all__ = ["Lease", "LeaseError", "LeaseState", "Leases", "Reason", "Terms"]
