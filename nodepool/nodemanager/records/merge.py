"""Merge the updates of authorities into the database (NM-A.6 with its fixes, B.2, C.6).

Every source numbers its own updates with a rising serial.  A complete update lists everything that
exists at that source; a partial one adds or changes.  No update deletes records of another source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nodepool.nodemanager.records import records
from nodepool.nodemanager.records.database import ABANDONED, Database, Record

log = logging.getLogger("nodepool.nodemanager.merge")


@dataclass
class Changes:
    """Keys of the changed records."""

    changed: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    #: Key (or position in the update) -> why the record was refused.
    refused: dict[str, str] = field(default_factory=dict)
    #: A complete update was accepted: everything is to be applied once more.
    complete: bool = False


def deliver(
    database: Database,
    source: str,
    serial: float | None,
    given: Iterable[Any],
    complete: bool,
    now: float | None = None,
) -> Changes:
    """Merge an update of a source into the database.

    Records replace those of the same source as a whole, if their timestamp is not older.  A record
    that cannot be used is refused alone; in a complete update its predecessor stays.  An expired
    record does not exist.  An update older than the last complete one of its source is refused as a
    whole.

    :param serial: rises with every update of the source, if it sends one; not a clock, as clocks
        can step back.
    :param complete: what the update does not contain no longer exists at the source.
    :param now: Unix seconds.
    """
    changes = Changes()
    now = time.time() if now is None else now
    with database.transaction():
        last = database.serial(source)
        if serial is None:
            serial = last + 1
        if serial < last:
            changes.refused[""] = f"update {serial} of {source} is older than {last}"
            log.warning("Refused: %s", changes.refused[""])
            return changes
        seen: set[str] = set()
        for place, item in enumerate(given, 1):
            _take(database, source, serial, now, place, item, seen, changes)
        if complete:
            for old in database.records(source):
                if old.key not in seen:
                    database.delete(old.key)
                    changes.deleted.add(old.key)
            database.set_serial(source, serial)
            database.put(
                Record(
                    records.TIMESTAMP,
                    "",
                    serial,
                    now,
                    None,
                    {"type": records.TIMESTAMP, "timestamp": now},
                )
            )
            changes.complete = True
    return changes


def _take(
    database: Database,
    source: str,
    serial: float,
    now: float,
    place: int,
    item: object,
    seen: set[str],
    changes: Changes,
) -> None:
    try:
        record = records.parse_record(item)
    except records.RecordError as error:
        changes.refused[str(place)] = str(error)
        log.error("Record %s of %s is refused: %s", place, source, error)
        # The record exists but is invalid: its predecessor stays.
        if isinstance(item, dict):
            account = item.get("account_type")
            seen.add(
                records.record_key(str(account), str(item.get("name")))
                if account
                else str(item.get("record_key"))
            )
        return
    key = record["record_key"]
    if key == records.TIMESTAMP:
        return  # this host stores this itself after a complete update
    old = database.get(key)
    if old is not None and old.source not in (source, ABANDONED):
        seen.add(key)
        changes.refused[key] = f"{key} belongs to source {old.source}"
        log.error("Record %s of %s is refused: it belongs to %s", key, source, old.source)
        return
    version, expiry = record.get("timestamp"), record.get("expiry")
    # Versions are compared only if the authority sends them: times of different clocks are not
    # comparable.
    known = None if old is None else old.content.get("timestamp")
    if old is not None and version is not None and known is not None and version < known:
        seen.add(key)
        changes.refused[key] = f"version {version} is older than {known}"
        # The update contains it all the same.
        old.serial, old.source = serial, source
        database.put(old)
        return
    if expiry is not None and expiry < now:
        changes.refused[key] = "it has expired"
        if old is not None:
            database.delete(key)
            changes.deleted.add(key)
        return
    seen.add(key)
    timestamp = now if version is None else float(version)
    content = {name: value for name, value in record.items() if name != "record_key"}
    if old is None or old.content != content or old.expiry != expiry:
        changes.changed.add(key)
    database.put(
        Record(key, source, serial, timestamp, None if expiry is None else float(expiry), content)
    )


def expire(database: Database, now: float) -> Changes:
    """Delete expired records; called by a timer, independent of the sources."""
    changes = Changes()
    with database.transaction():
        for record in database.expired(now):
            database.delete(record.key)
            changes.deleted.add(record.key)
            log.info("Record %s of %s has expired", record.key, record.source)
    return changes
