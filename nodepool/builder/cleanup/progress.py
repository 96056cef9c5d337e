"""Delete progress records that are neither written nor needed any more (ZK-11)."""

from __future__ import annotations

import time

from nodepool.builder.cleanup.records import RecordCleaner
from nodepool.builder.retention import Rules, Snapshot
from nodepool.builder.state import BuilderState
from nodepool.config.model import Config
from nodepool.zk.mirror.progress import BuildProgress, ProgressData, UploadFailure
from nodepool.zk.records import BUILDING, FAILED, READY

STOPPED = "the builder stopped during the build"


class ProgressCleaner:
    def __init__(self, state: BuilderState, records: RecordCleaner) -> None:
        self._state = state
        self._records = records
        #: (image, provider) pairs that have ever been configured here.
        self._pairs: set[tuple[str, str]] = set()

    def clean(
        self, config: Config, progress: ProgressData, snapshot: Snapshot, rules: Rules
    ) -> None:
        retention = config.failed_build_retention
        now = time.time()
        for build in progress.builds.values():
            key = (build.image, build.build)
            if key in rules.running_builds or key in snapshot.data.bad_builds:
                continue
            if build.state == BUILDING:
                self._check_living(build, snapshot)
            elif build.build not in snapshot.builds[build.image]:
                since = build.ended or build.updated or build.started or 0.0
                if (build.state == READY or now - since >= retention) and self._records.absent(
                    *key
                ):
                    self._state.zk.progress.delete(build)
        pairs = {(image, provider) for provider, images in rules.known.items() for image in images}
        for failure in progress.failures.values():
            if failure.key not in pairs and self._forgotten(
                failure, snapshot, rules, now - retention
            ):
                self._state.zk.progress.delete(failure)
        self._pairs |= pairs

    def _check_living(self, build: BuildProgress, snapshot: Snapshot) -> None:
        """End a build without a builder as failed, or as its record says."""
        if snapshot.data.build_locks.get(build.image, (0.0, False))[
            1
        ] or not self._records.build_lock_free(build.image):
            return
        store = self._state.zk.progress
        now = store.read_build(build.build)
        if now is None or now.state != BUILDING:
            return
        record = snapshot.builds[build.image].get(build.build)
        if record is not None and record.state == READY:
            now.state, now.ended = READY, record.state_time
        else:
            now.state, now.reason, now.ended = FAILED, STOPPED, time.time()
            self._records.log.warning(
                "Build %s-%s was abandoned without a recorded result: %s",
                build.image,
                build.build,
                STOPPED,
            )
        store.write(now)

    def _forgotten(
        self, failure: UploadFailure, snapshot: Snapshot, rules: Rules, before: float
    ) -> bool:
        """Return whether the failure of a pair that is not configured here can be deleted.

        Other builders may have the pair configured: their records stay for a limited time.
        """
        return (
            failure.provider in rules.known
            or failure.key in self._pairs
            or failure.image not in snapshot.data.names
            or (failure.time or 0.0) < before
        )
