"""``alien-image-list``: our images in the clouds that have no record."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any

from nodepool import status
from nodepool.base import threads
from nodepool.cmd.commands.context import Context, Subparsers, add_listing, running
from nodepool.config.model import ProviderConfig
from nodepool.exceptions import TimeoutException
from nodepool.process.program import describe
from nodepool.zk.records import READY
from nodepool.zk.zookeeper import ZooKeeper

BUILD_PROPERTY = "nodepool_build_id"
#: Seconds that a cloud may take to list its images.
LIST_TIMEOUT = 300.0
#: Types of resources that are images, in clouds that list images only as resources.
IMAGE_TYPES = frozenset({"image", "ami"})

log = logging.getLogger("nodepool.cmd.alien_images")


def register(subparsers: Subparsers) -> None:
    parser = add_listing(
        subparsers, "alien-image-list", alien_image_list, "list images without a record"
    )
    parser.add_argument("provider", metavar="PROVIDER", nargs="?", help="only this provider")


def list_all(
    functions: Mapping[str, Callable[[], list[Any]]],
) -> dict[str, list[Any] | BaseException]:
    """Return what each function lists, or why it cannot; they run concurrently."""
    lanes = {name: threads.shared().lane(f"Thread-listing-{name}", 1) for name in functions}
    listings = {name: lanes[name].submit(function) for name, function in functions.items()}
    done = wait(listings.values(), LIST_TIMEOUT).done
    late = TimeoutException(f"no answer within {LIST_TIMEOUT:g} s")
    return {
        name: (listing.exception() or listing.result()) if listing in done else late
        for name, listing in listings.items()
    }


def alien_image_list(context: Context) -> None:
    # Drivers load slowly, and no other command needs them.
    from nodepool.driver.toolkit.cloud_images import get_field, is_snapshot, properties_of

    wanted = context.args.provider
    zk = context.zk
    if wanted:
        context.check_provider(wanted)
    # Providers without image building (static hosts, namespaces) have no images to list.
    configs = {
        name: config
        for name, config in sorted(context.whole_config.providers.items())
        if (not wanted or name == wanted) and config.manage_images
    }
    found = list_all(
        {name: functools.partial(_provider_images, zk, config) for name, config in configs.items()}
    )
    # The records are read after the clouds: images uploaded in the meantime are not aliens.
    uploads = [upload for upload in zk.readImages().uploads if upload.state == READY]
    rows = []
    for name, listed in found.items():
        if isinstance(listed, BaseException):
            log.warning("Exception listing alien images for %s: %s", name, describe(listed))
            continue
        images = set(configs[name].diskimages)
        known = {
            u.external_id for u in uploads if u.provider_name == name and u.image_name in images
        }
        rows += [
            {
                "provider": name,
                "name": get_field(image, "name") or get_field(properties_of(image), "Name"),
                "image_id": get_field(image, "id"),
            }
            for image in listed
            if get_field(properties_of(image), BUILD_PROPERTY)
            and get_field(image, "id") not in known
            and not is_snapshot(image)
        ]
    context.show(status.Results(rows, status.ALIEN_COLUMNS))


def _provider_images(zk: ZooKeeper, config: ProviderConfig) -> list[Any]:
    """Return images with ``id``, perhaps ``name``, and ``properties`` or ``metadata``.

    The provider is started to list them.

    :raises TypeError: the driver cannot list images.
    """
    from nodepool.driver import lifecycle
    from nodepool.driver.toolkit.cloud_images import adapter_of, listing_of

    manager = lifecycle.get_provider(config)
    with running(manager, zk):
        listing = listing_of(manager)
        if listing is not None:
            return list(listing())
        adapter = adapter_of(manager)
        if not hasattr(adapter, "listResources"):
            raise TypeError(f"the driver of {config.name} cannot list images")
        return [
            resource
            for resource in adapter.listResources()
            if resource.type in IMAGE_TYPES and resource.id is not None
        ]
