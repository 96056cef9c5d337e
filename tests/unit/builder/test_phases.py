"""Phases, from real output of diskimage-builder 3.43 (shortened)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.builder.progress.phases import PHASES, PhaseTracker
from tests import FIXTURES

LOGS = FIXTURES / "builder"
TMP = "/var/tmp/nodepool-build.0011223344556677"


def follow(name: str) -> tuple[PhaseTracker, list[str]]:
    tracker = PhaseTracker()
    lines = (LOGS / name).read_text().splitlines()
    return tracker, [tracker.phase, *(tracker.phase for line in lines if tracker.feed(line))]


COMMON = [
    "starting",
    "root",
    "extra-data",
    "pre-install",
    "install",
    "post-install",
    "block-device",
    "finalise",
    "cleanup",
    "converting",
]


@pytest.mark.spec("BLD-20: progress: current phase")
def test_phases_of_a_tar() -> None:
    tracker, phases = follow("dib-tar.log")
    assert phases == COMMON
    assert tracker.build_dirs == [f"{TMP}/dib_build.QI9WKom9", f"{TMP}/dib_image.caTplJaQ"]
    assert tracker.last_line == "Build completed successfully"


@pytest.mark.spec("BLD-20: progress: current phase")
def test_phases_of_qcow2_and_raw() -> None:
    tracker, phases = follow("dib-qcow2.log")
    assert phases == [*COMMON, "checksums", "converting", "checksums"]
    assert set(phases) == set(PHASES)
    assert len(tracker.build_dirs) == 2


def test_phases_are_read_from_output_without_timestamps() -> None:
    tracker = PhaseTracker()
    assert tracker.feed("dib-run-parts Running /tmp/in_target.d/install.d/10-cloud-init\r\n")
    assert tracker.phase == "install"
    assert not tracker.feed("dib-run-parts Running /tmp/in_target.d/install.d/15-more")


def test_other_output_is_no_phase_and_names_no_directory() -> None:
    tracker = PhaseTracker()
    for line in (
        "Building in /usr/src",
        "Building in /home/zuul/dib_build.abc/../..",
        "echo Building in /tmp/dib_build.abc",
        "+ x.sh:main:1 : TMP_BUILD_DIR=/",
        "+ x.sh:mk_build_dir:1 : TMP_BUILD_DIR=/",
        "Running hooks in /etc/ca-certificates/update.d...",
        "Running hooks from /etc/something.d",
        "make: install.d",
        "Converting image",
    ):
        assert not tracker.feed(line), line
    assert tracker.phase == "starting"
    assert tracker.build_dirs == []


def test_last_line_is_short_and_printable() -> None:
    tracker = PhaseTracker()
    tracker.feed("2026-11-21 19:14:10.225 | \x1b[31mred\x1b[0m\ttext\x07 \x00")
    assert tracker.last_line == "red text"
    tracker.feed("   \n")
    assert tracker.last_line == "red text"
    tracker.feed("x" * 1000)
    assert tracker.last_line == "x" * 200


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    tracker = PhaseTracker()
    tracker.feed(text)
    assert tracker.phase in PHASES
    assert len(tracker.last_line) <= 200
