"""Count failed launches of uploads, and return to the previous one (BLD-23)."""

from __future__ import annotations

from collections.abc import Callable

from nodepool import exceptions
from nodepool.base import hostnames
from nodepool.base.problems import one_line
from nodepool.config.diskimages import DiskImage
from nodepool.config.model import disk_image
from nodepool.zk.records import HOLD, IN_USE, READY, USED, ImageUpload
from nodepool.zk.rollback import Rollbacks, upload_path
from nodepool.zk.zookeeper import ZooKeeper

#: What machines of a bad image fail with. Errors of the cloud's API do not blame the image.
SYMPTOMS = (
    exceptions.ConnectionTimeoutException,
    exceptions.ServerCreateTimeoutException,
    exceptions.LaunchKeyscanException,
    exceptions.LaunchStatusException,
)
#: A node in one of these states has started.
STARTED = frozenset({READY, IN_USE, USED, HOLD})


def rollback_after(label: object) -> int:
    """Return the option ``rollback-after`` of the label's image; 0: never."""
    image = disk_image(label)
    return image.rollback_after if isinstance(image, DiskImage) else 0


def blames_image(error: BaseException) -> bool:
    """Return whether a created machine may have failed because of its image."""
    return isinstance(error, SYMPTOMS) and not isinstance(error, exceptions.OfferRefusedException)


class FailingUploads:
    """Failed launches in a row of the newest upload of each image of one provider."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Image -> its upload, and its failures; None: one of its machines has started.
        self._counted: dict[str, tuple[str, int | None]] = {}

    def started(self, upload: ImageUpload) -> None:
        """Record that a machine of the upload has started: it is not rolled back."""
        self._counted[upload.image_name or ""] = (upload_path(upload), None)

    def failed(self, upload: ImageUpload, most: int) -> bool:
        """Count a failure; return whether to roll back after this many in a row."""
        image, path = upload.image_name or "", upload_path(upload)
        known, failures = self._counted.get(image, ("", 0))
        if known != path:
            failures = 0
        if failures is None:
            return False
        self._counted[image] = (path, failures + 1)
        return failures + 1 >= most

    def roll_back(self, zk: ZooKeeper, upload: ImageUpload, error: BaseException) -> str | None:
        """Return to the previous upload; None if there is nothing to do. May block.

        :return: what was done, for the log.
        :raises RollbackRefused: somebody has changed one of the uploads at the same time.
        :raises KazooException, TimeoutError: ZooKeeper does not answer.
        """
        path = upload_path(upload)
        if any(node.image_id == path and node.state in STARTED for node in zk.nodeIterator()):
            self.started(upload)
            return None
        image, provider = upload.image_name or "", upload.provider_name or ""
        count = self._counted.get(image, ("", 0))[1]
        reason = one_line(f"{count} launches in a row failed, the last one with: {error}")
        by = f"launcher {hostnames.short()}"
        result = Rollbacks(zk, self._clock).back(image, provider, by, reason, upload)
        # The mirror shows the change, also one of others, when a later read is answered.
        zk.kazoo_client.exists(path)
        if not result.changed:
            return None
        (switch,) = result.changed
        return (
            f"Image {image} of provider {provider}: returned from build "
            f"{switch.replaced.build_id} to {switch.used.build_id}: {reason}"
        )
