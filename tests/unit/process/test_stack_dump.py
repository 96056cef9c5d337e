from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import types

import pytest

from nodepool.process import stack_dump
from tests.conftest import wait_for


@pytest.fixture
def without_tools(monkeypatch):
    monkeypatch.setitem(sys.modules, "yappi", None)
    monkeypatch.setitem(sys.modules, "objgraph", None)


def messages(caplog):
    return [
        record.getMessage() for record in caplog.records if record.name == "nodepool.stack_dump"
    ]


@pytest.fixture
def sleeper():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="PoolWorker.p-main", daemon=True)
    thread.start()
    yield thread
    stop.set()
    thread.join()


@pytest.mark.spec("CLI-8: records, in order; thread lines")
def test_dump_lists_all_threads_with_stacks(caplog, without_tools, sleeper):
    caplog.set_level(logging.INFO)
    stack_dump.StackDumper().dump()
    first, threads, last = messages(caplog)
    assert (first, last) == ("Beginning debug handler", "End debug handler")
    lines = threads.splitlines()
    assert f"Thread: {sleeper.ident} PoolWorker.p-main d: True" in lines
    assert f"Thread: {threading.main_thread().ident} MainThread d: False" in lines
    assert any(
        line.startswith('  File "')
        and line.endswith(", in test_dump_lists_all_threads_with_stacks")
        for line in lines
    )
    assert all(record.levelno >= logging.INFO for record in caplog.records)


@pytest.mark.parametrize("level", [logging.WARNING, logging.CRITICAL])
def test_dump_is_shown_at_every_log_level(capsys, caplog, without_tools, level, monkeypatch):
    logger = logging.getLogger("nodepool.stack_dump")
    monkeypatch.setattr(logger, "level", level)
    logger.manager._clear_cache()
    stack_dump.StackDumper().dump()
    logger.manager._clear_cache()
    shown = messages(caplog) if level == logging.WARNING else capsys.readouterr().err.splitlines()
    assert shown[0] == "Beginning debug handler" and shown[-1] == "End debug handler"


def test_sigusr2_starts_a_dump_each_time(caplog, without_tools):
    caplog.set_level(logging.INFO)
    before = signal.getsignal(signal.SIGUSR2)
    try:
        stack_dump.install()
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(lambda n=number: messages(caplog).count("End debug handler") == n)
            wait_for(lambda: not stack_dump.dumper._busy.locked())
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_second_signal_during_a_dump_is_ignored(caplog, monkeypatch):
    dumper = stack_dump.StackDumper()
    started, go = threading.Event(), threading.Event()
    calls = []

    def dump():
        calls.append(1)
        started.set()
        go.wait(10)

    monkeypatch.setattr(dumper, "dump", dump)
    dumper.handler()
    assert started.wait(10)
    dumper.handler()
    go.set()
    wait_for(lambda: not dumper._busy.locked())
    assert calls == [1]


@pytest.mark.spec("CLI-8: yappi alternates, objgraph growth; a failure in one part is logged")
def test_profilers_alternate_and_failures_are_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    calls = []

    def stats(name):
        return lambda: types.SimpleNamespace(print_all=lambda out: out.write(name + "\n"))

    yappi = types.SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        clear_stats=lambda: calls.append("clear"),
        get_func_stats=stats("functions"),
        get_thread_stats=stats("threads"),
    )
    objgraph = types.SimpleNamespace(show_growth=lambda limit, file: file.write(f"dict {limit}\n"))
    monkeypatch.setitem(sys.modules, "yappi", yappi)
    monkeypatch.setitem(sys.modules, "objgraph", objgraph)
    dumper = stack_dump.StackDumper()
    dumper.dump()
    assert messages(caplog)[2:] == [
        "Starting Yappi",
        "Most common types:",
        "dict 100\n",
        "End debug handler",
    ]
    caplog.clear()
    dumper.dump()
    assert messages(caplog)[2:4] == ["Stopping Yappi", "functions\nthreads\n"]
    assert calls == ["start", "stop", "clear"]
    caplog.clear()
    yappi.start = None
    dumper.dump()
    assert messages(caplog)[3].startswith("Yappi error:\nTraceback")
    assert messages(caplog)[-1] == "End debug handler"
