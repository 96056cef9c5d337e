"""Copies images to hosts that joined later or were unavailable during the upload."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future

from nodepool.driver.nodemanager.config import NodeManagerProviderConfig
from nodepool.driver.nodemanager.host import ManagedHost
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds without a byte after which a copy is aborted.
STALL = 60.0


class ImageSpreader:
    """Copies images through the launcher, one at a time per host; hosts need not connect."""

    def __init__(self, provider: NodeManagerProviderConfig, log: logging.Logger) -> None:
        self._provider = provider
        self._log = log
        #: The last copy to each host.
        self._copies: dict[str, Future[None]] = {}

    def run(self, hosts: Iterable[ManagedHost], zk: ZooKeeper) -> None:
        """Start the missing copies of the newest uploads without waiting for them."""
        uploads = [
            zk.getMostRecentImageUpload(image, self._provider.name)
            for image in self._provider.diskimages
        ]
        wanted = {
            str(upload.external_id)
            for upload in uploads
            if upload is not None and upload.external_id
        }
        answering = [
            (host, set(host.capacity.get("images", ())))
            for host in hosts
            if host.usable and host.capacity is not None
        ]
        for host, has in answering:
            last = self._copies.get(host.name)
            if last is not None and not last.done():
                continue
            for image in sorted(wanted - has):
                source = next((other for other, there in answering if image in there), None)
                if source is not None:
                    self._copies[host.name] = host.run(
                        lambda host=host, source=source, image=image: self._copy(
                            source, host, image
                        ),  # type: ignore[misc]
                        wait=True,
                    )
                    break

    def _copy(self, source: ManagedHost, host: ManagedHost, image: str) -> None:
        self._log.info(
            "Copying image %s from %s to %s, which lacks it", image, source.name, host.name
        )
        try:
            with tempfile.TemporaryFile() as file:
                source.client.get_image(image, file, STALL)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                host.client.put_image(image, file, digest, STALL)
        except (RpcError, RpcFault, OSError) as error:
            self._log.warning(
                "Image %s cannot be copied from %s to %s: %s; retrying with the next pass",
                image,
                source.name,
                host.name,
                error,
            )
        finally:
            host.forget()
