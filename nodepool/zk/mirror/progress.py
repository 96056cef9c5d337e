"""What users see of running and failed builds and uploads.

The records are outside the tree of release 11.0.0 (ZK-11): older builders and
launchers iterate over ``/nodepool/images`` and find nothing new there.

- ``/nodepool/image-progress/builds/<build id>``: persistent
- ``/nodepool/image-progress/uploads/<build id>-<provider>-<upload id>``: ephemeral, while the
  upload runs
- ``/nodepool/image-progress/failed-uploads/<image>@<provider>``: persistent, until an upload
  works again

Names of images and providers are percent-quoted.  Times are UNIX seconds.  No value of an
environment variable is ever stored here: the builder removes them from the lines of a build log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.reading import TIMEOUT, remove, write
from nodepool.zk.records import RecordError
from nodepool.zk.records.progress import (
    BUILDS,
    FAILURES,
    ROOT,
    UPLOADS,
    BuildProgress,
    ProgressData,
    ProgressRecord,
    UploadFailure,
    UploadProgress,
    parse,
)

log = logging.getLogger("nodepool.zk.progress")
KINDS: dict[str, type[ProgressRecord]] = {
    BUILDS: BuildProgress,
    UPLOADS: UploadProgress,
    FAILURES: UploadFailure,
}


class ProgressStore:
    """Reads and writes the records; a missing tree counts as empty, writers create parents.

    Every call has a deadline.

    :raises KazooException: (all methods) no connection, or no answer in time.
    """

    def __init__(self, kazoo_client: KazooClient) -> None:
        self._kazoo = kazoo_client

    def write(self, record: ProgressRecord) -> None:
        """Create or replace a record; that of a running upload ends with the session."""
        write(
            self._kazoo,
            record.path,
            record.serialize(),
            ephemeral=isinstance(record, UploadProgress),
        )

    def delete(self, record: ProgressRecord) -> None:
        """Delete a record; the fields in the name of its znode suffice."""
        remove(self._kazoo, record.path)

    def read_build(self, build_id: str) -> BuildProgress | None:
        path = BuildProgress("", build_id).path
        try:
            return parse(
                BuildProgress,
                path.rpartition("/")[2],
                self._kazoo.get_async(path).get(timeout=TIMEOUT)[0],
            )
        except NoNodeError:
            return None
        except RecordError as error:
            log.error("Ignoring %s: %s", path, error)
            return None


# -- mirror


class ProgressTree(Tree[Any]):
    """A live copy, without cost while nothing changes."""

    log = log

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, ROOT)
        self._records: dict[str, ProgressRecord] = {}
        #: Path -> zxid of the creation of the record.
        self.created: dict[str, int] = {}
        #: Called with the image name; on the connection thread.
        self.listeners: list[Callable[[str], Any]] = []

    def wants_data(self, parts: list[str]) -> bool:
        return len(parts) == 2 and f"{ROOT}/{parts[0]}" in KINDS

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return len(parts) == 1 and f"{ROOT}/{parts[0]}" in KINDS

    def known_paths(self) -> set[str]:
        return set(self._records)

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        record = parse(KINDS[f"{ROOT}/{parts[0]}"], parts[1], data)
        if record is None:
            self.vanished(parts, path)
            return
        if record.path != path:
            raise RecordError(f"another name of {record.path}")
        with self.lock:
            self._records[path] = record
            self.created[path] = stat.czxid
        self.announce(self.listeners, record.image)

    def vanished(self, parts: list[str], path: str) -> None:
        with self.lock:
            gone = self._records.pop(path, None)
            self.created.pop(path, None)
        if gone is not None:
            self.announce(self.listeners, gone.image)

    def data(self) -> ProgressData:
        with self.lock:
            records = list(self._records.values())
        return ProgressData(
            {record.build: record for record in records if isinstance(record, BuildProgress)},
            {record.key: record for record in records if isinstance(record, UploadProgress)},
            {record.key: record for record in records if isinstance(record, UploadFailure)},
        )


__all__ = [
    "BuildProgress",
    "ProgressData",
    "ProgressStore",
    "ProgressTree",
    "UploadFailure",
    "UploadProgress",
]
