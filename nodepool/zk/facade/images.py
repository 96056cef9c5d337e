"""Facade methods about images, builds and uploads (PY-3)."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from nodepool.exceptions import ZKException
from nodepool.zk import locks, paths
from nodepool.zk.facade.base import FacadeBase
from nodepool.zk.mirror.images import ImageData, ImageTree
from nodepool.zk.mirror.progress import ProgressData, ProgressStore, ProgressTree
from nodepool.zk.reading import create_next, remove, write
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    READY,
    UPLOADING,
    ImageBuild,
    ImageBuildRequest,
    ImageUpload,
    newest_first,
)
from nodepool.zk.writer import TransactionFailed, Txn

#: How often a record is read again if another client changes it at the same time.
TRIES = 10


class ImageMethods(FacadeBase):
    """Images: builds, uploads, flags, locks, export and import."""

    # -- locks

    @contextlib.contextmanager
    def _locked(self, directory: str, blocking: bool, timeout: float | None) -> Iterator[None]:
        handle = locks.acquire(self.kazoo_client, directory, None, blocking, timeout)
        try:
            yield
        finally:
            locks.release(self.kazoo_client, handle)

    def imageBuildLock(
        self, image: str, blocking: bool = True, timeout: float | None = None
    ) -> Any:
        """Lock held during a whole build of the image."""
        return self._locked(f"{paths.builds(image)}/lock", blocking, timeout)

    def imageBuildIdLock(
        self, image: str, build_id: str, blocking: bool = True, timeout: float | None = None
    ) -> Any:
        """Lock held while a build is being deleted."""
        return self._locked(f"{paths.build(image, build_id)}/lock", blocking, timeout)

    def imageUploadLock(
        self,
        image: str,
        build_id: str,
        provider: str,
        blocking: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Lock held during a whole upload."""
        return self._locked(f"{paths.uploads(image, build_id, provider)}/lock", blocking, timeout)

    def imageUploadNumberLock(
        self, image_upload: ImageUpload, blocking: bool = True, timeout: float | None = None
    ) -> Any:
        """Lock held while an upload is being deleted."""
        path = paths.upload(
            image_upload.image_name or "",
            image_upload.build_id or "",
            image_upload.provider_name or "",
            image_upload.id or "",
        )
        return self._locked(f"{path}/lock", blocking, timeout)

    # -- images and builds

    def getImageNames(self) -> list[str]:
        return self._children(paths.IMAGES)

    def getBuildIds(self, image: str) -> list[str]:
        return [i for i in self._children(paths.builds(image)) if i != "lock"]

    def getBuild(self, image: str, build_id: str) -> ImageBuild | None:
        return self._record(ImageBuild, paths.build(image, build_id), image, build_id)

    def getBuilds(self, image: str, states: list[str] | None = None) -> list[ImageBuild]:
        builds = [self.getBuild(image, i) for i in self.getBuildIds(image)]
        return [b for b in builds if b is not None and (states is None or b.state in states)]

    def getMostRecentBuilds(
        self, count: int, image: str, state: str | None = None
    ) -> list[ImageBuild]:
        """Return builds, newest first by ``state_time``."""
        return newest_first(self.getBuilds(image, None if state is None else [state]), count)

    def _write(self, path: str, data: bytes, lock: str | None) -> None:
        """Write or create a znode.

        :param lock: path of a contender for a lock, without which nothing is written.
        :raises ContenderGone: it does not exist.
        :raises ZKException: others keep creating or deleting the znode.
        """
        if lock is None:
            write(self.kazoo_client, path, data)
            return
        for operation in (Txn.set, Txn.create) * TRIES:
            txn = Txn(self.kazoo_client)
            txn.check(lock)
            operation(txn, path, data)
            try:
                self.writer.run(txn)
                return
            except TransactionFailed as error:
                if error.index == 0:
                    raise locks.ContenderGone(str(error)) from error
        raise ZKException(f"{path} is created and deleted again and again")

    def storeBuild(
        self,
        image: str,
        build_data: ImageBuild,
        build_id: str | None = None,
        lock: str | None = None,
    ) -> str:
        """Create (new id) or write a build; return its id.

        :param lock: path of our contender for the lock of the image's builds, without which
            nothing is written.
        :raises ContenderGone: the lock was lost.
        """
        if build_id is None:
            build_id = uuid.uuid4().hex
            self.kazoo_client.create(
                paths.build(image, build_id), build_data.serialize(), makepath=True
            )
        else:
            self._write(paths.build(image, build_id), build_data.serialize(), lock)
        build_data.id = build_id
        return build_id

    def deleteBuild(self, image: str, build_id: str) -> bool:
        """Delete a build; return False while it has upload records."""

        def unused() -> bool:
            providers = self.getBuildProviders(image, build_id)
            return not any(
                self.getImageUploadNumbers(image, build_id, provider) for provider in providers
            )

        return self._delete(paths.build(image, build_id), unused)

    def markDeleting(self, image: str, build_id: str, *upload: str) -> str | None:
        """Let builders delete a build, or an upload, unless a builder is working on it.

        Only the version that was read is replaced; otherwise the record is read again, so that a
        builder that starts or ends something at this moment is not overridden.

        :param upload: provider and number.
        :return: ``deleting``, the state that forbids it, the last state of a record that keeps
            changing, or None: there is no such record.
        """
        names, state = (image, build_id, *upload), None
        if not paths.are_names(*names):
            return None
        path, running = (
            (paths.upload(*names), UPLOADING) if upload else (paths.build(*names), BUILDING)
        )
        for _ in range(TRIES):
            record = self.getImageUpload(*names) if upload else self.getBuild(*names)
            state = None if record is None else record.state
            if record is None or state in (running, DELETING):
                return state
            record.state = DELETING
            try:
                self.kazoo_client.set(
                    path, record.serialize(), -1 if record.stat is None else record.stat.version
                )
            except BadVersionError:
                continue
            except NoNodeError:
                return None
            return DELETING
        return state

    # -- flags

    def getImagePaused(self, image: str) -> bool:
        return self.kazoo_client.exists(f"{paths.image(image)}/pause") is not None

    def setImagePaused(self, image: str, paused: bool) -> None:
        """Pause or unpause the builds of an image."""
        path = f"{paths.image(image)}/pause"
        try:
            if paused:
                self.kazoo_client.create(path, makepath=True)
            else:
                self.kazoo_client.delete(path)
        except (NodeExistsError, NoNodeError):
            pass

    def submitBuildRequest(self, image: str) -> int | None:
        """Request a build; return the zxid of the request: earlier builds are not for it.

        Repeating the request lets a builder that waits after a failure try now. None: the earlier
        request was served at this moment.
        """
        path = f"{paths.image(image)}/request-build"
        try:
            return int(self.kazoo_client.create(path, makepath=True, include_data=True)[1].mzxid)
        except NodeExistsError:
            with contextlib.suppress(NoNodeError):
                return int(self.kazoo_client.set(path, b"").mzxid)
        return None

    def hasBuildRequest(self, image: str) -> bool:
        return self.kazoo_client.exists(f"{paths.image(image)}/request-build") is not None

    def getBuildRequest(self, image: str) -> ImageBuildRequest | None:
        stat = self.kazoo_client.exists(f"{paths.image(image)}/request-build")
        if stat is None:
            return None
        return ImageBuildRequest(image, not self.readImages(cached=False).served(image), stat)

    def removeBuildRequest(self, image: str) -> None:
        remove(self.kazoo_client, f"{paths.image(image)}/request-build")

    # -- uploads

    def _imageUploadPath(self, image: str, build_id: str, provider: str) -> str:
        return paths.uploads(image, build_id, provider)

    def getBuildProviders(self, image: str, build_id: str) -> list[str]:
        return self._children(paths.build_providers(image, build_id))

    def getImageUploadNumbers(self, image: str, build_id: str, provider: str) -> list[str]:
        return [i for i in self._children(paths.uploads(image, build_id, provider)) if i != "lock"]

    def getImageUpload(
        self, image: str, build_id: str, provider: str, upload_number: str
    ) -> ImageUpload | None:
        path = paths.upload(image, build_id, provider, upload_number)
        return self._record(ImageUpload, path, build_id, provider, image, upload_number)

    def getUploads(
        self, image: str, build_id: str, provider: str, states: list[str] | None = None
    ) -> list[ImageUpload]:
        uploads = [
            self.getImageUpload(image, build_id, provider, n)
            for n in self.getImageUploadNumbers(image, build_id, provider)
        ]
        return [u for u in uploads if u is not None and (states is None or u.state in states)]

    def getMostRecentBuildImageUploads(
        self, count: int, image: str, build_id: str, provider: str, state: str | None = None
    ) -> list[ImageUpload]:
        """Return ready uploads, newest first by ``state_time``."""
        return newest_first(
            self.getUploads(image, build_id, provider, None if state is None else [state]), count
        )

    def getMostRecentImageUpload(
        self, image: str, provider: str, state: str = READY, cached: bool = False
    ) -> ImageUpload | None:
        """Return the newest upload of the image to the provider over all builds.

        Uploads that are held back (BLD-25) are not returned.
        """
        tree = self.image_tree
        if cached and state == READY and tree is not None and tree.synced.is_set():
            return tree.newest_ready(image, provider)
        wanted = (image, provider, state)
        found = [
            u
            for u in self.readImages(cached=False).uploads
            if (u.image_name, u.provider_name, u.state) == wanted and not u.held_back
        ]
        return max(found, key=lambda upload: upload.state_time or 0, default=None)

    def getProviderUploads(self, provider_name: str) -> dict[str, dict[str, list[ImageUpload]]]:
        """Return {image: {build: [upload]}} of one provider."""
        result: dict[str, dict[str, list[ImageUpload]]] = {}
        for image in self.getImageNames():
            for build_id in self.getBuildIds(image):
                if provider_name in self.getBuildProviders(image, build_id):
                    uploads = self.getUploads(image, build_id, provider_name)
                    result.setdefault(image, {}).setdefault(build_id, []).extend(uploads)
        return result

    def getCachedImageUploads(self) -> list[ImageUpload]:
        """Return all mirrored uploads."""
        return (
            self.readImages().uploads if self.image_tree is None else self.image_tree.data().uploads
        )

    def storeImageUpload(
        self,
        image: str,
        build_id: str,
        provider: str,
        image_data: ImageUpload,
        upload_number: str | None = None,
        lock: str | None = None,
    ) -> str:
        """Create (new number) or write an upload; return its number.

        :param lock: path of our contender for the lock of the uploads, without which nothing is
            written.
        :raises ContenderGone: the lock was lost.
        :raises ZKException: the build is missing.
        """
        if self.kazoo_client.exists(paths.builds(image)) is None:
            raise ZKException(f"Cannot find build {build_id} of image {image}")
        if upload_number is None:
            path = create_next(
                self.kazoo_client, paths.uploads(image, build_id, provider), image_data.serialize()
            )
            upload_number = path.rsplit("/", 1)[1]
        else:
            path = paths.upload(image, build_id, provider, upload_number)
            self._write(path, image_data.serialize(), lock)
        image_data.id = upload_number
        return upload_number

    def deleteUpload(self, image: str, build_id: str, provider: str, upload_number: str) -> None:
        self._delete(paths.upload(image, build_id, provider, upload_number))

    # -- everything

    def readImages(self, cached: bool = True) -> ImageData:
        """Return everything about images; from a complete mirror, else read."""
        return self._complete(self.image_tree if cached else None, ImageTree).data()

    @property
    def progress(self) -> ProgressStore:
        """Return the store of records about running and failed builds and uploads."""
        return ProgressStore(self.kazoo_client)

    def readProgress(self, cached: bool = True) -> ProgressData:
        """Return all progress records; from a complete mirror, else read."""
        return self._complete(self.progress_tree if cached else None, ProgressTree).data()

    def exportImageData(self) -> dict[str, str]:
        """Return pause markers, builds and uploads: path -> text (ZK-11)."""
        data = self.readImages(cached=False)
        wanted = [f"{paths.image(i)}/pause" for i in sorted(data.paused)]
        wanted += [paths.build(b.image_name or "", b.id or "") for b in data.builds]
        wanted += [
            paths.upload(u.image_name or "", u.build_id or "", u.provider_name or "", u.id or "")
            for u in data.uploads
        ]
        return {path: raw.decode("utf8") for path, (raw, _stat) in self._get_many(wanted)}

    def importImageData(self, import_data: dict[str, str]) -> None:
        """Write the result of :meth:`exportImageData`.

        Upload numbers continue after the highest imported one.

        :raises ZKException: a path is not one of an image.
        """
        uploads: dict[str, set[int]] = {}
        for path, text in import_data.items():
            if not path.startswith(f"{paths.IMAGES}/") or not isinstance(text, str):
                raise ZKException(f"Cannot import {path}: not image data")
            if text:
                json.loads(text)
            parts = path.split("/")
            if len(parts) == 10 and parts[9].isdigit():
                uploads.setdefault(path.rsplit("/", 1)[0], set()).add(int(parts[9]))
        # The counter of a container only grows by creating children: advance it before a record
        # prevents that.
        for parent, numbers in uploads.items():
            self.kazoo_client.ensure_path(parent)
            reached = -1
            while reached < max(numbers):
                try:
                    path = self.kazoo_client.create(f"{parent}/", sequence=True)
                    reached = int(path.rsplit("/", 1)[1])
                except NodeExistsError:
                    # A child without a number was created here; every child increases the counter.
                    path = self.kazoo_client.create(f"{parent}/counter")
                if reached not in numbers or path.endswith("/counter"):
                    self.kazoo_client.delete(path)
        for path, text in sorted(import_data.items()):
            write(self.kazoo_client, path, text.encode("utf8"))


__all__ = ["ImageMethods"]
