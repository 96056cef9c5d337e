"""What this release calls itself, and where its documents say to get it."""

from __future__ import annotations

import configparser
import re

import pytest

from nodepool import version
from tests import REPOSITORY

ROOT = REPOSITORY


@pytest.mark.spec("issue 11, users fault 3: a version of its own, the same everywhere")
def test_version_is_the_same_everywhere() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == version.FALLBACK == "12.0.0"
    assert f'release = version = "{version.FALLBACK}"' in (ROOT / "doc" / "conf.py").read_text()


@pytest.mark.spec(
    "issue 11, users fault 3: nobody is told to install by the bare name, which is that of the "
    "original"
)
def test_no_bare_name() -> None:
    bare = re.compile(r"""pip install (?:-\S+ )*['"]?nodepool(?:\[|['"`\s]|$)""")
    files = [
        ROOT / "README.rst",
        *ROOT.glob("doc/**/*.rst"),
        *ROOT.glob("etc/**/*.*"),
        *ROOT.glob("nodepool/**/*.py"),
    ]
    texts = [path for path in files if path.is_file()]
    told = [(str(path), match[0]) for path in texts for match in bare.finditer(path.read_text())]
    assert len(files) > 100 and told == []
