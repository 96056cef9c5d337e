"""What is stored about a lease, and a lease as its users see it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodepool.zk.records import HOLD, Node, NodeRequest
from nodepool.zk.records.base import LATEST

#: Requestor of the requests of leases.
REQUESTOR = "nodepool-lease"
#: The key in ``requestor_data`` of requests and ``user_data`` of nodes.
KEY = "lease"
VERSION = 1
#: Least and most seconds of a lease: launchers look each minute, and store the seconds as an
#: integer.
LEAST, MOST = 60, 10 * 366 * 86400
#: Bytes of the notes, as JSON.
MOST_NOTES = 1024
#: The option of the configuration that ends every hold.
MAX_HOLD_AGE = "max-hold-age"


class Reason(enum.Enum):
    """Why a lease cannot be had, or changed."""

    NOT_FOUND = "not-found"
    NOT_READY = "not-ready"
    FAILED = "failed"
    ENDED = "ended"
    TOO_LATE = "too-late"
    KEY_IN_USE = "key-in-use"
    UNAVAILABLE = "unavailable"
    TOO_MANY = "too-many-leases"
    BUSY = "busy"
    BAD_REQUEST = "bad-request"


class LeaseError(Exception):
    """The text is for users.

    :ivar reason: for programs.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class LeaseState(enum.Enum):
    #: Launchers look for its nodes.
    WAITING = "waiting"
    #: The nodes are ready, and have not been handed over.
    READY = "ready"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True)
class Terms:
    """What is stored about a lease in its request, and then in each of its nodes.

    :param owner: name of the person or system.
    :param via: how the owner was identified, such as ``unix:1000``.
    :param created: Unix time.
    :param size: number of nodes.
    :param key: idempotency key of the owner.
    :param secret: SHA-256 of the token that may renew and return this lease.
    :param renewed: how often.
    :param notes: of the holder, such as the id of a job.
    :param longest: seconds from now of a renewal with that token; None: as configured for all.
    :param limit: what gave the lease an earlier end than it was asked for; None: nothing.
    """

    owner: str
    via: str
    purpose: str = ""
    created: float = 0.0
    size: int = 1
    key: str | None = None
    secret: str | None = None
    renewed: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    longest: float | None = None
    limit: str | None = None

    def stored(self) -> dict[str, Any]:
        """Return the JSON object for a request or a node."""
        return {KEY: {"v": VERSION, **vars(self), "notes": dict(self.notes)}}

    @classmethod
    def read(cls, stored: object) -> Terms | None:
        """Return the terms in ``requestor_data`` or ``user_data``; None: there are none.

        Anybody who may write records may write anything there.
        """
        found = stored.get(KEY) if isinstance(stored, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("owner"), str):
            return None

        def of(name: str, kind: type | tuple[type, ...], default: Any) -> Any:
            value = found.get(name)
            # NaN fails the comparison, too.
            odd = isinstance(value, bool) or (
                isinstance(value, (int, float)) and not abs(value) < LATEST
            )
            return value if isinstance(value, kind) and not odd else default

        return cls(
            owner=found["owner"],
            via=of("via", str, "unknown"),
            purpose=of("purpose", str, ""),
            created=float(of("created", (int, float), 0.0)),
            size=of("size", int, 1),
            key=of("key", str, None),
            secret=of("secret", str, None),
            renewed=of("renewed", int, 0),
            longest=of("longest", (int, float), None),
            notes=of("notes", dict, {}),
            limit=of("limit", str, None),
        )

    def comment(self) -> str:
        """Return the comment of the nodes, which the lists of 11.0.0 show."""
        return f"lease {self.owner}: {self.purpose}" if self.purpose else f"lease {self.owner}"


@dataclass(frozen=True)
class Lease:
    """A lease, or nodes that are held for another reason.

    :param id: of the request from which the nodes came.
    :param ends: Unix time; None: it has no end, or has not begun.
    """

    id: str
    state: LeaseState
    terms: Terms
    labels: tuple[str, ...]
    nodes: tuple[Node, ...] = ()
    ends: float | None = None
    tenant: str | None = None

    @property
    def lost(self) -> int:
        """Return how many nodes of the lease no longer exist."""
        return self.terms.size - len(self.nodes) if self.state is LeaseState.HELD else 0

    def fits(self, labels: Sequence[str]) -> bool:
        """Return whether it may come from a request for these labels.

        A node may have several labels, and nothing is known about those of nodes that were lost.
        """
        known = (
            all(set(node.type) & set(labels) for node in self.nodes)
            if self.nodes
            else sorted(self.labels) == sorted(labels)
        )
        return known and self.terms.size == len(labels)


def end_of(node: Node) -> float | None:
    """Return the Unix time at which launchers end the hold of a node; None: never."""
    if not node.hold_expiration or node.hold_expiration < 0 or not node.state_time:
        return None
    return float(node.state_time + node.hold_expiration)


def id_of(node: Node) -> str:
    """Return the id of the lease of a held node, or the id by which another hold is known."""
    if node.allocated_to and Terms.read(node.user_data) is not None:
        return str(node.allocated_to)
    return f"node-{node.id}"


def write_terms(node: Node, terms: Terms) -> None:
    """Write the terms to a node; what others have stored in its user data stays."""
    others = node.user_data if isinstance(node.user_data, dict) else {}
    node.user_data, node.comment = {**others, **terms.stored()}, terms.comment()


def hold(node: Node, terms: Terms, seconds: float, now: float, most: float) -> None:
    """Let a node be held for some seconds from now.

    :param most: ``max-hold-age``, after which launchers end the hold in any case.
    """
    node.state, node.state_time, node.hold_expiration, node.hold_job = (
        HOLD,
        now,
        int(min(seconds, most)),
        None,
    )
    write_terms(node, replace(terms, limit=MAX_HOLD_AGE if seconds > most else None))


def of_nodes(lease_id: str, nodes: Sequence[Node]) -> Lease:
    """Return the lease, or hold, of nodes in state ``hold``."""
    terms = Terms.read(nodes[0].user_data) or _of_others(nodes)
    ends = [end_of(node) for node in nodes]
    known = [end for end in ends if end is not None]
    return Lease(
        lease_id,
        LeaseState.HELD,
        terms,
        tuple(label for node in nodes for label in node.type[:1]),
        tuple(nodes),
        min(known) if len(known) == len(nodes) else None,
        nodes[0].tenant_name,
    )


def _of_others(nodes: Sequence[Node]) -> Terms:
    """Return the terms of a hold of Zuul or of ``nodepool hold``."""
    first = nodes[0]
    purpose = " ".join(
        text for text in (first.comment, first.hold_job) if isinstance(text, str) and text
    )
    owner = "zuul" if first.hold_job else "nobody"
    return Terms(owner, "record", purpose, float(first.state_time or 0.0), len(nodes))


def of_request(request: NodeRequest, terms: Terms) -> Lease:
    """Return the lease of a request that waits, or has just been fulfilled or failed."""
    states = {"fulfilled": LeaseState.READY, "failed": LeaseState.FAILED}
    state = states.get(str(request.state), LeaseState.WAITING)
    return Lease(
        request.id or "", state, terms, tuple(request.node_types), tenant=request.tenant_name
    )
