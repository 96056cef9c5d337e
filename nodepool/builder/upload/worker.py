"""Upload workers: bring the newest builds to the providers (builder.md section 9)."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import KazooException

from nodepool.builder.cleanup import retention
from nodepool.builder.cleanup.retention import Candidate
from nodepool.builder.host import image_files
from nodepool.builder.progress import gauges
from nodepool.builder.upload.job import Result, UploadJob
from nodepool.builder.worker import Worker

if TYPE_CHECKING:
    from nodepool.builder.builder import NodePoolBuilder


#: Seconds between two reports when no cleanup worker makes them.
STATISTICS_INTERVAL = 60.0


class UploadClaims:
    """Which (image, provider) a worker of this process is at, and with which build."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[tuple[str, str], str] = {}
        self._seconds: dict[str, int] = {}

    def take(self, pair: tuple[str, str], build_id: str) -> bool:
        """False: another worker has it."""
        with self._lock:
            if pair in self._claims:
                return False
            self._claims[pair] = build_id
            return True

    def release(self, pair: tuple[str, str]) -> None:
        with self._lock:
            self._claims.pop(pair, None)

    def running(self) -> set[tuple[str, str, str]]:
        """(image, build, provider) of each."""
        with self._lock:
            return {(image, build, provider) for (image, provider), build in self._claims.items()}

    def second(self, image: str) -> int:
        """UNIX time for an external name, never the same twice: providers may share what names must be unique in (a bucket)."""
        with self._lock:
            found = self._seconds[image] = max(int(time.time()), self._seconds.get(image, 0) + 1)
            return found


def subject(candidate: Candidate) -> Hashable:
    """What a failure counts for: with a new build, or other options of provider or image, it is tried at once."""
    return candidate.build.id, fingerprint(candidate.provider), fingerprint(candidate.provider_image)


def fingerprint(config: Any) -> str:
    """Options as they were given; objects of a configuration are new after each reload."""
    given = getattr(config, "provider", None)
    if isinstance(given, dict):
        return repr(given)
    plain = (str, int, float, dict, list, type(None))
    return repr(sorted((k, v) for k, v in getattr(config, "__dict__", {}).items() if isinstance(v, plain)))


class UploadWorker(Worker):
    """Makes one upload after the other while there are pairs that lack the newest build.

    :param interval: seconds; a pass is made at least so often.
    """

    def __init__(self, number: int, builder: NodePoolBuilder, interval: float) -> None:
        super().__init__(f"UploadWorker.{number}", builder, interval)
        #: (image, provider) being uploaded.
        self.current: tuple[str, str] | None = None
        self._statistics_due = 0.0

    def make_pass(self) -> float | None:
        if self._builder.cleanup_interval <= 0 and self is self._builder._upload_workers[0]:
            self._emit_statistics()
        # What did not work is left alone until all others had their turn: a broken provider must not starve them.
        tried: set[tuple[str, str, str | None]] = set()
        due: float | None = None
        while self._usable():
            config = self._builder.check_config()
            due, done = self._try_all(config, tried)
            if not done:
                return due
            tried.clear()
        return due

    def _emit_statistics(self) -> None:
        """The cleanup worker's task, where there is none."""
        now = time.monotonic()
        if now >= self._statistics_due:
            self._statistics_due = now + STATISTICS_INTERVAL
            gauges.emit(self._builder)

    def _usable(self) -> bool:
        return self._running and self._builder.session_usable.is_set()

    def _try_all(self, config: Any, tried: set[tuple[str, str, str | None]]) -> tuple[float | None, bool]:
        """Seconds until the next retry, and whether something was uploaded (the configuration is looked at again)."""
        due: float | None = None
        for candidate in self._candidates(config):
            if not self._usable():
                break
            key = (*candidate.pair, candidate.build.id)
            wait = self._builder.upload_backoff.wait(candidate.pair, subject(candidate))
            if wait > 0:
                due = wait if due is None else min(due, wait)
            elif key not in tried:
                tried.add(key)
                result = self._try(config, candidate)
                if result is Result.DONE:
                    return None, True
                if result is Result.FAILED:
                    wait = self._builder.upload_backoff.wait(candidate.pair, subject(candidate))
                    due = wait if due is None else min(due, wait)
        return due, False

    def _candidates(self, config: Any) -> list[Candidate]:
        found = retention.upload_candidates(self._zk.readImages(), retention.image_providers(config))
        local: dict[str, bool] = {}
        for candidate in found:
            base = image_files.image_id(candidate.image, candidate.build.id or "")
            if base not in local:
                local[base] = bool(image_files.DibImageFile.from_image_id(config.images_dir, base))
        return [c for c in found if local[image_files.image_id(c.image, c.build.id or "")]]

    def _try(self, config: Any, candidate: Candidate) -> Result:
        claims, backoff = self._builder.upload_claims, self._builder.upload_backoff
        if not claims.take(candidate.pair, candidate.build.id or ""):
            return Result.SKIPPED
        self.current = candidate.pair
        try:
            job = UploadJob(self, self._builder, config, candidate, backoff.attempts(candidate.pair, subject(candidate)) + 1)
            try:
                result = job.run()
            except KazooException as error:
                self.log.warning("Upload of %s to %s: ZooKeeper: %r", *candidate.pair, error)
                return Result.SKIPPED
            except Exception as error:
                self.log.exception("Error uploading %s to %s:", *candidate.pair)
                job.reason = repr(error)
                result = Result.FAILED
            if result is Result.FAILED:
                job.publish_failure(backoff.failed(candidate.pair, subject(candidate)))
            elif result is Result.DONE:
                backoff.succeeded(candidate.pair)
            return result
        finally:
            self.current = None
            claims.release(candidate.pair)
