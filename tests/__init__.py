"""Tests; a package, so that they can share helpers."""

import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = REPOSITORY / "tests" / "fixtures"
