"""Which of our pools serves a request: the pure decision (LAU-2 to LAU-4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodepool.launcher.requests.queue import RequestClass, SortKey
from nodepool.reasons import Code, Reason, because
from nodepool.zk.components import RegisteredPool


@dataclass(frozen=True)
class PoolView:
    """The state of one of our pools at one moment, for requests of some class."""

    label: str
    load: int = 0
    paused: bool = False
    #: Why it cannot serve any request of the class now.
    closed: Reason | None = None
    #: Why it has no capacity for one.
    full: Reason | None = None
    #: Why it accepts no more requests at this moment.
    refuses: Reason | None = None
    #: The request that blocks a paused pool.
    blocker: str = ""
    #: Requests with a smaller key (precedence and relative priority) may overtake all that wait in
    #: the pool; None: one of those already holds nodes.
    overtakable: SortKey | None = None


@dataclass(frozen=True)
class Decision:
    """What to do with the head of a class."""

    #: Launcher id of the selected pool.
    pool: str | None = None
    check_only: bool = False
    #: If the pool turns out to be full, it releases the request: another pool is open.
    gives_way: bool = False
    decline_by: tuple[str, ...] = ()
    #: It could wait here, pending, but is left to other launchers.
    left_to_others: bool = False
    reasons: tuple[Reason, ...] = ()


def eligible_pools(cls: RequestClass, pools: list[RegisteredPool]) -> list[RegisteredPool]:
    """Return the pools that offer all labels and have not declined the request.

    Only those of the preferred provider, if there are any.
    """
    eligible = [p for p in pools if cls.labels <= p.labels and p.id not in cls.key.declined]
    if cls.key.provider and any(p.provider_name == cls.key.provider for p in eligible):
        return [p for p in eligible if p.provider_name == cls.key.provider]
    return eligible


def choose(
    cls: RequestClass,
    pools: list[RegisteredPool],
    views: Mapping[str, PoolView],
    version: int,
    insist: bool = False,
) -> Decision:
    """Decide about the head of the class from a snapshot, without effects.

    :param views: our own pools by launcher id; at least those that are eligible.
    :param version: the moment at which reasons to decline may have changed last.
    :param insist: other launchers have had time to accept the request; it is no longer left to
        them.
    """
    eligible = eligible_pools(cls, pools)
    if not eligible:
        return _nobody(cls, pools, views)
    ours = [p for p in eligible if p.id in views]
    if not ours:
        return Decision(reasons=(because(Code.OTHER_LAUNCHER),))
    full = {p.id: reason for p in ours if (reason := cls.full.get(p.id) or views[p.id].full)}

    def is_open(pool: RegisteredPool) -> bool:
        if pool.id not in views:
            return pool.is_open_to(cls.labels)
        return not (views[pool.id].paused or views[pool.id].closed or pool.id in full)

    open_pools = [p for p in eligible if is_open(p)]
    best = min((p.priority for p in open_pools), default=None)
    peers = [p for p in open_pools if p.priority == best]
    others_open = any(p.id not in views for p in peers) and not insist
    reasons: list[Reason] = []
    usable: list[str] = []
    waitable: list[str] = []
    overtaking: list[str] = []
    for pool in ours:
        view = views[pool.id]
        reason = view.closed or cls.refused.get(pool.id) or view.refuses
        if best is not None and best < pool.priority:
            reason = because(Code.BETTER_PRIORITY)
        if reason is None and view.paused:
            if cls.checked.get(pool.id, -1) < version:
                return Decision(pool=pool.id, check_only=True)
            reason = because(Code.POOL_PAUSED, request=view.blocker)
            if (
                view.overtakable is not None
                and not cls.key.min_ready
                and cls.queue
                and cls.queue[0][0][:2] < view.overtakable[:2]
            ):
                overtaking.append(pool.id)
        if reason is None and pool.id in full:
            waitable.append(pool.id)
            reason = full[pool.id]
        if reason is None:
            usable.append(pool.id)
        else:
            reasons.append(reason.at(view.label))

    def least_busy(candidates: list[str]) -> str:
        return min(candidates, key=lambda pool_id: views[pool_id].load)

    if usable:
        gives_way = others_open or sum(p.id in views for p in peers) > 1
        return Decision(pool=least_busy(usable), gives_way=gives_way)
    if waitable and not others_open:
        return Decision(pool=least_busy(waitable))  # no pool has capacity: it waits there
    if others_open:
        reasons.append(because(Code.OTHER_LAUNCHER))
    elif overtaking:
        return Decision(pool=least_busy(overtaking))
    return Decision(reasons=tuple(reasons), left_to_others=bool(waitable))


def _nobody(
    cls: RequestClass, pools: list[RegisteredPool], views: Mapping[str, PoolView]
) -> Decision:
    """Decide about a request that no remaining pool can serve."""
    if not views.keys() <= {p.id for p in pools}:
        return Decision(reasons=(because(Code.REGISTERING),))
    ours = tuple(i for i in views if i not in cls.key.declined and any(p.id == i for p in pools))
    if ours:
        return Decision(decline_by=ours)
    if views and pools and all(p.id in cls.key.declined for p in pools):
        return Decision(
            decline_by=(next(iter(views)),)
        )  # the last candidate was deleted: re-evaluate
    return Decision(reasons=(because(Code.OTHERS_DECLINE),))
