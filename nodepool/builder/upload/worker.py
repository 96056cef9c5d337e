"""Upload workers: bring the newest builds to the providers (BLD-9)."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from kazoo.exceptions import KazooException

from nodepool.builder import retention
from nodepool.builder.machine import image_files
from nodepool.builder.progress import gauges
from nodepool.builder.retention import Candidate
from nodepool.builder.state import BuilderState
from nodepool.builder.upload.job import FileDeleted, UploadError, UploadJob
from nodepool.builder.worker import Worker
from nodepool.config.model import Config, ProviderConfig


def subject(candidate: Candidate) -> Hashable:
    """Return what a failure is recorded for.

    A new build, or other options of provider or image, are tried immediately.
    """
    return (
        candidate.build.id,
        fingerprint(candidate.provider),
        fingerprint(candidate.provider_image),
    )


def fingerprint(config: object) -> str:
    """Return the options as given; objects of a configuration are new after each reload."""
    if isinstance(config, ProviderConfig):
        return repr(config.provider)
    plain = (str, int, float, dict, list, type(None))
    return repr(
        sorted((k, v) for k, v in getattr(config, "__dict__", {}).items() if isinstance(v, plain))
    )


class UploadWorker(Worker):
    """Makes uploads sequentially while there are pairs that lack the newest build.

    :param interval: longest time between two passes in seconds.
    """

    def __init__(self, number: int, state: BuilderState, interval: float) -> None:
        super().__init__(f"UploadWorker.{number}", state, interval)
        #: (image, provider) being uploaded.
        self.current: tuple[str, str] | None = None
        self._first = number == 0

    def make_pass(self) -> float | None:
        if self._state.cleanup_interval <= 0 and self._first:
            gauges.emit(self._state)  # there is no cleanup worker to do it
        # Failed pairs are skipped until all others were tried: a broken provider must not starve
        # them.
        tried: set[tuple[str, str, str | None]] = set()
        while self._usable():
            due, done = self._try_all(self._state.check_config(), tried)
            if not done:
                return due
            tried.clear()
        return None

    def _usable(self) -> bool:
        return self._running and self._state.session_usable.is_set()

    def _try_all(
        self, config: Config, tried: set[tuple[str, str, str | None]]
    ) -> tuple[float | None, bool]:
        """Upload all candidates.

        Return the seconds until the next retry, and whether something was uploaded (the
        configuration is then read again).
        """
        candidates = self._candidates(config)
        for candidate in candidates:
            if not self._usable():
                break
            key = (*candidate.pair, candidate.build.id)
            if key not in tried and self._wait(candidate) <= 0:
                tried.add(key)
                if self._try(config, candidate):
                    return None, True
        return min((wait for wait in map(self._wait, candidates) if wait > 0), default=None), False

    def _wait(self, candidate: Candidate) -> float:
        return self._state.upload_backoff.wait(candidate.pair, subject(candidate))

    def _candidates(self, config: Config) -> list[Candidate]:
        found = retention.upload_candidates(
            self._zk.readImages(), retention.image_providers(config), self._state.builder_id
        )
        files = functools.cache(
            functools.partial(image_files.DibImageFile.from_image_id, config.images_dir)
        )
        return [
            c
            for c in found
            if files(image_files.image_id(c.pair[0], c.build.id or ""))
            or self._files_deleted(config, c)
        ]

    def _files_deleted(self, config: Config, candidate: Candidate) -> bool:
        """Return whether this builder may have deleted all files of the build, to report that."""
        diskimage = config.diskimages.get(candidate.pair[0])
        return (
            diskimage is not None
            and diskimage.delete_after_upload
            and candidate.build.builder_id == self._state.builder_id
        )

    def _try(self, config: Config, candidate: Candidate) -> bool:
        """Try to upload; return False if it failed, or is not ours."""
        with self._state.upload_claims.claim(candidate.pair, candidate.build.id or "") as ours:
            if not ours:
                return False
            self.current = candidate.pair
            try:
                return self._upload(config, candidate)
            finally:
                self.current = None

    def _upload(self, config: Config, candidate: Candidate) -> bool:
        backoff = self._state.upload_backoff
        job = UploadJob(
            self,
            self._state,
            config,
            candidate,
            backoff.attempts(candidate.pair, subject(candidate)) + 1,
        )
        try:
            done = job.run()
        except KazooException as error:
            self.log.warning("Upload of %s to %s: ZooKeeper: %r", *candidate.pair, error)
            return False
        except Exception as error:
            if not isinstance(error, UploadError):
                self.log.exception("Error uploading %s to %s:", *candidate.pair)
            reason = str(error) if isinstance(error, UploadError) else repr(error)
            until = backoff.failed(
                candidate.pair, subject(candidate), final=isinstance(error, FileDeleted)
            )
            job.publish_failure(reason, until)
            return False
        if done:
            backoff.succeeded(candidate.pair)
        return done
