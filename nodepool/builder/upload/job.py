"""One upload of one build to one provider (BLD-9, "Doing the upload")."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import metrics
from nodepool.base.problems import log_failure
from nodepool.builder.building import process
from nodepool.builder.machine import image_files
from nodepool.builder.retention import Candidate, make_newest, upload_key
from nodepool.builder.state import BuilderState
from nodepool.builder.upload import journal as upload_journal
from nodepool.builder.worker import Worker
from nodepool.config.model import Config
from nodepool.driver.provider import Provider
from nodepool.exceptions import ZKLockException
from nodepool.zk import paths
from nodepool.zk.cluster import CLUSTER_ID
from nodepool.zk.locks import ContenderGone
from nodepool.zk.locks.long_held import HeldLock, Lost
from nodepool.zk.mirror.progress import ProgressStore, UploadFailure, UploadProgress
from nodepool.zk.records import DELETING, FAILED, READY, UPLOADING, ImageUpload, RecordError
from nodepool.zk.rollback import RollbackRefused, Rollbacks

#: Seconds a post-upload hook may take.
HOOK_TIMEOUT = 3600.0


class UploadError(Exception):
    """The upload failed; the text is the reason for users."""


class FileDeleted(UploadError):
    """The option ``delete-after-upload`` has deleted the file: no attempt can succeed."""


class UploadJob:
    """Holds the upload lock while it works; the record is written before the cloud is called.

    :param attempt: 1 for the first one of this build.
    """

    def __init__(
        self,
        worker: Worker,
        state: BuilderState,
        config: Config,
        candidate: Candidate,
        attempt: int,
    ) -> None:
        self._worker = worker
        self._state = state
        self._config = config
        self._candidate = candidate
        self._attempt = attempt
        self.log = worker.log
        self.image, self.provider = candidate.pair
        self.build_id = candidate.build.id or ""
        self.number = ""
        self._lock: HeldLock
        #: From before the call of the cloud until ZooKeeper knows all that the cloud has of this
        #: upload.
        self._note: upload_journal.UploadEntry
        self._started = time.time()

    # -- frame

    def run(self) -> bool:
        """Run the upload; return False if there is nothing to do, or another builder does it.

        :raises UploadError: it failed.
        :raises KazooException: ZooKeeper failed before anything was done.
        """
        try:
            self._lock = HeldLock(
                self._state.zk.client,
                f"{paths.uploads(self.image, self.build_id, self.provider)}/lock",
                record=paths.build(self.image, self.build_id),
            )
        except ZKLockException:
            return False
        try:
            if not self._still_wanted():
                return False
            record = self._new_record(UPLOADING)
            self.number = self._state.zk.storeImageUpload(
                self.image, self.build_id, self.provider, record
            )
            self.log.info(
                "Uploading %s (build %s) to %s as upload %s",
                self.image,
                self.build_id,
                self.provider,
                self.number,
            )
            self._upload()
        finally:
            self._lock.release()
        return True

    def _still_wanted(self) -> bool:
        """Check conditions 4 and 6 with the lock held."""
        zk = self._state.zk
        build = zk.getBuild(self.image, self.build_id)
        return (
            build is not None
            and build.state == READY
            and not zk.getUploads(self.image, self.build_id, self.provider, [READY])
        )

    def _new_record(
        self, state: str, name: str | None = None, external_id: str | None = None
    ) -> ImageUpload:
        """Return a record; name and id are those of the image in the cloud, if there is one."""
        build = self._candidate.build
        record = ImageUpload(self.build_id, self.provider, self.image)
        if state in (UPLOADING, READY):
            record.username, record.python_path, record.shell_type = (
                build.username,
                build.python_path,
                build.shell_type,
            )
        record.state = state
        if external_id is not None:
            record.external_id, record.external_name = external_id, name
            record.format = self._candidate.provider.image_type
        return record

    def _upload(self) -> None:
        started = time.monotonic()
        with self._state.managers.use(self._config, self.provider) as manager:
            try:
                name, external_id = self._send(manager)
            except UploadError as error:
                self._failed(error)
                raise
            assert manager is not None  # else nothing has been sent
            try:
                self._hook(external_id)
                if not self._provider_known():
                    raise UploadError(
                        f"provider {self.provider} was removed from the configuration during the "
                        "upload"
                    )
            except UploadError as error:
                self._failed_with_image(error, manager, name, external_id)
                raise
            self._succeeded(manager, name, external_id, started)

    # -- the cloud

    def _send(self, manager: Provider | None) -> tuple[str, str]:
        """Upload the image; return its external name and id.

        :raises UploadError: the upload failed.
        """
        if manager is None:
            raise UploadError(f"provider {self.provider} is not running; see the log of its start")
        provider = self._candidate.provider
        path, image_file = self._file(provider.image_type or "")
        name = self._external_name(provider.image_name_format)
        self._note = upload_journal.begin(
            self._config.images_dir, (self.image, self.build_id, self.provider, self.number), name
        )
        progress = UploadProgress(
            self.image,
            self.build_id,
            self.provider,
            self.number,
            self._state.fqdn,
            started=self._started,
            bytes_total=os.path.getsize(path),
            attempt=self._attempt,
        )
        publisher, key = (
            self._state.publisher,
            ("upload", self.build_id, self.provider, self.number),
        )
        publisher.keep(key, lambda store: store.write(progress))
        try:
            external_id = manager.uploadImage(
                self._candidate.provider_image,
                name,
                path,
                image_type=provider.image_type,
                meta=self._metadata(),
                md5=image_file.md5,
                sha256=image_file.sha256,
            )
        except Exception as error:
            # The clean-up searches for an image that the cloud may have created, because the upload
            # is in the journal.
            log_failure(
                self.log,
                error,
                "Failed to upload %s (build %s) to %s",
                self.image,
                self.build_id,
                self.provider,
            )
            raise UploadError(f"{type(error).__name__}: {error}") from error
        finally:
            publisher.forget(key)
            publisher.write(key, lambda store: store.delete(progress))
        if external_id is None:
            raise UploadError(f"provider {self.provider} returned no id for the uploaded image")
        self.log.info(
            "%s (build %s) is at %s as %s, id %s",
            self.image,
            self.build_id,
            self.provider,
            name,
            external_id,
        )
        return name, str(external_id)

    def _file(self, image_type: str) -> tuple[str, image_files.DibImageFile]:
        base = image_files.image_id(self.image, self.build_id)
        image_file = image_files.DibImageFile(base, image_type)
        path = image_file.to_path(self._config.images_dir)
        if not os.path.isfile(path):
            diskimage = self._config.diskimages.get(self.image)
            if diskimage is not None and diskimage.delete_after_upload:
                raise FileDeleted(
                    f"delete-after-upload has deleted file {path}; only a new build can be uploaded"
                )
            raise UploadError(
                f"file {path} does not exist; provider {self.provider} needs format {image_type}"
            )
        return path, image_file

    def _external_name(self, name_format: str) -> str:
        try:
            return name_format.format(
                image_name=self.image,
                upload_id=self.number,
                build_id=self.build_id,
                timestamp=str(self._state.upload_claims.second(self.image)),
            )
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise UploadError(
                f"image-name-format {name_format!r} of provider {self.provider} is invalid "
                f"({error!r}); it may contain "
                "{image_name}, {upload_id}, {timestamp} and {build_id}"
            ) from None

    def _metadata(self) -> dict[str, Any]:
        diskimage = self._config.diskimages.get(self.image)
        provider_image = self._candidate.provider_image
        return {
            **(diskimage.meta if diskimage is not None else {}),
            **(getattr(provider_image, "tags", None) or {}),
            **(getattr(provider_image, "meta", None) or {}),
            "nodepool_build_id": self.build_id,
            "nodepool_upload_id": self.number,
            **self._cluster(),
        }

    def _cluster(self) -> dict[str, str]:
        """Return the id of the cluster as metadata; empty if it cannot be read.

        An upload must not fail because of it.
        """
        try:
            return {CLUSTER_ID: self._state.zk.cluster.identity()}
        except (KazooException, RecordError) as error:
            self.log.warning(
                "Upload of %s to %s continues without %s: %s",
                self.image,
                self.provider,
                CLUSTER_ID,
                error,
            )
            return {}

    def _hook(self, external_id: str) -> None:
        hook = self._candidate.provider.post_upload_hook
        if not hook:
            return
        path, _ = self._file(self._candidate.provider.image_type or "")
        try:
            status, output = process.run_hook(
                [hook, self.provider, external_id, path], HOOK_TIMEOUT
            )
        except OSError as error:
            self.log.error("Cannot start post-upload-hook %s: %s", hook, error)
            raise UploadError(
                f"post-upload-hook {hook} cannot be started: {error.strerror or error}"
            ) from error
        if status != 0:
            self.log.error(
                "post-upload-hook %s ended with status %s; output: %s", hook, status, output
            )
            raise UploadError(
                f"post-upload-hook {hook} ended with status {status}; see the builder's log"
            )
        self.log.info("post-upload-hook %s: %s", hook, output)

    def _delete_image(self, manager: Provider, name: str, external_id: str) -> bool:
        """Delete the image; return True if the cloud does not have it any more."""
        try:
            manager.discardImage(name, external_id)
        except Exception as error:  # a driver may raise anything
            log_failure(
                self.log,
                error,
                "Cannot delete the just uploaded image %s (%s) of %s",
                name,
                external_id,
                self.provider,
            )
            return False
        self.log.info(
            "Deleted the just uploaded image %s (%s) of %s", name, external_id, self.provider
        )
        self._note.end()
        return True

    def _provider_known(self) -> bool:
        provider = self._state.config.providers.get(self.provider)
        return provider is not None and bool(provider.manage_images)

    # -- results

    def _succeeded(self, manager: Provider, name: str, external_id: str, started: float) -> None:
        try:
            self._store(self._new_record(READY, name, external_id))
        except Lost as error:
            reason = f"the result could not be stored: {error}"
            self.log.error(
                "Upload of %s (build %s) to %s: %s",
                self.image,
                self.build_id,
                self.provider,
                reason,
            )
            self._delete_image(manager, name, external_id)
            raise UploadError(reason) from error
        self._note.end()
        statsd, metric = self._state.statsd, metrics.IMAGE_UPLOADS(self.image, self.provider)
        statsd.timing(metric, int((time.monotonic() - started) * 1000))
        statsd.incr(metric)
        self._publish(lambda store: store.delete(UploadFailure(self.image, self.provider)))

    def _failed(self, reason: UploadError) -> None:
        self.log.error(
            "Upload of %s (build %s) to %s failed: %s",
            self.image,
            self.build_id,
            self.provider,
            reason,
        )
        try:
            self._store(self._new_record(FAILED))
        except Lost as error:
            # Without our lock the record counts as abandoned, with the same result.
            self.log.warning(
                "Upload %s of %s to %s: %s", self.number, self.image, self.provider, error
            )

    def _failed_with_image(
        self, reason: UploadError, manager: Provider, name: str, external_id: str
    ) -> None:
        """Record a failure after the image was created in the cloud, where it must not stay."""
        if not self._delete_image(manager, name, external_id):
            self.log.error(
                "Upload of %s to %s failed: %s; the deletion of the image will be retried",
                self.image,
                self.provider,
                reason,
            )
            try:
                self._store(self._new_record(DELETING, name, external_id))
                self._note.end()
            except Lost as error:
                self.log.error(
                    "Image %s (%s) of %s is not deleted yet: %s",
                    name,
                    external_id,
                    self.provider,
                    error,
                )
        elif self._provider_known():
            self._failed(reason)
        else:  # no clean-up would remove a failed record
            self.log.error("Upload of %s to %s failed: %s", self.image, self.provider, reason)
            try:
                self._locked(
                    lambda _contender: self._state.zk.deleteUpload(
                        self.image, self.build_id, self.provider, self.number
                    )
                )
            except Lost as error:
                self.log.warning(
                    "Upload %s of %s to %s: %s", self.number, self.image, self.provider, error
                )

    def _store(self, record: ImageUpload) -> None:
        """Write the result under our number, waiting for ZooKeeper if needed.

        :raises Lost: the upload is not ours any more, or ZooKeeper is not available before we must
            end.
        """
        record.id = self.number
        zk = self._state.zk

        def write(contender: str) -> None:
            if record.state == READY and self._lock.regained:
                self._check_regained()
            diskimage = self._config.diskimages.get(self.image)
            if record.state == READY and diskimage is not None and diskimage.verify is not None:
                try:
                    Rollbacks(zk, time.time).hold_back(record, contender)
                except RollbackRefused as error:
                    raise Lost(str(error)) from error
                return
            if record.state == READY:
                newest = zk.getMostRecentImageUpload(self.image, self.provider, cached=True)
                key = (self.image, self.build_id, self.provider, self.number)
                ours = newest is not None and upload_key(newest) == key
                make_newest(record, None if ours else newest, self.log)
            result = (self.image, self.build_id, self.provider, record, self.number)
            try:
                zk.storeImageUpload(*result, contender)
            except ContenderGone:
                if zk.getBuild(self.image, self.build_id) is not None:
                    raise
                zk.storeImageUpload(*result)  # deleted with the build: the clean-up does the rest

        self._locked(write)

    def _check_regained(self) -> None:
        """Check what others did while the lock was lost.

        :raises Lost: the image is not needed, or may not exist any more.
        """
        zk = self._state.zk
        if any(
            u.id != self.number
            for u in zk.getUploads(self.image, self.build_id, self.provider, [READY])
        ):
            raise Lost("another builder has uploaded this build since")
        own = zk.getImageUpload(self.image, self.build_id, self.provider, self.number)
        if own is None or own.state == DELETING:
            # Without a record, a launcher deletes the image as leaked.
            raise Lost("the record of the upload has been removed as abandoned")

    def _locked(self, write: Callable[[str], Any]) -> None:
        """Run a function with the lock held.

        :raises Lost: see :meth:`_store`.
        """
        self._lock.store(write, self._state.session_usable, lambda: self._worker.running)

    # -- what users see

    def publish_failure(self, reason: str, next_try: float) -> None:
        """Publish the failure; ``next_try`` is a UNIX time, as is the clock of the back-off.

        Infinity: it is not retried.
        """
        failure = UploadFailure(
            self.image,
            self.provider,
            self.build_id,
            self.number,
            reason,
            time.time(),
            self._attempt,
            next_try if math.isfinite(next_try) else None,
        )
        self._publish(lambda store: store.write(failure))

    def _publish(self, write: Callable[[ProgressStore], Any]) -> None:
        self._state.publisher.write(("upload-failure", self.image, self.provider), write)
