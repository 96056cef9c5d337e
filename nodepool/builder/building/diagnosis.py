"""Find the line of a failed build's output that shows the cause; for users."""

from __future__ import annotations

import re

from nodepool.builder.progress.phases import TIMESTAMP

#: Shell traces (-x) and progress messages of diskimage-builder and debootstrap.
_CHATTER = re.compile(r"\++ |DEBUG |INFO |I: |Unmount |dib-run-parts ")
_ERROR = re.compile(
    r"^E: |\berror\b|\bfatal\b|\bfailed\b|\bfailure\b|no such file|not found|no space "
    r"left|permission denied|unable to|"
    r"can't |cannot |could not|does not exist|timed out|unresolvable|unknown",
    re.IGNORECASE,
)
#: diskimage-builder starts its clean-up: later lines are not the cause. Early in its trace it only
#: sets that trap.
_CLEARING_UP = re.compile(r":trap_cleanup:\d|\s(?<!trap )trap_cleanup$")


class Diagnosis:
    """Collects candidates from the lines of the output."""

    def __init__(self) -> None:
        self._error = ""
        self._last = ""
        self._over = False

    def feed(self, line: str) -> None:
        if self._over:
            return
        text = TIMESTAMP.sub("", line, count=1).strip()
        if _CHATTER.match(text):
            self._over = _CLEARING_UP.search(text) is not None
            return
        if not text:
            return
        self._last = text
        if _ERROR.search(text):
            self._error = text

    @property
    def cause(self) -> str:
        """Return the last line that looks like an error, or the last meaningful line.

        It has at most 300 characters.
        """
        return (self._error or self._last)[:300]
