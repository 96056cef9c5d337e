"""Each news fragment appears in the page that a release makes of them."""

from __future__ import annotations

import subprocess
import sys

from tests import REPOSITORY

FRAGMENTS = REPOSITORY / "doc" / "release-notes" / "fragments"


def test_page_of_a_release_has_all_fragments() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "99"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    words = " ".join(page.split())
    files = [path for path in FRAGMENTS.rglob("*") if path.is_file()]
    left_out = [path.name for path in files if " ".join(path.read_text().split()) not in words]
    assert left_out == [], "the name is not AREA/+NAME.TYPE.rst"
