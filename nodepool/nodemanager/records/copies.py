"""A copy of each living sliver's record, in case the database is lost (NM-A.11)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from nodepool.base.files import remove_unfinished, replace_file
from nodepool.nodemanager.records import records
from nodepool.nodemanager.records.database import Database, Record

log = logging.getLogger("nodepool.nodemanager.copies")


class Copies:
    """Files ``<record key>.json`` (0600) in our own directory, written atomically."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._kept: dict[str, str] = {}

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, f"{key}.json")

    def keep(self, stored: Record | None, local: dict[str, Any]) -> None:
        """Write the copy if it changed; errors of the file system do not affect the sliver."""
        if stored is None:
            return
        text = json.dumps(
            {
                "source": stored.source,
                "timestamp": stored.timestamp,
                "expiry": stored.expiry,
                "record": stored.content,
                "local": local,
            },
            sort_keys=True,
        )
        if self._kept.get(stored.key) == text:
            return
        try:
            replace_file(self._path(stored.key), text, sync=False)
        except OSError as error:
            log.warning("Cannot keep a copy of record %s: %s", stored.key, error)
            return
        self._kept[stored.key] = text

    def forget(self, key: str) -> None:
        self._kept.pop(key, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def restore(self, database: Database) -> None:
        """Add all copies to a new database; invalid ones are logged and skipped."""
        remove_unfinished(self._directory)
        for name in sorted(os.listdir(self._directory)):
            path = os.path.join(self._directory, name)
            if not name.endswith(".json"):
                continue
            try:
                with open(path, encoding="utf-8") as stream:
                    content = json.load(stream)
                record = records.parse_record(content["record"])
                local = dict(content["local"])
                index, sliver = int(local["index"]), str(record["name"])
                if f"{record['record_key']}.json" != name or not database.take_index(sliver, index):
                    raise ValueError("its name or number belongs to another sliver")
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("The copy %s cannot be used: %s", path, error)
                continue
            key = record.pop("record_key")
            expiry = content.get("expiry")
            database.put(
                Record(
                    key,
                    str(content.get("source")),
                    0.0,
                    float(content.get("timestamp") or 0),
                    None if expiry is None else float(expiry),
                    record,
                )
            )
            database.update_local(key, **local)
            log.info("Sliver %s is restored from its copy", sliver)
