"""``python -m tests.world.directed.server``: a pytest that runs each of its tests in a separate
simulation.

It imports everything once and then forks for each test that is asked for. A request is a line with
the id of a test, the answer a line of JSON with its reports.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import traceback
import zlib
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import pytest

#: Directed tests are given up after this many virtual seconds.
LONGEST = 30 * 86400.0


class Server:
    """The plugin that replaces pytest's own loop over the tests."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        # Of the plugin for time limits, which the process that asks has loaded.
        parser.addini("timeout", "seconds of the time limit, which is not used here")

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "timeout: not used here")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _import()
        items = {item.nodeid: item for item in session.items}
        for line in sys.stdin:
            self._answers.write(json.dumps(self._forked(items[line.strip()])) + "\n")
            self._answers.flush()
        return True

    def _forked(self, item: pytest.Item) -> Any:
        """Run a test in a child; return its reports, or a text that says why there are none."""
        from tests.world.directed import server

        with tempfile.TemporaryFile("w+", encoding="utf8") as file:
            pid = os.fork()
            if pid == 0:
                try:
                    answer: Any = server.simulated(item)
                except BaseException:
                    answer = traceback.format_exc()
                json.dump(answer, file)
                file.flush()
                os._exit(0)
            _pid, status = os.waitpid(pid, 0)
            file.seek(0)
            text = file.read()
        return (
            json.loads(text) if text else f"the process of the test has ended with status {status}"
        )


def _import() -> None:
    """Import what all tests need, once and not in each child."""

    import nodepool.driver.fake.adapter
    import nodepool.driver.metastatic.adapter
    import nodepool.driver.statemachine.provider
    import nodepool.launcher
    import nodepool.zk.zookeeper  # noqa: F401
    from nodepool.driver import Drivers
    from tests.world import order
    from tests.world.directed import world  # noqa: F401

    for name in ("fake", "metastatic", "static"):
        Drivers.get(name)
    order.order_by_age(("nodepool.", "kazoo.", "concurrent.", "threading", "tests."))


def simulated(item: pytest.Item) -> list[Any]:
    """Run a test as a task of a new simulation; return its reports."""
    from _pytest.runner import runtestprotocol

    from nodepool.lab.simulation import install
    from nodepool.lab.simulation.zookeeper import ZooKeeper
    from tests.world.directed import world
    from tests.world.faulty import FaultyKernel, FaultyNetwork

    kernel = FaultyKernel(zlib.crc32(item.nodeid.encode()))
    network = FaultyNetwork(kernel)
    install.begin(kernel, network)
    world.current = world.World(kernel, network, ZooKeeper(kernel, network))

    def run() -> Any:
        threading.current_thread()  # known to the thread module from the start
        return runtestprotocol(item, log=False)

    reports = kernel.run(run, until=LONGEST)
    return [
        item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        for report in reports
    ]


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.world.directed.server", *sys.argv[1:]]
        )
    # Before anything that makes a lock.
    from nodepool.lab.simulation import install, kernel

    kernel.use(kernel.Kernel(0))
    install.replace_standard_library()
    # Time limits of tests are virtual: they do not depend on this machine, and waiting costs next
    # to nothing.
    os.getloadavg = lambda: (0.0, 0.0, 0.0)
    os.environ["NODEPOOL_TEST_PATIENCE"] = "20"
    answers = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)

    import pytest

    install.adapt_libraries()
    without = [
        argument
        for name in ("xdist", "randomly", "timeout", "cacheprovider")
        for argument in ("-p", f"no:{name}")
    ]
    planted = ["-p", "tests.world.planted"] if os.environ.get("NODEPOOL_PLANTED") else []
    # A failure shows what the launcher did, and when.
    log = [
        "--log-level=INFO",
        "--log-format=%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
    ]
    arguments = [
        "-o",
        "addopts=--strict-markers",
        "-q",
        "--capture=no",
        *log,
        *without,
        *planted,
        *sys.argv[1:],
    ]
    pytest.main(arguments, [Server(answers)])


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    # The interpreter's own shutdown would wait for threads that are none.
    os._exit(0)
