"""State shared by the parts of a builder, without threads or actions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import IO

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.base.backoff import Backoff, KeyedBackoff
from nodepool.base.clock import SYSTEM, Clock
from nodepool.builder.progress.publisher import Publisher
from nodepool.builder.providers import ImageManagers
from nodepool.builder.upload.claims import UploadClaims
from nodepool.config.model import Config
from nodepool.zk import ZooKeeperClient
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds between two attempts of something that fails repeatedly.
LONGEST_PAUSE = 3600.0
Work = Callable[[], list[tuple[str, str] | None]]


class BuilderState:
    """The configuration in force, ZooKeeper, providers, and the claimed images.

    :param check_config: applies a changed file and returns the configuration in force.
    :param building: returns the current work of each worker: (image, build id).
    :param uploading: the same for uploads: (image, provider).
    """

    def __init__(
        self,
        check_config: Callable[[], Config],
        building: Work = list,
        uploading: Work = list,
        clock: Clock = SYSTEM,
    ) -> None:
        self.check_config = check_config
        self.clock = clock
        #: None until the builder starts, as `zk`.
        self.config: Config = None  # type: ignore[assignment]
        self.zk: ZooKeeper = None  # type: ignore[assignment]
        self.connection: ZooKeeperClient | None = None
        self.statsd = metrics.shared()
        self.fqdn = hostnames.fqdn()
        self.builder_id = ""
        #: Seconds; 0: there is no cleanup worker.
        self.cleanup_interval: float = 60
        #: Set while the session is usable and the mirror is complete.
        self.session_usable = threading.Event()
        self.publisher = Publisher(self.session_usable, lambda: self.zk.kazoo_client)
        self.managers = ImageManagers()
        self.upload_claims = UploadClaims()
        #: Set when running builds are not to be waited for.
        self.stopping_at_once = threading.Event()
        #: Held if all entries in the image directory belong to this builder or to killed ones.
        self.images_lock: IO[bytes] | None = None
        self.building, self.uploading = building, uploading
        self.forget_failures(10, 10)

    def forget_failures(self, build_interval: float, upload_interval: float) -> None:
        """Reset the pauses after failures; arguments are the first pauses in seconds."""
        self.build_backoff = KeyedBackoff(Backoff(build_interval, LONGEST_PAUSE), time.time)
        self.upload_backoff = KeyedBackoff(Backoff(upload_interval, LONGEST_PAUSE), time.time)

    def running_builds(self) -> set[tuple[str, str]]:
        """Return (image, build id) of the builds of this process.

        Their files are not leftovers, whatever the records say.
        """
        return {key for key in self.building() if key is not None}
