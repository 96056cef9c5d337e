"""BuildWorker: runs the due builds sequentially (BLD-6 and BLD-13)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from nodepool.builder.building.plan import WantedBuild, plan
from nodepool.builder.building.run import BuildRun
from nodepool.builder.machine import image_files
from nodepool.builder.state import BuilderState
from nodepool.builder.worker import Worker
from nodepool.exceptions import ZKLockException
from nodepool.zk import paths
from nodepool.zk.locks.long_held import HeldLock
from nodepool.zk.mirror.progress import BuildProgress
from nodepool.zk.records import BUILDING, FAILED, READY

INTERRUPTED = "the builder ended during the build"


class BuildWorker(Worker):
    """Builds images; two workers of any builders never build the same image concurrently."""

    def __init__(self, number: int, state: BuilderState, interval: float) -> None:
        super().__init__(f"BuildWorker.{number}", state, interval)
        self.run_in_work: BuildRun | None = None

    @property
    def building(self) -> tuple[str, str] | None:
        run = self.run_in_work
        return run.key if run is not None else None

    def abort(self, reason: str) -> None:
        """End the running build within seconds; thread-safe."""
        run = self.run_in_work
        if run is not None:
            run.abort(reason)

    def session_back(self) -> None:
        """Acquire the lock of the running build in the restored ZooKeeper session."""
        run = self.run_in_work
        if run is not None and not run.lock.held:
            threading.Thread(target=run.lock.regain, name=f"{self.name}-lock", daemon=True).start()

    def make_pass(self) -> float | None:
        passed: set[str] = set()
        while True:
            config = self._state.check_config()
            if (
                not self._running
                or self._state.stopping_at_once.is_set()
                or not self._state.session_usable.is_set()
            ):
                return None
            busy = passed | {image for image, _ in self._state.running_builds()}
            decision = plan(
                config,
                self._zk.readImages(),
                busy,
                self._state.build_backoff.wait,
                self._state.clock.time(),
                self._state.builder_id,
            )
            if decision.build is None:
                return decision.wait
            passed.add(decision.build.image)
            try:
                if self._try(decision.build):
                    # Check new requests again, manual ones first.
                    passed = set()
            except (
                Exception
            ):  # other images are built meanwhile; this one waits as after a failed build
                self.log.exception("Error building image %s:", decision.build.image)
                self._state.build_backoff.failed(decision.build.image, decision.build.subject)

    def _try(self, wanted: WantedBuild) -> bool:
        """Try to build; return False if the build is not ours."""
        try:
            lock = HeldLock(self._zk.client, f"{paths.builds(wanted.image)}/lock")
        except ZKLockException:
            return False  # another worker or builder has it; its end is an event
        try:
            if not self._still_wanted(wanted):
                return False
            self._build(wanted, lock)
        finally:
            lock.release()
        return True

    def _still_wanted(self, wanted: WantedBuild) -> bool:
        """Check again with the lock held, when no other builder can build it."""
        newest = self._zk.getMostRecentBuilds(1, wanted.image, READY)
        if (newest[0].id if newest else None) != wanted.newest:
            return False
        return not self._zk.getImagePaused(wanted.image) and (
            wanted.request is None or self._zk.hasBuildRequest(wanted.image)
        )

    def _build(self, wanted: WantedBuild, lock: HeldLock) -> None:
        config = self._config
        diskimage = config.diskimages.get(wanted.image)
        if diskimage is None:
            return
        self.log.info("Building image %s: %s", wanted.image, wanted.reason)
        run = BuildRun(self._state, config, diskimage, wanted, lock, self.log)
        self.run_in_work = run
        try:
            if self._state.stopping_at_once.is_set():
                return
            run.execute()
        finally:
            self.run_in_work = None


def fail_interrupted(
    state: BuilderState, interrupted: Iterable[tuple[str, str]], log: logging.Logger
) -> None:
    """Mark builds of a killed builder of ours as failed and delete their files.

    A build whose result was stored just before remains unchanged.
    """
    store = state.zk.progress
    for image, build_id in interrupted:
        build = state.zk.getBuild(image, build_id)
        if build is not None and build.state != BUILDING:
            continue
        log.warning("Build %s-%s was interrupted: %s", image, build_id, INTERRUPTED)
        image_files.delete_local_build(state.config.images_dir, image, build_id, log)
        progress = store.read_build(build_id) or BuildProgress(
            image, build_id, state.fqdn, state.builder_id
        )
        progress.state = FAILED
        progress.reason = INTERRUPTED
        progress.ended = state.clock.time()
        store.write(progress)
        if build is not None:
            build.state = FAILED
            build.formats = []
            state.zk.storeBuild(image, build, build_id)
