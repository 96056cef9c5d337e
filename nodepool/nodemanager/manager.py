"""NodeManager: creates and connects all parts (NM-A.2, NM-C.5 to NM-C.7)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterable

from nodepool.base.files import lock_file
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import backends
from nodepool.nodemanager.api.methods import Api
from nodepool.nodemanager.api.programs import Programs
from nodepool.nodemanager.api.server import Servers
from nodepool.nodemanager.attachments import Attachments
from nodepool.nodemanager.backends.base import Backend, Services
from nodepool.nodemanager.calls import Calls
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.confinement import seccomp
from nodepool.nodemanager.delivery import Delivery
from nodepool.nodemanager.helper.zygote import Zygote
from nodepool.nodemanager.host import Host, make_services
from nodepool.nodemanager.kernel import descriptors
from nodepool.nodemanager.limits.free_space import FreeSpace
from nodepool.nodemanager.limits.memory_kills import Kill, MemoryKills
from nodepool.nodemanager.limits.netlink import NetlinkLimit
from nodepool.nodemanager.outcomes import BackendError, Problem
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.regular_tasks import RegularTasks
from nodepool.nodemanager.rootfs.trees import Trees
from nodepool.nodemanager.rootfs.uploaded import Images
from nodepool.nodemanager.slivers.events import ANY, Events
from nodepool.nodemanager.slivers.process_watch import ProcessWatch
from nodepool.nodemanager.slivers.reconciler import SliverReconciler
from nodepool.nodemanager.slivers.slivers import Slivers
from nodepool.nodemanager.slivers.startup import Startup
from nodepool.nodemanager.sources import tickets
from nodepool.nodemanager.sources.sources import make as make_sources
from nodepool.nodemanager.ssh.logins import Logins
from nodepool.process.parts import Group, Part

log = logging.getLogger("nodepool.nodemanager")

#: Seconds that the start waits for a previous node manager to release the state directory.
STATE_LOCK_TIMEOUT = 10.0
#: Seconds for the stop of all parts, before the service gives up.
STOP_TIMEOUT = 8.0


class NodeManager:
    """The daemon: its parts, the calls of its API, and the delivery of records.

    :param startup: start every enabled sliver once.
    :param more: what else starts, after everything else.
    """

    def __init__(self, config: NodeManagerConfig, startup: bool = False, *more: Part) -> None:
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
        with contextlib.ExitStack() as ending:
            _lock_state(config.state_dir, ending)
            zygote = Zygote()
            ending.callback(zygote.stop)
            zygote.start()
            free_space = FreeSpace(config.state_dir, config.overcommit.disk)
            services = make_services(config, zygote, free_space)
            self._connect(config, startup, services, free_space, ending, more)

    def _connect(
        self,
        config: NodeManagerConfig,
        startup: bool,
        services: Services,
        free_space: FreeSpace,
        ending: contextlib.ExitStack,
        more: Iterable[Part],
    ) -> None:
        if (missing := tickets.missing(config.tickets)) is not None:
            raise ConfigurationError(missing)

        def room_left() -> int:
            return host.left(slivers.effective())

        services = dataclasses.replace(services, free_space=room_left)
        backend, problems = _load_backend(config, services)
        database = Database(
            os.path.join(config.state_dir, "nodemanager.sqlite"), free_ballast=free_space.ensure
        )
        host = Host(config, database, services, free_space)
        ending.callback(host.stop)
        problems += host.problems()
        slivers = Slivers(config, database, backend)
        delivery = Delivery(
            database, slivers, host, Startup(database, slivers) if startup else None
        )

        trees = Trees(backend, delivery.announce)
        images = Images(
            os.path.join(config.state_dir, "images"),
            lambda name: trees.prepare(f"image:{name}"),
            room_left,
        )
        watch, programs = ProcessWatch(), Programs(config.ssh.connections)
        logins = Logins(config, backend, watch, programs, slivers.check_soon)
        events = Events(database, backend.usage, lambda: servers.connections.recheck_now(ANY))
        self.calls = calls = Calls(
            config,
            database,
            backend,
            slivers,
            host,
            images,
            trees,
            logins,
            delivery,
            events,
            problems,
        )

        def killed(kill: Kill) -> None:
            if (name := calls.sliver_of_uid(kill.uid)) is not None:
                events.killed(name, kill)

        kills = MemoryKills(killed)
        servers = Servers(
            Api(calls.table(), slivers.record, calls.is_delegate),
            config,
            backend,
            database,
            images,
            calls.sliver_of_uid,
            programs,
        )
        attachments = Attachments(
            host,
            free_space,
            slivers,
            logins,
            watch,
            None if services.cgroups is None else NetlinkLimit(services.cgroups.kill),
            servers,
        )
        reconciler = SliverReconciler(config, database, backend, slivers, attachments, events)
        tasks = RegularTasks(
            delivery,
            {
                # Slivers without a record may use one, too.
                "removal of unused root trees": lambda: trees.prune(
                    lambda: set(backend.found()) | slivers.names()
                ),
                "removal of leftovers": host.tidy,
                "name servers of slivers": lambda: host.follow_names(slivers.check_all),
                "removal of unused sockets": servers.tidy,
                "accounting of bandwidth": lambda: host.account(slivers.effective()),
                "measuring of disks": lambda: events.measure(backend.found()),
            },
        )
        preparation = threading.Thread(
            target=trees.prepare_host, name="Thread-nm-prepare", daemon=True
        )
        # Each stop works without a start, too: a part may have started only half.
        self.parts = Group(
            STOP_TIMEOUT,
            Part("host", stop=ending.pop_all().close),
            Part("report", lambda: _report(problems)),
            Part("free space", free_space.keep),
            Part("database", database.open, database.close),
            # Login keys are below the run directory, which a reboot empties.
            Part("delegates", delivery.update_delegates),
            Part("services", host.prepare),
            Part("attachments", attachments.start, attachments.stop),
            Part("kills", kills.start, kills.stop),
            Part("recovery", reconciler.recover),
            Part("balance", lambda: host.rebalance(slivers.effective())),
            Part("root trees", preparation.start),
            Part("reconciler", reconciler.start, reconciler.stop),
            Part("regular tasks", tasks.start, tasks.stop),
            Part("servers", servers.start, servers.stop),
            Part("checks", slivers.check_all),
            Part(
                "sources",
                lambda: delivery.start(
                    make_sources(config, database, delivery.deliver, calls.capacity)
                ),
                delivery.stop,
            ),
            *more,
        )


def _report(problems: Iterable[Problem]) -> None:
    """Log what this host lacks, and what its slivers share."""
    for problem in problems:
        log.warning("%s: %s", problem.feature, problem.remedy)
    if os.geteuid() == 0:  # other backends give no privilege
        descriptors.raise_terminals()
        log.info("All filter programs of slivers and of this host share %s", seccomp.shared_area())


def _lock_state(directory: str, ending: contextlib.ExitStack) -> None:
    """Lock the state directory against other node managers, until the end."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        ending.callback(os.close, descriptor)
        lock_file(descriptor, STATE_LOCK_TIMEOUT)
    except BlockingIOError:
        raise ConfigurationError(
            f"state-dir: another node manager uses {directory}; stop it, or give this one "
            "another state-dir"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"state-dir: cannot lock {directory}: {error.strerror}") from error


def _load_backend(config: NodeManagerConfig, services: Services) -> tuple[Backend, list[Problem]]:
    """Return the backend and what it lacks here. Raises ConfigurationError."""
    name = (
        config.backend
        if config.backend != "auto"
        else "native"
        if os.geteuid() == 0
        else "rootless"
    )
    try:
        backend = backends.load(name)(config.state_dir, services)
    except BackendError as error:
        raise ConfigurationError(f"backend: {error}") from error
    problems = backend.check()
    if fatal := [p for p in problems if p.fatal]:
        raise ConfigurationError(
            f"backend {backend.name} cannot work here: "
            + "; ".join(f"{p.feature}: {p.remedy}" for p in fatal)
        )
    return backend, problems
