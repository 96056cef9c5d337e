"""The mirrored images, builds and uploads (ZK-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kazoo.protocol.states import ZnodeStat

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree, put
from nodepool.zk.records import READY, ImageBuild, ImageUpload

K = TypeVar("K")
V = TypeVar("V")

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


def _keep(records: dict[K, V], empty: set[K], key: K, record: V | None) -> None:
    """Show a record, or that its znode has no data."""
    if record is None:
        records.pop(key, None)
        empty.add(key)
    else:
        records[key] = record
        empty.discard(key)


class ImageTree(Tree[Any]):
    """Images with their builds, uploads and flags."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.IMAGES)
        self.names: set[str] = set()
        self.builds: dict[tuple[str, str], ImageBuild] = {}
        self.uploads: dict[UploadKey, ImageUpload] = {}
        self.providers: dict[tuple[str, str], set[str]] = {}
        self.paused: set[str] = set()
        self.requests: dict[str, float] = {}
        self.build_lock_time: dict[str, float] = {}
        self.build_contenders: dict[str, set[str]] = {}
        #: (image, build, provider) -> contenders for the upload lock.
        self.upload_contenders: dict[tuple[str, str, str], set[str]] = {}
        #: Znodes without data that should contain a record; they count as missing (BLD-4).
        self.empty_builds: set[tuple[str, str]] = set()
        self.empty_uploads: set[UploadKey] = set()
        #: image -> (czxid, version) of its build request: distinguishes requests.
        self.request_marks: dict[str, tuple[int, int]] = {}
        #: (image, provider) -> newest ready upload.
        self._newest: dict[tuple[str, str], ImageUpload] = {}
        #: Called with the image name; on the connection thread.
        self.listeners: list[Callable[[str], Any]] = []

    @staticmethod
    def _kind(parts: list[str]) -> str:
        count = len(parts)
        if count == 1:
            return "image"
        if count == 2 and parts[1] in ("pause", "request-build"):
            return "flag"
        if parts[1] != "builds":
            return ""
        if count == 2:
            return "container"
        if parts[2] == "lock":
            return {3: "build-lock", 4: "build-contender"}.get(count, "")
        if count == 3:
            return "build"
        if parts[3] == "providers":
            if count in (4, 6):
                return "container"
            if count == 5:
                return "provider"
            if count == 7:
                return "container" if parts[6] == "lock" else "upload"
            if count == 8 and parts[6] == "lock":
                return "upload-contender"
        return ""

    def wants_data(self, parts: list[str]) -> bool:
        return self._kind(parts) in ("build", "upload", "flag", "build-lock")

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return self._kind(parts) in ("image", "container", "build", "provider", "build-lock") and (
            stat is None or stat.numChildren > 0
        )

    def known_paths(self) -> set[str]:
        result = {paths.image(name) for name in self.names}
        result |= {paths.build(*key) for key in self.builds}
        result |= {paths.upload(*key) for key in self.uploads}
        result |= {f"{paths.build_providers(*key)}/{p}" for key, names in self.providers.items() for p in names}
        result |= {f"{paths.image(name)}/pause" for name in self.paused}
        result |= {f"{paths.image(name)}/request-build" for name in self.requests}
        result |= {f"{paths.builds(name)}/lock" for name in self.build_lock_time}
        result |= {f"{paths.builds(name)}/lock/{c}" for name, cs in self.build_contenders.items() for c in cs}
        result |= {f"{paths.uploads(*key)}/lock/{c}" for key, cs in self.upload_contenders.items() for c in cs}
        result |= {paths.build(*key) for key in self.empty_builds}
        result |= {paths.upload(*upload) for upload in self.empty_uploads}
        return result

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        kind = self._kind(parts)
        with self.lock:
            if kind == "flag":
                if parts[1] == "pause":
                    self.paused.add(parts[0])
                else:
                    self.requests[parts[0]] = stat.ctime / 1000
                    self.request_marks[parts[0]] = (stat.czxid, stat.version)
            elif kind == "build-lock":
                self.build_lock_time[parts[0]] = stat.ctime / 1000
            elif kind == "build":
                image, build_id = parts[0], parts[2]
                build = ImageBuild.read(data, stat, image, build_id)
                _keep(self.builds, self.empty_builds, (image, build_id), build)
            elif kind == "upload":
                image, build_id, provider, number = parts[::2]
                upload = ImageUpload.read(data, stat, build_id, provider, image, number)
                _keep(self.uploads, self.empty_uploads, (image, build_id, provider, number), upload)
                self._choose(image, provider)
        self.announce(self.listeners, parts[0])

    def appeared(self, parts: list[str], path: str) -> None:
        kind = self._kind(parts)
        with self.lock:
            if kind == "image":
                self.names.add(parts[0])
            elif kind == "provider":
                put(self.providers, (parts[0], parts[2]), parts[4], True)
            elif kind == "build-contender":
                put(self.build_contenders, parts[0], parts[3], True)
            elif kind == "upload-contender":
                put(self.upload_contenders, (parts[0], parts[2], parts[4]), parts[7], True)
            else:
                return
        self.announce(self.listeners, parts[0])

    def vanished(self, parts: list[str], path: str) -> None:
        kind = self._kind(parts)
        name = parts[0]
        with self.lock:
            if kind == "image":
                self.names.discard(name)
            elif kind == "flag":
                if parts[1] == "pause":
                    self.paused.discard(name)
                else:
                    self.requests.pop(name, None)
                    self.request_marks.pop(name, None)
            elif kind == "build-lock":
                self.build_lock_time.pop(name, None)
            elif kind == "build-contender":
                put(self.build_contenders, name, parts[3], False)
            elif kind == "upload-contender":
                put(self.upload_contenders, (name, parts[2], parts[4]), parts[7], False)
            elif kind == "build":
                self.empty_builds.discard((name, parts[2]))
                # Its providers are kept: each one is deleted before it, or only the record is damaged.
                self.builds.pop((name, parts[2]), None)
            elif kind == "provider":
                put(self.providers, (name, parts[2]), parts[4], False)
            elif kind == "upload":
                self.uploads.pop((name, parts[2], parts[4], parts[6]), None)
                self.empty_uploads.discard((name, parts[2], parts[4], parts[6]))
                self._choose(name, parts[4])
            else:
                return
        self.announce(self.listeners, name)

    def _choose(self, image: str, provider: str) -> None:
        ready = [u for (i, _b, p, _n), u in self.uploads.items() if i == image and p == provider and u.state == READY]
        if ready:
            self._newest[(image, provider)] = max(ready, key=lambda u: u.state_time or 0)
        else:
            self._newest.pop((image, provider), None)

    def newest_ready(self, image: str, provider: str) -> ImageUpload | None:
        return self._newest.get((image, provider))

    def data(self) -> ImageData:
        with self.lock:
            return ImageData(
                names=set(self.names),
                builds=[build for _, build in sorted(self.builds.items())],
                uploads=[upload for _, upload in sorted(self.uploads.items())],
                providers={key: set(value) for key, value in self.providers.items()},
                paused=set(self.paused),
                requests=dict(self.requests),
                build_locks={
                    name: (ctime, bool(self.build_contenders.get(name))) for name, ctime in self.build_lock_time.items()
                },
                upload_locks={key for key, contenders in self.upload_contenders.items() if contenders},
                empty_builds=set(self.empty_builds),
                empty_uploads=set(self.empty_uploads),
                bad_builds={(p[3], p[5]) for p in (path.split("/") for path in self.bad) if len(p) == 6},
                request_marks=dict(self.request_marks),
            )
