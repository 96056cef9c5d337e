"""The pinned packages can be installed where the README promises it."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import REPOSITORY

CONSTRAINTS = [
    Requirement(line)
    for line in (REPOSITORY / "tools" / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
#: Of Debian 12, Ubuntu 24.04 and Debian 13.
PYTHONS = ("3.11.2", "3.12.3", "3.13.5")


@pytest.mark.parametrize("python", PYTHONS)
def test_pinned_packages_accept_the_python_of_each_release(python: str) -> None:
    refused = []
    for pinned in CONSTRAINTS:
        try:
            found = importlib.metadata.distribution(pinned.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform or version of Python
        # Only what is installed here says what it accepts.
        if pinned.specifier.contains(found.version):
            wanted = found.metadata.get("Requires-Python")
            if wanted and not SpecifierSet(wanted).contains(python):
                refused.append(f"{pinned} wants Python {wanted}")
    assert refused == []
