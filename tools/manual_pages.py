"""Create manual pages: of programs from their parsers, of files from the declarations of options.

The programs' pages also use manual_pages.yaml.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TEXTS: dict[str, dict[str, Any]]
FILES: dict[str, dict[str, Any]]
TEXTS, FILES = yaml.safe_load_all((REPOSITORY / "tools" / "manual_pages.yaml").read_text())


def file_of(program: str) -> str:
    """Return the name of the page of a program, with its section."""
    return f"{program}.{TEXTS[program]['section']}"


def roff(text: str) -> str:
    """Return a text with ``literals`` and :roles:`of the manual` for troff."""
    text = re.sub(r":\w+:`([^`<]*?)(?: *<[^>]*>)?`", r"\1", text)
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"``(.+?)``", r"\\fB\1\\fR", text)
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def _entries(entries: Mapping[str, str], style: str = "B") -> Iterator[str]:
    for name, text in entries.items():
        yield (
            f".TP\n\\f{style}{roff(name)}\\fR\n{roff(text)}\n"
            if name != "others"
            else f".TP\nothers\n{roff(text)}\n"
        )


def _code(text: str) -> str:
    return f".PP\n.RS 4\n.nf\n{roff(text.rstrip())}\n.fi\n.RE\n"


def _see_also(pages: str) -> str:
    names = re.sub(r"(\S+) \((\d)\)", r"\\fB\1\\fR(\2)", pages.replace("-", "\\-"))
    return f".SH SEE ALSO\n{names}\n"


def tail_of(program: str) -> str:
    """Return the sections after the options of a program."""
    texts = TEXTS[program]
    parts = []
    for title in ("exit status", "environment", "files", "signals"):
        if title in texts:
            found = dict(texts[title])
            others = {"others": found.pop("others")} if "others" in found else {}
            parts += [
                f".SH {title.upper()}\n",
                *_entries({**found, **others}, "I" if title == "files" else "B"),
            ]
    parts.append(".SH EXAMPLES\n")
    for text, commands in texts["examples"].items():
        parts.append(f".PP\n{roff(text)}:\n{_code(chr(10).join(commands))}")
    others = [f"{name} ({TEXTS[name]['section']})" for name in TEXTS if name != program]
    return "".join(parts) + _see_also(", ".join([*others, "nodepool.yaml (5)"]))


def program_page(program: str, parser: argparse.ArgumentParser, version: str) -> str:
    """Return the page of a program."""
    from argparse_manpage.manpage import Manpage

    text = str(
        Manpage(
            parser,
            _data={"project_name": "Nodepool", "version": version, "manual_title": "Nodepool"},
        )
    )
    # No date: the same options make the same page.
    _first, rest = text.split("\n", 1)
    # For whatis and apropos, which read what is after the dash.
    name = f".SH NAME\n{program} \\- {(parser.description or '').splitlines()[0].rstrip('.')}\n"
    rest = re.sub(r"\.SH NAME\n.*\n", lambda _found: name, rest, count=1).rstrip()
    rest = re.sub(
        "^'", lambda _quote: "\\&'", rest, flags=re.MULTILINE
    )  # which would begin a request of troff
    return f"{_head(program, TEXTS[program]['section'], version)}{rest}\n{tail_of(program)}"


def _head(name: str, section: int, version: str) -> str:
    return f'.TH {name.upper()} "{section}" "" "Nodepool {version}" "Nodepool"\n'


def file_page(name: str, version: str) -> str:
    """Return the page of a configuration file: every option with type, default and meaning."""
    sys.path.insert(0, str(REPOSITORY / "doc" / "ext"))
    reference = importlib.import_module("driver_options")
    texts = FILES[name]
    head = (
        f".SH NAME\n{name} \\- {texts['name']}\n.SH SYNOPSIS\n.I /etc/nodepool/{name}\n.SH "
        "DESCRIPTION\n"
    )
    parts = [
        _head(name, 5, version),
        head,
        ".PP\n".join(f"{roff(text)}\n" for text in texts["description"]),
    ]
    common: set[tuple[str, ...]] = set()
    for source, title in texts["options"].items():
        parts.append(f".SH {title.upper()}\n")
        for where, rows in reference.sections(source):
            place = {"providers": "provider", source: ""}.get(where, where)
            new = [row for row in rows if (place or source, *row) not in common]
            if source in ("providers", "pools"):
                common |= {("provider" if source == "providers" else "pools", *row) for row in rows}
            if new and place:
                parts.append(f".SS Options of {roff(place)}\n")
            parts += [_option(*row) for row in new]
    parts.append(f".SH EXAMPLES\n{_code(texts['example'])}{_see_also(texts['see also'])}")
    return "".join(parts)


def _option(name: str, kind: str, default: str, meaning: str) -> str:
    state = "required" if default == "required" else f"default: {default}"
    return f".TP\n{roff(name)} ({roff(kind)}; {roff(state)})\n{roff(meaning)}\n"
