"""Import the pickled database of the original node manager (NM-A.11, NM-B.2, NM-C.5).

Only by an explicit offline command: the daemon never reads a pickle.  No class of the pickle is
instantiated: nothing in it can run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nodepool.nodemanager.records import loans, records
from nodepool.nodemanager.records.database import ABANDONED, Database, Record
from nodepool.nodemanager.records.rspec import RESOURCES, SYNONYMS

#: Bytes.
MAX_SIZE = 64 << 20
_CONTAINERS = {
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "frozenset"): frozenset,
}
_TYPES = {
    "sliver.VServer": records.SLIVER,
    "sliver": records.SLIVER,
    "controller.Controller": records.DELEGATE,
    "delegate": records.DELEGATE,
}


class ImportFailed(Exception):
    """The file cannot be used as a whole; the text contains the reason."""


@dataclass
class Imported:
    taken: list[str] = field(default_factory=list)
    #: Key -> why the record was skipped.
    refused: dict[str, str] = field(default_factory=dict)


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CONTAINERS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}; only plain values are accepted"
            ) from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside")


def load(data: bytes) -> Any:
    """Return the value of a pickle of numbers, strings, lists, tuples, dicts and sets.

    :raises ImportFailed: damaged, too large, or with anything else.
    """
    if len(data) > MAX_SIZE:
        raise ImportFailed(f"it has more than {MAX_SIZE} bytes")
    try:
        return _Restricted(io.BytesIO(data), encoding="utf-8", errors="surrogateescape").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ImportFailed(
            f"not a pickle of plain values: {str(error)[:200] or type(error).__name__}"
        ) from None


def import_pickle(database: Database, path: str) -> Imported:
    """Copy the records of a dump and their loans into a database that no other process uses.

    They belong to no source until the next source that delivers them adopts them.  Records that
    exist already are kept.

    :raises ImportFailed: the file cannot be read or used; nothing is changed.
    """
    try:
        with open(path, "rb") as stream:
            content = load(stream.read(MAX_SIZE + 1))
    except OSError as error:
        raise ImportFailed(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise ImportFailed("the content is not a dictionary of records")
    result = Imported()
    with database.transaction():
        for name, given in content.items():
            _one(database, str(name)[:128], given, result)
    return result


def _one(database: Database, name: str, given: object, result: Imported) -> None:
    try:
        if not isinstance(given, Mapping):
            raise records.RecordError("the record is not a dictionary")
        record = records.parse_record(_modern(given))
        made = loans.validate(given.get("loans", given.get("_loans")) or [])
    except (records.RecordError, loans.LoanError) as error:
        result.refused[name] = str(error)
        return
    key = record["record_key"]
    if key == records.TIMESTAMP:
        return
    if database.get(key) is not None:
        result.refused[name] = f"{key} is in the database already"
        return
    timestamp, expiry = record.get("timestamp"), record.get("expiry")
    database.put(
        Record(
            key,
            ABANDONED,
            0.0,
            float(timestamp or 0),
            None if expiry is None else float(expiry),
            {name: value for name, value in record.items() if name != "record_key"},
        )
    )
    if made:
        database.update_local(key, loans=[list(loan) for loan in made])
    result.taken.append(key)


def _modern(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a record of version A.5 or B.2 with current fields; obsolete resources go."""
    record = {
        str(name): value
        for name, value in given.items()
        if not str(name).startswith("_")
        and name not in ("loans", "eff_rspec", "dirty", "needs_update")
    }
    if isinstance(record.get("rspec"), Mapping):
        record["rspec"] = {
            name: amount
            for name, amount in record["rspec"].items()
            if name in RESOURCES or name in SYNONYMS
        }
    if "account_type" not in record and record.get("type") in _TYPES:
        record["account_type"] = _TYPES[record.pop("type")]
    if "instantiation" in record:
        record["plc_instantiated"] = record.pop("instantiation") in (
            "plc-instantiated",
            "nm-controller",
        )
    if "expires" in record:
        record.setdefault("expiry", record.pop("expires"))
    if "keys" in record and "ssh_keys" not in record:
        record["ssh_keys"] = record.pop("keys")
    return record
