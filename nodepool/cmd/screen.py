"""Shows repeatedly updated texts, with colors and scrolling on terminals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

Draw = Callable[[], object]
#: What is colored -> style of rich. Colors only repeat what the words say.
STYLES = {
    r"(?m)^[A-Z][\w ,]+:": "bold",
    r"\b(Failing|failed|aborted|not ready|not usable|not running|stale|refused)\b": "bold red",
    r"\b(Degraded|building|pending|deleting|paused|hold|full)\b": "yellow",
    r"\b(ready|usable|in force|No problems)\b": "green",
    r"\b([1-9][\d.,]*) of \1\b": "yellow",
}
#: Keys of terminals -> lines to scroll; pages are scrolled by the height of the screen.
LINES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1, b"\r": 1}
PAGES = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
ENDS = {
    b"\x1b[H": -1,
    b"\x1bOH": -1,
    b"\x1b[1~": -1,
    b"g": -1,
    b"\x1b[F": 1,
    b"\x1bOF": 1,
    b"\x1b[4~": 1,
    b"G": 1,
}
_KEY = re.compile(rb"\x1b[\[O]\d*[A-Z~]|.", re.DOTALL)
HINT = "arrows, Page Up/Down: scroll; q: quit"


class _Picture(io.StringIO):
    """Output for a terminal, collected until it is complete."""

    def isatty(self) -> bool:
        return True


class Changes:
    """A flag that other threads set, and that ``select`` can wait for."""

    def __init__(self) -> None:
        self._flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._flag

    def set(self) -> None:
        os.eventfd_write(self._flag, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is not set
            os.eventfd_read(self._flag)


class Lines:
    """Shows texts one below the other, with the time of day."""

    def show(self, draw: Draw) -> None:
        draw()
        print(time.strftime("%H:%M:%S"), flush=True)

    def wait(self, changed: Changes, soonest: float, latest: float) -> bool:
        """Wait for a change within these limits (seconds); return False if the user quits."""
        time.sleep(soonest)
        select.select([changed], [], [], latest - soonest)
        return True


class Screen(Lines):
    """Shows texts in place of each other; keys scroll."""

    def __init__(self, live: Live, keys: int | None) -> None:
        self._live = live
        self._keys = keys
        self._lines: list[str] = []
        self._top = 0
        self._clock = ""

    def show(self, draw: Draw) -> None:
        with contextlib.redirect_stdout(_Picture()) as picture:
            draw()
        self._lines, self._clock = picture.getvalue().splitlines(), time.strftime("%H:%M:%S")
        self._update()

    def _update(self) -> None:
        room, number = self._live.console.height - 1, len(self._lines)
        self._top = max(0, min(self._top, number - room))
        shown = self._lines[self._top : self._top + room]
        place = (
            ""
            if len(shown) == number
            else f"  lines {self._top + 1}-{self._top + len(shown)} of {number}"
        )
        hint = f"  ({HINT})" if self._keys is not None else ""
        text = colored("\n".join([*shown, f"{self._clock}{place}{hint}"]))
        text.no_wrap, text.overflow = True, "crop"
        self._live.update(text, refresh=True)

    def wait(self, changed: Changes, soonest: float, latest: float) -> bool:
        if self._keys is None:
            return super().wait(changed, soonest, latest)
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < latest:
            awaited: list[int | Changes] = (
                [self._keys] if passed < soonest else [self._keys, changed]
            )
            ready = select.select(
                awaited, [], [], (soonest if passed < soonest else latest) - passed
            )[0]
            if changed in ready:
                return True
            if not ready:
                continue
            keys = _KEY.findall(os.read(self._keys, 1024))
            if b"q" in keys or not keys:
                return False
            for key in keys:
                page, end = (
                    PAGES.get(key, 0) * (self._live.console.height - 2),
                    ENDS.get(key, 0) * len(self._lines),
                )
                self._top = max(
                    0, min(self._top + LINES.get(key, 0) + page + end, len(self._lines))
                )
                self._update()
        return True


def colored(text: str) -> Text:
    """Return the text with colors for states and problems, for a terminal."""
    from rich.text import Text

    found = Text(text)
    for pattern, style in STYLES.items():
        found.highlight_regex(pattern, style)
    return found


def print_colored(text: str) -> None:
    """Print a text, with colors on a terminal unless NO_COLOR is set."""
    # A picture is colored when its lines are cut to the width: escape codes would be cut as text.
    if isinstance(sys.stdout, _Picture) or not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False).print(colored(text), soft_wrap=True)


@contextlib.contextmanager
def screen() -> Iterator[Lines]:
    """Yield what shows texts; a terminal gets its former content and mode back at the end."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    # All other commands start without it.
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout, highlight=False)
    if console.is_dumb_terminal:
        yield Lines()
        return
    with (
        _keys() as keys,
        Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live,
    ):
        yield Screen(live, keys)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Let standard input yield each key without echo; None: it is not a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    mode = termios.tcgetattr(keys)
    # The terminal is restored at the end.
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGTERM, before)
