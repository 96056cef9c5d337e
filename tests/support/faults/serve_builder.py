"""The nodepool-builder program with faults built in from outside.

NODEPOOL_FAULT_CLEANUP   seconds between two clean-ups (default 1); builds and uploads are looked
                         for each 0.5 s
NODEPOOL_END_THREAD      as in serve.py
NODEPOOL_CRASH_AT        <point>[:n] - SIGKILL ourselves at the n-th passing of a point, each
                         -before and -after:
    build-record     the record of a new build
    process          the start of the command
    result           the build's result in ZooKeeper
    upload-record    the record of a new upload
    note             the note about an upload on disk
    upload-result    the upload's result in ZooKeeper
    cloud            the upload itself
    mark             a record is marked for deletion
    delete           an image is deleted in the cloud
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.faults.serve import end_threads, passed


def around(owner: Any, name: str, point: Callable[..., str | None]) -> None:
    """Crash points before and after a function; ``point`` names them from the arguments."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        where = point(*args, **kwargs)
        if where is None:
            return original(*args, **kwargs)
        passed(f"{where}-before")
        result = original(*args, **kwargs)
        passed(f"{where}-after")
        return result

    setattr(owner, name, wrapped)


def patch_points() -> None:
    from nodepool.builder.building.process import BuildProcess
    from nodepool.builder.cleanup.records import RecordCleaner
    from nodepool.builder.upload import journal as upload_journal
    from nodepool.driver.statemachine.provider import StateMachineProvider
    from nodepool.zk.facade.images import ImageMethods

    def of_build(_self: Any, _image: str, build: Any, *_args: Any) -> str:
        return "build-record" if build.state == "building" else "result"

    def of_upload(
        _self: Any, _image: str, _build: str, _provider: str, record: Any, *_args: Any
    ) -> str:
        return "upload-record" if record.state == "uploading" else "upload-result"

    around(ImageMethods, "storeBuild", of_build)
    around(ImageMethods, "storeImageUpload", of_upload)
    around(BuildProcess, "start", lambda *_args: "process")
    around(upload_journal, "begin", lambda *_args: "note")
    around(StateMachineProvider, "uploadImage", lambda *_args, **_kwargs: "cloud")
    around(StateMachineProvider, "deleteImage", lambda *_args, **_kwargs: "delete")
    around(RecordCleaner, "_mark", lambda *_args: "mark")


def patch_intervals() -> None:
    from nodepool.builder import NodePoolBuilder
    from nodepool.driver.common.adapter import MachineAdapter

    # Between two checks of an image that the cloud imports; clouds take minutes, the tests' parts
    # of a second.
    MachineAdapter.IMAGE_UPLOAD_SLEEP = 1
    start = NodePoolBuilder.start

    def _start(self: Any) -> None:
        self.cleanup_interval = float(os.environ.get("NODEPOOL_FAULT_CLEANUP", "1"))
        self.build_interval = self.upload_interval = 0.5
        start(self)

    NodePoolBuilder.start = _start  # type: ignore[method-assign]


def main() -> int:
    patch_points()
    patch_intervals()
    end_threads()
    from nodepool.cmd.builder import main as builder_main

    return builder_main()


if __name__ == "__main__":
    sys.exit(main())
