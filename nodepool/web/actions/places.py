"""Places for what lasts, such as a program or a long poll: one owner gets a part of them."""

from __future__ import annotations

import threading
from collections import Counter


class Places:
    """Counts what runs, in all and by name.

    :param limits: maximum in all, then for one name at each position.
    """

    def __init__(self, *limits: int) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._taken: Counter[tuple[int, str]] = Counter()

    def __len__(self) -> int:
        return self._taken[0, ""]

    def take(self, *names: str, part: float = 1.0) -> bool:
        """Take a place for these names; return False if one of them has its part already.

        :param part: of each limit that may be used.
        """
        keys = list(enumerate(("", *names)))
        with self._lock:
            if any(
                self._taken[key] >= limit * part
                for key, limit in zip(keys, self.limits, strict=True)
            ):
                return False
            self._taken.update(keys)
            return True

    def free(self, *names: str) -> None:
        """Free a place that was taken for these names."""
        with self._lock:
            self._taken -= Counter(enumerate(("", *names)))
