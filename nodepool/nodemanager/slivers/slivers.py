"""The slivers of this host: what is desired, and what is known of them (NM-C.7).

The desired state is in the database: records, and what this host adds to them. The status is in
memory only.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool.base.workqueue import WorkQueue
from nodepool.nodemanager.api.methods import NodeError
from nodepool.nodemanager.backends.base import Backend, SliverSpec
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.records import loans, records, rspec
from nodepool.nodemanager.records.database import Database

CREATING, READY, STOPPED, DISABLED, FAILED, DELETING, ABSENT = (
    "creating",
    "ready",
    "stopped",
    "disabled",
    "failed",
    "deleting",
    "absent",
)
CREATED, RUNNING = "created", "running"

log = logging.getLogger("nodepool.nodemanager.slivers")


def key_of(name: str) -> str:
    return records.record_key(records.SLIVER, name)


@dataclass
class Status:
    """Current knowledge about a sliver; in memory only."""

    state: str = CREATING
    error: str = ""
    since: float = 0.0


class Slivers:
    """Records and status of the slivers; changes nothing on the host. Thread-safe."""

    def __init__(self, config: NodeManagerConfig, database: Database, backend: Backend) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        #: Names of slivers to reconcile.
        self.queue: WorkQueue[str] = WorkQueue()
        self._changed = threading.Condition()
        self._status: dict[str, Status] = {}
        #: Every admission needs all of them, and they change rarely.
        self._effective: tuple[int | None, dict[str, dict[str, int]]] = None, {}
        self._grant = functools.lru_cache(maxsize=2 * config.max_slivers)(self._granted_by)
        self._running = True

    def stop(self) -> None:
        """End all waits."""
        with self._changed:
            self._running = False
            self._changed.notify_all()

    # -- reconciliation

    def check_soon(self, name: str, replaced: bool = False) -> None:
        """Reconcile the sliver soon.

        :param replaced: its record was: callers that wait for it wait for the next attempt,
            whatever the result of the last.
        """
        if replaced and self.status(name).state == FAILED:
            self.set_status(name, CREATING)
        self.queue.add(name)

    def check_all(self) -> None:
        """Reconcile all slivers that have a record or resources, after more urgent ones."""
        keys = self._database.locals()
        self.queue.add_all(
            self.names() | {key.partition("_")[2] for key in keys if key.startswith("sliver_")}
        )

    # -- status

    def status(self, name: str) -> Status:
        with self._changed:
            return self._status.get(name, Status(ABSENT))

    def wait(self, name: str, done: Callable[[Status], bool], timeout: float) -> Status | None:
        """Wait until the status satisfies `done`; return None after `timeout` seconds."""
        with self._changed:
            if (
                not self._changed.wait_for(
                    lambda: not self._running or done(self._status.get(name, Status(ABSENT))),
                    timeout,
                )
                or not self._running
            ):
                return None
            return self._status.get(name, Status(ABSENT))

    def set_status(self, name: str, state: str, error: str = "") -> None:
        """Store the state; log a change."""
        error = clean(error)  # may contain names from inside
        with self._changed:
            before = self._status.get(name)
            if state == ABSENT:
                self._status.pop(name, None)
            else:
                self._status[name] = Status(state, error, time.time())
            self._changed.notify_all()
        if before is None or (before.state, before.error) != (state, error):
            log.info("Sliver %s: %s%s", name, state, f" ({error})" if error else "")

    # -- desired state

    def names(self) -> set[str]:
        """Return the slivers that have a record."""
        return {
            r.content["name"]
            for r in self._database.records()
            if r.content.get("account_type") == records.SLIVER
        }

    def record(self, name: str) -> dict[str, Any] | None:
        """Return the record, or None."""
        stored = self._database.get(key_of(name))
        return None if stored is None else stored.content

    def existing(self, name: str) -> dict[str, Any]:
        """Return the record.

        :raises NodeError: there is none.
        """
        record = self.record(name)
        if record is None:
            raise NodeError(f"there is no sliver {name}")
        return record

    def note(self, name: str, **values: object) -> None:
        """Store values of a sliver as long as it has a record: a later one must not inherit
        them.

        :raises NodeError: there is no record, or its authority decides about its existence.
        """
        with self._database.transaction():
            record = self.existing(name)
            if CREATED in values and record.get("plc_instantiated"):
                raise NodeError(
                    f"sliver {name} is kept by its authority: "
                    + (
                        "it exists already, or will soon, without being asked for"
                        if values[CREATED]
                        else "it cannot be deleted here"
                    )
                )
            self._database.update_local(key_of(name), **values)

    def start(self, name: str) -> None:
        """Have an enabled sliver run.

        :raises NodeError: there is no such sliver, or it is disabled.
        """
        if not self.effective_of(name)["nm_enabled"]:
            raise NodeError(f"sliver {name} is not enabled (nm_enabled is 0)")
        self.note(name, **{RUNNING: True})
        self.check_soon(name)

    def effective_of(self, name: str) -> dict[str, int]:
        """Return the RSpec with loans.

        :raises NodeError: there is no such sliver.
        """
        found = self.effective().get(name)
        if found is None:
            raise NodeError(f"there is no sliver {name}")
        return found

    def granted(self, record: Mapping[str, Any]) -> dict[str, int]:
        """Return the complete RSpec without loans."""
        return rspec.with_defaults({**self._config.default_rspec, **(record.get("rspec") or {})})

    def effective(self) -> dict[str, dict[str, int]]:
        """Return name -> RSpec with loans, of all slivers with a record; do not change it."""
        version = self._database.version
        known, result = self._effective
        if version is not None and known == version:
            return result
        result = self._calculate()
        self._effective = version, result
        return result

    def _calculate(self) -> dict[str, dict[str, int]]:
        given: dict[str, tuple[dict[str, int], list[loans.Loan]]] = {}
        for text, local in self._database.texts("sliver_"):
            name, granted = self._grant(text)
            made = json.loads(local).get("loans", []) if local and '"loans"' in local else []
            given[name] = dict(granted), [(str(r), str(n), int(a)) for r, n, a in made]
        return loans.effective(given)

    def _granted_by(self, text: str) -> tuple[str, dict[str, int]]:
        record = json.loads(text)
        return record["name"], self.granted(record)

    def spec(
        self,
        name: str,
        record: Mapping[str, Any],
        index: int,
        effective: Mapping[str, int],
        api_socket: str | None = None,
    ) -> SliverSpec:
        """Return what the backend needs to know.

        :param api_socket: see :attr:`SliverSpec.api_socket`.
        """
        return SliverSpec(
            name=name,
            index=index,
            image=record.get("image", "host"),
            rspec=effective,
            ssh_keys=record.get("ssh_keys", ""),
            initscript=records.decode_initscript(record.get("initscript")),
            network=record.get("network", self._config.network.default),
            username=self.username(record),
            privileges=tuple(record.get("privileges") or ()),
            hostname=record.get("hostname") or name.replace("_", "-"),
            api_socket=api_socket,
        )

    def username(self, record: Mapping[str, Any]) -> str:
        """Return the login user."""
        return str(record.get("username") or self._backend.default_username)
