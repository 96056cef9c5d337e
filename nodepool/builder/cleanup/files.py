"""Delete files of removed builds, and unneeded formats (BLD-10.C, BLD-10.E, BLD-12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from nodepool.builder.machine import image_files
from nodepool.builder.retention import BuildKey, Snapshot, image_providers, surplus_formats
from nodepool.config.model import Config
from nodepool.zk.records import DELETING


def clean_files(
    config: Config,
    snapshot: Snapshot,
    going: Collection[BuildKey],
    running: Callable[[], Collection[BuildKey]],
    absent: Callable[[str, str], bool],
    log: logging.Logger,
) -> None:
    """Delete the files in ``images-dir`` that are not needed.

    :param going: builds just marked or removed, which the snapshot does not know yet.
    :param running: builds of this process.
    :param absent: checks in ZooKeeper that a build really has no record.
    """
    providers = image_providers(config)
    try:
        local = image_files.local_builds(config.images_dir)
    except OSError as error:
        log.error("Cannot read images-dir %s: %s", config.images_dir, error.strerror)
        return
    for image, build_id in sorted(local):
        if (
            image.startswith(".")
            or (image, build_id) in snapshot.data.bad_builds
            or (image, build_id) in running()
        ):
            continue
        build = snapshot.builds[image].get(build_id)
        if (image, build_id) in going or (build is not None and build.state == DELETING):
            image_files.delete_local_build(config.images_dir, image, build_id, log)
        elif build is None:
            if absent(image, build_id) and (image, build_id) not in running():
                log.info("Files of %s-%s belong to no build", image, build_id)
                image_files.delete_local_build(config.images_dir, image, build_id, log)
        else:
            diskimage = config.diskimages.get(image)
            surplus = surplus_formats(
                build, snapshot.uploads.get((image, build_id), []), diskimage, providers
            )
            base = image_files.image_id(image, build_id)
            for image_file in image_files.DibImageFile.from_image_id(config.images_dir, base):
                if image_file.extension in surplus:
                    log.info(
                        "Deleting %s of %s, which is uploaded (delete-after-upload)",
                        image_file.extension,
                        base,
                    )
                    image_files.delete_format(
                        config.images_dir, base, image_file.extension or "", log
                    )
