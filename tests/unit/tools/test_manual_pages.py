"""Manual pages are current, complete and correct: sections, examples, variables and options."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest

from nodepool.cmd.commands import lease
from nodepool.config.jsonschema import document
from nodepool.version import get_version_string
from tests import REPOSITORY
from tests.conftest import load_tool

PACKAGE: Any = load_tool("package")
PAGES: Any = load_tool("manual_pages.py")
MAN = REPOSITORY / "etc" / "man"
ALL = sorted(MAN.iterdir())
DAEMONS = {
    "nodepool-launcher",
    "nodepool-builder",
    "nodepool-nodemanager",
    "nodepool-github",
    "nodepool-gitea",
}


def test_every_program_has_a_page_and_daemons_are_in_section_8() -> None:
    assert PAGES.TEXTS.keys() == PACKAGE.PROGRAMS.keys()
    assert {
        program for program in PACKAGE.PROGRAMS if PAGES.file_of(program).endswith(".8")
    } == DAEMONS
    expected = {
        *map(PAGES.file_of, PACKAGE.PROGRAMS),
        *(f"{name}.5" for name in PAGES.FILES),
        "nodepool-nm-forward.1",
    }
    assert {path.name for path in ALL} == expected


@pytest.mark.parametrize("program", PACKAGE.PROGRAMS)
def test_sections_of_programs_are_current(program: str) -> None:
    """Run ``tools/package pages`` after changes."""
    page = (MAN / PAGES.file_of(program)).read_text()
    assert page.endswith(PAGES.tail_of(program))
    assert {"EXAMPLES", "EXIT STATUS", "FILES", "SEE ALSO"} <= set(
        re.findall(r"^\.SH (.*)$", page, re.MULTILINE)
    )
    assert program not in DAEMONS or ".SH SIGNALS\n" in page


@pytest.mark.parametrize("program", sorted(DAEMONS))
def test_unit_of_systemd_names_the_page(program: str) -> None:
    assert (
        f"\nDocumentation=man:{program}(8)\n"
        in (REPOSITORY / "etc" / "systemd" / f"{program}.service").read_text()
    )


@pytest.mark.parametrize("name", PAGES.FILES)
def test_pages_of_files_are_current(name: str) -> None:
    version = PACKAGE.setup()["metadata"]["version"]
    assert (MAN / f"{name}.5").read_text() == PAGES.file_page(name, version), (
        "run tools/package pages"
    )
    assert version in get_version_string()


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_pages_are_rendered_without_warnings(path: pathlib.Path) -> None:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MANROFFSEQ": ""}
    shown = subprocess.run(
        ["man", "--warnings", "-l", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    assert shown.stderr == ""
    assert "SEE ALSO" in shown.stdout and "``" not in shown.stdout and ":doc:" not in shown.stdout


EXAMPLES = [
    command
    for texts in PAGES.TEXTS.values()
    for commands in texts["examples"].values()
    for command in commands
]


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_are_accepted_by_the_program(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "systemctl":
        assert (REPOSITORY / "etc" / "systemd" / f"{arguments[-1]}.service").exists()
    else:
        importlib.import_module(PACKAGE.PROGRAMS[program]).create_parser().parse_args(arguments)


def test_variables_of_the_environment_are_read_by_the_code() -> None:
    code = "\n".join(path.read_text() for path in (REPOSITORY / "nodepool").rglob("*.py"))
    names = {
        name
        for texts in PAGES.TEXTS.values()
        for names in texts.get("environment", {})
        for name in names.split(", ")
    }
    # argparse, rich and the standard library read the others.
    assert {
        name
        for name in names - {"others", "NO_COLOR", "COLUMNS", "TMPDIR"}
        if f'"{name}"' not in code
    } == set()


def test_statuses_of_leases_are_named() -> None:
    named = PAGES.TEXTS["nodepool"]["exit status"]
    assert {
        str(each) for each in (lease.NOT_IN_TIME, lease.FAILED_STATUS, lease.ENDED)
    } <= named.keys()


def test_page_of_the_configuration_has_every_option_with_type_and_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "doc" / "ext"))
    reference = importlib.import_module("driver_options")
    page = (MAN / "nodepool.yaml.5").read_text().replace("\\-", "-")
    shown = set(
        re.findall(
            r"^\.TP\n\\fB(\S+?)\\fR \(.+; (?:required|default: .+)\)\n\S", page, re.MULTILINE
        )
    )
    assert document(())["properties"].keys() <= shown
    for name in PAGES.FILES["nodepool.yaml"]["options"]:
        assert {
            row[0].strip("`") for _where, rows in reference.sections(name) for row in rows
        } <= shown, name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a-b ``c-d``", "a\\-b \\fBc\\-d\\fR"),
        (".start\n'quote", "\\&.start\n\\&'quote"),
        ("see :doc:`the page <operation/web>` or :doc:`nodes`", "see the page or nodes"),
        ("C:\\x", "C:\\ex"),
    ],
)
def test_texts_are_escaped_for_troff(text: str, shown: str) -> None:
    assert PAGES.roff(text) == shown


def test_exit_statuses_of_the_command_are_the_same_in_the_manual_and_its_page() -> None:
    text = (
        (REPOSITORY / "doc/operation/index.rst")
        .read_text()
        .partition("Exit statuses:")[2]
        .partition("\n- ")[0]
    )
    found = dict(re.findall(r"^`*(\w+)`*\n((?:    .*\n)+)", text, re.MULTILINE))
    assert {name: " ".join(words.split()) for name, words in found.items()} == PAGES.TEXTS[
        "nodepool"
    ]["exit status"]
