"""Shows a repeatedly updated text: in place on a terminal, otherwise line by line."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator


class _Picture(io.StringIO):
    """Output for a terminal, collected until it is complete."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def screen() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield a function that shows what another one prints, with the time of day.

    A terminal gets its former content back at the end. Lines that do not fit are omitted, and counted.
    """
    if not sys.stdout.isatty():
        yield _print
        return
    # All other commands start without it.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if console.is_dumb_terminal:
        yield _print
        return
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def show(draw: Callable[[], object]) -> None:
            with contextlib.redirect_stdout(_Picture()) as picture:
                _print(draw)
            *lines, clock = picture.getvalue().splitlines()
            room = console.height - 1
            if len(lines) > room:
                clock += f"  ({len(lines) - room} more lines)"
            live.update(Text("\n".join([*lines[:room], clock]), no_wrap=True, overflow="crop"), refresh=True)

        yield show


def _print(draw: Callable[[], object]) -> None:
    draw()
    print(time.strftime("%H:%M:%S"), flush=True)
