"""Count launches of new uploads, and return to the previous one if they fail (BLD-23)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from nodepool import exceptions
from nodepool.base import hostnames
from nodepool.base.problems import one_line
from nodepool.config.diskimages import DiskImage
from nodepool.config.model import disk_image
from nodepool.zk.records import HOLD, IN_USE, READY, USED, ImageUpload
from nodepool.zk.rollback import Rollbacks, earlier_upload, upload_path
from nodepool.zk.zookeeper import ZooKeeper

#: What machines of a bad image fail with. Errors of the cloud's API do not blame the image.
SYMPTOMS = (
    exceptions.ConnectionTimeoutException,
    exceptions.ServerCreateTimeoutException,
    exceptions.LaunchKeyscanException,
    exceptions.LaunchStatusException,
)
#: Uploads of an image whose launches are counted: the newest, those that it replaces.
KEPT = 3
#: A node in one of these states has started.
STARTED = frozenset({READY, IN_USE, USED, HOLD})


def trial_options(label: object) -> tuple[int, int]:
    """Return ``rollback-after`` and ``canary`` of the label's image; 0: switched off."""
    image = disk_image(label)
    return (image.rollback_after, image.canary) if isinstance(image, DiskImage) else (0, 0)


def blames_image(error: BaseException) -> bool:
    """Return whether a created machine may have failed because of its image."""
    return isinstance(error, SYMPTOMS) and not isinstance(error, exceptions.OfferRefusedException)


@dataclass
class _Trial:
    """What is known about an upload: machines that have started, and failures without one."""

    started: int = 0
    failures: int = 0
    #: Launches that use it; those that are never started disappear by themselves.
    launches: WeakSet[object] = field(default_factory=WeakSet)


class UploadTrials:
    """How launches of the newest uploads of one provider end; may be used by all threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Image -> path of an upload -> its trial, the last one added last.
        self._trials: dict[str, dict[str, _Trial]] = {}

    def _trial(self, upload: ImageUpload) -> _Trial:
        known = self._trials.setdefault(upload.image_name or "", {})
        path = upload_path(upload)
        if path not in known:
            for old in list(known)[: 1 - KEPT]:
                del known[old]
            known[path] = _Trial()
        return known[path]

    def choose(
        self, zk: ZooKeeper, newest: ImageUpload, canary: int, launch: object, first: bool
    ) -> ImageUpload:
        """Return the upload for an attempt: the previous one while a few launches try the newest.

        :param canary: machines of the newest that have to start before all launches use it.
        :param launch: uses the newest upload until :meth:`ended` if that is returned.
        :param first: it is the first attempt of the launch; later ones do not try.
        """
        if not canary:
            return newest
        with self._lock:
            known = upload_path(newest) in self._trials.get(newest.image_name or "", {})
        if not known:
            self.started(newest, _machines(zk, newest))
        with self._lock:
            trial = self._trial(newest)
            trial.launches.discard(launch)
            if first and trial.started + len(trial.launches) < canary:
                trial.launches.add(launch)
                return newest
            if trial.started >= canary:
                return newest
        return earlier_upload(zk.readImages(), newest) or newest

    def ended(self, launch: object, upload: ImageUpload) -> None:
        """Let another launch try the upload, as this one has ended."""
        with self._lock:
            self._trial(upload).launches.discard(launch)

    def started(self, upload: ImageUpload, machines: int = 1) -> None:
        """Record that machines of the upload have started: it is not rolled back."""
        with self._lock:
            self._trial(upload).started += machines

    def failed(self, upload: ImageUpload, most: int) -> bool:
        """Count a failure; return whether to roll back after this many without a success."""
        with self._lock:
            trial = self._trial(upload)
            trial.failures += 1
            return not trial.started and trial.failures >= most

    def roll_back(self, zk: ZooKeeper, upload: ImageUpload, error: BaseException) -> str | None:
        """Return to the previous upload; None if there is nothing to do. May block.

        :return: what was done, for the log.
        :raises RollbackRefused: somebody has changed one of the uploads at the same time.
        :raises KazooException, TimeoutError: ZooKeeper does not answer.
        """
        if earlier_upload(zk.readImages(), upload) is None:
            return None
        if machines := _machines(zk, upload):
            self.started(upload, machines)
            return None
        with self._lock:
            failures = self._trial(upload).failures
        image, provider = upload.image_name or "", upload.provider_name or ""
        reason = one_line(f"{failures} launches in a row failed, the last one with: {error}")
        by = f"launcher {hostnames.short()}"
        result = Rollbacks(zk, self._clock).back(image, provider, by, reason, upload)
        # The mirror shows the change, also one of others, when a later read is answered.
        zk.kazoo_client.exists(upload_path(upload))
        if not result.changed:
            return None
        (switch,) = result.changed
        return (
            f"Image {image} of provider {provider}: returned from build "
            f"{switch.replaced.build_id} to {switch.used.build_id}: {reason}"
        )


def _machines(zk: ZooKeeper, upload: ImageUpload) -> int:
    """Return how many nodes of the upload have started, of all launchers."""
    path = upload_path(upload)
    return sum(node.image_id == path and node.state in STARTED for node in zk.nodeIterator())
