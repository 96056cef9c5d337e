"""Reconciles slivers with their records (NM-C.7).

Each step is small and safe to repeat after a crash.
The desired state is in the database (records, and what this host adds to them), the actual state in
the backend.  An event only names the sliver to check.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool.base.workqueue import Reconciler
from nodepool.nodemanager.backends.base import Backend, Handle, SliverSpec
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.kernel.syscalls import SHORTAGE
from nodepool.nodemanager.outcomes import BackendError
from nodepool.nodemanager.records import loans, records, rspec
from nodepool.nodemanager.records.copies import Copies
from nodepool.nodemanager.records.database import Database, DatabaseError

CREATING, READY, STOPPED, DISABLED, FAILED, DELETING, ABSENT = (
    "creating",
    "ready",
    "stopped",
    "disabled",
    "failed",
    "deleting",
    "absent",
)
#: Seconds after which a sliver with a temporary failure is tried again.
RETRY = 30.0
#: The same for a sliver that runs, but not according to its record; doubled each time, up to the
#: second value.
CONFIGURE_RETRY = RETRY, 3600.0
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
    """The slivers of the host.

    :param opened: called with (name, handle or None) when connections are to be accepted, or
        refused; returns the number of seconds after which it is to be called again, or None.
    :param usable: whether a number can be given to a new sliver; see
        :meth:`Database.allocate_index`.
    :param told: called with the name of a sliver whose state may have changed.
    :param removed: called with its name when the resources of a deleted sliver are free again.
    :param api_socket: the directory on the host with the API's socket for the sliver of a name and
        number.
    """

    def __init__(
        self,
        config: NodeManagerConfig,
        database: Database,
        backend: Backend,
        opened: Callable[[str, Handle | None], float | None],
        admit: Callable[[str, Mapping[str, int], Mapping[str, Mapping[str, int]]], None],
        now: Callable[[], float] = time.time,
        usable: Callable[[int], bool] = lambda number: True,
        told: Callable[[str], None] = lambda name: None,
        removed: Callable[[str], object] = lambda name: None,
        api_socket: Callable[[str, int], str | None] = lambda name, index: None,
    ) -> None:
        self._config = config
        self._usable = usable
        self._told = told
        self._removed = removed
        self._api_socket = api_socket
        self._database = database
        self.backend = backend
        self._opened = opened
        self._admit = admit
        self._now = now
        self.changed = threading.Condition()
        self._status: dict[str, Status] = {}
        self._admitting = threading.Lock()
        self._being_made: set[str] = set()
        self._creating = threading.BoundedSemaphore(config.create_concurrency)
        self._deleting = threading.BoundedSemaphore(config.delete_concurrency)
        self._reconciler: Reconciler[str] = Reconciler(
            "Thread-nm-sliver",
            self._reconcile,
            log,
            config.create_concurrency + config.delete_concurrency,
        )
        self._copies = Copies(os.path.join(config.state_dir, "records"))
        #: Every admission needs all of them, and they change rarely.
        self._effective: tuple[int | None, dict[str, dict[str, int]]] = None, {}
        self._grant = functools.lru_cache(maxsize=2 * config.max_slivers)(self._granted_by)
        #: Slivers that run, but not according to their records: pause after the next failure
        #: (seconds).
        self._pace: dict[str, float] = {}
        self._running = True

    def start(self) -> None:
        self._reconciler.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop changing slivers; those that run keep running."""
        with self.changed:
            self._running = False
            self.changed.notify_all()
        self._reconciler.stop()
        self._reconciler.join(timeout)

    # -- looking

    def look_at(self, name: str, anew: bool = False) -> None:
        """Reconcile the sliver soon.

        :param anew: its record was replaced: callers that wait for it wait for the next attempt,
            whatever the result of the last.
        """
        if anew and self.status(name).state == FAILED:
            self._set(name, CREATING)
        self._reconciler.queue.add(name)

    def look_at_all(self) -> None:
        for name in self.names() | {
            key.partition("_")[2] for key in self._database.locals() if key.startswith("sliver_")
        }:
            self._reconciler.queue.add(name, urgent=False)

    def names(self) -> set[str]:
        """Return the slivers that have a record."""
        return {
            r.content["name"]
            for r in self._database.records()
            if r.content.get("account_type") == records.SLIVER
        }

    def status(self, name: str) -> Status:
        with self.changed:
            return self._status.get(name, Status(ABSENT))

    def wait(self, name: str, done: Callable[[Status], bool], timeout: float) -> Status | None:
        """Wait until the status satisfies `done`; return None after `timeout` seconds."""
        with self.changed:
            if (
                not self.changed.wait_for(
                    lambda: not self._running or done(self._status.get(name, Status(ABSENT))),
                    timeout,
                )
                or not self._running
            ):
                return None
            return self._status.get(name, Status(ABSENT))

    def _set(self, name: str, state: str, error: str = "") -> None:
        error = clean(error)  # may contain names from inside
        with self.changed:
            before = self._status.get(name)
            if state == ABSENT:
                self._status.pop(name, None)
                self._pace.pop(name, None)
            else:
                self._status[name] = Status(state, error, self._now())
            self.changed.notify_all()
        self._told(name)
        if before is None or (before.state, before.error) != (state, error):
            log.info("Sliver %s: %s%s", name, state, f" ({error})" if error else "")

    # -- desired state

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
        self, name: str, record: Mapping[str, Any], index: int, effective: Mapping[str, int]
    ) -> SliverSpec:
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
            api_socket=self._api_socket(name, index) if self.backend.shares_socket else None,
        )

    def username(self, record: Mapping[str, Any]) -> str:
        """Return the login user."""
        return str(record.get("username") or self.backend.default_username)

    @staticmethod
    def _fingerprint(spec: SliverSpec) -> str:
        values = json.dumps(
            [
                dict(spec.rspec),
                spec.ssh_keys,
                (spec.initscript or b"").hex(),
                spec.network,
                spec.username,
                *([list(spec.privileges)] if spec.privileges else []),
            ],
            sort_keys=True,
        )
        return hashlib.sha256(values.encode()).hexdigest()

    @staticmethod
    def _exists_wanted(record: Mapping[str, Any], local: Mapping[str, Any]) -> bool:
        return bool(record.get("plc_instantiated")) or bool(local.get(CREATED))

    # -- the steps

    def _reconcile(self, name: str) -> float | None:
        key = key_of(name)
        stored = self._database.get(key)
        local = self._database.local(key)
        if stored is None or not self._exists_wanted(stored.content, local):
            return self._destroy(name, key, local, stored is None)
        try:
            return self._ensure(name, key, stored.content, local)
        except (BackendError, DatabaseError, rspec.RSpecError, records.RecordError) as error:
            self._set(name, FAILED, str(error))
            return RETRY if getattr(error, "retry", True) else None
        except Exception as error:
            if isinstance(error, MemoryError) or (
                isinstance(error, OSError) and error.errno in SHORTAGE
            ):
                self._set(name, FAILED, f"this host: {str(error) or 'no memory left'}")
                return RETRY
            # Callers waiting for the sliver see the failure; the queue logs it and retries.
            self._set(name, FAILED, f"internal error: {type(error).__name__}: {error}")
            raise

    def _ensure(
        self, name: str, key: str, record: Mapping[str, Any], local: dict[str, Any]
    ) -> float | None:
        everybody = self.effective()
        effective = everybody.get(name)
        if effective is None:
            return 0.0  # its record went this moment
        index = local.get("index")
        if index is None:
            with self._database.transaction():
                index = self._database.allocate_index(name, self._config.max_slivers, self._usable)
                local = self._database.update_local(key, index=index)
        spec = self.spec(name, record, int(index), effective)
        if refused := sorted(set(spec.privileges) - self.backend.privileges):
            raise BackendError(
                f"privileges: backend {self.backend.name} cannot give {', '.join(refused)}; it has "
                f"{', '.join(sorted(self.backend.privileges)) or 'none'}"
            )
        handle = local.get("handle")
        image = local.get("image")
        if handle is not None and image is not None and image != spec.image:
            self._remove(name, key, local)  # another root tree is another machine
            handle = None
        if handle is None:
            handle = self._create(name, key, spec, everybody)
            local = self._database.local(key)
        if local.get(RUNNING, True) and effective["nm_enabled"]:
            return self._run(name, key, spec, local, handle)
        return self._halt(name, key, spec, local, handle, bool(effective["nm_enabled"]))

    def _create(
        self, name: str, key: str, spec: SliverSpec, everybody: Mapping[str, Mapping[str, int]]
    ) -> Handle:
        self._set(name, CREATING)
        with (
            self._admitting
        ):  # two that are created at the same time must not get the same capacity
            made = self._made() | self._being_made
            self._admit(
                name,
                spec.rspec,
                {other: rspec for other, rspec in everybody.items() if other in made},
            )
            self._being_made.add(name)
        try:
            with self._creating:
                handle = self.backend.create(spec)
            self._database.update_local(
                key, handle=handle, image=spec.image, applied=self._fingerprint(spec), halted=False
            )
        finally:
            with self._admitting:
                self._being_made.discard(name)
        return handle

    def _made(self) -> set[str]:
        """Return the existing slivers."""
        return {
            key.partition("_")[2]
            for key in self._database.keys_with("handle")
            if key.startswith("sliver_")
        }

    def _run(
        self, name: str, key: str, spec: SliverSpec, local: Mapping[str, Any], handle: Handle
    ) -> float | None:
        if local.get("frozen"):
            self.backend.freeze(spec, handle, False)
            self._database.update_local(key, frozen=False)
        problem = ""
        if local.get("halted") or not self.backend.adopt(spec, handle):
            handle, problem = self._start(spec, handle)
        elif local.get("applied") != self._fingerprint(spec):
            handle, problem = self._configure(spec, handle)
        self._database.update_local(
            key, handle=handle, halted=False, applied=None if problem else self._fingerprint(spec)
        )
        self._copies.keep(self._database.get(key), self._database.local(key))
        again = self._opened(name, handle)
        self._set(name, READY, problem)
        if not problem:
            self._pace.pop(name, None)
            return again
        pace = self._pace.get(name, CONFIGURE_RETRY[0])
        self._pace[name] = min(2 * pace, CONFIGURE_RETRY[1])
        return pace if again is None else min(again, pace)

    def _start(self, spec: SliverSpec, handle: Handle) -> tuple[Handle, str]:
        """Start the sliver; return its handle and what could not be applied."""
        try:
            return self.backend.start(spec, handle), ""
        except BackendError as error:
            # Owners of keys can log in again, whatever a job did to the key files or to the disk.
            try:
                return self.backend.start(dataclasses.replace(spec, ssh_keys=None), handle), str(
                    error
                )
            except BackendError:
                raise error from None

    def _configure(self, spec: SliverSpec, handle: Handle) -> tuple[Handle, str]:
        """Apply a changed record; return an error text instead of ending jobs or the sliver."""
        try:
            return self.backend.configure(spec, handle), ""
        except BackendError as error:
            return handle, str(error)
        except Exception as error:
            log.exception("Change of sliver %s failed:", spec.name)
            return handle, f"internal error: {type(error).__name__}: {error}"

    def _halt(
        self,
        name: str,
        key: str,
        spec: SliverSpec,
        local: Mapping[str, Any],
        handle: Handle,
        enabled: bool,
    ) -> float | None:
        self._opened(name, None)
        if not enabled and self.backend.freezes:
            if not local.get("frozen"):
                self.backend.freeze(spec, handle, True)
                self._database.update_local(key, frozen=True)
        elif not local.get("halted"):
            self._database.update_local(key, handle=self.backend.stop(spec, handle), halted=True)
        self._set(name, STOPPED if enabled else DISABLED)
        return None

    def _destroy(self, name: str, key: str, local: dict[str, Any], forget: bool) -> float | None:
        if local.get("index") is not None:
            try:
                self._remove(name, key, local)
            except BackendError as error:
                self._set(name, DELETING, str(error))
                raise
        if forget:
            self._database.delete_local(key)
        self._set(name, ABSENT)
        return None

    def _remove(self, name: str, key: str, local: Mapping[str, Any]) -> None:
        """Remove the sliver in an order that survives crashes: its number is freed last."""
        self._set(name, DELETING)
        self._opened(name, None)
        with self._deleting:
            self.backend.destroy(name, int(local["index"]), local.get("handle"))
        self._removed(name)
        self._copies.forget(key)
        self._database.update_local(
            key, handle=None, applied=None, image=None, halted=None, frozen=None, index=None
        )
        self._database.free_index(name)

    # -- after a restart of the daemon

    def recover(self) -> None:
        """Adopt what lives, remove what has no record; called before the workers start."""
        if self._database.moved_aside is not None:
            self._copies.restore(self._database)
        known = {
            key.partition("_")[2]: local
            for key, local in self._database.locals().items()
            if key.startswith("sliver_")
        }
        strays = {
            name: self.backend.number(name)
            for name in sorted(set(self.backend.found()) - set(known))
        }
        # Those with a number first: nobody else may get it before they are gone.
        for name, index in sorted(strays.items(), key=lambda item: item[1] is None):
            log.warning("Removing sliver %s: it has no record in the database", name)
            if index is None or not self._database.take_index(name, index):
                index = self._database.allocate_index(name, self._config.max_slivers)
            self._database.update_local(key_of(name), index=index)
        effective = self.effective()
        for name, local in known.items():
            record = self._database.get(key_of(name))
            handle = local.get("handle")
            if record is None or handle is None or name not in effective or local.get("halted"):
                continue
            spec = self.spec(name, record.content, int(local["index"]), effective[name])
            if self.backend.adopt(spec, handle):
                self._opened(name, handle)
                self._set(name, READY if not local.get("frozen") else DISABLED)
