"""Commands and files of pages of the manual, for tests that run them as written."""

from __future__ import annotations

import re
import textwrap

from tests import REPOSITORY


def page(name: str) -> str:
    return (REPOSITORY / "doc" / "operation" / f"{name}.rst").read_text()


def commands(name: str) -> list[str]:
    """Return the commands of a page: lines that begin with a dollar sign."""
    return re.findall(r"^ +\$ (.*)$", page(name), re.MULTILINE)


def block(name: str, language: str, number: int = 0) -> str:
    """Return a block of code of a page, without indentation."""
    found = re.findall(
        rf"^( *)\.\. code-block:: {language}\n((?:\1   .*\n|\n)+)", page(name), re.MULTILINE
    )
    return textwrap.dedent(found[number][1]).strip("\n") + "\n"
