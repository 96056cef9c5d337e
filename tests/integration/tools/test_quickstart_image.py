"""The image of tools/quickstart: one build, whichever of the builder and the request is faster."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.zk import zookeeper as zk_module
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.conftest import Chroot
from tests.support.deadline import limit

sys.path.insert(0, str(REPOSITORY / "tools"))

from demo import __main__ as demo_main
from demo import image as demo_image

IMAGE = demo_image.IMAGE


class SlowRequest(demo_main.Demo):
    """Its ``nodepool`` requests nothing before the demonstration waits; its builder is the test."""

    def __init__(self, work: pathlib.Path, facade: ZooKeeper, config: str) -> None:
        super().__init__(argparse.Namespace(work=work, zookeeper=False, no_image=False))
        self.facade = facade
        self.config = pathlib.Path(config)
        self.facade.image_tree.listeners.append(lambda _image: self._notify())
        self.requested: list[bool] = []
        self.builds = 0

    def _wait(self, what: str, condition: Any, *arguments: Any, **options: Any) -> None:
        if what == "Requesting the image":
            (self.work / "gate").write_text("open\n")
        super()._wait(what, condition, *arguments, **options)

    def _start_daemon(self, name: str) -> None:
        assert name == "builder"
        self.requested.append(self.facade.hasBuildRequest(IMAGE))
        for _ in range(self.builds):
            record = zk_module.ImageBuild()
            record.state, record.formats = zk_module.READY, ["tar"]
            build = self.facade.storeBuild(IMAGE, record)
            (self.work / "images" / f"{IMAGE}-{build}.tar").write_bytes(b"four")
        self.facade.removeBuildRequest(IMAGE)
        upload = zk_module.ImageUpload()
        upload.state, upload.external_id = zk_module.READY, "id"
        self.facade.storeImageUpload(IMAGE, build, "here", upload)


@pytest.fixture
def demo(
    tmp_path: pathlib.Path, zk: ZooKeeper, zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlowRequest]:
    work = tmp_path / "work"
    (work / "images").mkdir(parents=True)
    os.mkfifo(work / "gate")
    real = demo_main.program("nodepool")
    late = work / "nodepool"
    late.write_text(
        f'#!/bin/sh\ncase "$*" in *image-build*) read -r line <"{work}/gate";; esac\nexec "{real}" '
        '"$@"\n'
    )
    late.chmod(0o755)
    monkeypatch.setattr(demo_main, "program", lambda name: str(work / name))
    monkeypatch.setattr(demo_main, "STEP_TIMEOUT", limit(60))
    monkeypatch.setattr(demo_main, "BUILD_TIMEOUT", limit(60))
    config = zk_chroot.config(
        {"diskimages": [{"name": IMAGE, "elements": ["vm"]}], "labels": [], "providers": []}
    )
    yield SlowRequest(work, zk, config)


@pytest.mark.parametrize("builds", [1, 2])
def test_builder_starts_after_the_request_and_any_number_of_builds_is_shown(
    demo: SlowRequest, builds: int
) -> None:
    demo.builds = builds
    demo.build_image()
    assert demo.requested == [True]
    assert [(row["bytes"], row["uploads"], row["state"]) for row in demo.images] == [
        (4, ["here"], "ready")
    ]


def test_unexpected_error_is_one_sentence_with_the_log_and_no_traceback(
    tmp_path: pathlib.Path,
) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tools")!r})
from demo import __main__ as demo
demo.Demo.start = lambda self: [].pop()
sys.exit(demo.main())
"""
    command = [sys.executable, "-c", script, "--no-image", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit(60))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done
    assert (
        f"IndexError: pop from empty list; read {tmp_path}/quickstart.log, and start again"
        in done.stdout
    )
    assert "Traceback" in (tmp_path / "quickstart.log").read_text()


def test_closed_network_prints_which_mirror_is_missing() -> None:
    main = demo_image.apt_mirrors("deb http://mirror.example/debian bookworm main\n")
    assert "no mirror of security.debian.org, so the build uses the public one" in (
        demo_image.missing_mirrors(main) or ""
    )
    both = demo_image.apt_mirrors(
        "URIs: http://mirror.example/debian\nURIs: http://mirror.example/debian-security\n"
    )
    assert demo_image.missing_mirrors(both) is None
