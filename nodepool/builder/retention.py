"""Decide what to upload and what to delete, from a snapshot (BLD-9 to BLD-12)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodepool.config.diskimages import DiskImage
from nodepool.config.model import Config, ProviderConfig
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    READY,
    UPLOADING,
    ImageBuild,
    ImageUpload,
    newest_first,
)
from nodepool.zk.rollback import STEP

#: Number of newest ready builds kept per image, and of newest ready uploads kept per image and
#: provider.
KEPT_BUILDS = 2
KEPT_UPLOADS = 2

BuildKey = tuple[str, str]
#: Image, build, provider, upload number.
UploadKey = tuple[str, str, str, str]


def upload_key(upload: ImageUpload) -> UploadKey:
    return (
        upload.image_name or "",
        upload.build_id or "",
        upload.provider_name or "",
        upload.id or "",
    )


def ready_builds(data: ImageData) -> dict[str, list[ImageBuild]]:
    """Return image -> its builds in state ``ready``, newest first; only images that have one."""
    ready = [build for build in data.builds if build.state == READY]
    found: dict[str, list[ImageBuild]] = defaultdict(list)
    for build in newest_first(ready, len(ready)):
        found[build.image_name or ""].append(build)
    return dict(found)


def newest_for(
    builds: Sequence[ImageBuild], formats: Collection[str | None], builder_id: str
) -> ImageBuild:
    """Return the build that counts for a builder whose providers need these formats.

    That is the newest one. If another builder has created it without these formats, its providers
    need others: the newest one with these formats counts. Otherwise, two builders would replace
    the builds of each other forever.

    :param builds: ready builds of an image, newest first; at least one.
    """
    newest = builds[0]
    if newest.builder_id == builder_id:
        return newest
    return next((build for build in builds if {*formats} <= {*build.formats}), newest)


def image_providers(config: Config) -> list[ProviderConfig]:
    """Return the configurations of providers that manage images, in file order."""
    return [provider for provider in config.providers.values() if provider.manage_images]


def make_newest(
    record: ImageBuild | ImageUpload,
    newest: ImageBuild | ImageUpload | None,
    log: logging.Logger | logging.LoggerAdapter[Any],
) -> None:
    """Let a finished build or upload count as the newest one, whatever the clocks say.

    One that a builder whose clock was ahead has finished would count as newer until then.

    :param newest: the newest ready one of the others.
    """
    ahead = ((newest.state_time or 0) if newest is not None else 0) - (record.state_time or 0)
    if newest is None or ahead < 0:
        return
    log.warning(
        "Build %s of %s has a time that is %.0f s ahead of the clock of this builder; what has "
        "finished now counts as newer. Check the clocks of all builders",
        newest.id if isinstance(newest, ImageBuild) else newest.build_id,
        newest.image_name,
        ahead,
    )
    record.state_time = (newest.state_time or 0) + STEP


# -- uploads


@dataclass(frozen=True)
class Candidate:
    """A pair of provider and image that lacks a build, usually the newest."""

    provider: ProviderConfig
    provider_image: object
    build: ImageBuild

    @property
    def pair(self) -> tuple[str, str]:
        return self.build.image_name or "", self.provider.name


def upload_candidates(
    data: ImageData, providers: Iterable[ProviderConfig], builder_id: str
) -> list[Candidate]:
    """Return the pairs to upload, in file order.

    Checks conditions 1, 2, 4 and 5 of BLD-9, and that no upload is running.
    """
    ready = ready_builds(data)
    uploaded = {
        (u.build_id, u.image_name, u.provider_name) for u in data.uploads if u.state == READY
    }
    found = []
    for provider in providers:
        for image, provider_image in provider.diskimages.items():
            if image not in ready:
                continue
            build = newest_for(ready[image], [provider.image_type], builder_id)
            if provider_image.pause or provider.image_type not in build.formats:
                continue
            if (build.id, image, provider.name) in uploaded or (
                image,
                build.id,
                provider.name,
            ) in data.upload_locks:
                continue
            found.append(Candidate(provider, provider_image, build))
    return found


# -- removal


@dataclass(frozen=True)
class Rules:
    """What this process knows in addition to ZooKeeper."""

    #: Images in the configuration.
    images: frozenset[str]
    #: Providers that manage images -> their configured images.
    known: Mapping[str, frozenset[str]]
    #: Builds and uploads (image, build, provider) that this process works on, regardless of the
    #: locks.
    running_builds: Collection[BuildKey] = frozenset()
    running_uploads: Collection[tuple[str, str, str]] = frozenset()


@dataclass
class RemovalPlan:
    """What to do with one build.

    ``state`` None: a znode without data, which may have uploads.
    """

    image: str
    build: str
    state: str | None
    #: Abandoned uploads of a kept build: only the record is deleted.
    drop: list[ImageUpload] = field(default_factory=list)
    #: Deleted in the cloud, then the record.
    delete: list[ImageUpload] = field(default_factory=list)
    #: Delete the build: the only uploads left are those being deleted.
    remove: bool = False


class Snapshot:
    def __init__(self, data: ImageData) -> None:
        self.data = data
        self.builds: dict[str, dict[str, ImageBuild]] = defaultdict(dict)
        self.uploads: dict[BuildKey, list[ImageUpload]] = defaultdict(list)
        for build in data.builds:
            self.builds[build.image_name or ""][build.id or ""] = build
        for upload in data.uploads:
            self.uploads[(upload.image_name or "", upload.build_id or "")].append(upload)

    @property
    def images(self) -> list[str]:
        return sorted(
            self.data.names | set(self.builds) | {image for image, _ in self.data.empty_builds}
        )

    def uploads_to_keep(self, image: str) -> set[UploadKey]:
        """Return the ready uploads to keep: the newest ones, and that in use (BLD-10.A)."""
        by_provider: dict[str, list[ImageUpload]] = defaultdict(list)
        for build in self.builds[image].values():
            if build.state == READY:
                for upload in self.uploads.get((image, build.id or ""), []):
                    if upload.state == READY:
                        by_provider[upload.provider_name or ""].append(upload)
        return {
            upload_key(u)
            for uploads in by_provider.values()
            for u in (
                *newest_first(uploads, KEPT_UPLOADS),
                *newest_first((each for each in uploads if not each.held_back), 1),
            )
        }

    def builds_to_keep(self, image: str, rules: Rules) -> set[str]:
        """Return the builds to keep (BLD-10.B.1)."""
        if image not in rules.images:
            return set()
        return {
            b.id or ""
            for b in newest_first(
                (b for b in self.builds[image].values() if b.state == READY), KEPT_BUILDS
            )
        }

    def building(self, build: ImageBuild, rules: Rules) -> bool:
        """Return whether a build is in progress, as far as visible without taking the lock."""
        image = build.image_name or ""
        if (image, build.id or "") in rules.running_builds:
            return True
        return build.state == BUILDING and self.data.build_locks.get(image, (0.0, False))[1]

    def uploading(self, upload: ImageUpload, rules: Rules) -> bool:
        key = (upload.image_name or "", upload.build_id or "", upload.provider_name or "")
        return upload.state == UPLOADING and (
            key in self.data.upload_locks or key in rules.running_uploads
        )

    def plan(self, image: str, rules: Rules, everything: bool = True) -> list[RemovalPlan]:
        """Return what to do with the builds of an image, without those to keep (BLD-10.B).

        :param everything: include failed and abandoned ones; otherwise only what users or the
            configuration removed, and what newer builds replaced.
        """
        builds_to_keep, uploads_to_keep = (
            self.builds_to_keep(image, rules),
            self.uploads_to_keep(image),
        )
        empty = [
            ImageBuild(image, build_id)
            for name, build_id in sorted(self.data.empty_builds)
            if name == image
        ]
        builds = [*self.builds[image].values(), *empty]
        plans = [
            self._plan(build, builds_to_keep, uploads_to_keep, rules, everything)
            for build in builds
        ]
        return [plan for plan in plans if plan.drop or plan.delete or plan.remove]

    def _plan(
        self,
        build: ImageBuild,
        builds_to_keep: set[str],
        uploads_to_keep: set[UploadKey],
        rules: Rules,
        everything: bool,
    ) -> RemovalPlan:
        image, build_id = build.image_name or "", build.id or ""
        plan = RemovalPlan(image, build_id, build.state)
        kept = build_id in builds_to_keep
        stays = build.state != DELETING and (kept or self.building(build, rules))
        if not stays and not everything and build.state in (FAILED, BUILDING, None):
            stays = True
        uploads = self.uploads.get((image, build_id), [])
        for upload in uploads:
            wanted = rules.known.get(upload.provider_name or "")
            if wanted is None or self.uploading(upload, rules):
                continue
            replaced = not stays and upload_key(upload) not in uploads_to_keep
            tidied = kept and (upload.state == DELETING or (everything and upload.state == FAILED))
            if image not in wanted or replaced or tidied:
                plan.delete.append(upload)
            elif kept and everything and upload.state == UPLOADING:
                plan.drop.append(upload)
        # No other upload needs the build.
        plan.remove = not stays and all(
            upload.state == DELETING or upload in plan.delete for upload in uploads
        )
        return plan


# -- files


def surplus_formats(
    build: ImageBuild,
    uploads: Iterable[ImageUpload],
    diskimage: DiskImage | None,
    providers: Iterable[ProviderConfig],
) -> set[str]:
    """Return the formats whose files ``delete-after-upload`` allows to delete now (BLD-12).

    :param uploads: those of this build.
    :param diskimage: the image in this configuration, or None.
    """
    if build.state != READY or diskimage is None or not diskimage.delete_after_upload:
        return set()
    ready = [upload for upload in uploads if upload.state == READY]
    served = {upload.provider_name for upload in ready}
    needed: set[str | None] = set(diskimage.keep_image_types)
    needed |= {
        p.image_type for p in providers if build.image_name in p.diskimages and p.name not in served
    }
    return {upload.format for upload in ready if upload.format} - needed
