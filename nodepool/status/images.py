"""Rows about images: builds, uploads, progress, build requests (CLI-5 and CLI-6.5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nodepool.status.known import configured_images, read_progress
from nodepool.status.once import Facade
from nodepool.status.results import Results, to_int_or_none
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.mirror.progress import BuildProgress, UploadFailure, UploadProgress
from nodepool.zk.records import BUILDING, FAILED, UPLOADING, ImageBuild, ImageUpload
from nodepool.zk.rollback import rolled_back, upload_path
from nodepool.zk.zookeeper import ZooKeeper

UPLOAD_COLUMNS = {
    "id": "Build ID",
    "upload_id": "Upload ID",
    "provider": "Provider",
    "image": "Image",
    "external_name": "Provider Image Name",
    "external_id": "Provider Image ID",
    "state": "State",
    "age": "Age",
}
BUILD_COLUMNS = {
    "id": "ID",
    "image": "Image",
    "builder": "Builder",
    "formats": "Formats",
    "state": "State",
    "age": "Age",
}
UPLOAD_DETAIL_COLUMNS = {**UPLOAD_COLUMNS, "bytes_total": "Bytes Total", "reason": "Reason"}
BUILD_DETAIL_COLUMNS = {
    **BUILD_COLUMNS,
    "phase": "Phase",
    "elapsed": "Elapsed",
    "expected": "Expected",
    "exit_code": "Exit Code",
    "reason": "Reason",
    "log": "Log",
    "last_line": "Last Line",
}
PROGRESS_COLUMNS = {
    "kind": "Kind",
    "id": "ID",
    "image": "Image",
    "provider": "Provider",
    "builder": "Builder",
    "state": "State",
    "phase": "Phase",
    "progress": "Progress",
    "elapsed": "Elapsed",
    "expected": "Expected",
    "bytes_total": "Bytes Total",
    "exit_code": "Exit Code",
    "reason": "Reason",
    "next_try": "Next Try In",
    "last_line": "Last Line",
}
IMAGE_STATUS_COLUMNS = {
    "image": "Image",
    "paused": "Paused",
    "build_request": "Build Request",
    "build_request_age": "Build Request Age",
}


def _upload_row(upload: ImageUpload) -> dict[str, Any]:
    return {
        "id": upload.build_id,
        "upload_id": upload.id,
        "provider": upload.provider_name,
        "image": upload.image_name,
        "external_name": upload.external_name,
        "external_id": upload.external_id,
        "state": upload.state,
        "age": to_int_or_none(upload.state_time),
    }


def _upload_progress(
    running: UploadProgress | None, failure: UploadFailure | None, note: str | None = None
) -> dict[str, Any]:
    return {
        "bytes_total": running.bytes_total if running else None,
        "reason": failure.reason if failure else note,
    }


def image_list(zk: Facade, detail: bool = False, ended: bool = True) -> Results:
    """Return image uploads; ``age`` is the UNIX time of the state change.

    :param detail: include the size of running uploads, and why others failed or were replaced.
    :param ended: with ``detail``: include the last failed upload to a provider whose record was
        deleted.
    """
    data = zk.readImages()
    uploads = sorted(data.uploads, key=lambda u: (u.image_name, u.build_id, u.provider_name, u.id))
    if not detail:
        return Results([_upload_row(upload) for upload in uploads], UPLOAD_COLUMNS)
    progress = zk.readProgress()
    failures = {(f.image, f.build, f.provider, f.upload): f for f in progress.failures.values()}
    notes = {upload_path(each.replaced): each.text for each in rolled_back(data)}
    rows = []
    for upload in uploads:
        build, provider, number = upload.build_id or "", upload.provider_name or "", upload.id or ""
        running = progress.uploads.get((build, provider, number))
        failure = failures.pop((upload.image_name or "", build, provider, number), None)
        if upload.state != UPLOADING:
            running = None
        mark = upload.rolled_back
        note = notes.get(upload_path(upload), mark.text() if mark is not None else None)
        extra = _upload_progress(running, failure, note)
        rows.append({**_upload_row(upload), **extra})
    if ended:
        rows += [
            {
                "id": failure.build,
                "upload_id": failure.upload,
                "provider": failure.provider,
                "image": failure.image,
                "external_name": None,
                "external_id": None,
                "state": FAILED,
                "age": to_int_or_none(failure.time),
                **_upload_progress(None, failure),
            }
            for failure in failures.values()
        ]
        rows.sort(key=lambda row: (row["image"], row["id"], row["provider"], row["upload_id"]))
    return Results(rows, UPLOAD_DETAIL_COLUMNS)


def _build_row(build: ImageBuild, paused: bool) -> dict[str, Any]:
    return {
        "id": f"{build.image_name}-{build.id}",
        "image": build.image_name,
        "builder": build.builder,
        "formats": list(build.formats),
        "state": "paused" if paused else build.state,
        "age": to_int_or_none(build.state_time),
    }


def _fraction(progress: BuildProgress, now: float) -> float | None:
    fraction = progress.fraction(now)
    return None if fraction is None else round(fraction, 3)


def _build_progress(progress: BuildProgress | None, now: float) -> dict[str, Any]:
    if progress is None:
        return dict.fromkeys(
            ("phase", "elapsed", "expected", "exit_code", "reason", "log", "last_line", "progress")
        )
    return {
        "phase": progress.phase or None,
        "elapsed": to_int_or_none(progress.elapsed(now)),
        "expected": to_int_or_none(progress.expected),
        "exit_code": progress.exit_code,
        "reason": progress.reason,
        "log": progress.log or None,
        "last_line": progress.last_line or None,
        "progress": _fraction(progress, now),
    }


def dib_image_list(
    zk: Facade, detail: bool = False, ended: bool = True, clock: Callable[[], float] = time.time
) -> Results:
    """Return image builds; those of an image paused in ZooKeeper have the state ``paused``.

    :param detail: include the progress of running builds, and the reason of failed ones.
    :param ended: with ``detail``: include failed builds whose record was already deleted.
    """
    images = zk.readImages()
    builds = sorted(images.builds, key=lambda b: (b.image_name, b.id))
    if not detail:
        return Results(
            [_build_row(build, build.image_name in images.paused) for build in builds],
            BUILD_COLUMNS,
        )
    now = clock()
    known: dict[str, BuildProgress] = dict(read_progress(zk).builds)
    rows = []
    for build in builds:
        extra = _build_progress(known.pop(build.id or "", None), now)
        if extra["elapsed"] is None and build.state == BUILDING and build.state_time:
            extra["elapsed"] = max(0, int(now - build.state_time))
        rows.append({**_build_row(build, build.image_name in images.paused), **extra})
    if ended:
        rows += [
            {
                "id": f"{p.image}-{p.build}",
                "image": p.image,
                "builder": p.builder or None,
                "formats": list(p.formats),
                "state": FAILED,
                "age": to_int_or_none(p.ended or p.updated or p.started),
                **_build_progress(p, now),
            }
            for p in known.values()
            if p.state == FAILED
        ]
        rows.sort(key=lambda row: (row["image"], row["id"]))
    return Results(rows, BUILD_DETAIL_COLUMNS)


def image_progress(zk: ZooKeeper, clock: Callable[[], float] = time.time) -> Results:
    """Return the progress of running and ended builds and of running or failed uploads.

    ``next_try`` is a UNIX time, ``elapsed`` and ``expected`` are seconds.
    """
    now = clock()
    progress = read_progress(zk)
    empty: dict[str, Any] = dict.fromkeys([*PROGRESS_COLUMNS, "log"])
    rows = [
        {
            **empty,
            "kind": "build",
            "id": f"{p.image}-{p.build}",
            "image": p.image,
            "builder": p.builder or None,
            "state": p.state,
            **_build_progress(p, now),
            "next_try": to_int_or_none(p.next_try),
        }
        for p in progress.builds.values()
    ]
    rows += [
        {
            **empty,
            "kind": "upload",
            "id": f"{u.build}-{u.upload}",
            "image": u.image,
            "provider": u.provider,
            "builder": u.builder or None,
            "state": UPLOADING,
            **_upload_progress(u, None),
            "elapsed": None if u.started is None else max(0, int(now - u.started)),
        }
        for u in progress.uploads.values()
    ]
    rows += [
        {
            **empty,
            "kind": "upload",
            "id": f"{f.build}-{f.upload}",
            "image": f.image,
            "provider": f.provider,
            "state": FAILED,
            "reason": f.reason,
            "next_try": to_int_or_none(f.next_try),
        }
        for f in progress.failures.values()
    ]
    rows.sort(key=lambda row: (row["image"], row["kind"], row["id"], row["provider"] or ""))
    return Results(rows, PROGRESS_COLUMNS)


def _created(build: ImageBuild) -> float:
    """Return the creation time of the build record (UNIX time by ZooKeeper's clock)."""
    return build.stat.ctime / 1000 if build.stat is not None else 0.0


def build_request_state(name: str, images: ImageData) -> str | None:
    """Return ``building``, ``pending``, or None if there is no build request."""
    if name not in images.requests:
        return None
    lock_created, has_contender = images.build_locks.get(name, (0.0, False))
    builds = [build for build in images.builds if build.image_name == name]
    if not has_contender or not builds:
        return "pending"
    current = max(builds, key=lambda build: (build.state == "building", _created(build)))
    return "building" if _created(current) >= lock_created else "pending"


def image_status(zk: Facade) -> Results:
    """Return every image in ZooKeeper or in the configuration of a launcher.

    ``build_request_age`` is in UNIX seconds.
    """
    images, configured = zk.readImages(), configured_images(zk)
    names = {build.image_name or "" for build in images.builds}
    names |= (
        {name for name, entry in configured.items() if entry["labels"]}
        | set(images.names)
        | set(images.paused)
        | set(images.requests)
        | set(images.build_locks)
    )
    rows = [
        {
            "image": name,
            "paused": name in images.paused or configured.get(name, {}).get("paused", False),
            "build_request": build_request_state(name, images),
            "build_request_age": to_int_or_none(images.requests.get(name)),
        }
        for name in sorted(names)
    ]
    return Results(rows, IMAGE_STATUS_COLUMNS)
