"""The daemons of an installation, and their messages for the user."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kazoo.exceptions import KazooException

from nodepool.lab.dev.files import LABEL, Directory
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault
from nodepool.process.program import ending_signals, load_config
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.records import READY, Node
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds for a daemon to start, and to stop.
START_LIMIT, STOP_LIMIT = 30.0, 20.0
#: Seconds without a ready node until the command for the reason is shown.
PATIENCE = 20.0
#: Seconds between two attempts to reach a daemon that starts.
PAUSE = 0.02


class DevError(Exception):
    """The installation ends; the text is the reason for the user."""


class Daemon:
    """A process that is killed when this process ends or is killed.

    :param ended: called in a separate thread after the process has ended.
    """

    def __init__(
        self, name: str, arguments: list[str], log: Path, ended: Callable[[Daemon], None]
    ) -> None:
        self.name = name
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nodepool.lab.dev.child", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # Ctrl-C must not end it before we have asked it for things.
                start_new_session=True,
            )
        self._ended = ended
        threading.Thread(target=self._wait, name=f"Thread-{name}", daemon=True).start()

    def _wait(self) -> None:
        self.process.wait()
        self._ended(self)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_line(self) -> str:
        with open(self.log, errors="replace") as file:
            return (file.readlines() or ["nothing in its log"])[-1].strip()

    def stop(self) -> None:
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_LIMIT)


class Installation:
    """Starts, watches and stops ZooKeeper, node manager and launcher.

    :param say: shows a line to the user.
    """

    def __init__(self, directory: Directory, fake: bool, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._fake = fake
        self._say = say
        self._began = time.monotonic()
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._daemons: list[Daemon] = []
        self._manager: Daemon | None = None
        self._api = Client(directory.api)
        self._facade: ZooKeeper | None = None

    # -- life

    def run(self) -> None:
        """Run until a signal ends it.

        :raises DevError: a daemon does not start, or has ended.
        """
        numbers = ending_signals()
        for number in numbers:
            signal.signal(number, lambda *_: self._events.put(("signal", None)))
        try:
            self._start()
            self._watch()
            self._serve()
        except KeyboardInterrupt:
            pass
        except Exception:
            # The user may need the logs.
            self._directory.kept = True
            raise
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)
            self._stop()

    def _start(self) -> None:
        path = self._directory.path
        self._directory.write()
        # For fake clouds, which need an entry somewhere.
        os.environ["OS_CLIENT_CONFIG_FILE"] = str(self._directory.clouds)
        settings = self._directory.settings()
        port = str(settings["zookeeper-servers"][0]["port"])
        tls = [
            text
            for name in ("cert", "key", "ca")
            for text in (f"--tls-{name}", str(path / f"{name}.pem"))
        ]
        self._launch(
            "zookeeper",
            [
                "nodepool.lab.zkserver",
                "--directory",
                str(path / "zookeeper"),
                "--tls-port",
                port,
                *tls,
            ],
        )
        if any(provider["driver"] == "nodemanager" for provider in settings["providers"]):
            self._start_manager()
        self._launch("launcher", ["nodepool.cmd.launcher", "-f", "-c", str(self._directory.config)])

    def _launch(self, name: str, arguments: list[str]) -> Daemon:
        if name != "zookeeper":
            arguments += ["-p", str(self._directory.path / f"{name}.pid")]
        log = self._directory.path / f"{name}.log"
        daemon = Daemon(name, arguments, log, lambda daemon: self._events.put(("ended", daemon)))
        self._daemons.append(daemon)
        return daemon

    def _start_manager(self) -> None:
        """Start the node manager; if it cannot work, nodes are fake."""
        if self._fake:
            reason = "as asked for"
        else:
            manager = self._launch(
                "nodemanager",
                ["nodepool.cmd.nodemanager", "-f", "-c", str(self._directory.manager_config)],
            )
            try:
                capacity = self._wait_manager(manager)
            except DevError:
                if manager.running:
                    raise
                capacity = None
            if capacity is not None:
                self._manager = manager
                self._say(
                    "Nodes are slivers of this machine"
                    + ("" if os.geteuid() == 0 else ", without root in them")
                )
                for problem in capacity["problems"]:
                    self._say(f"  missing on this machine: {problem}")
                return
            manager.stop()
            self._daemons.remove(manager)
            reason = manager.last_line()
        self._say(f"Nodes are FAKE, records without machines: {reason}")
        old = self._directory.use_fake()
        if old is not None:
            self._say(f"  the configuration before that is {old}")

    def _wait_manager(self, manager: Daemon) -> Any:
        """Return the capacity of the node manager once it can create slivers.

        Return None after START_LIMIT.

        :raises DevError: a daemon has ended.
        """
        deadline = time.monotonic() + START_LIMIT
        while manager.running and time.monotonic() < deadline:
            with contextlib.suppress(RpcError, RpcFault):
                capacity = self._api.call("GetCapacity", timeout=5)
                if capacity["prepared"]:
                    return capacity
            self._next_node(PAUSE)
        return None

    def _watch(self) -> None:
        client = ZooKeeperClient.from_config(load_config(str(self._directory.config), None))
        client.connect(START_LIMIT)
        self._facade = facade = ZooKeeper(client, enable_cache=True)
        facade.wait_synced(START_LIMIT)
        assert facade.node_tree is not None
        facade.node_tree.listeners.append(lambda _id, _old, node: self._events.put(("node", node)))
        for node in facade.nodeIterator():
            self._events.put(("node", node))

    def _serve(self) -> None:
        seen: set[str] = set()
        self._say(f"Pages: http://127.0.0.1:{self._directory.settings()['webapp']['port']}/ui/")
        command = f"nodepool -c {self._directory.config}"
        while True:
            node = self._next_node(None if seen else PATIENCE)
            if node is None and not seen:
                self._say(f"No node is ready yet. Show the reason: {command} explain label {LABEL}")
                seen.add("")
            if node is not None and node.state == READY and node.id not in seen:
                self._directory.add_node(node)
                if not seen - {""}:
                    self._introduce(node, command)
                seen.add(node.id)

    def _next_node(self, timeout: float | None) -> Any:
        """Return the next changed node; None on timeout (seconds) or another event.

        :raises KeyboardInterrupt: the user has requested the end.
        :raises DevError: a daemon has ended.
        """
        try:
            kind, what = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if kind == "signal":
            raise KeyboardInterrupt
        if kind == "ended" and what in self._daemons:
            raise DevError(f"{what.name} has ended ({what.log}): {what.last_line()}")
        return what if kind == "node" else None

    def _introduce(self, node: Node, command: str) -> None:
        self._say(
            f"Node {node.id} is ready, {time.monotonic() - self._began:.1f} s after the start. Try "
            "in another terminal:"
        )
        if self._manager is not None:
            self._say(f"  ssh -F {self._directory.ssh_config} {node.id}")
        else:
            self._say(f"  export OS_CLIENT_CONFIG_FILE={self._directory.clouds}")
        for arguments in (
            "list",
            f"request create {LABEL} --wait",
            f"explain label {LABEL}",
            "top",
        ):
            self._say(f"  {command} {arguments}")
        self._say(
            f"Change {self._directory.config}, and it is loaded immediately. Ctrl-C ends "
            "everything."
        )

    # -- the end

    def _stop(self) -> None:
        """Stop everything, including slivers, which would outlive the node manager.

        Their records end with them.
        """
        by_name = {daemon.name: daemon for daemon in self._daemons}
        if "launcher" in by_name:
            by_name["launcher"].stop()
        if self._manager is not None and not self._delete_slivers():
            self._say(
                "Not all slivers could be deleted; the next nodepool dev with this directory finds "
                "them"
            )
            self._directory.kept = True
        if self._facade is not None:
            # Without ZooKeeper the client would wait for it forever.
            if by_name["zookeeper"].running:
                with contextlib.suppress(KazooException, TimeoutError):
                    self._delete_records(self._facade)
            self._facade.client.disconnect()
        for daemon in reversed(self._daemons):
            daemon.stop()

    @staticmethod
    def _delete_records(facade: ZooKeeper) -> None:
        for node in facade.nodeIterator():
            facade.deleteRawNode(node.id or "")

    def _delete_slivers(self) -> bool:
        try:
            names = [sliver["name"] for sliver in self._api.call("ListSlivers", timeout=10)]
            for name in names:
                self._api.call("DeleteSliver", name, timeout=10)
            for name in names:
                self._api.call("WaitSliver", name, "gone", STOP_LIMIT, timeout=STOP_LIMIT + 10)
        except (RpcError, RpcFault):
            return False
        return True
