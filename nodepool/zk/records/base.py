"""Common parts of all records in ZooKeeper: states, checks of fields, JSON (ZK-1)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from sys import intern
from types import MappingProxyType
from typing import Any, ClassVar, Self

from kazoo.protocol.states import ZnodeStat

BUILDING = "building"
UPLOADING = "uploading"
READY = "ready"
DELETING = "deleting"
FAILED = "failed"
REQUESTED = "requested"
FULFILLED = "fulfilled"
PENDING = "pending"
TESTING = "testing"
IN_USE = "in-use"
USED = "used"
HOLD = "hold"
INIT = "init"
ABORTED = "aborted"
DELETED = "deleted"

_encode = json.JSONEncoder(ensure_ascii=True, separators=(", ", ": ")).encode


#: Seconds of the latest valid date.
LATEST = 1e11
#: Larger numbers (and Infinity and NaN, which JSON readers accept) are not valid amounts.
LARGEST = 1e15


class RecordError(ValueError):
    """Data in ZooKeeper that are not a valid record; the text says why."""


def parse_object(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a znode; None if it is empty.

    :raises RecordError: not JSON, or not an object.
    """
    if not data:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecordError(f"a JSON object is expected, found {type(value).__name__}")
    return value


class BaseModel:
    """A record with an id and a checked state; setting the state sets ``state_time``."""

    VALID_STATES: ClassVar[frozenset[str]] = frozenset()
    #: Stored keys that we know.
    KEYS: ClassVar[frozenset[str]] = frozenset({"id", "state", "state_time"})
    #: Values that others stored under other keys; they are written unchanged, and not shown.
    extra: Mapping[str, Any] = MappingProxyType({})
    #: Our lock on the record.
    lock: Any = None
    #: Names of the lists that are copied with the record.
    LISTS: ClassVar[tuple[str, ...]] = ()
    #: Names of the attributes that are not in the dictionary of the record.
    SLOTS: ClassVar[tuple[str, ...]] = ()
    #: Names of the attributes that a copy does not have.
    OWN: ClassVar[frozenset[str]] = frozenset({"lock", "unsaved", "promise"})

    def __init__(self, o_id: str | None = None) -> None:
        self._id: str | None = None
        if o_id is not None:
            self.id = o_id
        self._state: str | None = None
        self.state_time: float | None = None
        self.stat: ZnodeStat | None = None

    @property
    def id(self) -> str | None:
        return self._id

    @id.setter
    def id(self, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError("'id' attribute must be a string type")
        self._id = value

    @property
    def state(self) -> str | None:
        return self._state

    @state.setter
    def state(self, value: str) -> None:
        if value not in self.VALID_STATES:
            raise TypeError(f"'{value}' is not a valid state")
        self._state = value
        self.state_time = time.time()

    @property
    def version(self) -> int:
        """Return the version as read, for a conditional write; -1 (any) if it was not read."""
        return self.stat.version if self.stat is not None else -1

    def toDict(self) -> dict[str, Any]:
        """Return the stored values: everything but the id."""
        return {"state": self._state, "state_time": self.state_time}

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        """Set stored values.

        :raises RecordError: the state is unknown, or its time is not a number of seconds.
        """
        state = d.get("state")
        if state is not None and (not isinstance(state, str) or state not in self.VALID_STATES):
            raise RecordError(f"unknown state {state!r}")
        state_time = d.get("state_time")
        # Everybody sorts by it: a text among the numbers would stop them all. NaN fails the
        # comparison, too.
        if state_time is not None and (
            not isinstance(state_time, (int, float)) or not abs(state_time) < LATEST
        ):
            raise RecordError(f"state_time {state_time!r} is not a time in seconds")
        self._state = state and intern(state)
        self.state_time = state_time
        if (extra := {key: d[key] for key in d.keys() - self.KEYS}) or self.extra:
            self.extra = extra

    @classmethod
    def read(cls, data: bytes | None, stat: ZnodeStat, *names: str) -> Self | None:
        """Return the record of a znode; None if it is empty.

        :param names: arguments of the class.
        :raises RecordError: the data are not a valid record.
        """
        values = parse_object(data)
        if values is None:
            return None
        record = cls.of(values, *names)
        record.stat = stat
        return record

    @classmethod
    def of(cls, values: Mapping[str, Any], *names: str | None) -> Self:
        """Return the record with these stored values.

        :param names: arguments of the class.
        """
        record = cls(*names)
        record.updateFromDict(values)
        return record

    def copy(self) -> Self:
        """Return a separate record that can be changed, not locked; lists are copied, too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        for name in self.OWN & self.__dict__.keys():
            del other.__dict__[name]
        for name in self.SLOTS:
            setattr(other, name, getattr(self, name))
        for name in self.LISTS:
            setattr(other, name, list(getattr(self, name)))
        return other

    def serialize(self) -> bytes:
        values = self.toDict()
        return _encode({**self.extra, **values} if self.extra else values).encode("utf8")

    def _comparable(self) -> dict[str, Any]:
        return self.toDict()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._id == other._id and self._comparable() == other._comparable()

    # Records change; sets distinguish them by identity.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        values = " ".join(
            f"{key}={value!r}" for key, value in self.toDict().items() if key not in SECRETS
        )
        return f"<{type(self).__name__} {self._id} {values}>"


#: Fields that may contain credentials (Kubernetes-like connection data) and are not logged.
SECRETS = frozenset({"connection_port", "ssh_port", "driver_data"})


def text_of(d: Mapping[str, Any], key: str) -> str | None:
    """Return a field that everybody searches, compares and sorts; equal texts are kept once.

    :raises RecordError: it is neither a text nor null.
    """
    value = d.get(key)
    if value is not None and not isinstance(value, str):
        raise RecordError(f"{key} is not a text but {type(value).__name__}")
    return intern(value) if type(value) is str else value


def texts_of(d: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of texts; equal texts are kept once.

    :raises RecordError: it is not a list of texts.
    """
    value = d.get(key)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecordError(f"{key} is not a list of texts")
    return [*map(intern, map(str, value))]
