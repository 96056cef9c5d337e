"""Docstrings and tests cite the contract by section and rule: what is cited exists, and each
section has a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import REPOSITORY

PAGES = {
    "AWS": "aws",
    "AZU": "azure",
    "BLD": "builder",
    "CFG": "config",
    "CLI": "commands",
    "DRV": "drivers",
    "FAK": "fake",
    "GCE": "gce",
    "IBM": "ibmvpc",
    "KUB": "kubernetes",
    "LAU": "launcher",
    "MST": "metastatic",
    "NM": "nodemanager",
    "OSH": "openshift",
    "OST": "openstack",
    "PY": "python",
    "STA": "static",
    "ZK": "zookeeper",
}
NUMBER = r"(?:[ABC]\.)?\d+(?:\.\d+)*(?:\.[A-E])?"
CITED = re.compile(rf"\b({'|'.join(PAGES)})-({NUMBER})")
HEADING = re.compile(rf"^(?:#+ )?({'|'.join(PAGES)})-({NUMBER})(?: (.*))?$", re.MULTILINE)
OLD = re.compile(
    r"\b(?:launcher|builder|config|driver-[a-z-]+|zookeeper-schema|cli-web-metrics|"
    r"python-interface|nodemanager|design|style)\.md\b"
)
#: Overviews, examples, and what is tested under the name of another section; may only become
#: shorter.
NO_TEST: dict[str, set[str]] = {
    "BLD": {"3", "5", "19"},
    "CFG": {"1", "3", "11", "13", "14", "15", "16"},
    "CLI": {"3"},
    "DRV": {"11", "13"},
    "KUB": {"1"},
    "LAU": {"1", "17", "18"},
    "MST": {"1", "5", "7"},
    "NM": {"B.1", "B.5"},
    "OSH": {"1", "5", "10"},
    "PY": {"7"},
    "STA": {"2", "3", "5"},
    "ZK": {"3", "9", "12", "13", "15"},
}


@cache
def page(prefix: str) -> str:
    return next((REPOSITORY / "doc/contract").glob(f"{PAGES[prefix]}.*")).read_text()


@cache
def sections(prefix: str) -> dict[str, str]:
    """Number of each section and named rule -> its text."""
    text = page(prefix)
    found = list(HEADING.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match[2]: text[match.end() : end] for match, end in zip(found, ends, strict=True)}


def exists(prefix: str, number: str) -> bool:
    """A section, a rule with a name, or an item of a section by its number or letter."""
    known = sections(prefix)
    if number in known:
        return True
    section, _, item = number.rpartition(".")
    if section not in known:
        return False
    if item.isalpha():
        return bool(re.search(rf"\b{item}\b", known[section]))
    return bool(
        re.search(
            rf"^\s*{re.escape(number)}\b|^\s*(?:{item}|#)\. |^- ", known[section], re.MULTILINE
        )
    )


def texts(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in (REPOSITORY / folder).rglob("*.py"):
            if path != Path(__file__):
                yield path, path.read_text()


def test_what_is_cited_exists() -> None:
    cited = {
        (match[1], match[2], path.name)
        for path, text in texts("nodepool", "tests", "tools")
        for match in CITED.finditer(text)
    }
    assert len(cited) > 800
    assert (
        sorted(
            f"{prefix}-{number} ({name})"
            for prefix, number, name in cited
            if not exists(prefix, number)
        )
        == []
    )


def test_number_of_a_rule_is_used_once() -> None:
    numbers = [match.group() for prefix in PAGES for match in HEADING.finditer(page(prefix))]
    assert sorted({number for number in numbers if numbers.count(number) > 1}) == []


def test_nothing_is_cited_that_is_not_here() -> None:
    assert [
        str(path) for path, text in texts("nodepool", "tests", "tools") if OLD.search(text)
    ] == []


def test_each_section_has_a_test() -> None:
    cited: dict[str, set[str]] = {prefix: set() for prefix in PAGES}
    for _path, text in texts("tests"):
        for match in CITED.finditer(text):
            parts = match[2].split(".")
            cited[match[1]].update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    for prefix in PAGES:
        tops = {
            number
            for number in sections(prefix)
            if "." not in number or re.fullmatch(r"[ABC]\.\d+", number)
        }
        assert tops - cited[prefix] == NO_TEST.get(prefix, set()), prefix
