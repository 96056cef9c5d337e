"""Watched listings scroll, end at a key, and color states only where that is required."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.cmd import screen as module
from nodepool.cmd.screen import Changes, Screen, colored, print_colored, screen
from tests.support.deadline import limit

TEXT = "\n".join(f"line {number}" for number in range(1, 31))
NEVER = Changes()


class Picture:
    """Stands for the terminal: 11 lines; the last picture is kept."""

    class console:
        height = 11

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, text: Any, refresh: bool) -> None:
        self.lines = text.plain.splitlines()


class Keyboard:
    def __init__(self, picture: Any) -> None:
        self.read, self.write = os.pipe()
        self.picture = picture
        self.screen = Screen(picture, self.read)
        self.screen.show(lambda: print(TEXT))

    def type(self, *keys: bytes) -> str:
        """Return the first line that is shown afterwards."""
        os.write(self.write, b"".join(keys))
        assert self.screen.wait(NEVER, 0, 0.01)
        return str(self.picture.lines[0])


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    found = Keyboard(Picture())
    yield found
    os.close(found.read)
    os.close(found.write)


UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = (
    b"\x1b[A",
    b"\x1b[B",
    b"\x1b[5~",
    b"\x1b[6~",
    b"\x1b[H",
    b"\x1b[F",
)


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ([DOWN], 2),
        ([DOWN, DOWN, UP], 2),
        ([UP], 1),
        ([PAGE_DOWN], 10),
        ([b" "], 10),
        ([PAGE_DOWN, PAGE_UP], 1),
        ([END], 21),
        ([END, DOWN], 21),
        ([END, HOME], 1),
        ([b"j", b"j", b"k"], 2),
        ([b"x", b"\x1b[1;5Z"], 1),
        ([b"\x1bOB"], 2),
    ],
)
def test_keys_scroll_within_the_text(keyboard: Keyboard, keys: list[bytes], first: int) -> None:
    assert keyboard.type(*keys) == f"line {first}"


def test_last_line_names_the_shown_lines_and_the_keys(keyboard: Keyboard) -> None:
    keyboard.type(DOWN)
    assert len(keyboard.picture.lines) == 11
    assert keyboard.picture.lines[-1].endswith(
        "  lines 2-11 of 30  (arrows, Page Up/Down: scroll; q: quit)"
    )
    keyboard.screen.show(lambda: print("short"))
    assert keyboard.picture.lines[0] == "short" and " of " not in keyboard.picture.lines[-1]


def test_position_stays_when_the_text_changes(keyboard: Keyboard) -> None:
    keyboard.type(PAGE_DOWN)
    keyboard.screen.show(lambda: print(TEXT.replace("line", "row")))
    assert keyboard.picture.lines[0] == "row 10"


def test_colored_lines_lose_no_text_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    picture: Any = Picture()
    text = "Health: Failing, 3 of 3 failed, not ready, building, ready"
    Screen(picture, None).show(lambda: print_colored(text))
    assert picture.lines[0] == text


def test_q_ends_immediately(keyboard: Keyboard) -> None:
    os.write(keyboard.write, b"q")
    begin = time.monotonic()
    assert keyboard.screen.wait(NEVER, 20, 20) is False
    assert time.monotonic() - begin < limit(5)


def test_closed_terminal_ends(keyboard: Keyboard) -> None:
    os.close(keyboard.write)
    keyboard.write = os.dup(keyboard.read)
    assert keyboard.screen.wait(NEVER, 20, 20) is False


def test_change_ends_the_wait_but_not_before_the_minimum(keyboard: Keyboard) -> None:
    changed = Changes()
    changed.set()
    begin = time.monotonic()
    assert keyboard.screen.wait(changed, 0.3, 20)
    assert 0.3 <= time.monotonic() - begin < limit(10)
    changed.clear()
    assert keyboard.screen.wait(changed, 0, 0.01)
    os.close(changed.fileno())


def test_change_in_another_thread_ends_the_wait_without_polling(
    keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, waits, wait = Changes(), [], select.select
    monkeypatch.setattr(
        select, "select", lambda *arguments: (waits.append(arguments[3]), wait(*arguments))[1]
    )
    timer = threading.Timer(0.3, changed.set)
    timer.start()
    begin = time.monotonic()
    assert keyboard.screen.wait(changed, 0.05, 60)
    assert time.monotonic() - begin < limit(20)
    assert len(waits) == 2, "until the minimum has passed, and until the change"
    timer.join()
    os.close(changed.fileno())


def test_change_that_is_set_often_blocks_nobody() -> None:
    changed = Changes()
    for _ in range(70_000):
        changed.set()
    changed.clear()
    assert select.select([changed], [], [], 0)[0] == []
    os.close(changed.fileno())


def styles(text: str) -> dict[str, str]:
    found = colored(text)
    return {found.plain[span.start : span.end]: str(span.style) for span in found.spans}


def test_states_and_problems_are_colored() -> None:
    assert styles("Nodes: 3\n a | failed | not ready | building | ready | unready") == {
        "Nodes:": "bold",
        "failed": "bold red",
        "not ready": "bold red",
        "building": "yellow",
        "ready": "green",
    }


@pytest.mark.parametrize(
    ("text", "style"), [("No problems", "green"), ("Degraded", "yellow"), ("Failing", "bold red")]
)
def test_health_is_colored(text: str, style: str) -> None:
    assert styles(f"Health: {text}") == {"Health:": "bold", text: style}


def test_limit_that_is_reached_is_colored() -> None:
    limits = "cores 2 of 20, instances 20 of 20, RAM 1.5 of 1.5 GiB, disk 12 of 2, volumes 0 of 0"
    assert styles(limits) == {"20 of 20": "yellow", "1.5 of 1.5": "yellow"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("output", "variables", "has_colors"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
    ],
)
def test_colors_need_a_terminal_and_no_NO_COLOR(
    monkeypatch: pytest.MonkeyPatch,
    output: type[io.StringIO],
    variables: dict[str, str],
    has_colors: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    long = "failed " + "x" * 300
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    print_colored(long)
    written = stream.getvalue()
    assert ("\x1b[1;31m" in written or "\x1b[31" in written) is has_colors
    assert "x" * 300 in written, "long lines are not broken"
    if not has_colors:
        assert "\x1b[3" not in written


def test_mode_of_the_terminal_is_restored_also_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "r") as keys, os.fdopen(ours, "wb", 0):
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", Terminal())
        before = termios.tcgetattr(keys)
        with pytest.raises(SystemExit, match="143"), screen() as shown:
            assert isinstance(shown, Screen)
            assert not termios.tcgetattr(keys)[3] & termios.ECHO
            signal.raise_signal(signal.SIGTERM)
        assert termios.tcgetattr(keys) == before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_pipe_gets_each_text_once(capsys: pytest.CaptureFixture[str]) -> None:
    with screen() as shown:
        shown.show(lambda: print("text"))
        assert type(shown) is module.Lines
    assert capsys.readouterr().out.splitlines()[0] == "text"
