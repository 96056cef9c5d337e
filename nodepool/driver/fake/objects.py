"""Objects of the fake cloud. Their state follows from the clock: no threads, no timers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, SupportsIndex


class Dummy:
    """An object of the cloud: attributes that can be read like a dict's items as well.

    ``status`` turns from the first value given to ``_final_status`` at ``_ready_at`` (monotonic
    seconds), but not before ``event`` is set when the object is ``_paused``. Assigning it ends
    that.
    """

    IMAGE = "Image"
    INSTANCE = "Instance"
    FLAVOR = "Flavor"
    LOCATION = "Server.Location"
    PORT = "Port"

    def __init__(self, kind: str, **kw: Any) -> None:
        self._kind = kind
        self._kw = kw
        self._status: object = None
        self._ready_at: float | None = None
        self._final_status: object = None
        self._paused = False
        self._event: threading.Event | None = None
        for key, value in kw.items():
            setattr(self, key, value)
        metadata = kw.get("metadata") or kw.get("meta") or {}
        if "true" in (str(kw.get("SHOULD_FAIL")).lower(), str(metadata.get("SHOULD_FAIL")).lower()):
            from openstack import exceptions

            raise exceptions.SDKException(f"This {kind} has SHOULD_FAIL set to True.")

    def __repr__(self) -> str:
        return f"<{self._kind} {self.get('id')} {self.get('name')} {self.status}>"

    @property
    def event(self) -> threading.Event:
        if self._event is None:
            self._event = threading.Event()
        return self._event

    @property
    def status(self) -> Any:
        if self._ready_at is not None and time.monotonic() >= self._ready_at:
            if self._paused and not self.event.is_set():
                return self._status
            self._status, self._ready_at = self._final_status, None
        return self._status

    @status.setter
    def status(self, value: object) -> None:
        self._status, self._ready_at = value, None

    def becomes(self, status: str, at: float, paused: bool = False) -> None:
        self._final_status, self._ready_at, self._paused = status, at, paused

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self, key, value)

    def __contains__(self, key: str) -> bool:
        return hasattr(self, key)

    def get(self, key: str, default: object = None) -> Any:
        return getattr(self, key, default)

    def raw(self) -> dict[str, Any]:
        """Return the object as the API's JSON."""
        data = {key: value for key, value in self.__dict__.items() if not key.startswith("_")}
        return {**data, "status": self.status}


class ObjectList(list[Dummy]):
    """A list with an index by id and name, which the cloud and tests change."""

    def __init__(self, items: Iterable[Dummy] = ()) -> None:
        super().__init__(items)
        self._index: dict[str, Dummy] | None = None

    def append(self, item: Dummy) -> None:
        super().append(item)
        if self._index is not None:
            self._index[item.id] = item

    def remove(self, item: Dummy) -> None:
        super().remove(item)
        if self._index is not None:
            self._index.pop(item.id, None)

    def __delitem__(self, where: SupportsIndex | slice) -> None:
        super().__delitem__(where)
        self._index = None

    def __setitem__(self, where: Any, value: Any) -> None:
        super().__setitem__(where, value)
        self._index = None

    def clear(self) -> None:
        super().clear()
        self._index = None

    def pop(self, index: SupportsIndex = -1) -> Dummy:
        self._index = None
        return super().pop(index)

    def by_id(self, object_id: Any) -> Dummy | None:
        if self._index is None:
            self._index = {item.id: item for item in list(self)}
        return self._index.get(object_id)

    def find(self, name_or_id: object) -> Dummy | None:
        found = self.by_id(name_or_id)
        if found is not None:
            return found
        return next(
            (item for item in list(self) if name_or_id in (item.get("id"), item.get("name"))), None
        )
