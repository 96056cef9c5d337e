"""Events of slivers for launchers: what they have used until their end, and kills.

Events are numbered and stored, the newest :data:`KEPT`. A launcher waits for those after the last
one that it has received, and confirms those that it has stored. After a crash of the launcher, it
receives all others again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.base.boot import boot_id
from nodepool.nodemanager.api.methods import Parked
from nodepool.nodemanager.backends.base import Handle
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.limits.cgroups.files import MIB
from nodepool.nodemanager.limits.memory_kills import Kill
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.slivers.slivers import key_of

log = logging.getLogger("nodepool.nodemanager.events")

#: Events that are stored, those of one answer, and kills of one sliver that are named.
KEPT, MOST, NAMED = 10_000, 500, 20
#: The sliver for which calls that wait for events are parked; no sliver has this name.
ANY = ""
ENDED, KILLED = "ended", "killed"
#: What is stored of the usage at the end.
USED = (
    *("cpu_usec", "throttled_usec", "memory_peak", "oom_kills", "pids_peak", "disk_bytes"),
    *("net_tx_bytes", "net_rx_bytes"),
    *("cpu_stalled_usec", "memory_stalled_usec", "io_stalled_usec"),
)
#: Seconds by which the time of a kill may be wrong.
CLOCK_STEP = 1.0


class Events:
    """The events of this host. Thread-safe.

    :param added: is called after each new event.
    :param usage: returns what a sliver has used, as :meth:`.Backend.usage`.
    """

    def __init__(
        self,
        database: Database,
        usage: Callable[[str, Handle], dict[str, int]],
        added: Callable[[], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._usage, self._added, self._now = database, usage, added, now
        #: Sliver -> the most bytes that were on its disk at a check.
        self._disks: dict[str, int] = {}

    def _add(
        self, kind: str, name: str, local: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        metadata = local.get("metadata") or {}
        content = {"kind": kind, "name": name, "metadata": metadata, **values}
        self._database.add_event(content, int(self._now() * 1000), KEPT)
        self._added()

    # -- sources

    def used(self, name: str, handle: Handle) -> dict[str, int]:
        """Return what a sliver has used; nothing if that is not known."""
        try:
            return self._usage(name, handle)
        except Exception:  # the removal of a sliver does not depend on it
            log.exception("The use of resources by sliver %s is not known:", name)
            return {}

    def measure(self, names: list[str]) -> None:
        """Check the disks of these slivers, and forget all others."""
        self._disks = {
            name: max(self._disks.get(name, 0), self.used(name, {}).get("disk_bytes", 0))
            for name in names
        }

    def ended(
        self, name: str, local: Mapping[str, Any], used: Mapping[str, int], exact: bool
    ) -> None:
        """Store what a sliver has used, whose last process has ended.

        :param local: the host's own values of it.
        :param exact: it was read after that.
        """
        if local.get("handle") is None:
            return  # it never ran
        values: dict[str, Any] = {key: used[key] for key in used if key in USED}
        values["disk_peak"] = max(used.get("disk_bytes", 0), self._disks.pop(name, 0))
        now, made = self._now(), local.get("made")
        if made is not None:  # by this release
            values["seconds"] = round(max(0.0, now - float(made)), 3)
        self._add(
            ENDED,
            name,
            local,
            {
                "time": round(now, 3),
                "memory_limit": int(local.get("memory", 0)) * MIB,
                # Counters end with the boot, and those of the network with each start.
                "complete": exact
                and "cpu_usec" in used
                and local.get("booted") == boot_id()
                and not local.get("restarted"),
                **values,
            },
        )

    def killed(self, name: str, kill: Kill) -> None:
        """Store that a process was killed because the memory limit was reached."""
        local = self._database.local(key_of(name))
        boot, last, named = local.get("killed") or (None, 0, 0)
        # After a restart the kernel's log is read again, with kills in earlier slivers.
        known = boot == boot_id() and kill.sequence <= last
        made = local.get("made")
        earlier = made is None or (not kill.is_new and kill.when < made - CLOCK_STEP)
        if known or named >= NAMED or earlier:
            return
        program = clean(kill.program)
        with self._database.transaction():
            self._database.update_local(key_of(name), killed=[boot_id(), kill.sequence, named + 1])
            self._add(
                KILLED,
                name,
                local,
                {
                    "time": round(kill.when, 3),
                    "pid": kill.pid,
                    "program": program,
                    "memory_limit": int(local.get("memory", 0)) * MIB,
                },
            )
        log.info("Sliver %s: process %d (%s) was killed for memory", name, kill.pid, program)

    # -- answers

    def wait(self, reader: str, confirmed: int, after: int, timeout: float) -> Any:
        """Return events after a number, oldest first, when there are some, or an empty list.

        :param reader: for whom it is noted what is confirmed.
        :param confirmed: the number up to which it has stored the events; 0: unchanged.
        :param after: 0: after what is confirmed.
        """
        key = f"reader {reader}"
        if confirmed:
            self._database.set_counters(key, {"confirmed": confirmed})
        start = after or int(self._database.counters(key).get("confirmed", 0))

        def found() -> list[dict[str, Any]]:
            return self._database.events_after(start, MOST)

        events = found()
        if events or not timeout:
            return events
        return Parked(ANY, timeout, lambda: found() or None, [])
