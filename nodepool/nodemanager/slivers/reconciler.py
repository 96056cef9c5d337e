"""Reconciles slivers with their records (NM-C.7).

Each step is small and safe to repeat after a crash.
The desired state is in the database (records, and what this host adds to them), the actual state in
the backend.  An event only names the sliver to check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nodepool.base.workqueue import Reconciler
from nodepool.nodemanager.backends.base import Backend, Handle, SliverSpec
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.kernel.syscalls import SHORTAGE
from nodepool.nodemanager.outcomes import BackendError
from nodepool.nodemanager.records import records, rspec
from nodepool.nodemanager.records.copies import Copies
from nodepool.nodemanager.records.database import Database, DatabaseError
from nodepool.nodemanager.slivers.events import Events
from nodepool.nodemanager.slivers.slivers import (
    ABSENT,
    CREATED,
    CREATING,
    DELETING,
    DISABLED,
    FAILED,
    READY,
    RUNNING,
    STOPPED,
    Slivers,
    key_of,
)

#: Seconds after which a sliver with a temporary failure is tried again.
RETRY = 30.0
#: The same for a sliver that runs, but not according to its record; doubled each time, up to the
#: second value.
CONFIGURE_RETRY = RETRY, 3600.0
#: The host's values that end with the removal of a sliver.
_OF_ONE_CREATION = (
    *("handle", "applied", "image", "halted", "frozen", "index"),
    *("made", "booted", "memory", "metadata", "restarted", "killed", "used", "counted"),
)

log = logging.getLogger("nodepool.nodemanager.slivers")


class SliverHost(Protocol):
    """What the host does for its slivers, besides the backend. Called from several threads."""

    def admit(
        self, name: str, rspec: Mapping[str, int], others: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Check that a new sliver fits in addition to the existing ones.

        :param rspec: of the new one, with loans.
        :param others: name -> RSpec with loans, of the existing slivers.
        :raises BackendError: it does not fit now.
        """

    def usable(self, number: int) -> bool:
        """Return whether a new sliver can have this number (from 1), which no other has."""

    def api_socket(self, name: str, number: int) -> str | None:
        """Return the host's directory with the API's socket for a sliver, created if needed.

        None: it has none, which is logged if that is an error.
        """

    def attach(self, name: str, handle: Handle) -> float | None:
        """Let callers and logins in, and watch process 1. Idempotent.

        :return: seconds after which it must be called again; None: not before an event.
        :raises BackendError: the port for logins is not available now.
        """

    def detach(self, name: str) -> None:
        """Let nobody in; return when name, number and port can be given to another sliver.

        Idempotent.
        """

    def status_changed(self, name: str) -> None:
        """Recheck the calls that wait for this sliver. Returns immediately."""

    def freed(self, name: str) -> None:
        """Clean up after a sliver whose resources are free again. Idempotent."""


class SliverReconciler:
    """Brings each sliver to its desired state, in its threads."""

    def __init__(
        self,
        config: NodeManagerConfig,
        database: Database,
        backend: Backend,
        slivers: Slivers,
        host: SliverHost,
        events: Events,
    ) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._slivers = slivers
        self._host = host
        self._events = events
        self._admitting = threading.Lock()
        self._being_made: set[str] = set()
        self._creating = threading.BoundedSemaphore(config.create_concurrency)
        self._deleting = threading.BoundedSemaphore(config.delete_concurrency)
        self._reconciler = Reconciler(
            "Thread-nm-sliver",
            self._reconcile,
            log,
            config.create_concurrency + config.delete_concurrency,
            slivers.queue,
        )
        self._copies = Copies(os.path.join(config.state_dir, "records"))
        #: Slivers that run, but not according to their records: pause after the next failure
        #: (seconds).
        self._pace: dict[str, float] = {}

    def start(self) -> None:
        self._reconciler.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop changing slivers; those that run keep running."""
        self._slivers.stop()
        self._reconciler.stop()
        self._reconciler.join(timeout)

    def _set(self, name: str, state: str, error: str = "") -> None:
        if state == ABSENT:
            self._pace.pop(name, None)
        self._slivers.set_status(name, state, error)
        self._host.status_changed(name)

    def _spec(
        self, name: str, record: Mapping[str, Any], index: int, effective: Mapping[str, int]
    ) -> SliverSpec:
        socket = self._host.api_socket(name, index) if self._backend.shares_socket else None
        return self._slivers.spec(name, record, index, effective, socket)

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

    # -- the steps

    def _reconcile(self, name: str) -> float | None:
        key = key_of(name)
        stored = self._database.get(key)
        local = self._database.local(key)
        if stored is None or not (stored.content.get("plc_instantiated") or local.get(CREATED)):
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
        everybody = self._slivers.effective()
        effective = everybody.get(name)
        if effective is None:
            return 0.0  # its record went this moment
        index = local.get("index")
        if index is None:
            with self._database.transaction():
                index = self._database.allocate_index(
                    name, self._config.max_slivers, self._host.usable
                )
                local = self._database.update_local(key, index=index)
        spec = self._spec(name, record, int(index), effective)
        if refused := sorted(set(spec.privileges) - self._backend.privileges):
            raise BackendError(
                f"privileges: backend {self._backend.name} cannot give {', '.join(refused)}; it "
                f"has {', '.join(sorted(self._backend.privileges)) or 'none'}"
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
            made = self._being_made | {
                key.partition("_")[2]
                for key in self._database.keys_with("handle")
                if key.startswith("sliver_")
            }
            self._host.admit(
                name,
                spec.rspec,
                {other: rspec for other, rspec in everybody.items() if other in made},
            )
            self._being_made.add(name)
        try:
            with self._creating:
                handle = self._backend.create(spec)
            record = self._database.get(key)
            self._database.update_local(
                key,
                handle=handle,
                image=spec.image,
                applied=self._fingerprint(spec),
                halted=False,
                made=time.time(),
                booted=handle.get("boot_id"),
                memory=int(spec.rspec.get("nm_mem_limit", 0)),
                metadata=None if record is None else record.content.get("metadata"),
            )
        finally:
            with self._admitting:
                self._being_made.discard(name)
        return handle

    def _run(
        self, name: str, key: str, spec: SliverSpec, local: Mapping[str, Any], handle: Handle
    ) -> float | None:
        if local.get("frozen"):
            self._backend.freeze(spec, handle, False)
            self._database.update_local(key, frozen=False)
        problem = outdated = ""
        if local.get("halted") or not self._backend.adopt(spec, handle):
            self._database.update_local(key, restarted=True)
            handle, problem = self._start(spec, handle)
        else:
            if local.get("applied") != self._fingerprint(spec):
                handle, problem = self._change(self._backend.configure, spec, handle)
            handle, outdated = self._change(self._backend.refresh, spec, handle)
        self._database.update_local(
            key, handle=handle, halted=False, applied=None if problem else self._fingerprint(spec)
        )
        problem = problem or outdated
        self._copies.keep(self._database.get(key), self._database.local(key))
        again = self._host.attach(name, handle)
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
            return self._backend.start(spec, handle), ""
        except BackendError as error:
            # Owners of keys can log in again, whatever a job did to the key files or to the disk.
            try:
                return self._backend.start(dataclasses.replace(spec, ssh_keys=None), handle), str(
                    error
                )
            except BackendError:
                raise error from None

    def _change(
        self, change: Callable[[SliverSpec, Handle], Handle], spec: SliverSpec, handle: Handle
    ) -> tuple[Handle, str]:
        """Change a running sliver; return an error text instead of ending jobs or the sliver."""
        try:
            return change(spec, handle), ""
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
        self._host.detach(name)
        if not enabled and self._backend.freezes:
            if not local.get("frozen"):
                self._backend.freeze(spec, handle, True)
                self._database.update_local(key, frozen=True)
        elif not local.get("halted"):
            self._database.update_local(key, handle=self._backend.stop(spec, handle), halted=True)
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
        self._host.detach(name)
        index, handle = int(local["index"]), local.get("handle")
        with self._deleting:
            place, counted = (name, handle or {}), bool(local.get("counted"))
            used = local.get("used") or {}
            if not (counted or used or self._backend.counts_to_the_end):
                used = self._events.used(*place)
                self._database.update_local(key, used=used)
            self._backend.end(name, index, handle)
            if not counted:
                used = used or self._events.used(*place)
                self._count(name, key, local, used)
            self._backend.remove(name)
        self._host.freed(name)
        self._copies.forget(key)
        with self._database.transaction():
            self._database.update_local(key, **dict.fromkeys(_OF_ONE_CREATION))
            self._database.free_index(name)

    def _count(
        self, name: str, key: str, local: Mapping[str, Any], used: Mapping[str, int]
    ) -> None:
        """Store what an ended sliver has used; before its counters are removed."""
        # After a loss of power there are no counters anyway.
        with self._database.transaction(lasting=False):
            self._events.ended(name, local, used, self._backend.counts_to_the_end)
            self._database.update_local(key, counted=True)

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
            name: self._backend.number(name)
            for name in sorted(set(self._backend.found()) - set(known))
        }
        # Those with a number first: nobody else may get it before they are removed.
        for name, index in sorted(strays.items(), key=lambda item: item[1] is None):
            log.warning("Removing sliver %s: it has no record in the database", name)
            if index is None or not self._database.take_index(name, index):
                index = self._database.allocate_index(name, self._config.max_slivers)
            self._database.update_local(key_of(name), index=index)
        effective = self._slivers.effective()
        for name, local in known.items():
            record = self._database.get(key_of(name))
            handle = local.get("handle")
            if record is None or handle is None or name not in effective or local.get("halted"):
                continue
            spec = self._spec(name, record.content, int(local["index"]), effective[name])
            if self._backend.adopt(spec, handle):
                self._host.attach(name, handle)
                self._set(name, READY if not local.get("frozen") else DISABLED)
