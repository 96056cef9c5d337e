"""What a planted defect is."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Mutation:
    """
    :param module: in which text is replaced; it has to be there once, in whatever layout.
    :param found_by: the first seed of the world with a violation, or the id of a test that fails.
    """

    module: str
    old: str
    new: str
    found_by: int | str

    def place(self, text: str) -> tuple[int, int]:
        """Return where the text of the module has what is replaced, from and to.

        :raises ValueError: what is replaced is not there once.
        """
        # Lines may be wrapped elsewhere, which also adds commas before closing brackets.
        words = (
            f",?\\s*{re.escape(word)}" if word in ")]}" else re.escape(word)
            for word in _WORDS.findall(self.old)
        )
        start = (
            r"\n[ \t]*"
            if self.old.startswith("\n")
            else r"[ \t]*"
            if self.old.startswith(" ")
            else ""
        )
        end = r"[ \t]*\n" if self.old.endswith("\n") else ""
        found = list(re.finditer(start + r"\s*".join(words) + end, text))
        if len(found) != 1:
            raise ValueError(f"{self.old!r} occurs {len(found)} times in {self.module}, not once")
        return found[0].span()

    def apply(self, text: str) -> str:
        """Return the text of the module with the defect."""
        start, end = self.place(text)
        return text[:start] + self.new + text[end:]
