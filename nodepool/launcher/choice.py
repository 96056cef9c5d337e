"""Which of our pools takes a request: the pure decision (launcher.md sections 2 - 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nodepool.zk.components import RegisteredPool

if TYPE_CHECKING:
    from nodepool.launcher.poolworker import PoolWorker

SortKey = tuple[str, int, str]


@dataclass
class RequestClass:
    """Requests that are treated alike."""

    node_types: tuple[str, ...]
    provider: str | None
    tenant: str | None
    declined: frozenset[str]
    queue: list[tuple[SortKey, str]] = field(default_factory=list)
    #: Why its head has to wait; None when it has not been looked at since something changed.
    reason: str | None = None
    #: Launcher ids of paused pools that found nothing to decline, and for which state of affairs.
    checked: dict[str, int] = field(default_factory=dict)
    #: Launcher ids of pools that have looked and cannot serve it now, with the reason; until something changes.
    refused: dict[str, str] = field(default_factory=dict)
    #: So, because they have no room: pools of worse priority may take it.
    full: dict[str, str] = field(default_factory=dict)
    #: The error that was logged last.
    logged: str | None = None
    #: The moment at which the safety net looked at it again, although nothing had happened.
    netted: int | None = None

    def waits_for(self, reason: str) -> bool:
        return reason in (self.reason or "") or any(reason in why for why in self.refused.values())

    def look_again(self, reason: str = "") -> None:
        """What it waits for, for that reason, has changed; without one: something has."""
        self.reason = None
        self.netted = None
        for book in (self.refused, self.full):
            for launcher_id in [i for i, why in book.items() if reason in why]:
                del book[launcher_id]

    def __post_init__(self) -> None:
        self.labels = frozenset(self.node_types)


@dataclass(frozen=True)
class Decision:
    """What to do with the head of a class."""

    worker: PoolWorker | None = None
    check_only: bool = False
    #: When the pool turns out to be full the request is not kept: another one is open.
    gives_way: bool = False
    decline_by: tuple[str, ...] = ()
    #: It could wait here, pending, and is left to other launchers instead.
    left_to_others: bool = False
    reason: str = ""


def eligible_pools(cls: RequestClass, pools: list[RegisteredPool]) -> list[RegisteredPool]:
    """Those that offer it all and have not declined it; only those of the wished provider when there are any."""
    eligible = [p for p in pools if cls.labels <= p.labels and p.id not in cls.declined]
    if cls.provider and any(p.provider_name == cls.provider for p in eligible):
        return [p for p in eligible if p.provider_name == cls.provider]
    return eligible


def choose(cls: RequestClass, pools: list[RegisteredPool], workers: dict[str, Any], version: int,
           insist: bool = False) -> Decision:
    """Decide about the head of the class from a snapshot; no effects.

    ``workers`` are our own pools by launcher id; each offers ``paused``, ``load`` and, for a class, ``closed`` (it cannot
    serve it), ``full`` (it has no room) and ``admission`` (why it takes no more at this moment): reasons or None.

    :param insist: other launchers have had time to take it; it is not left to them any longer.
    """
    eligible = eligible_pools(cls, pools)
    if not eligible:
        return _nobody(cls, pools, workers)
    ours = [p for p in eligible if p.id in workers]
    if not ours:
        return Decision(reason="another launcher can serve it")
    closed = {p.id: reason for p in ours if (reason := workers[p.id].closed(cls))}
    full = {p.id: reason for p in ours if (reason := cls.full.get(p.id) or workers[p.id].full(cls))}

    def is_open(pool: RegisteredPool) -> bool:
        if pool.id not in workers:
            return not pool.paused
        return not (workers[pool.id].paused or pool.id in closed or pool.id in full)

    open_pools = [p for p in eligible if is_open(p)]
    best = min((p.priority for p in open_pools), default=None)
    peers = [p for p in open_pools if p.priority == best]
    others_open = any(p.id not in workers for p in peers) and not insist
    reasons: list[str] = []
    usable: list[Any] = []
    waitable: list[Any] = []
    for pool in ours:
        worker = workers[pool.id]
        reason = closed.get(pool.id) or cls.refused.get(pool.id)
        if best is not None and best < pool.priority:
            reason = "a pool of better priority is open"
        elif reason is None:
            reason = worker.admission(cls)
        if reason is None and worker.paused:
            if cls.checked.get(pool.id) != version:
                return Decision(worker=worker, check_only=True)
            reason = "paused at quota"
        if reason is None and pool.id in full:
            waitable.append(worker)
            reason = full[pool.id]
        if reason is None:
            usable.append(worker)
        else:
            reasons.append(f"{worker.label}: {reason}")
    if usable:
        gives_way = others_open or sum(p.id in workers for p in peers) > 1
        return Decision(worker=min(usable, key=lambda w: w.load), gives_way=gives_way)
    if waitable and not others_open:
        return Decision(worker=min(waitable, key=lambda w: w.load))  # nobody has room: it waits there
    if others_open:
        reasons.append("another launcher can serve it")
    return Decision(reason="; ".join(reasons), left_to_others=bool(waitable))


def _nobody(cls: RequestClass, pools: list[RegisteredPool], workers: dict[str, Any]) -> Decision:
    """No pool at all is left that could serve it."""
    if not workers.keys() <= {p.id for p in pools}:
        return Decision(reason="some pools of ours are still being registered")
    ours = tuple(i for i in workers if i not in cls.declined and any(p.id == i for p in pools))
    if ours:
        return Decision(decline_by=ours)
    if workers and pools and all(p.id in cls.declined for p in pools):
        return Decision(decline_by=(next(iter(workers)),))  # its last hope has gone: re-evaluate
    return Decision(reason="no pool of ours offers it; other launchers still have to decline")
