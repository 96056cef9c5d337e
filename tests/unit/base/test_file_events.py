"""Waiting for changes of files."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import pytest

from nodepool.base import file_events
from nodepool.base.file_events import FileEvents


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileEvents]:
    monkeypatch.setattr(file_events, "WITH_EVENTS", 3600.0)
    found = FileEvents()
    yield found
    found.close()


def waits(events: FileEvents) -> threading.Thread:
    thread = threading.Thread(target=events.wait, name="waits", daemon=True)
    thread.start()
    return thread


def assert_ends(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


def test_file_that_grows_ends_the_wait(events: FileEvents, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    events.watch([str(log), str(tmp_path / "missing")])
    thread = waits(events)
    with log.open("a") as stream:
        stream.write("two\n")
    assert_ends(thread)


def test_replaced_file_in_a_directory_ends_the_wait(
    events: FileEvents, tmp_path: pathlib.Path
) -> None:
    events.watch([str(tmp_path)])
    thread = waits(events)
    (tmp_path / "new").write_text("content")
    (tmp_path / "new").rename(tmp_path / "file")
    assert_ends(thread)


def test_wake_ends_the_present_or_the_next_wait(events: FileEvents) -> None:
    events.wake()
    events.wait()
    thread = waits(events)
    events.wake("anything")
    assert_ends(thread)


def test_files_are_checked_without_inotify(
    events: FileEvents, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def refuse(**_options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(file_events, "INotify", refuse)
    monkeypatch.setattr(file_events, "WITHOUT_EVENTS", 0.01)
    events.watch([str(tmp_path)])
    assert_ends(waits(events))


def test_wake_and_close_are_harmless_once_closed(events: FileEvents) -> None:
    events.close()
    events.close()
    events.wake()


@pytest.mark.timeout(60)
def test_wakes_that_nobody_waits_for_do_not_block(events: FileEvents) -> None:
    for _ in range(70_000):  # a pipe holds 65,536 bytes
        events.wake()
    assert_ends(waits(events))
    events.wake()
    assert_ends(waits(events))
