"""Values of a configuration: compared by their content (DRV-3)."""

from __future__ import annotations

import abc
from typing import Any, ClassVar


class ConfigValue(metaclass=abc.ABCMeta):  # noqa: B024
    """Compares by content: every attribute but those named in ``ignore_equality`` counts."""

    ignore_equality: list[str] = []
    #: Checks of the schema over all options together, see ``nodepool.base.option``.
    checks: ClassVar[tuple[Any, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, self.__class__):
            return False
        mine, theirs = self.__dict__, other.__dict__
        return all(
            mine.get(key) == theirs.get(key)
            for key in mine.keys() | theirs.keys()
            if key not in self.ignore_equality
        )

    def __ne__(self, other: object) -> bool:
        return not self.__eq__(other)

    def __hash__(self) -> int:
        # The name is set once and never changes; equal objects have equal names.
        name = None if "name" in self.ignore_equality else self.__dict__.get("name")
        return hash(("ConfigValue", str(name)))

    def __repr__(self) -> str:
        name = getattr(self, "name", None)
        cls = self.__class__.__name__
        return f"<{cls} {name}>" if name else f"<{cls}>"
