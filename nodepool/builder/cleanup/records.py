"""Delete builds and uploads: records under their locks, images in the clouds (BLD-10).

Implements BLD-10.B and BLD-10.D. Decisions are based on a mirror; every record is read again under
its lock before it is changed, and writes never recreate a deleted record.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, NotEmptyError

from nodepool.base.problems import log_failure
from nodepool.builder.provider_queues import ProviderQueues
from nodepool.builder.retention import RemovalPlan, Snapshot, UploadKey, upload_key
from nodepool.builder.state import BuilderState
from nodepool.exceptions import ZKLockException
from nodepool.zk import locks, paths
from nodepool.zk.mirror.progress import BuildProgress
from nodepool.zk.reading import children
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    UPLOADING,
    ImageBuild,
    ImageUpload,
    RecordError,
)
from nodepool.zk.zookeeper import ZooKeeper

ABANDONED = "the builder stopped when the build began"


class RecordCleaner:
    def __init__(self, state: BuilderState, lanes: ProviderQueues, log: logging.Logger) -> None:
        self._state = state
        self._lanes = lanes
        self.log = log

    @property
    def _zk(self) -> ZooKeeper:
        return self._state.zk

    @contextlib.contextmanager
    def _lock(self, directory: str, record: str) -> Iterator[bool]:
        """Take a lock without waiting; yield False if another client holds it.

        Also False if there is no such record; nothing is created in that case.
        """
        client = self._zk.kazoo_client
        try:
            handle = locks.acquire(client, directory, record, blocking=False)
        except ZKLockException:
            yield False
            return
        try:
            yield True
        finally:
            locks.release(client, handle)

    # -- uploads

    def drop(self, upload: ImageUpload) -> None:
        """Delete the record of an abandoned upload of a kept build."""
        key = upload_key(upload)
        with self._upload_lock(key) as free:
            if not free:
                return
            found = self._zk.getImageUpload(*key)
            if found is not None and found.state == UPLOADING:
                self.log.info(
                    "Deleting the record of abandoned upload %s of %s to %s", key[3], key[0], key[2]
                )
                self._zk.deleteUpload(*key)

    @contextlib.contextmanager
    def _upload(self, key: UploadKey, *states: str | None) -> Iterator[ImageUpload | None]:
        """Yield the upload under its own lock; None if it is locked, or in none of these states."""
        path = paths.upload(*key)
        with self._lock(f"{path}/lock", path) as free:
            found = self._zk.getImageUpload(*key) if free else None
            yield found if found is not None and found.state in states else None

    def _upload_lock(self, key: UploadKey) -> contextlib.AbstractContextManager[bool]:
        return self._lock(f"{paths.uploads(*key[:3])}/lock", paths.upload(*key))

    def delete(self, upload: ImageUpload) -> bool:
        """Mark an upload for deletion and queue its deletion in the cloud.

        Return True if it is marked or does not exist.
        """
        key = upload_key(upload)
        if upload.state != DELETING:
            if upload.state == UPLOADING:
                with self._upload_lock(key) as free:
                    marked = free and self._mark(key, upload.state)
            else:
                marked = self._mark(key, upload.state)
            if not marked:
                return False
        if upload.external_id:
            self._lanes.submit(key[2], key, lambda: self._delete_image(key))
        else:
            self._remove(key)
        return True

    def _mark(self, key: UploadKey, state: str | None) -> bool:
        with self._upload(key, state, DELETING) as found:
            if found is None:
                return False
            if found.state != DELETING:
                if not self._store_deleting(paths.upload(*key), found):
                    return False
                self.log.info(
                    "Marked upload %s of %s-%s to %s for deletion", key[3], key[0], key[1], key[2]
                )
            return True

    def _store_deleting(self, path: str, record: ImageBuild | ImageUpload) -> bool:
        """Store the state; return False if the record has changed (the lock may have been lost)."""
        record.state = DELETING
        assert record.stat is not None
        try:
            self._zk.kazoo_client.set(path, record.serialize(), version=record.stat.version)
        except BadVersionError:
            return False
        except NoNodeError:
            pass
        return True

    def _remove(self, key: UploadKey) -> None:
        """Delete the record; the cloud has no image of the upload."""
        with self._upload(key, DELETING) as found:
            if found is not None and not found.external_id:
                self._zk.deleteUpload(*key)

    def _delete_image(self, key: UploadKey) -> None:
        """Delete the image in the cloud, in the provider's queue; failures are retried later."""
        state = self._state
        if not state.session_usable.is_set():
            return
        try:
            with (
                self._upload(key, DELETING) as found,
                state.managers.use(state.config, key[2]) as manager,
            ):
                if found is None:
                    return
                image = f"{found.external_name} ({found.external_id}) of {key[2]}"
                if manager is None:
                    self.log.warning(
                        "Image %s cannot be deleted: the provider is not running", image
                    )
                    return
                self.log.info("Deleting image %s", image)
                try:
                    manager.deleteImage(found.external_name or "", found.external_id or "")
                except Exception as error:  # a driver may raise anything
                    log_failure(self.log, error, "Cannot delete image %s; retrying later", image)
                    return
                self._zk.deleteUpload(*key)
        except (
            KazooException,
            RuntimeError,
        ) as error:  # RuntimeError: the builder has stopped in the meantime
            self.log.warning(
                "Deleting upload %s of %s to %s: ZooKeeper: %r", key[3], key[0], key[2], error
            )

    # -- builds

    def _uploads_left(self, image: str, build_id: str) -> list[ImageUpload | None]:
        """Return the uploads of a build; None for a znode without data.

        Such znodes are deleted separately.

        :raises RecordError: one cannot be read.
        """
        left = []
        for provider in self._zk.getBuildProviders(image, build_id):
            for number in self._zk.getImageUploadNumbers(image, build_id, provider):
                with contextlib.suppress(NoNodeError):
                    read = self._zk.kazoo_client.get(
                        paths.upload(image, build_id, provider, number)
                    )
                    left.append(ImageUpload.read(*read, build_id, provider, image, number))
        return left

    def finish(self, plan: RemovalPlan, snapshot: Snapshot) -> bool:
        """Mark or delete a build if nothing uses it; return True if its files may be deleted."""
        image, build_id = plan.image, plan.build
        if any(key[:2] == (image, build_id) for key in snapshot.data.upload_locks):
            return False
        try:
            left = self._uploads_left(image, build_id)
        except RecordError:
            return False
        if any(upload is None or upload.state != DELETING for upload in left):
            return False
        if plan.state == DELETING and left:
            return True
        if plan.state == BUILDING:
            with self._lock(f"{paths.builds(image)}/lock", paths.build(image, build_id)) as free:
                return free and self._finish(plan, bool(left))
        return self._finish(plan, bool(left))

    def _finish(self, plan: RemovalPlan, uploads_left: bool) -> bool:
        image, build_id, path = plan.image, plan.build, paths.build(plan.image, plan.build)
        with self._lock(f"{path}/lock", path) as free:
            if not free:
                return False
            try:
                build = ImageBuild.read(*self._zk.kazoo_client.get(path), image, build_id)
            except NoNodeError:
                return True
            except RecordError:
                return False
            if (build and build.state) not in (plan.state, DELETING):
                return False
            # Marked first, even if it is deleted immediately: no further uploads of it are started.
            if build is not None and build.state != DELETING:
                if not self._store_deleting(path, build):
                    return False
                self.log.info(
                    "Marked build %s-%s for deletion (was %s)", image, build_id, plan.state
                )
                if plan.state == BUILDING:
                    self._record_abandoned(build)
            if not uploads_left and self._zk.deleteBuild(image, build_id):
                self.log.info("Deleted the record of build %s-%s", image, build_id)
            return True

    def _record_abandoned(self, build: ImageBuild) -> None:
        """Record the abandoned attempt for users if its builder could not do so."""
        store = self._zk.progress
        if store.read_build(build.id or "") is None:
            store.write(
                BuildProgress(
                    build.image_name or "",
                    build.id or "",
                    build.builder or "",
                    build.builder_id or "",
                    state=FAILED,
                    reason=ABANDONED,
                    ended=self._state.clock.time(),
                    formats=list(build.formats),
                )
            )

    # -- znodes without a record

    def remove_empty_upload(self, key: UploadKey) -> None:
        """Delete a znode that only a lock has left behind."""
        path = paths.upload(*key)
        with self._lock(f"{path}/lock", path) as free, contextlib.suppress(NoNodeError):
            if free and not self._zk.kazoo_client.get(path)[0]:
                self._zk.deleteUpload(*key)

    def absent(self, image: str, build_id: str) -> bool:
        """Return whether there is no build record, or one being deleted; unreadable ones count."""
        try:
            build = ImageBuild.read(
                *self._zk.kazoo_client.get(paths.build(image, build_id)), image, build_id
            )
        except NoNodeError:
            return True
        except RecordError:
            return False
        return build is None or build.state == DELETING

    def build_lock_free(self, image: str) -> bool:
        """Return whether no builder builds the image, by taking the lock."""
        with self._lock(f"{paths.builds(image)}/lock", paths.builds(image)) as free:
            return free or self._zk.kazoo_client.exists(paths.builds(image)) is None

    def remove_image(self, image: str) -> None:
        """Delete the znode of an image without children whose locks are free."""
        client = self._zk.kazoo_client
        names, below = (
            set(children(client, paths.image(image))),
            set(children(client, paths.builds(image))),
        )
        if not names <= {"builds"} or not below <= {"lock"}:
            return
        txn = client.transaction()
        if below:
            txn.delete(f"{paths.builds(image)}/lock")
        if names:
            txn.delete(paths.builds(image))
        txn.delete(paths.image(image))
        with contextlib.suppress(NotEmptyError, NoNodeError):
            results = txn.commit()
            if not any(isinstance(result, Exception) for result in results):
                self.log.info(
                    "Removed image %s, which is in no configuration here and has no builds", image
                )
