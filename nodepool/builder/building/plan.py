"""Decide which image to build next, and why, from a snapshot (BLD-6)."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass

from nodepool.builder.retention import newest_for, ready_builds
from nodepool.config.diskimages import DiskImage
from nodepool.config.model import Config
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import ImageBuild


@dataclass(frozen=True)
class WantedBuild:
    image: str
    reason: str
    #: Id of the newest ready build that the decision was based on.
    newest: str | None
    #: Identity of the manual request; None: the build is due.
    request: tuple[int, int] | None
    #: What is attempted: the back-off ends when this changes.
    subject: Hashable


@dataclass(frozen=True)
class Plan:
    """The next build, if one is due; else the seconds until one may be (None: unknown)."""

    build: WantedBuild | None
    wait: float | None = None


def due(diskimage: DiskImage, newest: ImageBuild | None, now: float) -> tuple[str | None, float]:
    """Return why the image must be built now (or None), and the seconds until it expires.

    :param newest: the ready build that counts for this builder.
    """
    if newest is None:
        return "there is no ready build", 0.0
    left = (newest.state_time or 0) + diskimage.rebuild_age - now
    if int(now) - (newest.state_time or 0) >= diskimage.rebuild_age:
        return f"the newest build is older than {diskimage.rebuild_age} s", 0.0
    missing = diskimage.image_types - set(newest.formats)
    if missing:
        return f"the newest build lacks {', '.join(sorted(missing))}", 0.0
    return None, max(0.1, left)


def configuration_of(diskimage: DiskImage) -> Hashable:
    """Return a value that changes whenever the configuration of the image changes."""
    return tuple(
        (key, repr(sorted(value) if isinstance(value, set) else value))
        for key, value in sorted(vars(diskimage).items())
    )


def plan(
    config: Config,
    images: ImageData,
    busy: Container[str],
    back_off: Callable[[str, Hashable], float],
    now: float,
    builder_id: str,
) -> Plan:
    """Return the next build: manual requests first, then in file order.

    :param busy: images that are being built or are to be skipped in this pass.
    :param back_off: seconds that an image must wait after failures.
    """
    ready = ready_builds(images)
    waits: list[float] = []
    scheduled: WantedBuild | None = None
    for name, diskimage in config.diskimages.items():
        if diskimage.pause or name in images.paused or not diskimage.image_types:
            continue
        if name in busy or images.build_locks.get(name, (0.0, False))[1]:
            continue
        request = images.request_marks.get(name)
        builds = ready.get(name, [])
        last = newest_for(builds, diskimage.image_types, builder_id) if builds else None
        subject = (configuration_of(diskimage), request)
        reason, left = due(diskimage, last, now) if request is None else ("requested by hand", 0.0)
        wait = left if reason is None else back_off(name, subject)
        if reason is None or wait > 0:
            waits.append(wait)
            continue
        newest = builds[0].id if builds else None
        wanted = WantedBuild(name, reason, newest, request, subject)
        if request is not None:
            return Plan(wanted)
        scheduled = scheduled or wanted
    return Plan(scheduled, min(waits, default=None))
