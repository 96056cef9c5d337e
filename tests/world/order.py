"""Let sets of objects have the same order in each run of the simulated world."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

_hashes = itertools.count(1)


def _hash(self: object) -> int:
    """Return a hash that does not depend on the address.

    Sets of objects then have the same order in each run.
    """
    values = self.__dict__
    if "_simulated_hash" not in values:
        values["_simulated_hash"] = next(_hashes)
    return int(values["_simulated_hash"])


def order_by_age(prefixes: tuple[str, ...]) -> None:
    """Replace the hash of all classes of these modules that are hashed by address."""
    by_address: Any = object.__hash__
    for cls in list(_subclasses(object)):
        if (
            str(cls.__module__).startswith(prefixes)
            and vars(cls).get("__hash__") is None
            and cls.__hash__ == by_address
            and cls.__dictoffset__
        ):
            type.__setattr__(cls, "__hash__", _hash)
    # It locks futures in the order of their addresses.
    vars(sys.modules["concurrent.futures._base"])["id"] = hash


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    waiting: list[type] = [cls]
    while waiting:
        each: type
        for each in type.__subclasses__(waiting.pop()):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
                yield each
