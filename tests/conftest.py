"""Fixtures: a private real ZooKeeper, one chroot per test."""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from kazoo.exceptions import NoNodeError, NotEmptyError

from tests import REPOSITORY
from tests.support import selection
from tests.support.deadline import limit

# Where tests run in the background the shell has it ignored, and the programs that tests start
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_server: dict[str, Any] = {}


def load_tool(name: str) -> Any:
    """A script of tools/ as a module."""
    path = REPOSITORY / "tools" / name
    loader = importlib.machinery.SourceFileLoader(f"tools_{name.replace('-', '_')}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses ask for it
    loader.exec_module(module)
    return module


def zookeeper_server() -> dict[str, Any]:
    """The server of this test process (or the one named by the environment); started once."""
    if _server:
        return _server
    if os.environ.get("NODEPOOL_ZK_HOST"):
        host = os.environ["NODEPOOL_ZK_HOST"]
        _server.update(
            hosts=host,
            ca=os.environ["NODEPOOL_ZK_CA"],
            cert=os.environ["NODEPOOL_ZK_CERT"],
            key=os.environ["NODEPOOL_ZK_KEY"],
            plain=os.environ.get("NODEPOOL_ZK_PLAIN"),
        )
        return _server
    tool = load_tool("zookeeper")
    root = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-test-zk-"))
    settings = tool.start(root)
    _server.update(
        hosts=f"127.0.0.1:{settings['port']}",
        ca=settings["ca"],
        cert=settings["cert"],
        key=settings["key"],
        plain=f"127.0.0.1:{settings['plain_port']}",
    )

    def stop() -> None:
        tool.stop(root)
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(stop)
    return _server


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    selection.register(config)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Tests run in random order: how to have the same once more."""
    if exitstatus and config.pluginmanager.has_plugin("randomly"):
        terminalreporter.write_line(
            f"The order of the tests: --randomly-seed={config.getoption('randomly_seed')}"
        )


#: Seconds between two questions of `wait_for`.
POLL = 0.01


def wait_for(
    condition: Callable[[], Any], timeout: float = 20.0, what: str = "the condition"
) -> Any:
    """Wait until the condition returns something true, and return that.

    It does not hold either while what it asks about does not exist yet.
    """
    timeout = limit(timeout)
    deadline = time.monotonic() + timeout
    while True:
        value, missing = _ask(condition)
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not hold within {timeout:g} s") from missing
        time.sleep(POLL)


def _ask(condition: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return condition(), None
    except AttributeError as error:
        if error.obj is not None:
            raise  # a name that this object never has
        return None, error
    except (LookupError, TypeError) as error:
        return None, error
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
        return None, error


@dataclass
class Chroot:
    """A part of the tree for one test."""

    hosts: str
    chroot: str
    ca: str
    cert: str
    key: str
    tmp: pathlib.Path
    clients: list[Any] = field(default_factory=list)

    @property
    def connection(self) -> str:
        return f"{self.hosts}{self.chroot}"

    def connect(self, timeout: float = 10.0, hosts: str | None = None) -> Any:
        """A connected ZooKeeperClient, disconnected at the end of the test."""
        from nodepool.zk import ZooKeeperClient

        client = ZooKeeperClient(
            (hosts or self.hosts) + self.chroot,
            timeout=timeout,
            tls_cert=self.cert,
            tls_key=self.key,
            tls_ca=self.ca,
        )
        client.connect(timeout=20)
        self.clients.append(client)
        return client

    def options(self, hosts: str) -> dict[str, Any]:
        """Return the options of a configuration file that lead to this part of the tree."""
        host, port = hosts.rsplit(":", 1)
        return {
            "zookeeper-servers": [{"host": host, "port": int(port), "chroot": self.chroot}],
            "zookeeper-tls": {"ca": self.ca, "cert": self.cert, "key": self.key},
        }

    def config(
        self,
        content: dict[str, Any] | str,
        name: str = "nodepool.yaml",
        timeout: float = 10.0,
        hosts: str | None = None,
    ) -> str:
        """Write a configuration file with our ZooKeeper in it; returns its path."""
        values = yaml.safe_load(content) if isinstance(content, str) else dict(content)
        values = {
            **self.options(hosts or self.hosts),
            "zookeeper-timeout": float(timeout),
            **values,
        }
        path = self.tmp / name
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump(values))
        new.replace(path)
        return str(path)


@pytest.fixture
def zk_chroot(tmp_path: pathlib.Path) -> Iterator[Chroot]:
    yield from make_chroot(tmp_path)


def make_chroot(folder: pathlib.Path) -> Iterator[Chroot]:
    """Yield a part of the tree, which is deleted afterward.

    :param folder: for configuration files.
    """
    server = zookeeper_server()
    chroot = Chroot(
        server["hosts"],
        f"/test-{uuid.uuid4().hex}",
        server["ca"],
        server["cert"],
        server["key"],
        folder,
    )
    setup = chroot.connect()
    setup.client.ensure_path("/")
    setup.disconnect()
    chroot.clients.clear()
    yield chroot
    for client in chroot.clients:
        client.disconnect()
    cleaner = chroot.connect()
    _wipe(cleaner.client)
    cleaner.disconnect()


def delete_tree(kazoo: Any, path: str) -> None:
    """Delete everything, as ``deleteall`` does, until nothing new is in its way."""
    for _ in range(100):
        with contextlib.suppress(NotEmptyError):
            kazoo.delete(path, recursive=True)
            return
    raise AssertionError(f"{path} is not deleted")


def _wipe(kazoo: Any) -> None:
    try:
        children = kazoo.get_children("/")
    except NoNodeError:
        return
    for child in children:
        kazoo.delete(f"/{child}", recursive=True)


@pytest.fixture
def zk(zk_chroot: Chroot) -> Any:
    """A facade with a complete mirror."""
    from nodepool.zk.zookeeper import ZooKeeper

    facade = ZooKeeper(zk_chroot.connect())
    assert facade.wait_synced(20)
    return facade


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    """Every thread stops on request: none may be left that was not there before."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while True:
        left = [
            t
            for t in threading.enumerate()
            if t not in before and t.is_alive() and not _is_harmless(t)
        ]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not left, f"threads left over: {[t.name for t in left]}"


@pytest.fixture(autouse=True)
def no_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers recheck nothing by the clock: a lost wake-up makes its test fail."""
    monkeypatch.setattr("nodepool.launcher.requests.assignment.RESYNC", 3600.0)


def _is_harmless(thread: threading.Thread) -> bool:
    # Threads of nodepool.base.threads that have no work end a few seconds later.
    return thread.name.startswith(("pydevd", "Thread-shared-"))


def settings_json(path: pathlib.Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
