"""The manual is complete and correct.

Its commands and examples of providers are valid, and it has all commands, options of daemons,
extras, events, errors and records.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import pathlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from types import ModuleType

import pytest

from nodepool.cmd import builder, launcher, nm, nodepoolcmd
from nodepool.cmd.config_validator import ConfigValidator
from nodepool.lease import Reason
from nodepool.zk.mirror.feed import TYPES
from tests import REPOSITORY
from tests.support import manual

#: What release 11.0.0 has below ``/nodepool``.
FORMER = {"components", "elections", "images", "nodes", "requests", "requests-lock"}
#: Errors of the API: the name of the exception, and the position of its code.
ERRORS = {"Denied": 1, "HttpError": 2, "Refused": 1}


def missing(page: str, words: Iterator[str]) -> list[str]:
    """Return the words that a page does not have, in double backquotes."""
    return sorted({word for word in words if not re.search(rf"``{re.escape(word)}\b", page)})


def test_table_of_commands_has_each_command_once() -> None:
    actions: list[argparse.Action] = vars(nodepoolcmd.create_parser())["_actions"]
    commands = next(action.choices for action in actions if isinstance(action.choices, dict))
    rows = re.findall(r"^   \* - (``.*``)$", manual.page("index"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"``([\w-]+)``", row)]
    assert sorted(named) == sorted(commands)


def test_commands_are_accepted() -> None:
    parsers = {
        "nodepool": nodepoolcmd.create_parser(),
        "np": nodepoolcmd.create_parser(),
        "nodepool-nm": nm.create_parser(),
    }
    accepted = 0
    for path in [
        *(REPOSITORY / "doc").glob("*.rst"),
        *(REPOSITORY / "doc/operation").glob("*.rst"),
    ]:
        text = path.read_text().replace("\\\n", "")
        for line in re.findall(r"^ +\$ ((?:np|nodepool|nodepool-nm) .*)$", text, re.MULTILINE):
            if "$(" not in line:
                program, *words = shlex.split(line, comments=True)
                ends = [number for number, word in enumerate(words) if word in (">", "|", "&&")]
                parsers[program].parse_args(words[: ends[0]] if ends else words)
                accepted += 1
    assert accepted > 60


@pytest.mark.parametrize("daemon", [launcher, builder])
def test_options_of_daemons_are_explained(daemon: ModuleType) -> None:
    actions: list[argparse.Action] = vars(daemon.create_parser())["_actions"]
    options = (option for action in actions for option in action.option_strings)
    page = (REPOSITORY / "doc" / "installation.rst").read_text()
    assert missing(page, options) == ["--help", "--version", "-h"]


def test_extras_are_explained() -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    page = (REPOSITORY / "doc" / "installation.rst").read_text()
    assert missing(page, iter(config["options.extras_require"])) == ["doc", "test"]


def test_types_of_events_are_explained() -> None:
    assert missing(manual.page("observe"), iter(TYPES)) == []


def test_codes_of_errors_are_listed() -> None:
    codes = {reason.value for reason in Reason}
    for path in (REPOSITORY / "nodepool").glob("web/**/*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                place = ERRORS.get(call.func.id, len(call.args))
                for code in call.args[place : place + 1]:
                    codes |= {str(code.value)} if isinstance(code, ast.Constant) else set()
    assert len(codes) > 20
    assert missing(manual.page("api"), iter(codes)) == []


def test_records_that_may_be_deleted_are_listed() -> None:
    ours = {
        name
        for path in (REPOSITORY / "nodepool").rglob("*.py")
        for name in re.findall(r'"/nodepool/([a-z-]+)', path.read_text())
    } - FORMER
    assert missing(manual.page("upgrades"), (f"/nodepool/{name}" for name in ours)) == []


@pytest.mark.parametrize("page", ["drivers", "nodemanager"])
def test_examples_of_providers_are_valid(page: str, tmp_path: pathlib.Path) -> None:
    text = (REPOSITORY / "doc" / f"{page}.rst").read_text()
    blocks = re.findall(r"(?:::|code-block:: yaml)\n\n((?: +.*\n|\n)+)", text)
    examples = [each for block in blocks if "\nproviders:" in (each := textwrap.dedent(block))]
    assert len(examples) >= 2
    path = tmp_path / "nodepool.yaml"
    for example in examples:
        path.write_text(f"zookeeper-insecure: true\nzookeeper-servers: [{{host: zk}}]\n{example}")
        validator = ConfigValidator(str(path))
        validator.check({})
        found = [problem.format("") for _path, problem in validator.findings if problem.error]
        assert found == [], example
