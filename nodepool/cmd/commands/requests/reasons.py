"""What a person who asks for nodes is told about launchers: who offers them, and why no pool does."""

from __future__ import annotations

import sys
from collections.abc import Collection

from kazoo.client import KazooClient

from nodepool.base.offers import joined, why_not_offered
from nodepool.status.causes import NOT_OFFERED, of_request
from nodepool.status.once import Once
from nodepool.zk import declines
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

NO_LAUNCHER = "no launcher is alive; requests wait until one starts"


def note(text: str) -> None:
    """A line beside the result, which scripts read from standard output."""
    print(f"nodepool: {text}", file=sys.stderr, flush=True)


def not_offered(zk: ZooKeeper, labels: Collection[str]) -> str | None:
    """Why no launcher can serve a request for these labels at present; None: one offers them."""
    pools = zk.getRegisteredPools()
    if not pools and not zk.getLaunchers():
        return NO_LAUNCHER
    return why_not_offered(labels, pools, "launcher")


def other_provider(zk: ZooKeeper, labels: Collection[str], provider: str | None) -> str | None:
    """That the provider asked for will not be the one that serves; None: it may be."""
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


def declined(kazoo: KazooClient, request_id: str, declined_by: list[str]) -> tuple[list[str], list[str]]:
    """What those said who declined, and one text for each of them, also for those that said nothing."""
    found = declines.read(kazoo, ((request_id, launcher_id) for launcher_id in declined_by))
    said = {launcher_id: decline.text for (_id, launcher_id), decline in found.items()}
    return ([said[one] for one in declined_by if one in said],
            _folded([said.get(one) or declines.pool_of(one) for one in declined_by]))  # fmt: skip


def _folded(texts: list[str]) -> list[str]:
    """The texts, with those of pools that merely do not offer the labels in one."""
    others = [text for text in texts if NOT_OFFERED in text]
    if len(others) < 2:
        return texts
    telling = [text for text in texts if NOT_OFFERED not in text]
    return [*telling, f"{len(others)}{' other' if telling else ''} pools do not offer it"]
