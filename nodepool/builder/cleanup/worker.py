"""CleanupWorker: deletes what retention does not keep (BLD-10 to BLD-12, BLD-14, BLD-15)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Hashable, Iterator
from typing import Any

from nodepool.builder.cleanup.files import clean_files
from nodepool.builder.cleanup.progress import ProgressCleaner
from nodepool.builder.cleanup.records import RecordCleaner
from nodepool.builder.machine import image_files
from nodepool.builder.progress import gauges
from nodepool.builder.provider_queues import ProviderQueues
from nodepool.builder.retention import (
    BuildKey,
    RemovalPlan,
    Rules,
    Snapshot,
    image_providers,
    upload_key,
)
from nodepool.builder.state import BuilderState
from nodepool.builder.upload.journal import CloudLeftoverSweeper
from nodepool.builder.worker import Worker
from nodepool.config.model import Config
from nodepool.zk.connection.protocol import BROKEN
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import DELETING

#: Minimum seconds between two passes triggered by events.
EVENT_INTERVAL = 1.0
#: Seconds that a pass waits for all clouds together; slower deletions continue alongside.
CLOUD_WAIT = 5.0


class CleanupWorker(Worker):
    """Runs a full pass at each interval, and short ones after events.

    Short passes delete what users or the configuration removed; failed and abandoned records are
    deleted in full passes only, so that they are visible for a while.
    """

    def __init__(self, number: int, state: BuilderState, interval: float) -> None:
        super().__init__(f"CleanupWorker.{number}", state, interval)
        self._lanes = ProviderQueues(self.name, self.log, lambda: self._running or self._by_hand)
        self._records = RecordCleaner(state, self._lanes, self.log)
        self._progress = ProgressCleaner(state, self._records)
        self._strays = CloudLeftoverSweeper(state, self._lanes)
        self._pass_lock = threading.Lock()
        #: Runs a pass on the caller's thread, whether our thread runs or not.
        self._by_hand = False
        self._next_whole = 0.0
        self._last = float("-inf")
        self._cleaned_config: object = None
        #: What was attempted since the last full pass; events do not cause a retry.
        self._tried: set[Hashable] = set()
        self._reported: set[BuildKey] = set()
        #: Images whose deletion was logged, because no configuration here contains them.
        self._unlisted: set[str] = set()

    @staticmethod
    def deleteLocalBuild(
        images_dir: str,
        image_name: str,
        build_id: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> bool:
        """Delete all files of a build; return True if none are left."""
        return image_files.delete_local_build(images_dir, image_name, build_id, log)

    def shutdown(self) -> None:
        super().shutdown()
        self._lanes.wake()

    def make_pass(self) -> float | None:
        now = self._state.clock.monotonic()
        config = self._state.check_config()
        whole = now >= self._next_whole
        if not whole:
            if config is self._cleaned_config and not self._urgent():
                return self._next_whole - now
            if now < self._last + EVENT_INTERVAL:
                return min(self._last + EVENT_INTERVAL, self._next_whole) - now
        try:
            self._cleanup(whole)
        finally:
            self._last = self._state.clock.monotonic()
            if whole:
                self._next_whole = self._last + self._interval
        self._emitBuildRequestStats()
        return max(0.0, self._next_whole - self._state.clock.monotonic())

    def _usable(self) -> bool:
        return self._state.session_usable.is_set() and (
            self._running or threading.current_thread() is not self
        )

    def _rules(self, config: Config) -> Rules:
        return Rules(
            frozenset(config.diskimages),
            {p.name: frozenset(p.diskimages) for p in image_providers(config)},
            self._state.running_builds(),
            self._state.upload_claims.running(),
        )

    def _urgent(self) -> bool:
        """Return whether a record awaits a deletion that was not attempted yet."""
        snapshot = Snapshot(self._zk.readImages())
        rules = self._rules(self._config)
        return any(
            upload.state == DELETING
            and upload.provider_name in rules.known
            and upload_key(upload) not in self._tried
            for upload in snapshot.data.uploads
        ) or any(
            build.state == DELETING
            and self._subject(snapshot, build.image_name or "", build.id or "") not in self._tried
            for build in snapshot.data.builds
        )

    @staticmethod
    def _subject(snapshot: Snapshot, image: str, build_id: str) -> Hashable:
        return (
            image,
            build_id,
            frozenset(upload_key(upload) for upload in snapshot.uploads.get((image, build_id), [])),
        )

    # -- a pass

    @contextlib.contextmanager
    def _going_on(self, text: str, *args: object) -> Iterator[None]:
        """Log errors of the block and continue; a later pass retries."""
        try:
            yield
        except BROKEN as error:
            self.log.warning(
                f"{text} the connection to ZooKeeper broke (%r); retrying in a later pass",
                *args,
                error,
            )
        except Exception:
            self.log.exception(text, *args)

    def _cleanup(self, everything: bool = True) -> None:
        """Run one pass.

        :param everything: also delete what failed or was abandoned.
        """
        with self._pass_lock:
            self._by_hand = threading.current_thread() is not self
            try:
                self._clean(everything)
            finally:
                self._by_hand = False

    def _clean(self, everything: bool) -> None:
        if everything:
            self._tried.clear()
        config = self._cleaned_config = self._config
        snapshot = Snapshot(self._zk.readImages())
        rules = self._rules(config)
        self._report_unreadable(snapshot.data)
        going: set[BuildKey] = set()
        unfinished: list[RemovalPlan] = []
        for image in snapshot.images:
            if not self._usable():
                return
            with self._going_on("Error cleaning image %s:", image):
                self._clean_image(image, snapshot, rules, everything, going, unfinished)
        # Files are deleted without waiting for the clouds.
        if self._usable():
            clean_files(
                config, snapshot, going, self._state.running_builds, self._records.absent, self.log
            )
        if everything and self._usable():
            self._clean_rest(config, snapshot, rules)
        if self._lanes.wait(CLOUD_WAIT):
            self._finish(unfinished, snapshot, going)

    def _clean_image(
        self,
        image: str,
        snapshot: Snapshot,
        rules: Rules,
        everything: bool,
        going: set[BuildKey],
        unfinished: list[RemovalPlan],
    ) -> None:
        plans = snapshot.plan(image, rules, everything)
        self._warn_unlisted(image, snapshot, rules, plans)
        for plan in plans:
            with self._going_on("Error cleaning uploads of build %s-%s:", image, plan.build):
                for upload in plan.drop:
                    self._records.drop(upload)
                for upload in plan.delete:
                    self._tried.add(upload_key(upload))
                    self._records.delete(upload)
            if plan.remove:
                self._tried.add(self._subject(snapshot, image, plan.build))
                self._finish([plan], snapshot, going)
                if plan.delete:
                    unfinished.append(plan)

    def _warn_unlisted(
        self, image: str, snapshot: Snapshot, rules: Rules, plans: list[RemovalPlan]
    ) -> None:
        """Warn about the deletion of an image that this configuration does not contain.

        It may have been removed from all configurations, or may only be configured at another
        builder.
        """
        if image in rules.images:
            self._unlisted.discard(image)
        elif image not in self._unlisted and any(plan.remove or plan.delete for plan in plans):
            self._unlisted.add(image)
            makers = {build.builder or "unknown" for build in snapshot.builds[image].values()}
            self.log.warning(
                "Image %s is not in the configuration of this builder: its builds (made by %s) and "
                "their uploads to providers "
                "that are configured here are being deleted. If another builder builds it, add it "
                "to this configuration, too",
                image,
                ", ".join(sorted(makers)) or "unknown",
            )

    def _finish(self, plans: list[RemovalPlan], snapshot: Snapshot, going: set[BuildKey]) -> None:
        for plan in plans:
            if not self._usable():
                return
            with self._going_on("Error removing build %s-%s:", plan.image, plan.build):
                if self._records.finish(plan, snapshot):
                    going.add((plan.image, plan.build))

    def _clean_rest(self, config: Config, snapshot: Snapshot, rules: Rules) -> None:
        data = snapshot.data
        for key in sorted(data.empty_uploads):
            with self._going_on(
                "Error removing the empty record %s of %s-%s:", key[3], key[0], key[1]
            ):
                if key[:3] not in data.upload_locks:
                    self._records.remove_empty_upload(key)
        used = {build.image_name for build in data.builds} | {
            image for image, _ in data.bad_builds | data.empty_builds
        }
        for image in sorted(data.names - rules.images - used - data.paused - set(data.requests)):
            with self._going_on("Error removing image %s:", image):
                if not data.build_locks.get(image, (0.0, False))[1]:
                    self._records.remove_image(image)
        with self._going_on("Error looking for what uploads left:"):
            self._strays.sweep(config)
        if self._zk.progress_tree.synced.is_set():
            with self._going_on("Error cleaning progress records:"):
                self._progress.clean(config, self._zk.progress_tree.data(), snapshot, rules)

    def _report_unreadable(self, data: ImageData) -> None:
        for image, build_id in sorted(data.bad_builds - self._reported):
            self.log.error(
                "The record of build %s-%s cannot be read; it and its files are kept. Repair it, "
                "or delete the znode "
                "/nodepool/images/%s/builds/%s",
                image,
                build_id,
                image,
                build_id,
            )
        self._reported = set(data.bad_builds)

    def _emitBuildRequestStats(self) -> None:
        gauges.emit(self._state)
