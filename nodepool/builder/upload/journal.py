"""Uploads that ended without a known result, and their leftovers in the cloud.

The record in ZooKeeper names the image only after a successful upload (BLD-4). To find images of
failed calls and killed builders, each call is recorded in ``<images-dir>/.uploads`` before it is
made. For each entry without a running upload, the builder that owns the directory searches the
cloud for the image by its metadata. Images of drivers that cannot list images are found by the
launcher's leak search.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import logging
import os
import pathlib
import time
from dataclasses import asdict, dataclass
from urllib.parse import quote

from nodepool.base.files import replace_file
from nodepool.base.problems import log_failure
from nodepool.builder.provider_queues import ProviderQueues
from nodepool.builder.retention import UploadKey
from nodepool.builder.state import BuilderState
from nodepool.config.model import Config
from nodepool.driver.provider import Provider
from nodepool.driver.toolkit.cloud_images import get_field, is_snapshot, listing_of, properties_of
from nodepool.zk import locks, paths

DIRECTORY = ".uploads"
#: Seconds after which an entry is discarded, if its provider has not been configured since.
MAX_AGE = 30 * 24 * 3600.0

log = logging.getLogger("nodepool.builder.uploads")


@dataclass(frozen=True)
class UploadEntry:
    """A call that is about to be made, or was."""

    directory: str
    image: str
    build: str
    provider: str
    number: str
    name: str
    time: float

    @property
    def key(self) -> UploadKey:
        return self.image, self.build, self.provider, self.number

    @property
    def path(self) -> str:
        return os.path.join(
            self.directory, f"{self.build}-{quote(self.provider, safe='')}-{self.number}.json"
        )

    def end(self) -> None:
        """Delete the entry: the cloud has no image of it without a record."""
        try:
            pathlib.Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            log.warning("Cannot remove %s: %s", self.path, error.strerror)


def begin(images_dir: str, key: UploadKey, name: str) -> UploadEntry:
    """Record a call; the upload continues even if the file system is full or fails."""
    directory = os.path.join(images_dir, DIRECTORY)
    note = UploadEntry(directory, *key, name, time.time())
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        replace_file(
            note.path, json.dumps({k: v for k, v in asdict(note).items() if k != "directory"})
        )
    except OSError as error:
        log.warning(
            "Cannot write %s: %s; an interrupted upload may leave an image in %s",
            note.path,
            error.strerror,
            key[2],
        )
    return note


def notes(images_dir: str) -> list[UploadEntry]:
    """Return all entries of this image directory; unreadable ones are deleted."""
    directory = os.path.join(images_dir, DIRECTORY)
    found = []
    for entry in sorted(glob.glob("*.json", root_dir=directory)):
        path = os.path.join(directory, entry)
        try:
            values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            image, build, provider, number, name = (
                str(values[key]) for key in ("image", "build", "provider", "number", "name")
            )
            note = UploadEntry(
                directory, image, build, provider, number, name, float(values["time"])
            )
            if note.path == path:
                found.append(note)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("Cannot read %s: %s; deleting it", path, error)
            with contextlib.suppress(OSError):
                os.unlink(path)
    return found


def is_of(item: object, key: UploadKey) -> bool:
    """Return whether an image in the cloud was created by this upload."""
    if is_snapshot(item):
        return False
    properties = properties_of(item)
    _image, build, provider, number = key
    return all(
        str(get_field(properties, f"nodepool_{name}")) == value
        for name, value in (("build_id", build), ("upload_id", number), ("provider_name", provider))
    )


class CloudLeftoverSweeper:
    """Deletes images of uploads that ended without a known result."""

    def __init__(self, state: BuilderState, lanes: ProviderQueues) -> None:
        self._state = state
        self._lanes = lanes

    def sweep(self, config: Config) -> None:
        """Queue the deletions at the providers."""
        if self._state.images_lock is None:
            return
        for note in notes(config.images_dir):
            if note.key[:3] in self._state.upload_claims.running():
                continue
            if note.provider in config.provider_managers:
                key = ("stray", note.path)
                self._lanes.submit(note.provider, key, functools.partial(self._check_note, note))
            elif time.time() - note.time > MAX_AGE:
                log.warning(
                    "Upload %s of %s may have left the image %s in %s, which is not configured any "
                    "more; giving up",
                    note.number,
                    note.image,
                    note.name,
                    note.provider,
                )
                note.end()

    def _check_note(self, note: UploadEntry) -> None:
        state = self._state
        if (
            not state.session_usable.is_set()
            or note.key[:3] in state.upload_claims.running()
            or not os.path.exists(note.path)
        ):
            return
        # Its lock is older than the entry: the upload is running.
        if locks.names_in_order(state.zk.kazoo_client, f"{paths.uploads(*note.key[:3])}/lock"):
            return
        with state.managers.use(state.config, note.provider) as manager:
            listing = None if manager is None else listing_of(manager)
            if manager is None:
                return
            try:
                found = [
                    item
                    for item in (listing() if listing is not None else ())
                    if is_of(item, note.key)
                ]
            except Exception as error:
                log.warning(
                    "Cannot search for leftovers of upload %s of %s in %s: %r; retrying later",
                    note.number,
                    note.image,
                    note.provider,
                    error,
                )
                return
            if not self._remove_parts(manager, note):
                return
            record = state.zk.getImageUpload(*note.key)
            for item in found:
                external_id = str(get_field(item, "id"))
                if record is not None and record.external_id == external_id:
                    continue
                name = get_field(item, "name") or note.name
                log.warning(
                    "Upload %s of %s (build %s) left image %s (%s) in %s; deleting it",
                    note.number,
                    note.image,
                    note.build,
                    name,
                    external_id,
                    note.provider,
                )
                try:
                    manager.discardImage(name, external_id)
                except Exception as error:  # a driver may raise anything
                    log_failure(
                        log,
                        error,
                        "Cannot delete image %s (%s) of %s; retrying later",
                        name,
                        external_id,
                        note.provider,
                    )
                    return
        note.end()

    def _remove_parts(self, manager: Provider, note: UploadEntry) -> bool:
        """Delete partial uploads; return False to retry."""
        # Names have a resolution of one second: another provider may be getting the same image
        # under this name now.
        if any(note.key[:2] == running[:2] for running in self._state.upload_claims.running()):
            return False
        try:
            manager.removeUnfinishedUpload(note.name, note.time)
        except Exception as error:  # a driver may raise anything
            log.warning(
                "Cannot delete the parts that upload %s of %s left in %s: %r; retrying later",
                note.number,
                note.image,
                note.provider,
                error,
            )
            return False
        return True
