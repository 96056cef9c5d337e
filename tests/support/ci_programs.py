"""Buildbot, Ansible and tmt, as black boxes in a separate virtual environment."""

from __future__ import annotations

import os
import pathlib

from tests import REPOSITORY
from tests.support import others

FOLDER = pathlib.Path(os.environ.get("NODEPOOL_CI_VENV") or REPOSITORY / ".ci-venv")
REQUIREMENTS = (
    "buildbot==4.3.0",
    "buildbot-worker==4.3.0",
    "buildbot-www==4.3.0",
    "ansible-core==2.19.14",
    "tmt==1.78.0",
)


def program(name: str) -> str:
    """Return the path of a program of one of them."""
    return str(pathlib.Path(others.create(FOLDER, REQUIREMENTS)).with_name(name))
