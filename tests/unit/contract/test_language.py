"""Plain English: docstrings, log messages and help texts avoid words that are nearly always
wrong in them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import REPOSITORY

AVOID = re.compile(
    r"""\b(?:
      tells? | telling | told                          # report, log, print, return, show, notify
    | look(?:s|ed|ing)?[ ](?:at|again) | a[ ]look                 # check, read, inspect, poll
    | (?:go|goes|going|went)[ ]on | gets?[ ]on                    # continue, retry, proceed
    | (?:is|are|was|were|be|has|have)[ ]gone                      # no longer exist, be deleted
    | g(?:ive|ives|iving|iven|ave)[ ](?:back|way)                 # return, release; yield
    | t(?:ake|akes|aking|aken|ook)[ ]over                         # adopt, apply, accept
    | (?:leave|leaves|leaving|left)[ ](?:alone|out)               # skip, ignore, omit
    | anew | at[ ]once | by[ ]itself | of[ ](?:its|their)[ ]own  # again; automatically; separate
    | one[ ]after[ ]the[ ]other | beside                          # sequentially; alongside
    | some[ ]\d+ | so[ ]many                                      # about 45 minutes; this many
    | (?<!make_)room                                              # capacity, free quota, disk space
    | (?:is|are|be)[ ]wanted                                      # must be, is required
    | (?<!there[ ])is[ ]no[ ](?!longer\b|more[ ]than\b)           # is not a valid
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
CODE = re.compile(r"``.*?``|`.*?`")
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical"}
HELP = {"help", "description", "epilog"}
#: Words that names of functions do not have: check, report, notify, release, deleted ... say more.
SPOKEN = frozenset(
    [
        "look",
        "looks",
        "told",
        "tell",
        "tells",
        "gone",
        "heard",
        "hear",
        "say",
        "says",
        "said",
        "leave",
        "leaves",
        "taken",
        "saw",
    ]
)
LONGEST = 88  # characters of the first line of a docstring


def _text(node: ast.AST) -> str:
    """Return the constant text of a string, of an f-string, or of their sum."""
    return "".join(
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def first_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and first docstring line of each module, class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring.partition("\n")[0]


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and text of log messages and of help texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOG_CALLS and node.args:
                yield node.lineno, _text(node.args[0])
            yield from (
                (keyword.value.lineno, _text(keyword.value))
                for keyword in node.keywords
                if keyword.arg in HELP
            )


def avoided(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the texts that use a word to avoid, with their line numbers."""
    return [
        found
        for found in (*first_lines(tree), *messages(tree))
        if AVOID.search(CODE.sub("", found[1]))
    ]


def too_long(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the first docstring lines that are too long, with their line numbers."""
    return [found for found in first_lines(tree) if len(found[1]) > LONGEST]


def returns_nothing(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the first docstring lines that promise a value of functions without one."""
    return [
        (node.lineno, docstring.partition("\n")[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.returns, ast.Constant)
        and node.returns.value is None
        and (docstring := ast.get_docstring(node) or "").startswith("Return ")
    ]


def spoken_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the functions whose names have words of speech instead of terms of the field."""
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and SPOKEN & set(node.name.split("_"))
    ]


def homonyms(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the classes whose names do not say whose client or connection they are."""
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in ("Client", "Connection")
    ]


def test_clients_and_connections_say_whose_they_are() -> None:
    found = {
        str(path.relative_to(REPOSITORY / "nodepool"))
        for path in (REPOSITORY / "nodepool").rglob("*.py")
        if homonyms(ast.parse(path.read_text()))
    }
    # Scripts of users import it: doc/nodemanager.rst.
    assert found == {"nodemanager/client/rpc.py"}


@pytest.mark.parametrize("find", [avoided, too_long, returns_nothing, spoken_names])
def test_texts_are_plain(find) -> None:
    found = []
    for path in sorted((REPOSITORY / "nodepool").rglob("*.py")):
        found += [
            f"{path.relative_to(REPOSITORY)}:{line}: {text}"
            for line, text in find(ast.parse(path.read_text()))
        ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        '"""Look at the node."""',
        'def wait():\n    """Begin anew."""',
        'log.warning("Provider %s is left out: %s", name, reason)',
        'log.error(f"Node {node.id} is gone: " + reason)',
        'parser.add_argument("--port", help="a whole number is wanted")',
    ],
)
def test_words_to_avoid_are_found(code) -> None:
    assert len(avoided(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        '"""Return the nodes, see ``look at``; None if there is no lock."""',
        'log.info("Node %s is no longer needed; beginning with the next", node.id)',
        'log.info("%s", "the argument tells what to do")',
        'raise ValueError("errors are for people")',
    ],
)
def test_other_texts_pass(code) -> None:
    assert avoided(ast.parse(code)) == []


def test_long_first_lines_are_found() -> None:
    assert len(too_long(ast.parse(f'def f():\n    """{"x" * LONGEST}."""'))) == 1
    assert (
        too_long(ast.parse(f'def f():\n    """{"x" * (LONGEST - 1)}.\n\n    {"x" * 100}"""')) == []
    )
