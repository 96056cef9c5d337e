"""Return to an earlier upload of an image, and back (BLD-22); verify new ones (BLD-25).

All launchers use the ready upload with the greatest ``state_time``. To roll back therefore means
to give an earlier upload a later time, and to note in the replaced one why. Both uploads stay
``ready``, which no builder deletes or uploads again. An upload that is to be verified begins as one
that was rolled back. Without an earlier one, only its note holds it back: launchers of 11.0.0 use
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from nodepool.zk import paths
from nodepool.zk.locks import ContenderGone
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import READY, ImageBuild, ImageUpload, NodeRequest, Rollback, newest_first
from nodepool.zk.records.images import VERIFICATION
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds by which the upload in use is newer than the one that it replaces: less than the time
#: between two uploads, so that the next one becomes current.
STEP = 0.001
#: The key of the upload in ``requestor_data`` of a verification.
UPLOAD = "upload"
#: Attempts to store an upload while others change uploads of the image.
TRIES = 10


class RollbackRefused(Exception):
    """Nothing was changed; the text says why."""


@dataclass(frozen=True)
class Switch:
    """Launchers use ``used`` instead of ``replaced``, both of one image at one provider.

    If they are the same, there is no other one.
    """

    replaced: ImageUpload
    used: ImageUpload

    @property
    def provider(self) -> str:
        return self.used.provider_name or ""

    @property
    def before(self) -> ImageUpload | None:
        """Return the replaced upload if it is another one."""
        return None if self.replaced is self.used else self.replaced

    @property
    def text(self) -> str:
        """Return what has happened to the replaced upload, for people.

        The upload that its note names may have been deleted since.
        """
        mark, before = self.replaced.rolled_back, self.before
        used = "" if before is None else self.used.build_id or ""
        return "" if mark is None else replace(mark, build=used).text()


def upload_path(upload: ImageUpload) -> str:
    """Return the path of an upload, which nodes have as ``image_id``."""
    return paths.upload(
        upload.image_name or "", upload.build_id or "", upload.provider_name or "", upload.id or ""
    )


class _Uploads:
    """The ready uploads of one image at one provider, newest first."""

    def __init__(self, data: ImageData, image: str, provider: str) -> None:
        found = [
            upload
            for upload in data.uploads
            if (upload.image_name, upload.provider_name, upload.state) == (image, provider, READY)
        ]
        self.ready = newest_first(found, len(found))
        #: The one in use; None: all are held back.
        self.current = next((each for each in self.ready if not each.held_back), None)
        self._builds = {
            build.id: build
            for build in data.builds
            if build.image_name == image and build.state == READY
        }

    def build(self, upload: ImageUpload) -> ImageBuild | None:
        """Return the build of an upload; None if it is being deleted."""
        return self._builds.get(upload.build_id)

    def replaced(self, held: bool = True) -> Iterator[ImageUpload]:
        """Yield the uploads that the current one replaces, and newer ones, the newest first.

        :param held: also those that were held back, and never used.
        """
        newer, current = True, self.current
        for upload in self.ready:
            mark = upload.rolled_back
            newer = newer and upload is not current
            in_force = newer or (current is not None and mark is not None and mark.names(current))
            if mark and not mark.undone and in_force and (held or not mark.holds_back):
                yield upload

    def earlier(self) -> ImageUpload | None:
        """Return the upload to roll back to."""
        for upload in self.ready:
            mark = upload.rolled_back
            if (
                self.current is not None
                and upload.build_id != self.current.build_id
                and self.build(upload) is not None
                and (mark is None or mark.undone)
            ):
                return upload
        return None


def _noted(data: ImageData) -> Iterator[_Uploads]:
    """Yield the uploads of each image at each provider where one has a note."""
    places = {
        (upload.image_name or "", upload.provider_name or "")
        for upload in data.uploads
        if upload.rolled_back
    }
    return (_Uploads(data, image, provider) for image, provider in sorted(places))


def rolled_back(data: ImageData) -> list[Switch]:
    """Return the roll-backs in force."""
    found = []
    for uploads in _noted(data):
        replaced = next(uploads.replaced(), None)
        if replaced is not None:
            found.append(Switch(replaced, uploads.current or replaced))
    return found


def unverified(data: ImageData) -> list[Switch]:
    """Return the uploads that wait for their verification.

    An older one waits as well if no upload is used and the newer ones are bad.
    """
    found = []
    for uploads in _noted(data):
        held = list(uploads.replaced())
        for upload in held if uploads.current is None else held[:1]:
            if upload.rolled_back is not None and upload.rolled_back.unverified:
                found.append(Switch(upload, uploads.current or upload))
                break
    return found


def unused(data: ImageData, image: str, provider: str) -> ImageUpload | None:
    """Return the newest upload if launchers use none although there are some."""
    uploads = _Uploads(data, image, provider)
    return uploads.ready[0] if uploads.ready and uploads.current is None else None


def why_unused(data: ImageData, image: str, provider: str) -> str:
    """Return why launchers use no upload although there are some; empty: that is not so."""
    upload = unused(data, image, provider)
    return "" if upload is None else f"build {upload.build_id} is {Switch(upload, upload).text}"


def upload_of(
    data: ImageData, request: NodeRequest, image: str, provider: str
) -> ImageUpload | None:
    """Return the usable upload of this image that the request of a verification is for."""
    wanted = request.requestor_data
    path = wanted.get(UPLOAD) if isinstance(wanted, dict) else None
    found = (
        each
        for each in data.uploads
        if (each.state, each.image_name, each.provider_name) == (READY, image, provider)
        and upload_path(each) == path
    )
    return next(found, None)


def earlier_upload(data: ImageData, current: ImageUpload) -> ImageUpload | None:
    """Return the upload to use instead of the current one.

    None: there is none, or this is not the current one, or somebody has returned to it.
    """
    uploads = _Uploads(data, current.image_name or "", current.provider_name or "")
    if uploads.current is None or upload_path(uploads.current) != upload_path(current):
        return None
    return None if next(uploads.replaced(held=False), None) else uploads.earlier()


@dataclass(frozen=True)
class Result:
    """What was changed, and what was not: provider -> why."""

    changed: list[Switch]
    #: The desired state was found.
    unchanged: dict[str, str]
    impossible: dict[str, str]

    def others(self, image: str) -> dict[str, str]:
        """Return what was not changed.

        :raises RollbackRefused: nothing was changed.
        """
        found = {**self.unchanged, **self.impossible}
        if not self.changed:
            reasons = "; ".join(f"{provider}: {why}" for provider, why in found.items())
            raise RollbackRefused(f"nothing was changed for image {image}: {reasons}")
        return found


class Rollbacks:
    """Changes which upload the launchers use."""

    def __init__(self, zk: ZooKeeper, clock: Callable[[], float]) -> None:
        self._zk = zk
        self._clock = clock

    def back(
        self,
        image: str,
        provider: str | None,
        by: str,
        reason: str,
        failed: ImageUpload | None = None,
    ) -> Result:
        """Return to the upload before the current one, in all its providers or in one.

        :param failed: a launcher does it because launches of this upload fail. It does so only once
            for an upload, and only for the current one.
        :raises RollbackRefused: somebody has changed an upload at the same time.
        """
        result = Result([], {}, {})
        data = self._zk.readImages(cached=False)
        txn = Txn(self._zk.kazoo_client)
        for name in self._providers(data, image, provider):
            uploads = _Uploads(data, image, name)
            current, earlier = uploads.current, uploads.earlier()
            replaced = next(uploads.replaced(held=False), None)
            if current is None:
                result.impossible[name] = "no upload there is used: all are held back"
            elif replaced is not None and replaced.rolled_back is not None:
                mark = replaced.rolled_back
                result.unchanged[name] = (
                    f"{mark.by} has rolled back from build {replaced.build_id} to {mark.build} "
                    f"already: {mark.reason}"
                )
            elif failed is not None and (
                upload_path(current) != upload_path(failed) or current.rolled_back is not None
            ):
                result.unchanged[name] = (
                    f"build {current.build_id} is newer, or an operator has returned to it"
                )
            elif earlier is None:
                result.impossible[name] = (
                    f"build {current.build_id} has no earlier usable upload there"
                )
            else:
                mark = Rollback(
                    by,
                    self._clock(),
                    reason,
                    earlier.build_id or "",
                    earlier.id or "",
                    earlier.state_time or 0,
                    failed is not None,
                )
                time = (current.state_time or 0) + STEP
                self._set(txn, uploads, earlier, time, earlier.rolled_back)
                self._set(txn, uploads, current, current.state_time or 0, mark)
                result.changed.append(Switch(current, earlier))
        self._run(txn, image)
        return result

    def forward(self, image: str, provider: str | None) -> Result:
        """Undo the last roll-back, in all its providers or in one.

        Launchers do not repeat it automatically.

        :raises RollbackRefused: somebody has changed an upload at the same time.
        """
        result = Result([], {}, {})
        data = self._zk.readImages(cached=False)
        txn = Txn(self._zk.kazoo_client)
        for name in self._providers(data, image, provider):
            uploads = _Uploads(data, image, name)
            current, replaced = uploads.current, next(uploads.replaced(), None)
            mark = replaced.rolled_back if replaced is not None else None
            if replaced is None or mark is None:
                result.unchanged[name] = (
                    f"no roll-back is in force; build {uploads.ready[0].build_id} is used"
                )
            elif uploads.build(replaced) is None:
                result.impossible[name] = f"build {replaced.build_id} is being deleted"
            else:
                self._set(
                    txn, uploads, replaced, replaced.state_time or 0, replace(mark, undone=True)
                )
                if current is not None and mark.names(current):
                    self._set(txn, uploads, current, mark.was, current.rolled_back)
                result.changed.append(Switch(current or replaced, replaced))
        self._run(txn, image)
        return result

    def hold_back(self, upload: ImageUpload, lock: str | None = None) -> None:
        """Store a finished upload that launchers use only once it is verified.

        :param lock: path of our contender for its lock, without which nothing is stored.
        :raises ContenderGone: the lock was lost.
        :raises RollbackRefused: others keep changing uploads of the image.
        """
        image, provider = upload.image_name or "", upload.provider_name or ""
        for attempt in range(1, TRIES + 1):
            uploads = _Uploads(self._zk.readImages(cached=False), image, provider)
            if any(upload_path(each) == upload_path(upload) for each in uploads.ready):
                return  # an earlier call has stored it, without an answer
            usable = (each for each in uploads.ready if uploads.build(each) and not each.held_back)
            used, txn = next(usable, None), Txn(self._zk.kazoo_client)
            if lock is not None:
                txn.check(lock)
            mark = Rollback(
                VERIFICATION, self._clock(), "not verified yet", "", "", 0, unverified=True
            )
            if used is not None:
                was = used.state_time or 0
                mark = replace(mark, build=used.build_id or "", upload=used.id or "", was=was)
                time = max(upload.state_time or 0, was) + STEP
                self._set(txn, uploads, used, time, used.rolled_back)
            changed = upload.copy()
            changed.rolled_back = mark
            txn.set(upload_path(upload), changed.serialize())
            try:
                self._run(txn, image)
                break
            except RollbackRefused as error:
                cause = error.__cause__
                if lock is not None and isinstance(cause, TransactionFailed) and cause.index == 0:
                    raise ContenderGone(str(cause)) from cause
                if attempt == TRIES:
                    raise

    def verified(self, upload: ImageUpload, failure: str | None) -> bool:
        """Use an upload that was held back, or note why not; return False if it is not any more.

        :raises RollbackRefused: somebody has changed an upload at the same time.
        """
        image, provider = upload.image_name or "", upload.provider_name or ""
        data = self._zk.readImages(cached=False)
        waiting = {upload_path(each.replaced): each for each in unverified(data)}
        switch = waiting.get(upload_path(upload))
        mark = switch.replaced.rolled_back if switch is not None else None
        if switch is None or mark is None:
            return False
        txn, uploads = Txn(self._zk.kazoo_client), _Uploads(data, image, provider)
        noted = None
        if failure is not None:
            noted = replace(mark, unverified=False, automatic=True, reason=failure)
        elif mark.names(switch.used):
            self._set(txn, uploads, switch.used, mark.was, switch.used.rolled_back)
        self._set(txn, uploads, switch.replaced, switch.replaced.state_time or 0, noted)
        self._run(txn, image)
        return True

    @staticmethod
    def _providers(data: ImageData, image: str, provider: str | None) -> Iterable[str]:
        """Return the providers with a usable upload.

        :raises RollbackRefused: there is none.
        """
        found = sorted(
            {
                upload.provider_name or ""
                for upload in data.uploads
                if (upload.image_name, upload.state) == (image, READY)
                and provider in (None, upload.provider_name)
            }
        )
        if not found:
            where = f" at provider {provider}" if provider else ""
            raise RollbackRefused(
                f"image {image} has no usable upload{where}; see `nodepool image-list`"
            )
        return found

    def _set(
        self,
        txn: Txn,
        uploads: _Uploads,
        upload: ImageUpload,
        state_time: float,
        mark: Rollback | None,
    ) -> None:
        """Write an upload, on condition that neither it nor its build has changed."""
        changed, build = upload.copy(), uploads.build(upload)
        changed.state_time, changed.rolled_back = state_time, mark
        if build is not None:
            txn.check(paths.build(build.image_name or "", build.id or ""), build.version)
        txn.set(upload_path(upload), changed.serialize(), upload.version)

    def _run(self, txn: Txn, image: str) -> None:
        if not txn.operations:
            return
        try:
            self._zk.writer.run(txn)
        except TransactionFailed as error:
            raise RollbackRefused(
                f"somebody has changed {error.path} at the same time; nothing was done. Check "
                f"`nodepool image-list --detail --image {image}`, then repeat the command if needed"
            ) from error
