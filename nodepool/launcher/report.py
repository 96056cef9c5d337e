"""The launcher's report of itself and of waiting requests, for commands and pages."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kazoo.exceptions import KazooException

from nodepool.base import hostnames
from nodepool.base.problems import one_line
from nodepool.config.model import Config, Label, ProviderConfig, disk_image
from nodepool.config.shown import differences, shown
from nodepool.driver.quota.support import QuotaSupport
from nodepool.exceptions import FOREIGN
from nodepool.launcher.requests.tenants import tenant_usage
from nodepool.launcher.state import LauncherState
from nodepool.launcher.trends import Trends
from nodepool.reasons import Reason
from nodepool.status import cluster
from nodepool.version import get_version_string
from nodepool.zk import reading, reports
from nodepool.zk.history import HistoryReader

#: Seconds between two reports, at least; with thousands of waiting requests, one second for this
#: many of them, up to a limit.
INTERVAL, PER_SECOND, MOST_INTERVAL = 2.0, 2500, 15.0
#: Limits of a report: groups of waiting requests, ids in a group, and hosts and warnings of one
#: provider.
MOST_GROUPS, MOST_IDS, MOST_HOSTS, MOST_WARNINGS = 500, 5000, 1000, 50
#: Groups of waiting requests in a report that would otherwise be too large for ZooKeeper.
MOST_GROUPS_IF_LARGE = 20

Waiting = list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]


class Reporter:
    """Composes and publishes the report.

    :param explain: request, labels, state and reasons of the requests that wait here, in serving
        order.
    :param readiness: whether the launcher can work, and current problems.
    """

    log = logging.getLogger("nodepool.Reporter")

    def __init__(
        self,
        state: LauncherState,
        trends: Trends,
        explain: Callable[[], Waiting],
        readiness: Callable[[], tuple[bool, list[str]]],
        config_files: Callable[[], dict[str, Any]],
    ) -> None:
        self._state = state
        self._trends = trends
        self._explain = explain
        self._readiness = readiness
        self._config_files = config_files
        self._started = state.clock.time()
        self._published: dict[str, Any] | None = None
        #: The configuration that was published last, and the session in which it was.
        self._published_config: tuple[Any, Any] = (None, None)
        #: The configuration that was shown last, since when (UNIX seconds), and how it differs from
        #: the one before.
        self._in_force: tuple[dict[str, Any], float, list[str]] | None = None
        self._due = -math.inf
        #: Something may have changed since the last report was written.
        self._postponed = False
        #: Since when (UNIX seconds) requests for these labels wait for this reason.
        self._since: dict[tuple[tuple[str, ...], str, str], float] = {}

    def recall(self) -> None:
        """Initialize charts and medians from the history.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        self._trends.recall(
            HistoryReader().read_all(self._state.zk.kazoo_client, self._trends.oldest)
        )

    def sample(self) -> None:
        """Note nodes by state and waiting requests by cause for the charts, if a sample is due."""
        zk = self._state.zk
        self._trends.sample(lambda: zk.countNodes().states, lambda: cluster.waiting_by_cause(zk))

    # -- publishing; one thread

    def seconds_left(self, waiting: bool) -> float:
        """Return the seconds until `publish` has to be called; infinite: after a change.

        :param waiting: requests wait; their reasons change without an event.
        """
        if not (waiting or self._postponed):
            return math.inf
        return max(0.0, self._due - self._state.clock.monotonic())

    def publish(self) -> None:
        """Write the report if something has changed and the last one is old enough.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        now = self._state.clock.monotonic()
        self._postponed = now < self._due
        if self._postponed:
            return
        self._due = now + INTERVAL
        content = self.compose()
        seconds = sum(group["count"] for group in content["waiting"]) / PER_SECOND
        self._due = now + max(INTERVAL, min(seconds, MOST_INTERVAL))
        zk, path = self._state.zk, reports.path(self._state.identifier)
        there = path.rpartition("/")[2] in zk.report_tree.reports
        if there and content == self._published:
            return
        if not there:
            self._published_config = (
                None,
                None,
            )  # others deleted both, or this is the first report
        for reduced in _reduced({**content, "time": self._state.clock.time()}):
            try:
                written = reports.write(zk.kazoo_client, path, reduced)
                if written is not None:
                    self._state.server_time.measured(written, now)
                break
            except ValueError as error:
                self.log.debug("Publishing a shorter report: %s", error)
        self._published = content

    def publish_config(self) -> None:
        """Write the configuration in force if it has changed.

        :raises KazooException: ZooKeeper cannot be reached.
        :raises ValueError: it is too large to be published.
        """
        kazoo = self._state.zk.kazoo_client
        config, session = published = (self._state.config, kazoo.client_id)
        known, in_session = self._published_config
        # Identity check: comparing the content of two configurations each second would be too slow.
        if config is None or (config is known and session == in_session):
            return
        try:
            reports.write(kazoo, self._config_path(), self.config())
        except ValueError:
            self._published_config = published  # retrying does not make it smaller
            reading.remove(kazoo, self._config_path())  # the previous one is not in force any more
            raise
        self._published_config = published

    def _config_path(self) -> str:
        return reports.path(self._state.identifier, reports.CONFIGS)

    def withdraw(self) -> None:
        """Delete report and configuration at an orderly stop; otherwise they end with the
        session.
        """
        zk = self._state.zk
        if self._published is not None and zk is not None and zk.connected:
            try:
                reading.remove(zk.kazoo_client, reports.path(self._state.identifier))
                reading.remove(zk.kazoo_client, self._config_path())
            except KazooException as error:
                self.log.debug("Cannot remove the report now: %r", error)

    # -- composing

    def compose(self) -> dict[str, Any]:
        ready, details = self._readiness()
        config = self._state.config
        providers = {} if config is None else config.providers
        return {
            "hostname": hostnames.short(),
            "pid": os.getpid(),
            "version": get_version_string(),
            "started": self._started,
            "ready": ready,
            "details": [one_line(line) for line in details[:50]],
            "config": self.config_files(),
            "providers": {
                name: self._provider(provider) for name, provider in sorted(providers.items())
            },
            "not_running": self.not_running(),
            "not_running_labels": {} if config is None else config.not_running_labels,
            "labels": {} if config is None else self._labels(config),
            "images": {} if config is None else self._images(config),
            "lately": self._trends.labels(),
            "tenants": self._tenants(),
            "waiting": self._waiting(),
        }

    def config(self) -> dict[str, Any]:
        """Return the configuration in force here, without possible secrets."""
        content, known = shown(self._state.config), self._in_force
        if known is None or known[0] != content:
            changes = [] if known is None else list(differences(known[0], content))[:MOST_WARNINGS]
            known = self._in_force = (content, self._state.clock.time(), changes)
        place = {"hostname": hostnames.short(), "pid": os.getpid()}
        return {**place, "in_force_since": known[1], "changes": known[2], **content}

    def config_files(self) -> dict[str, Any]:
        """Return the paths of the files and their errors."""
        found = self._config_files()
        return {**found, "warnings": [one_line(text) for text in found["warnings"][:MOST_WARNINGS]]}

    def not_running(self) -> dict[str, str]:
        """Return provider -> why it is not running."""
        if (config := self._state.config) is None:
            return {}
        reasons = {**config.provider_failures, **config.provider_errors}
        return {
            name: one_line(reasons.get(name, "not running"))
            for name in sorted(config.providers_not_running)
        }

    def _provider(self, provider: ProviderConfig) -> dict[str, Any]:
        """Return what is known without asking the cloud."""
        found: dict[str, Any] = {
            "driver": provider.driver.name,
            "max_concurrency": provider.max_concurrency,
        }
        try:
            manager = self._state.config.provider_managers.get(provider.name)
            workers = self._state.getPoolWorkers(provider.name)
            ids = {worker.pool_name: worker.launcher_id for worker in workers}
            found["pools"] = {
                pool.name: {
                    "labels": sorted(pool.labels),
                    "max_servers": _finite(pool.max_servers),
                    "id": ids.get(pool.name),
                }
                for pool in provider.pools.values()
            }
            if isinstance(manager, QuotaSupport):
                found["limits"] = _amounts(manager.known_limits())
                found["used"] = _amounts(self._state.zk.node_tree.usage(provider.name))
            if manager is not None and manager.cloud_calls is not None:
                found["calls"] = manager.cloud_calls.describe()
            if manager is not None:
                hosts = self._state.drains.show_hosts(manager.describeHosts()[:MOST_HOSTS])
                json.dumps(
                    hosts, allow_nan=False
                )  # raised by a driver; it must not block the whole report
                found["hosts"] = hosts
            found["launching"] = sum(worker.active_launches() for worker in workers)
        except FOREIGN as error:  # raised by a driver: it affects this provider only
            found["error"] = one_line(repr(error))
        return found

    def _labels(self, config: Config) -> dict[str, Any]:
        backing: dict[str, set[str]] = defaultdict(set)
        for _provider, name, entry in _entries(config):
            if other := getattr(entry, "backing_label", None):
                backing[name].add(str(other))
        return {
            name: self._label(name, label, backing.get(name))
            for name, label in config.labels.items()
        }

    def _label(self, name: str, label: Label, backing: Iterable[str] | None) -> dict[str, Any]:
        found: dict[str, Any] = {"min_ready": label.min_ready}
        if backing:
            found["backing"] = sorted(backing)
        if label.min_ready and (declined := self._state.declines.min_ready.get(name)):
            found["declined"] = [
                _published(reason.at(pool))
                for pool, said in sorted(declined.copy().items())
                for reason in said
            ]
        return found

    def _images(self, config: Config) -> dict[str, Any]:
        try:
            return _images(config)
        except FOREIGN as error:  # raised by a driver's configuration
            self.log.debug("Cannot list the images of labels: %r", error)
            return {}

    def _tenants(self) -> dict[str, Any]:
        """Return limits and use of each tenant for its next request; omit unknown ones."""
        config, found = self._state.config, {}
        for tenant, limits in (
            sorted(config.tenant_resource_limits.items()) if config is not None else ()
        ):
            try:
                found[tenant] = {
                    "limits": _amounts(limits),
                    "used": _amounts(tenant_usage(self._state, tenant)),
                }
            except (
                FOREIGN
            ) as error:  # raised by a driver; the limits of its cloud may still be unread
                self.log.debug("Cannot compute the use of tenant %s: %r", tenant, error)
        return found

    def _waiting(self) -> list[dict[str, Any]]:
        """Return groups of requests that wait for the same reason, ordered by their first one."""
        groups: dict[tuple[tuple[str, ...], str, str], dict[str, Any]] = {}
        #: Thousands of requests share one value.
        texts: dict[int, str] = {}
        ids = 0
        now = self._state.clock.time()
        since: dict[tuple[tuple[str, ...], str, str], float] = {}
        oldest: dict[tuple[tuple[str, ...], str, str], float] = {}
        tree = self._state.zk.request_tree
        for request_id, labels, state, reasons in self._explain():
            key = (
                labels,
                state,
                texts.get(id(reasons)) or texts.setdefault(id(reasons), repr(reasons)),
            )
            group = groups.get(key)
            if group is None:
                if len(groups) >= MOST_GROUPS:
                    continue
                group = groups[key] = {
                    "labels": list(labels),
                    "state": state,
                    "since": now,
                    "reasons": [_published(reason) for reason in reasons],
                    "count": 0,
                    "ids": [],
                }
            group["count"] += 1
            request = tree.get(request_id)
            if request is not None and request.created_time:
                oldest[key] = min(request.created_time, oldest.get(key, now))
            if ids < MOST_IDS:
                ids += 1
                group["ids"].append(request_id)
        for key, group in groups.items():
            # The age of a reason is at most that of the oldest request that waits for it.
            since[key] = max(self._since.get(key, now), oldest.get(key, 0.0))
            group["since"] = round(since[key], 3)
        self._since = since
        return list(groups.values())


def _reduced(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the report, then shorter ones for the size limit of ZooKeeper; the last one fits."""
    yield content
    left_out = (
        "its report is too large for ZooKeeper: hosts, disk images and most waiting "
        "requests are not shown"
    )
    providers = {name: {**entry, "hosts": []} for name, entry in content["providers"].items()}
    content = {
        **content,
        "providers": providers,
        "images": {},
        "waiting": content["waiting"][:MOST_GROUPS_IF_LARGE],
        "details": [*content["details"], left_out],
    }
    yield content
    yield {
        **content,
        "providers": {},
        "labels": {},
        "lately": {},
        "tenants": {},
        "waiting": [],
        "not_running": {},
        "not_running_labels": {},
    }


def _published(reason: Reason) -> dict[str, str]:
    found = {
        "code": reason.code.word,
        "pool": reason.pool,
        "text": one_line(reason.at("")),
        "help": one_line(reason.suggestion),
        "root": reason.root.code.word,
        "blocker": one_line(reason.blocker),
        "headline": one_line(reason.headline),
    }
    blocker = dict(reason.root.parameters).get("request")
    return {**found, "request": str(blocker)} if blocker else found


def _entries(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield provider, label and its options of each pool."""
    for provider in config.providers.values():
        for pool in provider.pools.values():
            for label, entry in pool.labels.items() if isinstance(pool.labels, dict) else ():
                yield provider.name, label, entry


def _images(config: Config) -> dict[str, dict[str, Any]]:
    """Return disk images with their rebuild-age, labels and providers, and if they are paused."""
    found: dict[str, dict[str, Any]] = {}
    for name, configured in config.diskimages.items():
        found[name] = {
            "paused": bool(configured.pause),
            "rebuild_age": configured.rebuild_age,
            "labels": set(),
            "providers": set(),
        }
    for provider, label, entry in _entries(config):
        image = disk_image(entry)
        if image is not None and (used := found.get(image.name or "")) is not None:
            used["labels"].add(label)
            used["providers"].add(provider)
    return {
        name: {**entry, "labels": sorted(entry["labels"]), "providers": sorted(entry["providers"])}
        for name, entry in found.items()
    }


def _finite(number: float) -> float | None:
    return number if isinstance(number, (int, float)) and math.isfinite(number) else None


def _amounts(amounts: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the limited amounts without rounding errors of sums."""
    return {
        name: round(number, 6)
        for name, value in (amounts or {}).items()
        if (number := _finite(value)) is not None
    }
