"""Failed launches of a label in a provider since the last success."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from nodepool.texts import one_line
from nodepool.zk.records import RecordError
from nodepool.zk.records.base import LATEST

#: Failures in a record; older ones are forgotten.
MOST = 100
#: Seconds after which a failure is forgotten.
MEMORY = 24 * 3600.0


@dataclass(frozen=True)
class Attempt:
    """The result of an attempt to launch a node.

    :param config: digest of the provider's configuration.
    :param failed_at: UNIX seconds; None: it succeeded.
    """

    config: str
    failed_at: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Failures:
    """The failures; immutable.

    :param times: UNIX seconds and digest of the provider's configuration, sorted.
    :param error: the last one, in one line.
    """

    provider: str
    label: str
    times: tuple[tuple[float, str], ...] = ()
    error: str = ""

    def of(self, config: str) -> list[float]:
        """Return the times of failures with this configuration, sorted."""
        return [time for time, with_config in self.times if with_config == config]

    def after(self, attempt: Attempt) -> Failures:
        """Return the record after an attempt; repeating an attempt changes nothing."""
        if attempt.failed_at is None:
            left = tuple(each for each in self.times if each[1] != attempt.config)
            return replace(self, times=left)
        times = sorted({*self.times, (attempt.failed_at, attempt.config)})
        # Also without what a clock far ahead has recorded.
        recent = [each for each in times if abs(each[0] - attempt.failed_at) < MEMORY]
        return replace(self, times=tuple(recent[-MOST:]), error=one_line(attempt.error))

    # -- as a note

    @property
    def name(self) -> str:
        return f"{quote(self.provider, safe='')} {quote(self.label, safe='')}"

    def values(self) -> dict[str, Any]:
        """Return the stored values."""
        return {"failures": [list(each) for each in self.times], "error": self.error}

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> Failures:
        """Return the record.

        :raises RecordError: it is not valid.
        """
        provider, label = (unquote(part) for part in f"{name} ".split(" ")[:2])
        listed = values.get("failures")
        if not (provider and label) or not isinstance(listed, list):
            raise RecordError(f"{name!r} names no provider and label, or has no list of failures")
        times = sorted(map(_failure, listed))
        return cls(provider, label, tuple(times[-MOST:]), one_line(values.get("error") or ""))


def _failure(entry: object) -> tuple[float, str]:
    if isinstance(entry, list) and len(entry) == 2:
        time, config = entry
        # NaN fails the comparison.
        if isinstance(time, (int, float)) and 0 <= time < LATEST and isinstance(config, str):
            return time, config
    raise RecordError(f"{entry!r} is not a time in seconds with the digest of a configuration")
