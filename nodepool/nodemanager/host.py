"""Capacity of the host, admission of slivers, and services of backends (NM-C.3, NM-C.8)."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nodepool.nodemanager.api.methods import NodeError
from nodepool.nodemanager.backends.base import Services
from nodepool.nodemanager.config import MEMORY_RESERVE, NodeManagerConfig, total_memory
from nodepool.nodemanager.helper.zygote import Zygote
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.limits.cgroups import Cgroups
from nodepool.nodemanager.limits.daily_bytes import Accounting
from nodepool.nodemanager.limits.disks import Disks
from nodepool.nodemanager.limits.free_space import FreeSpace
from nodepool.nodemanager.network.veth import Network
from nodepool.nodemanager.outcomes import BackendError, Problem
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.records.rspec import with_defaults

log = logging.getLogger("nodepool.nodemanager.host")

UNLIMITED = 2**62


def make_services(config: NodeManagerConfig, zygote: Zygote, free_space: FreeSpace) -> Services:
    """Return the services of this host: cgroups, disks and networks require root."""
    services = Services(zygote=zygote, id_base=config.id_base)
    if os.geteuid() != 0:
        return services
    services.disks = Disks(config.state_dir, config.overcommit.disk > 1, free_space.keep)
    services.cgroups = Cgroups.detect(group_name(config.state_dir), services.disks.devices)
    services.net = Network(config)
    return services


def group_name(state_dir: str) -> str:
    """Return the name of our cgroups, which differs between state directories."""
    if state_dir == "/var/lib/nodepool/nodemanager":
        return "nodepool-nm"
    return f"nodepool-nm-{hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:10]}"


class Host:
    """Capacity, admission, the node's bandwidth cap and delegates."""

    def __init__(
        self,
        config: NodeManagerConfig,
        database: Database,
        services: Services,
        free_space: FreeSpace,
    ) -> None:
        self._free_space = free_space
        self._config = config
        self._database = database
        self._services = services
        total = total_memory() - MEMORY_RESERVE
        self._memory = int(total * config.overcommit.memory)
        #: Without cgroups nothing is limited, and slivers without a limit get no promise.
        self._unlimited = total if services.cgroups is not None else 0
        self._accounts: Accounting | None = None
        #: Sliver -> rates that apply now instead of its configured ones.
        self._cut: dict[str, dict[str, int]] = {}
        #: resolv.conf of slivers, when it was last compared.
        self._names = self._name_servers()

    def prepare(self) -> None:
        if self._services.cgroups is not None:
            self._services.cgroups.prepare(self._config.host_reserve)
            helper = self._services.zygote.pid
            self._services.cgroups.start()
            helpers = [helper, *syscalls.children(helper)] if helper else []
            self._services.cgroups.shelter([os.getpid(), *helpers])
        if self._services.disks is not None:
            # On a full file system the remaining space is for the database.
            self._services.disks.prepare(self._free_space.free() > 0)
        if self._services.net is not None:
            self._services.net.prepare()
            stored = self._database.get("bwcap")
            if stored is not None:
                self.cap(stored.content["cap"], stored.content["exempt_ips"])
            else:
                self.cap(self._config.network.cap, self._config.network.exempt_ips)

    def rebalance(self, effective: Mapping[str, Mapping[str, int]]) -> None:
        """Set the weights of existing slivers, which cannot be derived from the cgroups alone."""
        if self._services.cgroups is not None:
            there = set(self._services.cgroups.found())
            self._services.cgroups.rebalance(
                {name: spec for name, spec in effective.items() if name in there}
            )

    def tidy(self) -> None:
        """Retry removals that failed earlier; call it now and then."""
        self._free_space.keep()
        for service in (self._services.disks, self._services.net):
            if service is not None:
                service.tidy()

    def follow_names(self, check: Callable[[], None]) -> None:
        """Check the slivers if they need other name servers than at the last call."""
        before, self._names = self._names, self._name_servers()
        if self._names not in (None, before):
            check()

    def _name_servers(self) -> bytes | None:
        net = self._services.net
        return None if net is None else net.resolv_conf("nat")

    def problems(self) -> list[Problem]:
        """Return what this machine lacks for limits, disks and networks."""
        return [
            problem
            for service in (self._services.cgroups, self._services.disks, self._services.net)
            if service is not None
            for problem in service.problems()
        ]

    def stop(self) -> None:
        """End threads; each service removes what it created on the host when no sliver uses it."""
        for service in (self._services.disks, self._services.net, self._services.cgroups):
            if service is not None:
                service.stop()

    def cap(self, bits_per_second: int, exempt: Iterable[str]) -> None:
        if self._services.net is not None:
            try:
                self._services.net.node_cap(bits_per_second, list(exempt))
            except Exception as error:
                log.error(
                    "The cap of this node, %s bit/s with exempt %s, cannot be applied: %s",
                    bits_per_second,
                    list(exempt),
                    error,
                )

    def account(self, effective: Mapping[str, Mapping[str, int]]) -> None:
        """Count what slivers sent today; reduce rates past the daily limit (B.4)."""
        net = self._services.net
        if net is None:
            return
        if self._accounts is None:
            self._accounts = Accounting(
                lambda: self._database.counters("bandwidth"),
                lambda content: self._database.set_counters("bandwidth", content),
                notify=lambda name, kind, used, limit: log.warning(
                    "Sliver %s has sent %s MiB (%s) of the %s MiB that it may send in a day: "
                    "reducing its rate",
                    name,
                    used >> 20,
                    kind,
                    limit >> 20,
                ),
            )
        cut = self._accounts.update(
            net.counters(), effective, self._config.network.daily_limit or UNLIMITED
        )
        for name in sorted(cut.keys() | self._cut.keys()):
            if name in effective and cut.get(name) != self._cut.get(name):
                net.apply(name, {**effective[name], **cut.get(name, {})})
        self._cut = cut

    def device_removed(self, name: str) -> None:
        """Reset the byte counters: the sliver's next device starts at 0."""
        if self._accounts is not None:
            self._accounts.forget_device(name)

    def delegates_changed(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        from nodepool.nodemanager.api import delegates

        delegates.update(self._config, found)

    # -- what fits

    def admit(
        self, name: str, rspec: Mapping[str, int], others: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Check that a sliver of any source fits before it is created.

        :raises BackendError: it does not fit in addition to the existing ones; retry later.
        """
        try:
            self.check_fit(name, rspec, others)
        except NodeError as error:
            raise BackendError(str(error), retry=True) from None

    def check_fit(
        self, name: str, wanted: Mapping[str, int], others: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Check whether a sliver fits in addition to the others.

        :raises NodeError: which resource is short, and by how much.
        """
        rest = [spec for other, spec in others.items() if other != name]
        if len(rest) >= self._config.max_slivers:
            raise NodeError(f"quota: all {self._config.max_slivers} slots for slivers are in use")
        share = (
            sum(spec["nm_cpu_guaranteed_share"] for spec in rest)
            + wanted["nm_cpu_guaranteed_share"]
        )
        if share > 1000 - self._config.host_reserve:
            raise NodeError(
                f"quota: guaranteed CPU of {share} per mille is more than "
                f"{1000 - self._config.host_reserve} (host-reserve {self._config.host_reserve})"
            )
        memory = self._memory_of(rest) + self._memory_of([wanted])
        if memory > self._memory:
            raise NodeError(
                f"quota: memory of {memory} MiB is more than the host's {self._memory}"
                + (
                    " (nm_mem_limit 0, no limit, counts as all of it)"
                    if not wanted["nm_mem_limit"]
                    else ""
                )
            )
        disk, promised = self._disk({**others, name: wanted})
        if promised > disk:
            raise NodeError(
                f"quota: disks of {promised} KiB are more than the {disk} KiB that this host can "
                "give to slivers (nm_disk_quota)"
            )

    def _memory_of(self, specs: Iterable[Mapping[str, int]]) -> int:
        return sum(spec["nm_mem_limit"] or self._unlimited for spec in specs)

    def _disk(self, effective: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
        """Return disk space for slivers and the promised part (KiB; 0 without sliver disks)."""
        if self._services.disks is None:
            return self._free_space.total(0) // 1024, 0
        taken: dict[str, int] = self._services.disks.allocated()
        promised = sum(
            max(spec["nm_disk_quota"], taken.get(name, 0) // 1024)
            for name, spec in effective.items()
        )
        return self._free_space.total(sum(taken.values())) // 1024, promised

    def left(self, effective: Mapping[str, Mapping[str, int]]) -> int:
        """Return the bytes that are not promised to slivers."""
        disk, promised = self._disk(effective)
        return max(0, min(self._free_space.free(), (disk - promised) * 1024))

    def capacity(self, effective: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        """Return totals and assigned amounts; memory in MiB, disk in KiB, CPU in per mille."""
        disk, promised = self._disk(effective)
        default = with_defaults(self._config.default_rspec)
        return {
            "host": self._config.host_name,
            "group": self._config.host_group,
            "cores": os.cpu_count() or 1,
            "memory": self._memory,
            "disk": disk,
            "disk_free": max(0, disk - promised),
            "slivers": self._config.max_slivers,
            "cpu": 1000 - self._config.host_reserve,
            "ssh_address": self._config.ssh.address,
            "allocated": {
                "slivers": len(effective),
                "cpu": sum(s["nm_cpu_guaranteed_share"] for s in effective.values()),
                "memory": self._memory_of(effective.values()),
                "disk": promised,
            },
            # Defaults that count for a sliver without its own values.
            "default": {
                "memory": default["nm_mem_limit"],
                "disk": default["nm_disk_quota"] if self._services.disks is not None else 0,
            },
        }
