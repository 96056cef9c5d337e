"""Effects of a changed configuration on the current state: ``nodepool plan``.

Nothing is written, and no cloud is asked.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from nodepool.config.live.changes import changes
from nodepool.config.model import Config
from nodepool.config.shown import differences, shown
from nodepool.status.once import Facade
from nodepool.status.results import Results
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import DELETED, DELETING, FAILED, PENDING, READY, REQUESTED

COLUMNS = {"effect": "Effect", "subject": "Of", "text": "What"}
#: Maximum number of named options of one object.
MOST_OPTIONS = 10
#: Maximum number of named ids.
NAMED = 5

Line = tuple[str, str, str]


def plan(zk: Facade, old: Config, new: Config) -> Results:
    """Return one row per effect, in order of importance.

    :param zk: facade; each list is read once if it is :class:`~nodepool.status.once.Once`.
    :raises KazooException: ZooKeeper cannot be reached.
    """
    looks: list[Callable[[Facade, Config, Config], Iterator[Line]]] = [
        _never,
        _stranded,
        _limits,
        _removed_images,
        _created,
        _built,
    ]
    rows = [dict(zip(COLUMNS, line, strict=True)) for look in looks for line in look(zk, old, new)]
    if text := changes(old, new):
        found = [{"effect": "changes", "subject": "configuration", "text": text}]
        found += [dict(zip(COLUMNS, line, strict=True)) for line in _options(old, new)]
        rows = found + rows
    return Results(rows, COLUMNS)


def _options(old: Config, new: Config) -> Iterator[Line]:
    """Yield options with changed values, by section and name, without possible secrets."""
    before, after = shown(old), shown(new)
    for section, kind in (
        ("labels", "label"),
        ("diskimages", "diskimage"),
        ("providers", "provider"),
    ):
        for name in sorted(before[section].keys() & after[section].keys()):
            if found := list(differences(before[section][name], after[section][name])):
                more = (
                    f"; and {len(found) - MOST_OPTIONS} more" if len(found) > MOST_OPTIONS else ""
                )
                yield "changes", f"{kind} {name}", "; ".join(found[:MOST_OPTIONS]) + more


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


def _offered(config: Config) -> list[frozenset[str]]:
    return [
        frozenset(pool.labels)
        for provider in config.providers.values()
        for pool in provider.pools.values()
    ]


def _elsewhere(zk: Facade, old: Config) -> list[Any]:
    """Return registered pools of other launchers' providers, which are not configured here."""
    return [pool for pool in zk.getRegisteredPools() if pool.provider_name not in old.providers]


def _never(zk: Facade, old: Config, new: Config) -> Iterator[Line]:
    """Yield open requests that no pool could serve."""
    pools = [*_offered(new), *(pool.labels for pool in _elsewhere(zk, old))]
    lost: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for request in zk.readRequests():
        if request.state in (REQUESTED, PENDING) and not any(
            set(request.node_types) <= labels for labels in pools
        ):
            lost[tuple(request.node_types)].append(str(request.id))
    for labels, ids in lost.items():
        yield (
            "never served",
            ", ".join(labels),
            f"no pool would offer it: requests {_some(ids)} would fail",
        )


def _stranded(zk: Facade, old: Config, new: Config) -> Iterator[Line]:
    """Yield nodes whose provider, driver, pool or label would no longer be configured."""
    others = {pool.provider_name for pool in _elsewhere(zk, old)}
    gone: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in zk.readNodes():
        if node.provider not in old.providers or node.provider in others:
            continue
        provider = new.providers.get(node.provider or "")
        pool = provider.pools.get(node.pool or "") if provider is not None else None
        if provider is None:
            gone["provider", str(node.provider)].append(str(node.id))
        elif provider.driver.name != (was := old.providers[provider.name].driver.name) and (
            was != "static"
        ):
            gone["driver of provider", str(node.provider)].append(str(node.id))
        elif pool is None:
            gone["pool", f"{node.provider}-{node.pool}"].append(str(node.id))
        elif (
            node.state == READY
            and node.allocated_to is None
            and not set(node.type) & set(pool.labels)
        ):
            gone["label", ",".join(node.type)].append(str(node.id))
    texts = {
        "provider": "nodes {ids} would neither be managed nor deleted until a launcher has the "
        "provider again",
        "driver of provider": "the machines of nodes {ids} would remain in the former cloud; give "
        "the new driver a provider with another name",
        "pool": "no request would get nodes {ids}; they are deleted after use, or by `nodepool "
        "delete`",
        "label": "no request would get the ready nodes {ids}; `nodepool delete` removes them",
    }
    for (kind, name), ids in sorted(gone.items()):
        yield "strands nodes", f"{kind} {name}", texts[kind].format(ids=_some(ids))


def _limits(zk: Facade, _old: Config, new: Config) -> Iterator[Line]:
    """Yield limits that are below the current use."""
    nodes = [node for node in zk.readNodes() if node.state not in (DELETING, DELETED, FAILED)]
    counts = Counter((node.provider, node.pool) for node in nodes)
    for provider in new.providers.values():
        if provider.max_concurrency == 0:
            yield (
                "limit",
                f"provider {provider.name}",
                "max-concurrency 0: it would accept no requests",
            )
        for name, pool in provider.pools.items():
            there = counts[provider.name, name]
            if pool.max_servers < there:
                text = (
                    f"max-servers {pool.max_servers:g} is below its {there} nodes: no node "
                    "would be created until there are fewer"
                )
                yield "limit", f"pool {provider.name}-{name}", text
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for node in nodes:
        if node.tenant:
            amounts = {
                key: value
                for key, value in (node.resources or {}).items()
                if isinstance(value, (int, float))
            }
            used[node.tenant].update({**amounts, "instances": 1})
    for tenant, limits in new.tenant_resource_limits.items():
        for name, limit in limits.items():
            if limit != math.inf and used[tenant][name] > limit:
                text = (
                    f"{name} {limit:g} is below the {used[tenant][name]:g} in use: its requests "
                    "would wait"
                )
                yield "limit", f"tenant {tenant}", text


def _created(zk: Facade, _old: Config, new: Config) -> Iterator[Line]:
    """Yield effects on ``min-ready`` nodes."""
    ready: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for node in zk.readNodes():
        if node.state == READY and node.allocated_to is None:
            ready.update(node.type)
            made.update(node.type if node.requestor == MIN_READY else ())
    for name, label in new.labels.items():
        short = label.min_ready - ready[name]
        excess = made[name] - max(0, label.min_ready)
        if excess > 0 and label.sets_min_ready and label.shrink_ready:
            yield (
                "deletes nodes",
                f"label {name}",
                f"{excess} above min-ready {label.min_ready}; `shrink-ready: false` keeps them",
            )
        if short <= 0:
            continue
        if not any(name in labels for labels in _offered(new)):
            yield (
                "never made",
                f"label {name}",
                f"min-ready {label.min_ready}, and no pool would offer it",
            )
        else:
            yield (
                "creates nodes",
                f"label {name}",
                f"{short} for min-ready {label.min_ready}; {ready[name]} are ready",
            )


def _managed(config: Config) -> dict[str, set[str]]:
    """Return provider -> images that are uploaded there."""
    return {p.name: set(p.diskimages or ()) for p in config.providers.values() if p.manage_images}


def _removed_images(zk: Facade, old: Config, new: Config) -> Iterator[Line]:
    data, managed, before = zk.readImages(), _managed(new), _managed(old)
    uploads: Counter[tuple[str, str]] = Counter(
        (str(u.image_name), str(u.provider_name)) for u in data.uploads
    )
    builds: Counter[str] = Counter(str(build.image_name) for build in data.builds)
    for image in sorted(old.diskimages.keys() - new.diskimages.keys()):
        if builds[image]:
            yield (
                "deletes images",
                f"image {image}",
                f"a builder would delete its {builds[image]} builds and their uploads",
            )
    for (image, provider), count in sorted(uploads.items()):
        if provider in before and provider not in new.providers:
            yield (
                "strands uploads",
                f"image {image}",
                f"{count} uploads would remain in provider {provider}, which no launcher would "
                "have",
            )
        elif (
            image in before.get(provider, ())
            and image in new.diskimages
            and image not in managed.get(provider, ())
        ):
            yield (
                "deletes images",
                f"image {image}",
                f"its {count} uploads in provider {provider} would be deleted",
            )


def _built(zk: Facade, _old: Config, new: Config) -> Iterator[Line]:
    data = zk.readImages()
    built = {str(build.image_name) for build in data.builds if build.state == READY}
    uploaded = {(str(u.image_name), str(u.provider_name)) for u in data.uploads if u.state == READY}
    for provider, images in sorted(_managed(new).items()):
        for image in sorted(images):
            diskimage = new.diskimages.get(image)
            if diskimage is not None and diskimage.pause:
                if (image, provider) not in uploaded:
                    yield (
                        "never uploaded",
                        f"image {image}",
                        f"it is paused and has no upload in provider {provider}",
                    )
            elif (image, provider) not in uploaded:
                first = "" if image in built else "after its build, "
                yield "uploads", f"image {image}", f"{first}to provider {provider}"
    for image in sorted({i for images in _managed(new).values() for i in images} - built):
        if image in new.diskimages and not new.diskimages[image].pause:
            yield "builds", f"image {image}", "it has no build that can be used"
