"""The builder: builds, uploads and deletes disk images (BLD)."""

from nodepool.builder.builder import NodePoolBuilder
from nodepool.builder.building.process import BUILD_PROCESS_POLL_TIMEOUT
from nodepool.builder.cleanup.worker import CleanupWorker
from nodepool.builder.machine.image_files import DibImageFile, removeDibItem
from nodepool.builder.worker import SUSPEND_WAIT_TIME

__all__ = [
    "BUILD_PROCESS_POLL_TIMEOUT",
    "SUSPEND_WAIT_TIME",
    "CleanupWorker",
    "DibImageFile",
    "NodePoolBuilder",
    "removeDibItem",
]
