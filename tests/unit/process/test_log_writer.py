"""LogWriter: records are written soon, in order, on its thread; none is lost when the process
ends.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nodepool.process import log_writer
from nodepool.process.log_writer import LogWriter


class Stream(io.StringIO):
    """Counts how often it is flushed, and by which threads; may be slow, and full."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []
        self.full = False
        self.asked, self.ready, self.done = threading.Event(), threading.Event(), threading.Event()
        self.ready.set()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.ready.wait(20)
        return super().write(text)

    def flush(self) -> None:
        self.flushed.append(threading.current_thread().name)
        if self.full:
            raise OSError(28, "No space left on device")
        self.done.set()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def logger(stream: Stream) -> Iterator[logging.Logger]:
    logger = logging.getLogger("nodepool.test_log_writer")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(threadName)s %(message)s"))
    logger.handlers = [handler, logging.NullHandler()]
    yield logger
    logger.handlers = []
    logger.propagate = True


@pytest.fixture
def writer(logger: logging.Logger) -> Iterator[LogWriter]:
    writer = LogWriter()
    writer.start()
    yield writer
    writer.stop()


def test_nobody_waits_for_the_disk_and_what_has_waited_is_written_immediately(
    logger: logging.Logger, stream: Stream, writer: LogWriter
) -> None:
    stream.ready.clear()
    logger.info("the disk begins to hang")
    assert stream.asked.wait(10)
    for number in range(3):
        logger.info("line %d", number)
    assert stream.getvalue() == "" and stream.flushed == []
    stream.ready.set()
    assert stream.done.wait(10)
    stream.done.clear()
    logger.info("the last line")
    assert stream.done.wait(10)
    assert [line.removeprefix("MainThread ") for line in stream.getvalue().splitlines()] == [
        "the disk begins to hang",
        "line 0",
        "line 1",
        "line 2",
        "the last line",
    ]
    assert set(stream.flushed) == {"LogWriter"} and len(stream.flushed) <= 3


def test_text_has_the_parameters_as_they_were_when_it_was_logged(
    logger: logging.Logger, stream: Stream, writer: LogWriter
) -> None:
    stream.ready.clear()
    logger.info("the disk begins to hang")
    assert stream.asked.wait(10)
    logger.info("%s", states := ["building"])
    states[0] = "ready"
    stream.ready.set()
    writer.write()
    assert "['building']" in stream.getvalue()


def test_each_handler_and_its_level_stay(
    logger: logging.Logger, stream: Stream, tmp_path: pathlib.Path
) -> None:
    handler = logging.handlers.WatchedFileHandler(tmp_path / "log")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    before = list(logger.handlers)
    writer = LogWriter()
    writer.start()
    assert any(isinstance(each, logging.NullHandler) for each in logger.handlers), (
        "stack_dump looks for it"
    )
    logger.info("quiet")
    logger.warning("loud")
    writer.stop()
    assert logger.handlers == before
    assert (
        tmp_path / "log"
    ).read_text() == "loud\n" and stream.getvalue() == "MainThread quiet\nMainThread loud\n"
    logger.info("afterwards")
    assert stream.getvalue().endswith("afterwards\n"), (
        "without the thread, it is written by who logs"
    )
    handler.close()


def test_record_of_a_thread_that_logs_during_the_stop_is_written(
    logger: logging.Logger, stream: Stream, writer: LogWriter
) -> None:
    late = logger.handlers[0]
    writer.stop()
    late.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 1, "late", (), None))
    assert stream.getvalue().endswith("late\n")


def test_writer_that_was_not_started_can_be_stopped() -> None:
    LogWriter().stop()


def test_thread_that_logs_too_much_writes_itself(
    logger: logging.Logger, stream: Stream, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MOST_WAITING", 2)
    monkeypatch.setattr(log_writer, "MOMENT", 60.0)
    for number in range(3):
        logger.info("line %d", number)
    assert stream.flushed == ["MainThread"] and stream.getvalue().count("\n") == 3


def test_faulty_filter_and_full_disk_harm_nothing_else(
    logger: logging.Logger, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        if "bad" in str(record.msg):
            raise ZeroDivisionError
        return True

    logger.handlers[0].addFilter(refuse)
    writer = LogWriter()
    writer.start()
    logger.info("bad")
    logger.info("good")
    writer.write()
    assert stream.getvalue() == "MainThread good\n"
    stream.full = True
    logger.info("lost")
    writer.write()
    stream.full = False
    stream.done.clear()
    logger.info("space again")
    assert stream.done.wait(10) and stream.getvalue().endswith("space again\n")
    writer.stop()
    told = capsys.readouterr().err
    assert "ZeroDivisionError" in told and "No space left on device" in told


def test_signal_that_ends_the_process_may_interrupt_a_write(
    logger: logging.Logger, writer: LogWriter
) -> None:
    interrupted = threading.Event()

    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            writer.write()  # what logging.shutdown() does in a signal handler
            interrupted.set()

    writer.add(
        Interrupted(), logger.makeRecord(logger.name, logging.INFO, __file__, 1, "a line", (), None)
    )
    assert interrupted.wait(10)


PROGRAM = """
import logging, os
logging.basicConfig(level=logging.INFO, format="%(message)s")
from nodepool.process import log_writer
log_writer.MOMENT = 60
log_writer.LogWriter().start()
logging.info("the last words")
{end}
"""


@pytest.mark.parametrize("end", ["", "logging.shutdown(); os._exit(0)"])
def test_records_that_wait_are_written_when_the_process_ends(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr == "the last words\n"
