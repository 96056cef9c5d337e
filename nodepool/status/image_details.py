"""Disk images with state, age, next build, progress, labels and uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from nodepool.status.images import image_status
from nodepool.status.known import configured_images, read_progress, seconds_text
from nodepool.status.once import Facade
from nodepool.status.results import format_bytes, format_duration
from nodepool.zk.mirror.progress import BuildProgress
from nodepool.zk.records import FAILED, READY, ImageBuild
from nodepool.zk.rollback import rolled_back

BUILDING, NEVER_BUILT, PAUSED = "building", "never built", "paused"


def image_details(zk: Facade, clock: Callable[[], float] = time.time) -> list[dict[str, Any]]:
    """Return one row for each image that is configured or exists in ZooKeeper.

    ``age``, ``next_build`` and ``started`` are UNIX times, ``rebuild_age`` and ``expected``
    seconds, ``size`` bytes.
    """
    known = {row["image"]: row for row in image_status(zk).rows}
    configured = configured_images(zk)
    empty = {"paused": False, "build_request": None, "build_request_age": None}
    progress: dict[str, list[BuildProgress]] = {}
    for each in read_progress(zk).builds.values():
        progress.setdefault(each.image, []).append(each)
    ready = [build for build in zk.readImages().builds if build.state == READY]
    newest = {
        str(build.image_name): build
        for build in sorted(ready, key=lambda build: build.state_time or 0)
    }
    return [
        _row(
            name,
            {**empty, **known.get(name, {})},
            configured.get(name, {}),
            progress.get(name, []),
            newest.get(name),
            clock(),
        )
        for name in sorted(known.keys() | configured.keys())
    ]


def _row(
    name: str,
    status: dict[str, Any],
    configured: dict[str, Any],
    progress: list[BuildProgress],
    newest: ImageBuild | None,
    now: float,
) -> dict[str, Any]:
    paused = bool(status["paused"] or configured.get("paused"))
    running = next((each for each in progress if each.running), None)
    last = max(
        (each for each in progress if not each.running),
        key=lambda each: each.started or 0,
        default=None,
    )
    failed = last if last is not None and last.state == FAILED else None
    built = None if newest is None else newest.state_time
    made = next((each for each in progress if newest is not None and each.build == newest.id), None)
    rebuild_age = configured.get("rebuild_age")
    next_build = (
        None
        if paused
        else failed.next_try
        if failed is not None
        else built and rebuild_age and built + rebuild_age
    )
    return {
        "image": name,
        "state": BUILDING
        if running is not None
        else PAUSED
        if paused
        else FAILED
        if failed is not None
        else READY
        if newest is not None
        else NEVER_BUILT,
        "labels": sorted(configured.get("labels", ())),
        "providers": sorted(configured.get("providers", ())),
        "age": built,
        "rebuild_age": rebuild_age,
        "next_build": next_build or None,
        "formats": list(newest.formats) if newest is not None else [],
        "size": sum(made.sizes.values()) if made is not None and made.sizes else None,
        "phase": (running.phase or "starting") if running is not None else None,
        "started": running.started if running is not None else None,
        "expected": running.expected if running is not None else None,
        "progress": running.fraction(now) if running is not None else None,
        "builder": running.builder if running is not None else None,
        **status,
        "paused": paused,
    }


def facts_of(zk: Facade, name: str, now: float) -> Iterator[tuple[str, str]]:
    """Yield titles and values for the explanation of an image."""
    row = next((row for row in image_details(zk, lambda: now) if row["image"] == name), None)
    if row is None:
        return
    limit = f" of {format_duration(row['rebuild_age'])} (rebuild-age)" if row["rebuild_age"] else ""
    facts = (
        ("state", row["state"]),
        ("labels", ", ".join(row["labels"]) or "none: no label of a running launcher uses it"),
        ("building", _progress(row, now) if row["phase"] else ""),
        ("age", f"{format_duration(now - row['age'])}{limit}" if row["age"] else ""),
        ("next build", "" if row["phase"] else _next(row, now)),
        ("formats", ", ".join(row["formats"])),
        ("size", format_bytes(row["size"]) if row["size"] else ""),
    )
    yield from ((title, value) for title, value in facts if value)
    yield from _uploads(zk, row, now)


def _progress(row: dict[str, Any], now: float) -> str:
    text = (
        f"phase {row['phase']} on {row['builder']} for "
        f"{format_duration(now - (row['started'] or now))}"
    )
    share = (
        f", {row['progress']:.0%} of the usual {seconds_text(row['expected'])}"
        if row["progress"] is not None
        else ""
    )
    return text + share


def _next(row: dict[str, Any], now: float) -> str:
    if row["paused"]:
        return "none while it is paused"
    if row["build_request"]:
        return f"requested ({row['build_request']})"
    if row["next_build"] is None:
        return (
            "as soon as a builder has this image"
            if row["age"] is None
            else "unknown: no launcher reports its rebuild-age"
        )
    return f"in {format_duration(row['next_build'] - now)}" if row["next_build"] > now else "due"


def _uploads(zk: Facade, row: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Yield the newest upload of each provider."""
    uploads = [each for each in zk.readImages().uploads if each.image_name == row["image"]]
    found = {
        str(each.provider_name): each
        for each in sorted(uploads, key=lambda each: each.state_time or 0)
    }
    replaced = {
        switch.provider: switch
        for switch in rolled_back(zk.readImages())
        if switch.used.image_name == row["image"]
    }
    for provider in sorted({*found, *row["providers"]}):
        last = found.get(provider)
        text = (
            "none yet"
            if last is None
            else f"{last.state} for {format_duration(now - (last.state_time or now))}"
        )
        yield f"upload to {provider}", text
        switch = replaced.get(provider)
        mark = None if switch is None else switch.replaced.rolled_back
        if switch is not None and mark is not None:
            ago = format_duration(now - mark.time)
            yield f"build {switch.replaced.build_id} there", f"{switch.text} ({ago} ago)"
