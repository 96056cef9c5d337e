"""Explains to users who request nodes which launchers offer them, and why none does."""

from __future__ import annotations

from collections.abc import Collection

from kazoo.client import KazooClient

from nodepool.base.offered_labels import joined, why_not_offered
from nodepool.status.causes import NOT_OFFERED, of_request
from nodepool.status.once import Once
from nodepool.zk import declines
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

NO_LAUNCHER = "no launcher is alive; requests wait until one starts"


def not_offered(zk: ZooKeeper, labels: Collection[str]) -> str | None:
    """Return why no launcher can serve these labels at present; None: one offers them."""
    pools = zk.getRegisteredPools()
    if not pools and not zk.getLaunchers():
        return NO_LAUNCHER
    return why_not_offered(labels, pools, "launcher")


def other_provider(zk: ZooKeeper, labels: Collection[str], provider: str | None) -> str | None:
    """Return a text if the preferred provider will not serve; None: it may."""
    pools = [pool for pool in zk.getRegisteredPools() if set(labels) <= pool.labels]
    if not provider or not pools or any(pool.provider_name == provider for pool in pools):
        return None
    return (
        f"provider {provider} does not offer {joined(set(labels))}; another one serves: "
        f"{joined({str(pool.provider_name) for pool in pools})}"
    )


def waits_for(zk: ZooKeeper, request: NodeRequest) -> str:
    """Return the cause for which a request waits or has failed, with a suggestion."""
    cause = of_request(Once(zk), request)
    return f"{cause.text}. Suggestion: {cause.remedy}" if cause.remedy else cause.text


def declined(
    kazoo: KazooClient, request_id: str, declined_by: list[str]
) -> tuple[list[str], list[str]]:
    """Return published decline reasons, and a text for each declining pool."""
    found = declines.read(kazoo, ((request_id, launcher_id) for launcher_id in declined_by))
    said = {launcher_id: decline.text for (_id, launcher_id), decline in found.items()}
    return (
        [said[one] for one in declined_by if one in said],
        _folded([said.get(one) or declines.pool_of(one) for one in declined_by]),
    )


def _folded(texts: list[str]) -> list[str]:
    """Return the texts, with pools that merely do not offer the labels combined."""
    others = [text for text in texts if NOT_OFFERED in text]
    if len(others) < 2:
        return texts
    telling = [text for text in texts if NOT_OFFERED not in text]
    return [*telling, f"{len(others)}{' other' if telling else ''} pools do not offer it"]
