"""The line that says why a build failed."""

from __future__ import annotations

import pytest

from nodepool.builder.building.diagnosis import Diagnosis

SET_TRAP = (
    "2026-11-21 20:20:59.194 | + diskimage_builder/lib/common-functions:mk_build_dir:46     "
    ":   trap trap_cleanup EXIT"
)
CALL = (
    "2026-11-21 20:21:38.971 | + diskimage_builder/lib/common-functions:run_d:1     :   "
    "trap_cleanup"
)
TRACE = "+ diskimage_builder/lib/img-functions:trap_cleanup:37       :   exit 100"


@pytest.mark.parametrize(
    "lines,cause",
    [
        ([], ""),
        (["hello", "bye"], "bye"),
        (
            [
                "2026-11-21 19:37:01.724 | E: Could not get lock /var/cache/apt/archives/lock.",
                "2026-11-21 19:37:01.8 | Unmount /x",
                f"2026-11-21 19:37:06.161 | {TRACE}",
                "error: of the clearing up",
            ],
            "E: Could not get lock /var/cache/apt/archives/lock.",
        ),
        (
            [
                "Expanded element dependencies to: base",
                SET_TRAP,
                "E: Release file is expired",
                CALL,
                "E: of the clearing up",
            ],
            "E: Release file is expired",
        ),
        (
            [
                "I: Retrieving libgpg-error0 1.46-1",
                "Element 'nonsense' not found in /elements",
                "the end",
            ],
            "Element 'nonsense' not found in /elements",
        ),
        (
            ["cp: writing 'image.raw': No space left on device", "Cleaning the chroot"],
            "cp: writing 'image.raw': No space left on device",
        ),
        (["error " + "x" * 1000], ("error " + "x" * 1000)[:300]),
    ],
)
def test_cause_is_the_line_that_explains_the_failure(lines: list[str], cause: str) -> None:
    diagnosis = Diagnosis()
    for line in lines:
        diagnosis.feed(line)
    assert diagnosis.cause == cause
