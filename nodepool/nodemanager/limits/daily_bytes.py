"""Daily limits on the bytes each sliver sends (NM-B.4, daily accounting). Does no I/O.

Totals belong to the name of a sliver, not to its device: a sliver that is deleted and created again
continues with its total until the period ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC

PERIOD = 86_400.0
#: Percentage of the limit at which the rate is first reduced.
THRESHOLD_PERCENT = 80
#: The rest of a limit is spread over at least this many seconds.
_LEAST_SECONDS = 1.0
#: Below the node's cap and exempt: names of the resources with minimum and maximum rate, and with
#: limit and threshold in KiB.
_KINDS = (
    ("plain", "nm_net_min_rate", "nm_net_max_rate", "nm_net_max_kbyte", "nm_net_thresh_kbyte"),
    (
        "exempt",
        "nm_net_exempt_min_rate",
        "nm_net_exempt_max_rate",
        "nm_net_exempt_max_kbyte",
        "nm_net_exempt_thresh_kbyte",
    ),
)


@dataclass
class _Account:
    began: float
    used: dict[str, int]
    #: Last values of the device's counters.
    seen: dict[str, int]
    told: bool = False


class Accounting:
    """Count sent bytes; returns reduced rates for slivers near their daily limit.

    `load` returns what `save` last got (JSON-able), or None.  `notify(name, kind, used, limit)` is
    called at most once per sliver
    and period.  The caller locks.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, Any] | None],
        save: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.time,
        notify: Callable[[str, str, int, int], None] | None = None,
    ) -> None:
        self._save, self._clock, self._notify = save, clock, notify
        self._accounts: dict[str, _Account] = {}
        for name, stored in (load() or {}).items():
            try:
                self._accounts[name] = _Account(
                    float(stored["began"]),
                    {kind: int(stored["used"][kind]) for kind, *_ in _KINDS},
                    {kind: int(stored["seen"][kind]) for kind, *_ in _KINDS},
                    bool(stored.get("told")),
                )
            except (KeyError, TypeError, ValueError):
                # One damaged account loses that sliver's total, but not the others.
                continue

    def update(
        self,
        counters: Mapping[str, tuple[int, int]],
        rspecs: Mapping[str, Mapping[str, Any]],
        limit: int,
    ) -> dict[str, dict[str, int]]:
        """Count what was sent since the last call (bytes: below the cap, exempt).

        Returns, for each sliver past its threshold, the maximum rates that replace the configured
        ones, in bit/s.

        :param limit: bytes that each sliver may send of either kind; its RSpec may have a lower
            limit.
        """
        now = self._clock()
        result: dict[str, dict[str, int]] = {}
        # Deleted ones, too, until their period ends. A clock that was set back must not prolong a
        # period.
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if name in counters or 0 <= now - account.began < PERIOD
        }
        for name, values in counters.items():
            account = self._count(name, dict(zip(("plain", "exempt"), values, strict=True)), now)
            cut = self._cut(name, account, {**DEFAULT_RSPEC, **rspecs.get(name, {})}, limit, now)
            if cut:
                result[name] = cut
        self._save({name: asdict(account) for name, account in self._accounts.items()})
        return result

    def _count(self, name: str, shown: dict[str, int], now: float) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(
                now, dict.fromkeys(shown, 0), dict.fromkeys(shown, 0)
            )
        elif not 0 <= now - account.began < PERIOD:
            account.began, account.told, account.used = now, False, dict.fromkeys(shown, 0)
        for kind, value in shown.items():
            # Less than before: a new device, which started at 0.
            account.used[kind] += (
                value - account.seen[kind] if value >= account.seen[kind] else value
            )
        account.seen = shown
        return account

    def _cut(
        self, name: str, account: _Account, rspec: Mapping[str, Any], most: int, now: float
    ) -> dict[str, int]:
        left = max(_LEAST_SECONDS, account.began + PERIOD - now)
        cut: dict[str, int] = {}
        for kind, minimum, maximum, limit_kib, threshold_kib in _KINDS:
            limit = min(most, int(rspec[limit_kib]) * 1024 or most)
            used = account.used[kind]
            if used < min(
                limit, int(rspec[threshold_kib]) * 1024 or limit * THRESHOLD_PERCENT // 100
            ):
                continue
            rate = max(int(rspec[minimum]), int(max(0, limit - used) * 8 / left))
            if rate < int(rspec[maximum]):
                cut[maximum] = rate
            if not account.told:
                account.told = True
                if self._notify is not None:
                    self._notify(name, kind, used, limit)
        return cut

    def forget_device(self, name: str) -> None:
        """Forget the sliver's deleted device: the counters of the next one start at 0."""
        if (account := self._accounts.get(name)) is not None:
            account.seen = {kind: 0 for kind, *_ in _KINDS}
