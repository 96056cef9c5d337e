"""The methods of the API (NM-A.8, NM-B.3)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodepool.nodemanager.api.methods import NodeError, Program, wait
from nodepool.nodemanager.backends.base import Backend
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.delivery import Delivery
from nodepool.nodemanager.host import Host
from nodepool.nodemanager.outcomes import Problem
from nodepool.nodemanager.records import loans, merge, records
from nodepool.nodemanager.records.database import ABANDONED, Database
from nodepool.nodemanager.rootfs.trees import Trees
from nodepool.nodemanager.rootfs.uploaded import Images
from nodepool.nodemanager.slivers.events import Events
from nodepool.nodemanager.slivers.slivers import (
    ABSENT,
    CREATED,
    DISABLED,
    FAILED,
    READY,
    RUNNING,
    STOPPED,
    Slivers,
    key_of,
)
from nodepool.nodemanager.sources import tickets
from nodepool.nodemanager.ssh.logins import Logins

#: Source of records that launchers and operators store.
DRIVER_SOURCE = "driver"
TICKET_SOURCE = "ticket"


@dataclass(eq=False)
class Calls:
    """Methods raise NodeError when there is no such sliver, or it is in another state."""

    config: NodeManagerConfig
    database: Database
    backend: Backend
    slivers: Slivers
    host: Host
    images: Images
    trees: Trees
    logins: Logins
    delivery: Delivery
    events: Events
    problems: Sequence[Problem]

    def table(self) -> dict[str, Callable[..., object]]:
        """Return name of each method -> the function that answers it."""
        return {
            "DumpDatabase": self.database.dump,
            "CreateSliver": self.create,
            "DeleteSliver": self.delete,
            "Start": self.slivers.start,
            "Stop": self.stop,
            "ReCreate": self.recreate,
            "GetRSpec": lambda name: self.slivers.granted(self.slivers.existing(name)),
            "GetEffectiveRSpec": self.slivers.effective_of,
            "GetLoans": lambda name: self.database.local(key_of(name)).get("loans", []),
            "SetLoans": self.set_loans,
            "GetRecord": self.describe,
            "GetUsage": self.usage,
            "GetConsole": self.console,
            "WaitSliver": functools.partial(wait, self.reached),
            "Exec": self.program,
            "RenewSliver": self.renew,
            "PutRecord": self.put_record,
            "ListSlivers": self.describe_all,
            "WaitEvents": self.events.wait,
            "GetCapacity": self.capacity,
            "GetXIDs": self.xids,
            "GetSSHKeys": self.ssh_keys,
            "Ticket": self.ticket,
        }

    # -- changes

    def set_loans(self, name: str, given: list[loans.Loan]) -> None:
        with self.delivery.lock:
            before = self.slivers.effective()
            self.slivers.note(name, loans=[list(loan) for loan in given])
            self.delivery.follow(merge.Changes(), before)

    def create(self, name: str) -> None:
        self.slivers.note(name, **{CREATED: True, RUNNING: True})
        self.slivers.check_soon(name)

    def delete(self, name: str) -> None:
        key = key_of(name)
        with self.delivery.lock:
            stored = self.database.get(key)
            if stored is None:
                return
            if stored.source in (DRIVER_SOURCE, TICKET_SOURCE, ABANDONED):
                before = self.slivers.effective()
                self.database.delete(key)
                self.delivery.follow(merge.Changes(deleted={key}), before)
                return
            self.slivers.note(name, **{CREATED: None})
        self.slivers.check_soon(name)

    def stop(self, name: str) -> None:
        self.slivers.note(name, **{RUNNING: False})
        self.slivers.check_soon(name)

    def recreate(self, name: str) -> None:
        self.stop(name)
        if self.slivers.wait(name, lambda s: s.state in (STOPPED, ABSENT, FAILED), 30) is None:
            raise NodeError(f"sliver {name} does not stop")
        kept = self.slivers.existing(name).get("plc_instantiated")
        self.slivers.note(name, **({} if kept else {CREATED: True}))
        self.slivers.start(name)

    def put_record(self, caller: str, record: dict[str, Any]) -> dict[str, Any]:
        """Add or change a sliver of a launcher.

        :raises NodeError: it does not fit on this host, or the name belongs to another source.
        """
        name = record["name"]
        effective = self.slivers.granted(record)
        if (problem := self.images.problem(record.get("image", "host"))) is not None:
            raise NodeError(problem)
        record["owner"] = caller
        with self.delivery.lock:
            self.host.check_fit(name, effective, self.slivers.effective())
            changes = self.delivery.deliver(DRIVER_SOURCE, time.time(), [record], complete=False)
            if changes.refused:
                raise NodeError("; ".join(changes.refused.values()))
            return self.describe(name)

    def renew(self, name: str, expiry: float) -> None:
        if not self.database.set_expiry(key_of(name), expiry):
            raise NodeError(f"there is no sliver {name}")
        self.delivery.wake.set()
        self.slivers.check_soon(name)

    def ticket(self, signed: str) -> list[str]:
        try:
            contained, jti, expiry = tickets.verify(
                signed, self.config.tickets, self.config.host_name
            )
        except tickets.TicketError as error:
            raise NodeError(f"ticket refused: {error}") from None
        names = [
            str(item.get("name"))
            for item in contained
            if item.get("account_type") == records.SLIVER
        ]
        with self.delivery.lock:
            before = self.slivers.effective()
            # All or nothing: a ticket that is refused for another reason may be submitted again.
            with self.database.transaction():
                if not self.database.use_ticket(jti, expiry):
                    raise NodeError("ticket refused: it was used before")
                changes = merge.deliver(self.database, TICKET_SOURCE, time.time(), contained, False)
                if changes.refused:
                    raise NodeError("; ".join(changes.refused.values()))
                if names and not self.slivers.existing(names[0]).get("plc_instantiated"):
                    self.slivers.note(names[0], **{CREATED: True, RUNNING: True})
            self.delivery.follow(changes, before)
        return names

    # -- answers

    def is_delegate(self, name: str) -> bool:
        return self.database.get(records.record_key(records.DELEGATE, name)) is not None

    def reached(self, name: str, state: str) -> dict[str, Any] | None:
        """Return the sliver when it is in that state or can no longer reach it; else None."""
        ends = {
            "ready": (READY, FAILED, DISABLED, ABSENT),
            "stopped": (STOPPED, FAILED, ABSENT, DISABLED),
            "gone": (ABSENT,),
        }[state]
        found = self.slivers.status(name).state
        # A record that was only just stored has not been reconciled yet.
        return (
            self.describe(name)
            if found in ends and (found != ABSENT or self.slivers.record(name) is None)
            else None
        )

    def describe_all(self) -> list[dict[str, Any]]:
        """Return all slivers that have a record."""
        effective = self.slivers.effective()
        return [self.describe(name, effective) for name in sorted(self.slivers.names())]

    def describe(
        self, name: str, effective: Mapping[str, dict[str, int]] | None = None
    ) -> dict[str, Any]:
        stored = self.database.get(key_of(name))
        status = self.slivers.status(name)
        if stored is None:
            return {
                "name": name,
                "state": status.state if status.state != READY else "deleting",
                "error": status.error,
            }
        record, local = stored.content, self.database.local(key_of(name))
        handle = local.get("handle") or {}
        index = local.get("index")
        address, port, own = self.logins.place(handle, index)
        return {
            "name": name,
            "state": status.state,
            "error": status.error,
            "source": stored.source,
            "image": record.get("image", "host"),
            "rspec": self.slivers.granted(record),
            "effective": (self.slivers.effective() if effective is None else effective).get(
                name, {}
            ),
            "expiry": stored.expiry or 0,
            "metadata": record.get("metadata") or {},
            "username": self.slivers.username(record),
            "index": index or 0,
            "ssh_address": address,
            "ssh_port": port,
            "own_ssh": own,
            "host_keys": [handle["host_key"]] if handle.get("host_key") else [],
            "backend": self.backend.name,
            "address": str(handle.get("address") or ""),
            "sessions": self.logins.sessions(name),
            "since": status.since,
        }

    def capacity(self) -> dict[str, Any]:
        return {
            **self.host.capacity(self.slivers.effective()),
            "images": self.images.names(),
            "backend": self.backend.name,
            "prepared": self.trees.prepared,
            "problems": [f"{p.feature}: {p.remedy}" for p in self.problems],
        }

    def usage(self, name: str) -> dict[str, int]:
        self.slivers.existing(name)
        handle = self.database.local(key_of(name)).get("handle")
        if handle is None:
            raise NodeError(f"sliver {name} does not run")
        return self.backend.usage(name, handle)

    def console(self, name: str) -> str:
        record, local = self.slivers.existing(name), self.database.local(key_of(name))
        index, rspec = int(local.get("index") or 0), self.slivers.effective_of(name)
        spec = self.slivers.spec(name, record, index, rspec)
        return self.backend.console(spec).decode(errors="replace")

    def program(self, name: str, argv: list[str], env: dict[str, str], user: str) -> Program:
        state, handle = (
            self.slivers.status(name).state,
            self.database.local(key_of(name)).get("handle"),
        )
        if state != READY or handle is None:
            raise NodeError(f"sliver {name} is {state}; programs can be run when it is {READY}")
        account = user or self.slivers.username(self.slivers.existing(name))
        return Program(
            name,
            lambda stdin, stdout, stderr: self.backend.spawn(
                handle, argv, stdin, stdout, stderr, env, account
            ),
        )

    def xids(self) -> dict[str, int]:
        return {
            key.partition("_")[2]: self.config.id_base + int(local["index"]) * 65536
            for key, local in self.database.locals().items()
            if key.startswith("sliver_") and local.get("index")
        }

    def sliver_of_uid(self, uid: int) -> str | None:
        """Return the sliver that a user id of the host belongs to."""
        index = (uid - self.config.id_base) // 65536
        return self.database.owner_of_index(index) if index > 0 else None

    def ssh_keys(self) -> dict[str, str]:
        return {
            name: self.slivers.existing(name).get("ssh_keys", "")
            for name in sorted(self.slivers.names())
        }
