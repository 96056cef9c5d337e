"""Favor slivers that have used little CPU recently (NM-B.4).

Weights alone decide the long-term shares, but not how long a task waits for its turn.  With the
scheduler of Linux 6.18 and two processors, a sliver that forks endlessly keeps others of the same
weight from running for seconds, and one of endless loops doubles the time of each short task of the
others.  Therefore slivers that use more than half of their fair share while processors are short
have the weight of their nm_cpu_share, and all others :data:`FAVOUR` times that.  No sliver gets
less than its fair share: a favored sliver uses at most half of its share, and the others keep their
proportions.  The same applies among slivers with a guarantee, and to all others together: a
guarantee is a share of the CPU, not the right to delay others.

Usage is measured only while tasks wait for a processor, which the kernel reports (pressure stall
information).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger("nodepool.nodemanager.cpu")

FAVOUR = 8
#: Shares of the fair share: above the first a sliver is no longer favored, below the second it is
#: favored again.
HEAVY, LIGHT = 0.5, 0.25
#: Seconds between the first two measurements and between all later ones while processors are short,
#: and the seconds without shortage after which measuring stops.
FIRST, PERIOD, CALM = 0.05, 0.2, 2.0
PRESSURE = "/proc/pressure/cpu"
#: Microseconds that some task had to wait, and the window in which they are counted.
TRIGGER = b"some 50000 500000"
#: Cores; a sliver that uses less does not compete.
IDLE = 0.01


def heavy(
    used: Mapping[str, float], shares: Mapping[str, int], cores: int, before: set[str]
) -> set[str]:
    """Return the slivers that are not favored.

    :param used: cores that each uses.
    :param shares: nm_cpu_share of each.
    :param before: the previous result.
    """
    active = {name: amount for name, amount in used.items() if amount > IDLE and name in shares}
    everybody = sum(shares[name] for name in active)
    return {
        name
        for name, amount in active.items()
        if amount > (LIGHT if name in before else HEAVY) * cores * shares[name] / everybody
    }


class CpuPace:
    """Measures CPU use in one thread.

    :param times: returns microseconds of CPU time that each sliver has used so far.
    :param shares: returns the weights of slivers that compete with each other, for each such set of
        them.
    :param apply: called with the slivers that are not favored, and with those that use CPU, when
        either have changed; with nobody, and None (not known), when processors are not short any
        more.
    """

    def __init__(
        self,
        cores: int,
        times: Callable[[], Mapping[str, int]],
        shares: Callable[[], Sequence[Mapping[str, int]]],
        apply: Callable[[set[str], set[str] | None], None],
    ) -> None:
        self._cores = cores
        self._times = times
        self._shares = shares
        self._apply = apply
        self._heavy: set[str] = set()
        self._active: set[str] | None = None
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="Thread-nm-cpu", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.write(self._stop, b"x")
        if self._thread.ident is not None:
            self._thread.join(5)
        os.close(self._stop)
        os.close(self._stopped)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._stopped, select.POLLIN)
        pressure = self._pressure()
        if pressure is not None:
            poller.register(pressure, select.POLLPRI)
        try:
            while pressure is None or self._stopped not in dict(poller.poll()):
                if self._until_calm(poller, pressure):
                    return
        finally:
            if pressure is not None:
                os.close(pressure)

    @staticmethod
    def _pressure() -> int | None:
        """Open a descriptor that has urgent data after tasks waited for CPU; None: not
        supported.
        """
        try:
            descriptor = os.open(PRESSURE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.write(descriptor, TRIGGER)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _until_calm(self, poller: select.poll, pressure: int | None) -> bool:
        """Measure until no task has waited for CALM seconds. Return whether the daemon stops."""
        seen: Mapping[str, int] = {}
        used: dict[str, float] = {}
        looked = short = time.monotonic()
        pause = 0.0
        while pressure is None or time.monotonic() < short + CALM:
            events = dict(poller.poll(pause * 1000))
            if self._stopped in events:
                return True
            now = time.monotonic()
            if events:
                short = now
            if now - looked < pause / 2:
                continue
            pause = PERIOD if pause else FIRST
            try:
                times = self._times()
                for name, spent in times.items():
                    if name in seen:
                        cores = max(0, spent - seen[name]) / 1e6 / (now - looked)
                        used[name] = (cores + used.get(name, cores)) / 2
                used = {name: amount for name, amount in used.items() if name in times}
                seen, looked = times, now
                self._report(
                    set().union(
                        *(
                            heavy(used, shares, self._cores, self._heavy)
                            for shares in self._shares()
                        )
                    ),
                    {name for name, amount in used.items() if amount > IDLE},
                )
            except Exception:
                log.exception("Measuring the CPU time of slivers failed:")
        try:
            self._report(set(), None)
        except Exception:
            log.exception("Cannot set the weights of slivers:")
        return False

    def _report(self, found: set[str], active: set[str] | None) -> None:
        if (found, active) != (self._heavy, self._active):
            self._apply(found, active)
            self._heavy, self._active = found, active
