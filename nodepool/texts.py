"""Text of others (forges, clouds, borrowers, nodes, records) for terminals and logs."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

#: Characters of a text in a list.
LONGEST = 400


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped, except newlines."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def escape_unencodable() -> None:
    """Let standard output escape what its encoding lacks, as standard error does.

    Locales can have another encoding than UTF-8, and names and comments have any characters.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_text(text: str) -> None:
    """Print a text that may contain what others have written."""
    print(printable(text), flush=True)


def counted(names: Iterable[str]) -> str:
    """Return the names, each once with how often it occurs: ``a x2, b``."""
    return ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in Counter(names).items()
    )


def one_line(text: object, most: int = LONGEST) -> str:
    """Return the text as a single line of at most ``most`` characters, for lists."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else line[: most - 3] + "..."


def killed(kill: Mapping[str, object]) -> str:
    """Return the line that names a process that was killed for memory.

    :param kill: event or detail with ``pid``, ``program`` and ``memory_limit`` (bytes).
    """
    limit, unit = kill.get("memory_limit"), "MiB"
    mib = limit / (1 << 20) if isinstance(limit, (int, float)) else 0.0
    if mib >= 1024 and mib % 1024 == 0:
        mib, unit = mib / 1024, "GiB"
    return one_line(
        f"process {kill.get('pid')} ({kill.get('program')}) was killed: the node's memory limit of "
        f"{f'{mib:.0f}' if mib else '?'} {unit} was reached"
    )
