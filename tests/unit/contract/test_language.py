"""Plain English: docstrings, comments and messages avoid words that are nearly always wrong."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
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
PYTHON = b"#!/usr/bin/env python3"
#: Of pages: quoted texts and examples.
QUOTED = re.compile(r"``[^`]*``|`[^`]*`|::\n(?:\n* {2,}[^\n]*\n)+")
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
#: The same for names of tests, which are promises: reported, deleted, capacity, concurrently ...
VAGUE = re.compile(
    r"""_(?:
        told | tells? | beside | gone | room | anew | at_once | by_itself | of_(?:its|their)_own
      | looks? | said | says? | heard | one_after_the_other | gives?_back | given_back | goe?s?_on
      | left_alone | left_out | taken_over | takes_over | wanted
    )(?:_|$)""",
    re.VERBOSE,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LONGEST = 88  # characters of the first line of a docstring


def first_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and first docstring line of each module, class and function."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.partition("\n")[0]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of docstrings, messages and comments: all texts with blanks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())
    yield from comments(source)


def descriptions(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of docstrings and comments; other texts of tests are data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(docstring.split())
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def avoided(source: str) -> list[tuple[int, str]]:
    """Return the texts that use a word to avoid, with their line numbers."""
    return [found for found in texts(source) if AVOID.search(CODE.sub("", found[1]))]


def avoided_in_tests(source: str) -> list[tuple[int, str]]:
    """Return the docstrings and comments that use a word to avoid, with their line numbers."""
    return [found for found in descriptions(source) if AVOID.search(CODE.sub("", found[1]))]


def too_long(source: str) -> list[tuple[int, str]]:
    """Return the first docstring lines that are too long, with their line numbers."""
    return [found for found in first_lines(ast.parse(source)) if len(found[1]) > LONGEST]


def returns_nothing(source: str) -> list[tuple[int, str]]:
    """Return the first docstring lines that promise a value of functions without one."""
    return [
        (node.lineno, docstring.partition("\n")[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.returns, ast.Constant)
        and node.returns.value is None
        and (docstring := ast.get_docstring(node) or "").startswith("Return ")
    ]


def spoken_names(source: str) -> list[tuple[int, str]]:
    """Return the functions whose names have words of speech instead of terms of the field."""
    return [
        (node.lineno, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and SPOKEN & set(node.name.split("_"))
    ]


def vague_names(source: str) -> list[tuple[int, str]]:
    """Return the tests whose names have words to avoid."""
    return [
        (node.lineno, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and VAGUE.search(node.name)
    ]


def homonyms(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the classes whose names do not say whose client or connection they are."""
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in ("Client", "Connection")
    ]


def test_names_of_clients_and_connections_have_their_owner() -> None:
    found = {
        str(path.relative_to(REPOSITORY / "nodepool"))
        for path in (REPOSITORY / "nodepool").rglob("*.py")
        if homonyms(ast.parse(path.read_text()))
    }
    # Scripts of users import it: doc/nodemanager.rst.
    assert found == {"nodemanager/client/rpc.py"}


def scripts(folder: str) -> list[pathlib.Path]:
    """Return the Python files of a folder, also those whose names do not end in ``.py``."""
    return [
        path
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.suffix == ".py"
        or (path.suffix == "" and path.is_file() and path.read_bytes().startswith(PYTHON))
    ]


@pytest.mark.parametrize(
    ("folder", "find"),
    [
        ("nodepool", avoided),
        ("nodepool", too_long),
        ("nodepool", returns_nothing),
        ("nodepool", spoken_names),
        ("tools", avoided),
        ("tools", returns_nothing),
        ("tests", avoided_in_tests),
        ("tests", vague_names),
    ],
)
def test_texts_are_plain(folder, find) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text}"
        for path in scripts(folder)
        for line, text in find(path.read_text())
    ]
    assert found == []


def test_pages_are_plain() -> None:
    pages = [*(REPOSITORY / "doc").rglob("*.rst"), *(REPOSITORY / "doc").rglob("*.md")]
    pages += [REPOSITORY / name for name in ("README.rst", "CONTRIBUTING.rst", "SECURITY.rst")]
    found = [
        f"{page.relative_to(REPOSITORY)}: {match[0]}"
        for page in [*pages, REPOSITORY / "findings/README.rst"]
        for match in AVOID.finditer(" ".join(QUOTED.sub("", page.read_text()).split()))
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
        'raise ValueError(f"{name} is no "\n    "number")',
        '"""Return the nodes.\n\nOthers are left\nout.\n"""',
        "x = 1  # some 50 nodes",
    ],
)
def test_words_to_avoid_are_found(code) -> None:
    assert len(avoided(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        '"""Return the nodes, see ``look at``; None if there is no lock."""',
        'log.info("Node %s is no longer needed; beginning with the next", node.id)',
        'raise ValueError("errors are for people")',
        'tells = "told"  # one word is a value',
    ],
)
def test_other_texts_pass(code) -> None:
    assert avoided(code) == []


def test_long_first_lines_are_found() -> None:
    assert len(too_long(f'def f():\n    """{"x" * LONGEST}."""')) == 1
    assert too_long(f'def f():\n    """{"x" * (LONGEST - 1)}.\n\n    {"x" * 100}"""') == []


def test_vague_names_are_found() -> None:
    assert vague_names("def test_a_node_is_gone(): ...") == [(1, "test_a_node_is_gone")]
    assert vague_names("def test_a_node_is_deleted(): ...") == []
