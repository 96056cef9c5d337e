"""Fixtures of directed tests, and the hook that has each of them run in a simulation."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.runner import pytest_runtest_teardown

from tests import REPOSITORY
from tests.support.launcher import LauncherBench, StatsdReceiver, make_statsd
from tests.world.directed.server import Server

HERE = pathlib.Path(__file__).resolve().parent


class Client:
    """The process in which the directed tests of this pytest run. It is started for the first of
    them.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None

    def run(self, item: pytest.Item) -> Iterator[Any]:
        """Run a test; yield its reports."""
        began = time.monotonic()
        try:
            answer = self._ask(item.nodeid)
        except pytest.fail.Exception as error:  # the time limit of the test
            self.stop()
            answer = str(error)
        if isinstance(answer, str):
            yield pytest.TestReport(item.nodeid, item.location, {}, "failed", answer, "call")
            answer = []
        for data in answer:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            # The test knows virtual time only.
            report.duration = time.monotonic() - began if report.when == "call" else 0.0
            yield report

    def _ask(self, test: str) -> Any:
        if self._process is None:
            command = [sys.executable, "-m", "tests.world.directed.server", str(HERE)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{test}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else "the process of the directed tests has ended"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


_clients: dict[pytest.Config, Client] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    config = item.config
    # Pytest asks for tests of other directories, too, and in the process of the directed tests
    # itself.
    if HERE not in item.path.parents or any(
        isinstance(each, Server) for each in config.pluginmanager.get_plugins()
    ):
        return None
    if config not in _clients:
        client = _clients[config] = Client(config)
        config.add_cleanup(client.stop)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _clients[config].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    # The test before has left set up what this one shares with it, such as a directory: the next
    # one may not share it.
    pytest_runtest_teardown(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture
def zk_chroot(tmp_path: pathlib.Path) -> Iterator[Any]:
    from tests.world.directed.world import WorldChroot

    chroot = WorldChroot(tmp_path)
    yield chroot
    for client in chroot.clients:
        client.disconnect()


@pytest.fixture
def bench(
    zk_chroot: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[LauncherBench]:
    from tests.world.directed.world import WorldBench

    monkeypatch.setattr("tests.conftest.POLL", 0.1)
    made = WorldBench(zk_chroot, monkeypatch, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def statsd(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatsdReceiver]:
    yield from make_statsd(monkeypatch)
