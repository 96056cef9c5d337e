"""NodeManager: creates, connects and stops all parts (NM-A.2, NM-C.5 to NM-C.7)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodepool.base.files import lock_file
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import backends
from nodepool.nodemanager.api.methods import Api, NodeError, Program, wait
from nodepool.nodemanager.backends.base import Handle, Services
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.confinement import seccomp
from nodepool.nodemanager.helper.zygote import Zygote
from nodepool.nodemanager.host import Host, make_services
from nodepool.nodemanager.kernel import descriptors
from nodepool.nodemanager.limits.free_space import FreeSpace
from nodepool.nodemanager.limits.netlink import NetlinkLimit
from nodepool.nodemanager.outcomes import BackendError, Problem
from nodepool.nodemanager.records import loans, merge, records
from nodepool.nodemanager.records.database import ABANDONED, Database
from nodepool.nodemanager.rootfs import uploaded
from nodepool.nodemanager.rootfs.ssh_files import SSHD_ARGV
from nodepool.nodemanager.rootfs.trees import Trees
from nodepool.nodemanager.slivers.process_watch import ProcessWatch
from nodepool.nodemanager.slivers.reconciler import (
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
from nodepool.nodemanager.slivers.startup import Startup
from nodepool.nodemanager.sources import tickets
from nodepool.nodemanager.ssh import sshd
from nodepool.nodemanager.ssh.gate import Gate
from nodepool.nodemanager.ssh.sshd import SshServers

#: Source of records that launchers and operators store.
DRIVER_SOURCE = "driver"
TICKET_SOURCE = "ticket"
#: What process 1 of a sliver is for :class:`ProcessWatch`.
FIRST = "The first process"
#: Maximum seconds between two checks of the expiry timer.
EXPIRY_CHECK = 60.0
#: Seconds that the start waits for a previous node manager to release the state directory.
STATE_LOCK_TIMEOUT = 10.0


class NodeManager:
    """The daemon.

    :param startup: start every enabled sliver once.
    """

    log = logging.getLogger("nodepool.nodemanager")

    def __init__(self, config: NodeManagerConfig, startup: bool = False) -> None:
        self.config = config
        self._start_stopped = startup
        descriptors.raise_limit()
        for directory in (config.state_dir, config.run_dir):
            try:
                os.makedirs(
                    directory, mode=0o755 if directory == config.run_dir else 0o700, exist_ok=True
                )
            except OSError as error:
                raise ConfigurationError(
                    f"cannot create directory {directory}: {error.strerror}"
                ) from error
        self._zygote = Zygote()
        self._zygote.start()
        try:
            # Locked after the helper was forked, which must not hold the lock when the daemon is
            # killed.
            self._state_lock = self._lock_state()
            try:
                self._make()
            except BaseException:
                os.close(self._state_lock)
                raise
        except BaseException:
            self._zygote.stop()
            raise

    def _lock_state(self) -> int:
        """Return a descriptor that locks the state directory against other node managers."""
        directory = self.config.state_dir
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                lock_file(descriptor, STATE_LOCK_TIMEOUT)
            except BaseException:
                os.close(descriptor)
                raise
        except BlockingIOError:
            raise ConfigurationError(
                f"state-dir: another node manager uses {directory}; stop it, or give this one "
                "another state-dir"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"state-dir: cannot lock {directory}: {error.strerror}"
            ) from error
        return descriptor

    def _make(self) -> None:
        config = self.config
        if (missing := tickets.missing(config.tickets)) is not None:
            raise ConfigurationError(missing)
        self.services: Services = make_services(config, self._zygote)
        name = (
            config.backend
            if config.backend != "auto"
            else "native"
            if os.geteuid() == 0
            else "rootless"
        )
        try:
            self.backend = backends.load(name)(config.state_dir, self.services)
        except BackendError as error:
            raise ConfigurationError(f"backend: {error}") from error
        self.problems: list[Problem] = self.backend.check()
        fatal = [p for p in self.problems if p.fatal]
        if fatal:
            raise ConfigurationError(
                f"backend {self.backend.name} cannot work here: "
                + "; ".join(f"{p.feature}: {p.remedy}" for p in fatal)
            )
        self.free_space = FreeSpace(config.state_dir, config.overcommit.disk)
        self.database = Database(
            os.path.join(config.state_dir, "nodemanager.sqlite"),
            free_ballast=self.free_space.ensure,
        )
        self.host = Host(config, self.database, self.services, self.free_space)
        self.problems += self.host.problems()
        self.trees = Trees(self.backend, self._room_left, self._announce)
        self.images = uploaded.Images(
            os.path.join(config.state_dir, "images"),
            lambda name: self.trees.prepare(f"image:{name}"),
            self._room_left,
        )
        self.gate = Gate(
            config.ssh.listen_address,
            *config.ssh.ports,
            lambda handle, connection: self.backend.serve(handle, SSHD_ARGV, connection),
            config.ssh.connections,
        )
        self.watch = ProcessWatch()
        self.netlink = (
            None if self.services.cgroups is None else NetlinkLimit(self.services.cgroups.kill)
        )
        self.sshd = None
        if config.ssh.mode == "sshd":
            self.sshd = SshServers(
                self.backend, self.watch, lambda name: self.slivers.look_at(name)
            )
        self.slivers = Slivers(
            config,
            self.database,
            self.backend,
            self._opened,
            self.host.admit,
            usable=self.gate.free,
            told=self._told,
            removed=self._removed,
            api_socket=self._api_socket,
        )
        self.startup = Startup(self.database, self.slivers, self.start_sliver)
        calls: dict[str, Callable[..., object]] = {
            "DumpDatabase": self.database.dump,
            "CreateSliver": self.create_sliver,
            "DeleteSliver": self.delete_sliver,
            "Start": self.start_sliver,
            "Stop": self.stop_sliver,
            "ReCreate": self.recreate_sliver,
            "GetRSpec": self.granted,
            "GetEffectiveRSpec": self.effective,
            "GetLoans": self.loans_of,
            "SetLoans": self.set_loans,
            "GetRecord": self.describe,
            "GetUsage": self.usage,
            "GetConsole": self.console,
            "WaitSliver": functools.partial(wait, self.reached),
            "Exec": self.program,
            "RenewSliver": self.renew,
            "PutRecord": self.put_record,
            "ListSlivers": self.describe_all,
            "GetCapacity": self.capacity,
            "GetXIDs": self.xids,
            "GetSSHKeys": self.ssh_keys,
            "Ticket": self.ticket,
        }
        self.api = Api(calls, self.sliver_record, self.is_delegate)
        self.servers: Any = None
        self._listening = ThreadPoolExecutor(1, thread_name_prefix="Thread-nm-listen")
        self._sources: list[Any] = []
        self._expiry = threading.Thread(
            target=self._run_expiry, name="Thread-nm-expiry", daemon=True
        )
        self._wake_expiry = threading.Event()
        self._running = False
        self._delivery = threading.RLock()

    def _room_left(self) -> int:
        """Return the bytes for images and their root trees."""
        return self.host.left(self.slivers.effective())

    # -- life

    def start(self) -> None:
        """Start; wait until slivers that live are adopted and the API answers."""
        from nodepool.nodemanager.api import server
        from nodepool.nodemanager.sources import sources

        for problem in self.problems:
            self.log.warning("%s: %s", problem.feature, problem.remedy)
        if os.geteuid() == 0:  # other backends give no privilege
            descriptors.raise_terminals()
            self.log.info(
                "All filter programs of slivers and of this host share %s", seccomp.shared_area()
            )
        self._running = True
        self.free_space.keep()
        self.database.open()
        # Start its thread now: it is then available whatever happens to the host.
        self._listening.submit(lambda: None)
        # Login keys are below the run directory, which a reboot empties.
        self.host.delegates_changed(self._delegate_records())
        self.host.prepare()
        self.gate.start()
        self.watch.start()
        if self.netlink is not None:
            self.netlink.start()
        self.servers = server.Servers(
            self.api, self.config, self.backend, self.database, self.images, self.sliver_of_uid
        )
        self.slivers.recover()
        self.host.rebalance(self.slivers.effective())
        threading.Thread(
            target=self.trees.prepare_host, name="Thread-nm-prepare", daemon=True
        ).start()
        self.slivers.start()
        self._expiry.start()
        self.servers.start()
        self.slivers.look_at_all()
        self._sources = sources.make(self.config, self.database, self.deliver, self.capacity)
        if self._start_stopped:
            self.startup.begin(source.name for source in self._sources)
        for source in self._sources:
            source.start()

    def stop(self) -> None:
        """Stop the daemon; slivers and sessions keep running."""
        if not self._running:
            self.host.stop()
            self._zygote.stop()
            os.close(self._state_lock)
            return
        self._running = False
        for source in self._sources:
            source.stop()
        if self.servers is not None:
            self.servers.stop()
        self._wake_expiry.set()
        if self._expiry.ident is not None:
            self._expiry.join(5)
        self.slivers.stop()
        self._listening.shutdown(wait=True, cancel_futures=True)
        self.watch.stop()
        if self.netlink is not None:
            self.netlink.stop()
        self.gate.stop()
        self.host.stop()
        self._zygote.stop()
        self.database.close()
        os.close(self._state_lock)

    def _opened(self, name: str, handle: Handle | None) -> float | None:
        again = None
        if handle is None:
            if self.sshd is not None:
                self.sshd.forget(name)
            self.watch.remove(FIRST, name)
            if self.netlink is not None:
                self.netlink.remove(name)
            self.host.device_gone(name)
            self.gate.close(name)
            if self.servers is not None:
                self.servers.cut_off(name)
        else:
            self.watch.add(
                FIRST, name, int(handle["pid"]), handle.get("start_time"), self.slivers.look_at
            )
            if self.netlink is not None:
                self.netlink.add(name, int(handle["pid"]))
            if self.sshd is not None and handle.get("veth"):
                again = self.sshd.ensure(name, handle)
            if self.sshd is None or not handle.get("address"):
                self.gate.open(name, int(self.database.local(key_of(name))["index"]), handle)
        if self.servers is not None:
            # In a thread, sequentially: the work does not wait for the API inside a sliver.
            with contextlib.suppress(RuntimeError):  # stopping
                self._listening.submit(self.servers.sliver_changed, name, handle)
        return again

    def _removed(self, name: str) -> None:
        if self.servers is not None:
            self.servers.close_socket(name)
        self.free_space.keep()

    def _api_socket(self, name: str, index: int) -> str | None:
        return self.servers.open_socket(name, index) if self.servers is not None else None

    def _told(self, name: str) -> None:
        if self.servers is not None:
            self.servers.connections.look_again(name)

    def _ssh_place(self, handle: Handle, index: int | None) -> tuple[str, int]:
        """Return address and port for logins: the sliver's own if it has server and address."""
        if self.sshd is not None and handle.get("veth"):
            address = handle.get("address") or sshd.own_address(
                int(handle["pid"]), sshd.bridge_networks(str(handle["veth"]["veth"]))
            )
            if address:
                return str(address), sshd.PORT
        return self.config.ssh.address, self.gate.port(index) if index else 0

    # -- records

    def deliver(
        self, source: str, serial: float | None, given: Iterable[Any], complete: bool
    ) -> merge.Changes:
        """Merge an update of a source and reconcile the slivers it changes."""
        with self._delivery:
            before = self.slivers.effective()
            changes = merge.deliver(self.database, source, serial, given, complete)
            self._follow(changes, before)
        if changes.complete:
            self.startup.synced(source)
        return changes

    def _follow(self, changes: merge.Changes, before: Mapping[str, Mapping[str, int]]) -> None:
        after = self.slivers.effective()
        names = {
            key.partition("_")[2]
            for key in changes.changed | changes.deleted
            if key.startswith("sliver_")
        }
        names |= {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }
        for name in sorted(names):
            self.slivers.look_at(name, anew=key_of(name) in changes.changed)
        if changes.complete:
            self.slivers.look_at_all()
        if {key for key in changes.changed | changes.deleted if key.startswith("delegate_")}:
            self.host.delegates_changed(self._delegate_records())
        if "bwcap" in changes.changed:
            record = self.database.get("bwcap")
            if record is not None:
                self.host.cap(record.content["cap"], record.content["exempt_ips"])
        self._wake_expiry.set()
        self._announce()

    def _announce(self) -> None:
        """Notify the sources that publish this host's capacity."""
        for source in self._sources:
            changed = getattr(source, "changed", None)
            if changed is not None:
                changed()

    def _delegate_records(self) -> dict[str, dict[str, Any]]:
        return {
            r.content["name"]: r.content
            for r in self.database.records()
            if r.content.get("account_type") == records.DELEGATE
        }

    def _run_expiry(self) -> None:
        checked = time.monotonic()
        while self._running:
            wait = max(0.0, checked + EXPIRY_CHECK - time.monotonic())
            try:
                due = self.database.next_expiry()
                if due is not None:
                    wait = max(0.0, min(wait, due - time.time() + 0.01))
            except Exception:
                self.log.exception("Error about expired records:")
            self._wake_expiry.wait(wait)
            self._wake_expiry.clear()
            if not self._running:
                return
            try:
                if time.monotonic() >= checked + EXPIRY_CHECK:
                    checked = time.monotonic()
                    self.each_minute()
                self._expire()
            except Exception:
                self.log.exception("Error about expired records:")

    def each_minute(self) -> None:
        """Run the regular tasks; one that fails does not stop the others."""
        tasks: dict[str, Callable[[], object]] = {
            "removal of unused root trees": self._prune_templates,
            "removal of leftovers": self.host.tidy,
            "removal of unused sockets": lambda: self.servers.tidy(),
            "accounting of bandwidth": lambda: self.host.account(self.slivers.effective()),
        }
        for name, task in tasks.items():
            try:
                task()
            except Exception:
                self.log.exception("Periodic task failed, retrying in a minute: %s:", name)

    def _expire(self) -> None:
        with self._delivery:
            due = self.database.next_expiry()
            if due is None or due >= time.time():
                return
            before = self.slivers.effective()
            self._follow(merge.expire(self.database, time.time()), before)

    def _prune_templates(self) -> None:
        """Prune unused templates; slivers without a record may use one, too."""
        self.trees.prune(lambda: set(self.backend.found()) | self.slivers.names())

    # -- called by the API

    def sliver_record(self, name: str) -> dict[str, Any] | None:
        record = self.database.get(key_of(name))
        return None if record is None else record.content

    def _record(self, name: str) -> dict[str, Any]:
        record = self.sliver_record(name)
        if record is None:
            raise NodeError(f"there is no sliver {name}")
        return record

    def sliver_names(self) -> list[str]:
        return sorted(self.slivers.names())

    def granted(self, name: str) -> dict[str, int]:
        return self.slivers.granted(self._record(name))

    def effective(self, name: str) -> dict[str, int]:
        found = self.slivers.effective().get(name)
        if found is None:
            raise NodeError(f"there is no sliver {name}")
        return found

    def loans_of(self, name: str) -> list[list[Any]]:
        return list(self.database.local(key_of(name)).get("loans", []))

    def set_loans(self, name: str, given: list[loans.Loan]) -> None:
        with self._delivery:
            before = self.slivers.effective()
            self._note(name, loans=[list(loan) for loan in given])
            self._follow(merge.Changes(), before)

    def _note(self, name: str, **values: object) -> None:
        """Store values of a sliver as long as it has a record: a later one must not inherit
        them.
        """
        with self.database.transaction():
            record = self._record(name)
            if CREATED in values and record.get("plc_instantiated"):
                raise NodeError(
                    f"sliver {name} is kept by its authority: "
                    + (
                        "it exists already, or will soon, without being asked for"
                        if values[CREATED]
                        else "it cannot be deleted here"
                    )
                )
            self.database.update_local(key_of(name), **values)

    def create_sliver(self, name: str) -> None:
        self._note(name, **{CREATED: True, RUNNING: True})
        self.slivers.look_at(name)

    def delete_sliver(self, name: str) -> None:
        key = key_of(name)
        with self._delivery:
            stored = self.database.get(key)
            if stored is None:
                return
            if stored.source in (DRIVER_SOURCE, TICKET_SOURCE, ABANDONED):
                before = self.slivers.effective()
                self.database.delete(key)
                self._follow(merge.Changes(deleted={key}), before)
                return
            self._note(name, **{CREATED: None})
        self.slivers.look_at(name)

    def start_sliver(self, name: str) -> None:
        if not self.effective(name)["nm_enabled"]:
            raise NodeError(f"sliver {name} is not enabled (nm_enabled is 0)")
        self._note(name, **{RUNNING: True})
        self.slivers.look_at(name)

    def stop_sliver(self, name: str) -> None:
        self._note(name, **{RUNNING: False})
        self.slivers.look_at(name)

    def recreate_sliver(self, name: str) -> None:
        self.stop_sliver(name)
        if self.slivers.wait(name, lambda s: s.state in (STOPPED, ABSENT, FAILED), 30) is None:
            raise NodeError(f"sliver {name} does not stop")
        self._note(name, **({} if self._record(name).get("plc_instantiated") else {CREATED: True}))
        self.start_sliver(name)

    def put_record(self, caller: str, record: dict[str, Any]) -> dict[str, Any]:
        """Add or change a sliver of a launcher.

        :raises NodeError: it does not fit on this host, or the name belongs to another source.
        """
        name = record["name"]
        effective = self.slivers.granted(record)
        problem = self.images.problem(record.get("image", "host"))
        if problem is not None:
            raise NodeError(problem)
        record["owner"] = caller
        with self._delivery:
            self.host.check_fit(name, effective, self.slivers.effective())
            return self._put(record)

    def _put(self, record: dict[str, Any]) -> dict[str, Any]:
        name = record["name"]
        changes = self.deliver(DRIVER_SOURCE, time.time(), [record], complete=False)
        if changes.refused:
            raise NodeError("; ".join(changes.refused.values()))
        return self.describe(name)

    def renew(self, name: str, expiry: float) -> None:
        if not self.database.set_expiry(key_of(name), expiry):
            raise NodeError(f"there is no sliver {name}")
        self._wake_expiry.set()
        self.slivers.look_at(name)

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
        with self._delivery:
            before = self.slivers.effective()
            # All or nothing: a ticket that is refused for another reason may be submitted again.
            with self.database.transaction():
                if not self.database.use_ticket(jti, expiry):
                    raise NodeError("ticket refused: it was used before")
                changes = merge.deliver(self.database, TICKET_SOURCE, time.time(), contained, False)
                if changes.refused:
                    raise NodeError("; ".join(changes.refused.values()))
                if names and not self._record(names[0]).get("plc_instantiated"):
                    self._note(names[0], **{CREATED: True, RUNNING: True})
            self._follow(changes, before)
        return names

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
            if found in ends and (found != ABSENT or self.sliver_record(name) is None)
            else None
        )

    def describe_all(self) -> list[dict[str, Any]]:
        """Return all slivers that have a record."""
        effective = self.slivers.effective()
        return [self.describe(name, effective) for name in self.sliver_names()]

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
        address, port = self._ssh_place(handle, index)
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
            "own_ssh": self.sshd is not None and port == sshd.PORT,
            "host_keys": [handle["host_key"]] if handle.get("host_key") else [],
            "backend": self.backend.name,
            "address": str(handle.get("address") or ""),
            "sessions": self._sessions(name),
            "since": status.since,
        }

    def _sessions(self, name: str) -> int:
        """Return the number of logins and of programs of callers."""
        others = (self.sshd, self.servers.programs if self.servers is not None else None)
        return self.gate.sessions(name) + sum(
            each.sessions(name) for each in others if each is not None
        )

    def capacity(self) -> dict[str, Any]:
        return {
            **self.host.capacity(self.slivers.effective()),
            "images": self.images.names(),
            "backend": self.backend.name,
            "prepared": self.trees.prepared,
            "problems": [f"{p.feature}: {p.remedy}" for p in self.problems],
        }

    def usage(self, name: str) -> dict[str, int]:
        record, local = self._record(name), self.database.local(key_of(name))
        if local.get("handle") is None:
            raise NodeError(f"sliver {name} does not run")
        spec = self.slivers.spec(name, record, int(local["index"]), self.effective(name))
        return self.backend.usage(spec, local["handle"])

    def console(self, name: str) -> str:
        record, local = self._record(name), self.database.local(key_of(name))
        spec = self.slivers.spec(name, record, int(local.get("index") or 0), self.effective(name))
        return self.backend.console(spec).decode(errors="replace")

    def program(self, name: str, argv: list[str], env: dict[str, str], user: str) -> Program:
        state, handle = (
            self.slivers.status(name).state,
            self.database.local(key_of(name)).get("handle"),
        )
        if state != READY or handle is None:
            raise NodeError(f"sliver {name} is {state}; programs can be run when it is {READY}")
        account = user or self.slivers.username(self._record(name))
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
        return {name: self._record(name).get("ssh_keys", "") for name in self.sliver_names()}
