"""Create root trees before a sliver needs them, and remove unused ones after a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager")

#: Stands for a sliver while a root tree is created in advance.
PREPARING = "preparing"
#: Seconds that an unused root tree is kept for the next sliver.
TEMPLATE_IDLE = 86400.0


class Trees:
    """Root trees of the backend, if it has any.

    :param made: called when one was created.
    """

    def __init__(self, backend: object, made: Callable[[], None]) -> None:
        self._roots = getattr(backend, "roots", None)
        self._made = made
        #: Whether the root tree of image host was prepared, and the first sliver need not wait for
        #: it.
        self.prepared = False

    def prepare(self, image: str) -> None:
        """Create the tree of an image. Raises BackendError."""
        if self._roots is not None:
            self._roots.tree(image, PREPARING)
            self._roots.release(PREPARING)
        self._made()

    def prepare_host(self) -> None:
        try:
            self.prepare("host")
        except (BackendError, OSError) as error:
            log.warning("Slivers of image host cannot be created: %s", error)
        self.prepared = True

    def prune(self, alive: Callable[[], set[str]]) -> None:
        """Remove those that no sliver has used for a while.

        :param alive: names of all slivers.
        """
        if self._roots is None:
            return
        asked = time.time()
        try:
            self._roots.prune(alive(), TEMPLATE_IDLE, asked)
        except OSError as error:
            log.warning("Unused root trees cannot be removed: %s", error)
