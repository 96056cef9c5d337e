"""``alien-image-list``: images of ours in the clouds that no record accounts for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from nodepool import status
from nodepool.cmd.base import describe
from nodepool.cmd.commands.context import Context, Subparsers, add_listing
from nodepool.zk.records import READY

BUILD_PROPERTY = "nodepool_build_id"

log = logging.getLogger("nodepool.cmd.alien_images")


def register(subparsers: Subparsers) -> None:
    parser = add_listing(subparsers, "alien-image-list", alien_image_list, "list images without a record")
    parser.add_argument("provider", metavar="PROVIDER", nargs="?", help="only this provider")


def alien_image_list(context: Context) -> None:
    wanted = context.args.provider
    uploads = [upload for upload in context.zk.readImages().uploads if upload.state == READY]
    rows = []
    for name, config in sorted(context.config.providers.items()):
        # Providers without image building (static hosts, namespaces) have no images to list.
        if (wanted and name != wanted) or not getattr(config, "manage_images", True):
            continue
        images = set(getattr(config, "diskimages", None) or ())
        known = {u.external_id for u in uploads if u.provider_name == name and u.image_name in images}
        try:
            rows += [
                {"provider": name, "name": image.name, "image_id": image.id}
                for image in _provider_images(context.zk, config)
                if BUILD_PROPERTY in (image.properties or {}) and image.id not in known
            ]
        except Exception as error:
            log.warning("Exception listing alien images for %s: %s", name, describe(error))
    context.show(status.Results(rows, status.ALIEN_COLUMNS))


def _provider_images(zk: Any, config: Any) -> Iterator[Any]:
    """Images with ``id``, ``name`` and ``properties``, read through a provider started for it."""
    from nodepool import provider_manager

    manager = provider_manager.get_provider(config)
    manager.start(zk)
    try:
        adapter = manager.adapter
        listing = getattr(adapter, "listImages", None) or adapter._listImages
        yield from list(listing())
    finally:
        manager.stop()
        manager.join()
