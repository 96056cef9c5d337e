"""The page about problems of other pools names tests and reports that exist."""

from __future__ import annotations

import re

import pytest

from tests import REPOSITORY

PAGE = (REPOSITORY / "doc/operation/known-problems.rst").read_text()
#: Path and name of each test; a class may be between them.
TESTS = re.findall(r"``(tests/[\w/]+\.py)::(?:\w+::)?(\w+)``", PAGE)
ENTRY = re.compile(r"^\S.*`__\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)


def test_each_problem_names_a_test() -> None:
    entries = ENTRY.findall(PAGE)
    assert len(entries) == len(re.findall(r"^\S.*`__$", PAGE, re.MULTILINE)) >= 50
    assert [text for text in entries if "``tests/" not in text] == []
    assert len(TESTS) == PAGE.count("``tests/")


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)))
def test_named_tests_exist(path: str, name: str) -> None:
    assert re.search(rf"^\s*def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE)


def test_links_lead_to_the_report_that_is_named() -> None:
    links = re.findall(r"`(\S+) #(\d+) <https://github\.com/(\S+)/(?:issues|pull)/(\d+)>`__", PAGE)
    assert len(links) == PAGE.count("`__")
    assert [link for link in links if link[:2] != link[2:]] == []
