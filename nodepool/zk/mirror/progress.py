"""What users see of running and failed builds and uploads.

The records are outside the tree of release 11.0.0 (ZK-11): older builders and
launchers iterate over ``/nodepool/images`` and find nothing new there.

========================================================================== ============================================
``/nodepool/image-progress/builds/<build id>``                             persistent
``/nodepool/image-progress/uploads/<build id>-<provider>-<upload id>``     ephemeral, while the upload runs
``/nodepool/image-progress/failed-uploads/<image>@<provider>``             persistent, until an upload works again
========================================================================== ============================================

Names of images and providers are percent-quoted.  Times are UNIX seconds.  No value of an environment variable is ever
stored here: the builder removes them from the lines of a build log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.reading import TIMEOUT, answers, children
from nodepool.zk.records import RecordError
from nodepool.zk.records.progress import (
    BUILD_STATES,
    BUILDS,
    FAILURES,
    LINE_LENGTH,
    REASON_LENGTH,
    ROOT,
    TAIL_BYTES,
    TAIL_LINES,
    UPLOADS,
    BuildProgress,
    P,
    ProgressData,
    UploadFailure,
    UploadProgress,
    clean_line,
    clip_tail,
    failure_path,
    parse,
)

log = logging.getLogger("nodepool.zk.progress")


class ProgressStore:
    """Reads and writes the records; a missing tree counts as empty, writers create parents.

    Every call has a deadline.

    :raises KazooException: (all methods) no connection, or no answer in time.
    """

    def __init__(self, kazoo_client: KazooClient) -> None:
        self._kazoo = kazoo_client

    def _create(self, path: str, data: bytes, ephemeral: bool) -> bool:
        """Create a record; return False if another client was faster."""
        try:
            self._kazoo.create_async(path, data, ephemeral=ephemeral, makepath=True).get(timeout=TIMEOUT)
        except NodeExistsError:
            return False
        return True

    def _set(self, path: str, data: bytes) -> ZnodeStat | None:
        """Write a record; return None if it does not exist."""
        try:
            return self._kazoo.set_async(path, data).get(timeout=TIMEOUT)
        except NoNodeError:
            return None

    def _delete(self, path: str) -> None:
        try:
            self._kazoo.delete_async(path).get(timeout=TIMEOUT)
        except NoNodeError:
            pass

    def _write(self, path: str, data: bytes) -> None:
        if self._set(path, data) is None and not self._create(path, data, False):
            self._set(path, data)

    def _read(self, kind: type[P], parent: str) -> list[P]:
        names = children(self._kazoo, parent)
        read = answers(self._kazoo.get_async, (f"{parent}/{name}" for name in names))
        records = [self._parse(kind, path, data) for path, (data, _stat) in read]
        return [record for record in records if record is not None]

    @staticmethod
    def _parse(kind: type[P], path: str, data: bytes) -> P | None:
        try:
            return parse(kind, path.rsplit("/", 1)[1], data)
        except RecordError as error:
            log.error("Ignoring %s: %s", path, error)
            return None

    # -- builds

    def write_build(self, progress: BuildProgress) -> None:
        self._write(progress.path, progress.serialize())

    def read_builds(self) -> list[BuildProgress]:
        return self._read(BuildProgress, BUILDS)

    def read_build(self, build_id: str, watch: Callable[[Any], Any] | None = None) -> BuildProgress | None:
        """Return the record of a build.

        ``watch`` is called at the next change, also if there is no record yet.
        """
        path = f"{BUILDS}/{quote(build_id, safe='')}"
        while True:
            try:
                data, _stat = self._kazoo.get_async(path, watch=watch).get(timeout=TIMEOUT)
                return self._parse(BuildProgress, path, data)
            except NoNodeError:
                if watch is None or self._kazoo.exists_async(path, watch=watch).get(timeout=TIMEOUT) is None:
                    return None

    def delete_build(self, build_id: str) -> None:
        self._delete(f"{BUILDS}/{quote(build_id, safe='')}")

    # -- running uploads

    def write_upload(self, progress: UploadProgress) -> None:
        """Write the record, which ends with the session of the writer.

        A leftover of a lost session of ours is replaced.
        """
        path, data = progress.path, progress.serialize()
        stat = self._set(path, data)
        if stat is not None and not self._ours(stat):
            self._delete(path)
            stat = None
        if stat is None and not self._create(path, data, True):
            self._set(path, data)

    def _ours(self, stat: ZnodeStat) -> bool:
        session = self._kazoo.client_id
        return session is None or stat.ephemeralOwner == session[0]

    def delete_upload(self, progress: UploadProgress) -> None:
        self._delete(progress.path)

    def read_uploads(self) -> list[UploadProgress]:
        return self._read(UploadProgress, UPLOADS)

    # -- failed uploads

    def write_failure(self, failure: UploadFailure) -> None:
        self._write(failure.path, failure.serialize())

    def delete_failure(self, image: str, provider: str) -> None:
        self._delete(failure_path(image, provider))

    def read_failures(self) -> list[UploadFailure]:
        return self._read(UploadFailure, FAILURES)

    def read_all(self) -> ProgressData:
        return ProgressData(
            builds={build.build: build for build in self.read_builds()},
            uploads={upload.key: upload for upload in self.read_uploads()},
            failures={failure.key: failure for failure in self.read_failures()},
        )


# -- mirror


class ProgressTree(Tree[Any]):
    """A live copy, without cost while nothing changes."""

    log = log

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, ROOT)
        self.builds: dict[str, BuildProgress] = {}
        #: Build id -> zxid of the creation of its record here.
        self.created: dict[str, int] = {}
        self.uploads: dict[tuple[str, str, str], UploadProgress] = {}
        self.failures: dict[tuple[str, str], UploadFailure] = {}
        #: Called with the image name; on the connection thread.
        self.listeners: list[Callable[[str], Any]] = []

    _KINDS = {"builds": BuildProgress, "uploads": UploadProgress, "failed-uploads": UploadFailure}

    def wants_data(self, parts: list[str]) -> bool:
        return len(parts) == 2 and parts[0] in self._KINDS

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return len(parts) == 1 and parts[0] in self._KINDS

    def known_paths(self) -> set[str]:
        result = {build.path for build in self.builds.values()}
        result |= {upload.path for upload in self.uploads.values()}
        return result | {failure.path for failure in self.failures.values()}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        record = parse(self._KINDS[parts[0]], parts[1], data)
        if record is None:
            self.vanished(parts, path)
            return
        if record.path != path:
            raise RecordError(f"another name of {record.path}")
        with self.lock:
            if isinstance(record, BuildProgress):
                self.builds[record.build] = record
                self.created[record.build] = stat.czxid
            elif isinstance(record, UploadProgress):
                self.uploads[record.key] = record
            else:
                self.failures[record.key] = record
        self.announce(self.listeners, record.image)

    def vanished(self, parts: list[str], path: str) -> None:
        if not self.wants_data(parts):
            return
        key: Any
        records: dict[Any, Any]
        try:
            if parts[0] == "builds":
                records, key = self.builds, unquote(parts[1])
            elif parts[0] == "uploads":
                records, key = self.uploads, UploadProgress.keyOf(parts[1])
            else:
                records, key = self.failures, UploadFailure.keyOf(parts[1])
        except RecordError:
            return
        with self.lock:
            gone = records.get(key)
            # Two names may unquote to one key: only the record of this znode was deleted.
            if gone is None or gone.path != path:
                return
            del records[key]
            if parts[0] == "builds":
                self.created.pop(key, None)
        self.announce(self.listeners, gone.image)

    def data(self) -> ProgressData:
        with self.lock:
            return ProgressData(dict(self.builds), dict(self.uploads), dict(self.failures))


__all__ = [
    "BUILDS",
    "BUILD_STATES",
    "FAILURES",
    "LINE_LENGTH",
    "REASON_LENGTH",
    "ROOT",
    "TAIL_BYTES",
    "TAIL_LINES",
    "UPLOADS",
    "BuildProgress",
    "ProgressData",
    "ProgressStore",
    "ProgressTree",
    "UploadFailure",
    "UploadProgress",
    "clean_line",
    "clip_tail",
    "failure_path",
    "parse",
]
