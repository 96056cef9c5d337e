"""Taking over what authorities deliver, and dropping what they drop (nodemanager.md A.6 with its fixes, B.2, C.6).

Every source has updates of its own with a rising serial number.  A complete update says what exists at that source;
a partial one adds or changes.  Nothing of one source is swept by another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nodepool.nodemanager import records
from nodepool.nodemanager.database import Database, Record

log = logging.getLogger("nodepool.nodemanager.merge")


@dataclass
class Changes:
    """Keys of records."""

    changed: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    #: Key (or place in the update) -> why it was not taken.
    refused: dict[str, str] = field(default_factory=dict)
    #: A complete update was taken: everything is to be applied once more.
    complete: bool = False


def deliver(database: Database, source: str, serial: float, given: Iterable[Any], complete: bool) -> Changes:
    """Take over an update.

    Records replace those of the same source as a whole, if their timestamp is not older.  A record that cannot be
    used is refused alone; in a complete update its predecessor stays.  An update older than the last complete one of
    its source is refused as a whole.

    :param serial: rises with every update of the source.
    :param complete: what is not in it does not exist at the source any more.
    """
    changes = Changes()
    last = database.serial(source)
    if serial < last:
        changes.refused[""] = f"update {serial} of {source} is older than {last}"
        log.warning("Refused: %s", changes.refused[""])
        return changes
    with database.transaction():
        seen: set[str] = set()
        for place, item in enumerate(given, 1):
            _take(database, source, serial, place, item, seen, changes)
        if complete:
            for old in database.records(source):
                if old.key not in seen:
                    database.delete(old.key)
                    changes.deleted.add(old.key)
            database.set_serial(source, serial)
            changes.complete = True
    return changes


def _take(database: Database, source: str, serial: float, place: int, item: Any, seen: set[str], changes: Changes) -> None:
    try:
        record = records.parse_record(item)
    except records.RecordError as error:
        changes.refused[str(place)] = str(error)
        log.error("Record %s of %s is refused: %s", place, source, error)
        # It is there, only wrong: what it named before stays as it was.
        if isinstance(item, dict):
            key = item.get("record_key") or f"{item.get('account_type')}_{item.get('name')}"
            seen.add(str(key))
        return
    key = record["record_key"]
    seen.add(key)
    old = database.get(key)
    if old is not None and old.source != source:
        changes.refused[key] = f"{key} belongs to source {old.source}"
        log.error("Record %s of %s is refused: it belongs to %s", key, source, old.source)
        return
    timestamp = record.get("timestamp")
    timestamp = serial if timestamp is None else float(timestamp)
    if old is not None and timestamp < old.timestamp:
        changes.refused[key] = f"version {timestamp} is older than {old.timestamp}"
        # The update contains it all the same.
        old.serial = serial
        database.put(old)
        return
    expiry = record.get("expiry")
    content = {name: value for name, value in record.items() if name != "record_key"}
    if old is None or old.content != content or old.expiry != expiry:
        changes.changed.add(key)
    database.put(Record(key, source, serial, timestamp, None if expiry is None else float(expiry), content))


def expire(database: Database, now: float) -> Changes:
    """Drop what has expired; on a timer of its own, whatever the sources do."""
    changes = Changes()
    with database.transaction():
        for record in database.expired(now):
            database.delete(record.key)
            changes.deleted.add(record.key)
            log.info("Record %s of %s has expired", record.key, record.source)
    return changes
