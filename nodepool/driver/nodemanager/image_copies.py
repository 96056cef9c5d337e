"""Copies images to hosts that joined later or were unavailable during the upload."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections.abc import Iterable
from typing import Any

from nodepool.driver.nodemanager.config import NodeManagerProviderConfig
from nodepool.driver.nodemanager.hosts import ManagedHost
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds without a byte after which a copy is aborted.
STALL = 60.0
_CHUNK = 1 << 20


class ImageSpreader:
    """Copies images through the launcher, one at a time per host; hosts need not connect."""

    def __init__(self, provider: NodeManagerProviderConfig, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._provider = provider
        self._log = log
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def wanted(self, zk: ZooKeeper) -> set[str]:
        """Return the newest upload of each image."""
        found = set()
        for image in self._provider.diskimages:
            upload = zk.getMostRecentImageUpload(image, self._provider.name)
            if upload is not None and upload.external_id:
                found.add(str(upload.external_id))
        return found

    def run(self, hosts: Iterable[ManagedHost], wanted: set[str]) -> None:
        """Start the missing copies without waiting for them."""
        answering = [(host, set(host.capacity.get("images", ()))) for host in hosts if host.usable and host.capacity is not None]
        for host, has in answering:
            for image in sorted(wanted - has):
                source = next((other for other, there in answering if image in there), None)
                if source is not None and self._claim(host):
                    host.run(
                        lambda host=host, source=source, image=image: self._copy(source, host, image),  # type: ignore[misc]
                        wait=True,
                    ).add_done_callback(lambda _done, host=host: self._release(host))  # type: ignore[misc]
                    break

    def _claim(self, host: ManagedHost) -> bool:
        with self._lock:
            if host.name in self._busy:
                return False
            self._busy.add(host.name)
            return True

    def _release(self, host: ManagedHost) -> None:
        with self._lock:
            self._busy.discard(host.name)

    def _copy(self, source: ManagedHost, host: ManagedHost, image: str) -> None:
        self._log.info("Copying image %s from %s to %s, which lacks it", image, source.name, host.name)
        try:
            with tempfile.TemporaryFile() as file:
                source.client.get_image(image, file, STALL)
                digest = hashlib.sha256()
                file.seek(0)
                while piece := file.read(_CHUNK):
                    digest.update(piece)
                file.seek(0)
                host.upload(image, file, digest.hexdigest(), STALL)
        except (RpcError, RpcFault, OSError) as error:
            self._log.warning(
                "Image %s cannot be copied from %s to %s: %s; retrying with the next pass", image, source.name, host.name, error
            )
        finally:
            host.forget()
