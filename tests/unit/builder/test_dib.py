"""The real disk-image-create, interrupted in its first phase (later ones need a package mirror)."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.builder.building.command import build_command, build_environment
from nodepool.builder.building.process import BuildProcess, ProcessResult
from nodepool.builder.machine import build_journal, image_files, mounts, processes
from nodepool.builder.machine.build_journal import begin, clean_all
from nodepool.builder.progress.phases import PhaseTracker
from nodepool.config.diskimages import DiskImage
from tests.conftest import wait_for

log = logging.getLogger("test")

TOOL = os.path.join(os.path.dirname(sys.executable), "disk-image-create")
pytestmark = [
    pytest.mark.skipif(
        not os.path.exists(TOOL), reason="diskimage-builder is not installed beside Python"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

HANGING_ELEMENT = """#!/bin/bash
mkdir -p $TARGET_ROOT/proc $TARGET_ROOT/dev
mount -t proc none $TARGET_ROOT/proc
mount -t tmpfs none $TARGET_ROOT/dev
dd if=/dev/zero of=$TMP_IMAGE_DIR/image0.raw bs=1M count=4 2>/dev/null
losetup -f $TMP_IMAGE_DIR/image0.raw || echo no loop device
( cd $TARGET_ROOT && setsid env -i sleep 1000 & )
echo now it waits
sleep 1000
"""


@pytest.fixture
def elements(tmp_path: pathlib.Path) -> pathlib.Path:
    hooks = tmp_path / "elements" / "hanging" / "root.d"
    hooks.mkdir(parents=True)
    (hooks / "10-hang").write_text(HANGING_ELEMENT)
    (hooks / "10-hang").chmod(0o755)
    (hooks.parent / "element-provides").write_text("operating-system\n")
    return tmp_path / "elements"


class Build:
    """One build as the builder runs it."""

    def __init__(self, tmp_path: pathlib.Path, elements: pathlib.Path, own_tmpdir: bool) -> None:
        self.images_dir = tmp_path / "images"
        self.tmp_base = tmp_path / "tmp"
        self.images_dir.mkdir()
        self.tmp_base.mkdir()
        image = DiskImage("hang")
        variables = {
            "DIB_INIT_SYSTEM": "systemd",
            **({"TMPDIR": str(self.tmp_base)} if own_tmpdir else {}),
        }
        image.setFromConfig({"formats": ["raw"], "elements": ["hanging"], "env-vars": variables})
        self.entry = begin(
            str(self.images_dir), "hang", "0f", str(self.tmp_base), private=not own_tmpdir
        )
        environment = build_environment(
            image, f"{self.images_dir}/hang-0f", str(elements), os.environ, self.entry.private_tmp
        )
        self.log_path = str(tmp_path / "build.log")
        self.log_file = image_files.open_log(self.log_path)
        self.tracker = PhaseTracker()
        self.process = BuildProcess(
            build_command(image, str(self.images_dir), "hang-0f"),
            environment | self.entry.environment,
            self.log_file,
            self.line,
        )
        self.endings: list[ProcessResult] = []
        self.thread = threading.Thread(target=self.run)

    def line(self, text: str) -> None:
        known = len(self.tracker.build_dirs)
        self.tracker.feed(text)
        for directory in self.tracker.build_dirs[known:]:
            assert self.entry.note_dir(directory)

    def run(self) -> None:
        self.endings.append(self.process.wait(time.monotonic() + 60))

    def start(self) -> None:
        self.process.start()
        assert self.process.pid is not None
        self.entry.started(self.process.pid)
        self.thread.start()
        wait_for(
            lambda: self.tracker.last_line.endswith("now it waits") or self.endings,
            60,
            "the element to hang",
        )
        assert not self.endings, pathlib.Path(self.log_path).read_text()[-3000:]

    def finish(self) -> ProcessResult:
        self.thread.join(60)
        self.log_file.close()
        return self.endings[0]

    def assert_nothing_left(self) -> None:
        assert processes.find(self.entry.origin()) == []
        assert mounts.mount_points([str(self.tmp_base)]) == []
        assert mounts.loop_devices(lambda path: path.startswith(str(self.tmp_base))) == []
        # With a TMPDIR of the image, nothing shows whose this directory with two small files is.
        shared = self.entry.private_tmp is None
        assert [
            name
            for name in os.listdir(self.tmp_base)
            if not (shared and name.startswith("profiledir."))
        ] == []
        assert os.listdir(os.path.join(self.images_dir, build_journal.JOURNAL)) == []


@pytest.fixture(params=[False, True], ids=["private TMPDIR", "TMPDIR in env-vars"])
def build(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, elements: pathlib.Path
) -> Iterator[Build]:
    """A build that has come to its hanging hook."""
    value = Build(tmp_path, elements, request.param)
    try:
        value.start()
        yield value
    finally:
        value.process.terminate("the test is over")
        value.finish()
        value.entry.end()


def test_terminated_build_leaves_nothing(build: Build) -> None:
    assert build.tracker.phase == "root"
    assert len(build.tracker.build_dirs) == 2
    build.process.terminate("the test wants it")
    assert build.finish().terminated == "the test wants it"
    assert build.entry.end() == []
    build.assert_nothing_left()
    assert (
        pathlib.Path(build.log_path).read_text().endswith("Build terminated: the test wants it\n")
    )


def test_killed_tool_leaves_nothing(build: Build) -> None:
    """The tool has no chance to clean up, and what it was doing continues."""
    assert mounts.mount_points([str(build.tmp_base)])
    assert build.process.pid is not None
    # Not the program kill: that of procps 4.0.2 takes "-1234" for "-1", which is everybody.
    os.killpg(build.process.pid, signal.SIGKILL)
    assert build.finish().returncode == -signal.SIGKILL
    assert clean_all(str(build.images_dir), log) == [("hang", "0f")]
    build.assert_nothing_left()
