"""The scripts of the pages: unit tests in the Node.js that Playwright contains, and types."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest
from playwright._impl._driver import (
    compute_driver_executable,
)  # the only place that names its Node.js

from tests import REPOSITORY

STATIC = REPOSITORY / "nodepool" / "web" / "static"
#: Installed by tools/run-tests (tests/javascript).
TYPES = REPOSITORY / "tests" / "javascript" / "pages.d.ts"
TSC = REPOSITORY / "tests" / "javascript" / "node_modules" / ".bin" / "tsc"
OPTIONS = (
    "--noEmit",
    "--checkJs",
    "--allowJs",
    "--strict",
    "--target",
    "es2022",
    "--module",
    "es2022",
    "--lib",
    "es2023,dom,dom.iterable",
)
LONGEST = 300
SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def test_pages_of_the_manual_that_are_named_exist() -> None:
    text = (STATIC / "empty.js").read_text()
    named = re.findall(r'\.", "([a-z/-]+)"\]', text)
    assert len(named) > 10
    assert [page for page in named if not (REPOSITORY / "doc" / f"{page}.rst").exists()] == []


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.test.js")))
def test_script_passes_its_unit_tests(script: str, tmp_path: pathlib.Path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "tests").mkdir()
    shutil.copy(SCRIPTS / script, tmp_path / "tests")
    node = str(compute_driver_executable()[0])
    ended = subprocess.run(
        [node, "--test", f"tests/{script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(not TSC.exists(), reason="needs TypeScript: npm ci --prefix tests/javascript")
def test_scripts_have_no_type_errors(tmp_path: pathlib.Path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    (tmp_path / "uplot.js").unlink()  # not ours
    shutil.copy(TYPES, tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.[jt]s"))
    ended = subprocess.run(
        [TSC, *OPTIONS, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_scripts_are_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in STATIC.glob("*.js")}
    assert {name: number for name, number in lines.items() if number > LONGEST} == {}
