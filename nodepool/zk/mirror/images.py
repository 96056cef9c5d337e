"""The mirrored images, builds and uploads (ZK-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kazoo.protocol.states import ZnodeStat

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import BUILDING, READY, ImageBuild, ImageUpload

UploadKey = tuple[str, str, str, str]


@dataclass
class ImageData:
    """All image data at one point in time, for tables."""

    names: set[str] = field(default_factory=set)
    builds: list[ImageBuild] = field(default_factory=list)
    uploads: list[ImageUpload] = field(default_factory=list)
    #: (image, build) -> providers that have a container there, with or without uploads.
    providers: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    #: image -> when a build was requested (Unix seconds).
    requests: dict[str, float] = field(default_factory=dict)
    #: image -> (creation of the lock directory in Unix seconds, whether a builder builds).
    build_locks: dict[str, tuple[float, bool]] = field(default_factory=dict)
    # Set by the mirror only:
    #: (image, build, provider) whose upload lock is held or contended.
    upload_locks: set[tuple[str, str, str]] = field(default_factory=set)
    #: Znodes without data that should contain a record.
    empty_builds: set[tuple[str, str]] = field(default_factory=set)
    empty_uploads: set[UploadKey] = field(default_factory=set)
    #: (image, build) with invalid data.
    bad_builds: set[tuple[str, str]] = field(default_factory=set)
    #: image -> identity of the build request.
    request_marks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def served(self, image: str) -> bool:
        """Return whether the builder that holds the build lock has begun a build.

        Otherwise a request for a build is pending.
        """
        since, held = self.build_locks.get(image, (0.0, False))
        return held and any(
            build.image_name == image
            and build.state == BUILDING
            and build.stat is not None
            and build.stat.ctime / 1000 >= since
            for build in self.builds
        )


#: What a znode below the images is, by the names on its path; "*" is any other name.
KINDS: dict[tuple[str, ...], str] = {
    ("*",): "image",
    ("*", "pause"): "pause",
    ("*", "request-build"): "request",
    ("*", "builds"): "container",
    ("*", "builds", "lock"): "build-lock",
    ("*", "builds", "lock", "*"): "build-contender",
    ("*", "builds", "*"): "build",
    ("*", "builds", "*", "providers"): "container",
    ("*", "builds", "*", "providers", "*"): "provider",
    ("*", "builds", "*", "providers", "*", "images"): "container",
    ("*", "builds", "*", "providers", "*", "images", "lock"): "container",
    ("*", "builds", "*", "providers", "*", "images", "lock", "*"): "upload-contender",
    ("*", "builds", "*", "providers", "*", "images", "*"): "upload",
}


def kind_of(parts: list[str]) -> str:
    """Return the kind of a znode; empty: it is none of ours."""
    for names, kind in KINDS.items():
        if len(names) == len(parts) and all(
            name in ("*", part) for name, part in zip(names, parts, strict=True)
        ):
            return kind
    return ""


class ImageTree(Tree[Any]):
    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.IMAGES)
        #: Path -> its parts, its kind, and what it contains: a record (None: it is empty), else its
        #: stat, if known.
        self._shown: dict[str, tuple[list[str], str, Any]] = {}
        #: (image, provider) -> newest ready upload that is not held back.
        self._newest: dict[tuple[str, str], ImageUpload] = {}
        #: Called with the image name; on the connection thread.
        self.listeners: list[Callable[[str], Any]] = []

    def wants_data(self, parts: list[str]) -> bool:
        return kind_of(parts) in ("build", "upload", "pause", "request", "build-lock")

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return kind_of(parts) in ("image", "container", "build", "provider", "build-lock") and (
            stat is None or stat.numChildren > 0
        )

    def known_paths(self) -> set[str]:
        return set(self._shown)

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        kind = kind_of(parts)
        content: ImageBuild | ImageUpload | ZnodeStat | None = stat
        if kind == "build":
            content = ImageBuild.read(data, stat, parts[0], parts[2])
        elif kind == "upload":
            image, build_id, provider, number = parts[::2]
            content = ImageUpload.read(data, stat, build_id, provider, image, number)
        self._change(parts, path, kind, (parts, kind, content))

    def appeared(self, parts: list[str], path: str) -> None:
        kind = kind_of(parts)
        self._change(parts, path, kind, (parts, kind, None))

    def vanished(self, parts: list[str], path: str) -> None:
        # What is below it is kept: it is deleted before it, or only the record is damaged.
        self._change(parts, path, kind_of(parts), None)

    def _change(
        self, parts: list[str], path: str, kind: str, shown: tuple[list[str], str, Any] | None
    ) -> None:
        if kind in ("", "container"):
            return
        with self.lock:
            self._shown.pop(path, None)
            if shown is not None:
                self._shown[path] = shown
            if kind == "upload":
                self._choose(parts[0], parts[4])
        self.announce(self.listeners, parts[0])

    def _choose(self, image: str, provider: str) -> None:
        uploads = [
            each
            for _parts, kind, each in self._shown.values()
            if kind == "upload" and each is not None
        ]
        ready = [
            u
            for u in uploads
            if (u.image_name, u.provider_name, u.state) == (image, provider, READY)
            and not u.held_back
        ]
        if ready:
            self._newest[(image, provider)] = max(ready, key=lambda u: u.state_time or 0)
        else:
            self._newest.pop((image, provider), None)

    def newest_ready(self, image: str, provider: str) -> ImageUpload | None:
        return self._newest.get((image, provider))

    def data(self) -> ImageData:
        with self.lock:
            shown = sorted(self._shown.values(), key=lambda each: each[0])
            bad = [path.split("/") for path in self.bad]
        data = ImageData(bad_builds={(path[3], path[5]) for path in bad if len(path) == 6})
        for parts, kind, content in shown:
            if kind in ("build", "upload"):
                _add_record(data, parts, kind, content)
            else:
                _add_mark(data, parts, kind, content)
        return data


def _add_record(
    data: ImageData, parts: list[str], kind: str, record: ImageBuild | ImageUpload | None
) -> None:
    if isinstance(record, ImageBuild):
        data.builds.append(record)
    elif isinstance(record, ImageUpload):
        data.uploads.append(record)
    elif kind == "build":
        data.empty_builds.add((parts[0], parts[2]))
    else:
        data.empty_uploads.add((parts[0], parts[2], parts[4], parts[6]))


def _add_mark(data: ImageData, parts: list[str], kind: str, stat: ZnodeStat | None) -> None:
    image = parts[0]
    if kind == "image":
        data.names.add(image)
    elif kind == "pause":
        data.paused.add(image)
    elif kind == "provider":
        data.providers.setdefault((image, parts[2]), set()).add(parts[4])
    elif kind == "upload-contender":
        data.upload_locks.add((image, parts[2], parts[4]))
    elif kind == "build-contender" and image in data.build_locks:  # which comes before it
        data.build_locks[image] = (data.build_locks[image][0], True)
    elif stat is not None and kind == "build-lock":
        data.build_locks[image] = (stat.ctime / 1000, False)
    elif stat is not None and kind == "request":
        data.requests[image] = stat.ctime / 1000
        data.request_marks[image] = (stat.czxid, stat.version)
