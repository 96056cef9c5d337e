"""Read YAML data from a file (CFG-2)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nodepool.base.files import FileIdentity, file_identity, open_now
from nodepool.config.errors import ConfigFileMissing, ConfigSyntaxError

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

PREFIX = "NODEPOOL_"
READ_ATTEMPTS = 3
READ_RETRY_INTERVAL = 0.5  # seconds; editors replace a file by deleting and creating it

_REFERENCE = re.compile(r"%\((" + PREFIX + r"[^)]*)\)")
#: The start of a line whose rest is a comment; not where a quote may contain the #.
_COMMENT = re.compile(r"(?:[^'\"]*\s)?#")


def as_list(item: object) -> list[Any]:
    """Return falsy values as ``[]``, lists unchanged, anything else as a list of one."""
    if not item:
        return []
    if isinstance(item, list):
        return item
    return [item]


def substitute_env_vars(config_str: str, env: Mapping[str, str]) -> str:
    """Replace each ``%(NODEPOOL_X)`` that *env* contains, in one pass.

    Replaced text is not processed again.
    """
    return _REFERENCE.sub(lambda match: env.get(match.group(1), match.group(0)), config_str)


def leftover_references(text: str) -> Iterator[tuple[str, int]]:
    """Yield names left as ``%(NODEPOOL_X)`` in the substituted *text*, with their lines.

    Comments are ignored.
    """
    for match in _REFERENCE.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not _COMMENT.match(before):
            yield match.group(1), text.count("\n", 0, match.start()) + 1


def read_text(path: str, env: Mapping[str, str]) -> tuple[str, FileIdentity]:
    """Return the substituted text and the identity of the file before reading.

    A missing file is retried for about a second; then ConfigFileMissing, a FileNotFoundError, is
    raised.
    """
    pause = threading.Event()
    for attempt in range(READ_ATTEMPTS):
        if attempt:
            pause.wait(READ_RETRY_INTERVAL)
        try:
            identity = file_identity(path)
            with open(path, encoding="utf-8", opener=open_now) as stream:
                if identity is not None:
                    return substitute_env_vars(stream.read(), env), identity
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as exc:
            error = ConfigSyntaxError(f"not UTF-8 text: {exc}")
            error.file = path
            raise error from exc
    raise ConfigFileMissing(f"No such file or directory: {path}")


def syntax_error(exc: yaml.YAMLError, text: str, path: str) -> ConfigSyntaxError:
    marked = exc if isinstance(exc, yaml.MarkedYAMLError) else yaml.MarkedYAMLError()
    mark, problem, context = (
        marked.problem_mark,
        marked.problem or str(exc).splitlines()[0],
        marked.context,
    )
    unset = ", ".join(f"{name} (line {line})" for name, line in leftover_references(text))
    before = f"not set in the environment: {unset}; " if unset else ""
    error = ConfigSyntaxError(
        f"{before}not valid YAML: {problem}" + (f" ({context})" if context else "")
    )
    error.file = path
    error.line = mark.line + 1 if mark else None
    return error
