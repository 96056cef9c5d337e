"""The thread that writes progress records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.builder.progress.publisher import Publisher
from tests.conftest import wait_for


@pytest.fixture
def usable() -> threading.Event:
    return threading.Event()


@pytest.fixture
def publisher(usable: threading.Event) -> Iterator[Publisher]:
    thread = Publisher(usable, object)
    thread.start()
    yield thread
    thread.stop()
    assert not thread.is_alive()


def test_only_the_latest_state_of_a_record_is_written_once_the_session_is_usable(
    publisher: Publisher, usable: threading.Event
) -> None:
    written: list[Any] = []
    publisher.write("a", lambda _store: written.append("a1"))
    publisher.detail("a", lambda _store: written.append("a2"))
    publisher.write("b", lambda _store: written.append("b"))
    assert not publisher.flush(0.1)
    usable.set()
    assert publisher.flush(10)
    assert written == ["a2", "b"]


def test_failed_write_is_repeated_and_delays_no_other(
    publisher: Publisher, usable: threading.Event
) -> None:
    usable.set()
    written: list[str] = []

    def fails_once(_store: object) -> None:
        written.append("try")
        if written.count("try") == 1:
            raise ConnectionError

    publisher.write("a", fails_once)
    publisher.write("b", lambda _store: written.append("b"))
    assert publisher.flush(10)
    wait_for(lambda: written.count("try") == 2, what="the second try")
    assert "b" in written


def test_kept_record_is_written_again_in_each_session_until_it_is_forgotten(
    publisher: Publisher, usable: threading.Event
) -> None:
    usable.set()
    written: list[str] = []
    publisher.keep("a", lambda _store: written.append("sent"))
    assert publisher.flush(10)
    assert written == ["sent"]
    publisher.renew()
    assert publisher.flush(10)
    assert written == ["sent", "sent"]
    publisher.forget("a")
    publisher.write("a", lambda _store: written.append("deleted"))
    publisher.renew()
    assert publisher.flush(10)
    assert written == ["sent", "sent", "deleted"]
