"""Real launcher processes, a cloud on disk, a client that plays Zuul, a proxy that cuts
connections; and the counting.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from nodepool.zk.connection.client import ZooKeeperClient
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.ports import reserve

HERE = pathlib.Path(__file__).resolve().parent
#: Session time-out of the launchers under test, in seconds.
SESSION = 2.0


class DiskCloud:
    """The directory of the driver ``diskcloud``, seen from outside."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def set(self, **values: float) -> None:
        new = self.directory / "settings.new"
        new.write_text(json.dumps(values))
        new.replace(self.directory / "settings.json")

    def instances(self) -> dict[str, dict[str, Any]]:
        found = {}
        for path in self.directory.glob("i-*.json"):
            with contextlib.suppress(FileNotFoundError):
                found[path.stem] = json.loads(path.read_text())["metadata"]
        return found

    def log(self) -> list[list[str]]:
        """``[time, pid, event, id, ...]`` of all that happened."""
        try:
            return [line.split() for line in (self.directory / "log").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def count(self, event: str) -> int:
        return sum(1 for entry in self.log() if entry[2] == event)


class DaemonProcess:
    """A daemon that runs in the foreground."""

    process: subprocess.Popen[bytes]

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.alive():
            self.send(signal.SIGKILL)
        self.process.wait(10)


class LauncherProcess(DaemonProcess):
    """The nodepool-launcher program in the foreground."""

    def __init__(
        self, bench: Bench, config: pathlib.Path, name: str, crash_at: str = "", **environment: str
    ) -> None:
        self.prepare(bench, config, name)
        env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "NODEPOOL_FAULT_DRIVERS": str(HERE / "drivers"),
            "NODEPOOL_JOURNAL": str(bench.journal),
            "NODEPOOL_CRASH_AT": crash_at,
            **environment,
        }
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "serve.py"),
                    "-f",
                    "-c",
                    str(self.config),
                    "-p",
                    str(bench.tmp / f"{name}.pid"),
                ],
                stdout=out,
                stderr=out,
                cwd="/",
                env=env,
            )

    def prepare(self, bench: Bench, config: pathlib.Path, name: str) -> None:
        """A copy of the configuration with a separate web server."""
        self.log = bench.tmp / f"{name}.log"
        self.port = reserve()
        content = yaml.safe_load(config.read_text())
        content["webapp"] = {"port": self.port, "listen_address": "127.0.0.1"}
        self.config = bench.tmp / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump(content))

    def rewrite(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the configuration file in one go."""
        content = yaml.safe_load(self.config.read_text())
        change(content)
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump(content))
        new.replace(self.config)

    def ready(self) -> bool:
        """What ``/ready`` says; False while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def readiness(self) -> str:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/ready?verbose", timeout=5
            ) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 11.0) -> float:
        """Orderly stop; seconds it took."""
        started = time.monotonic()
        if self.alive():
            self.send(number)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return time.monotonic() - started

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Proxy:
    """TCP proxy in front of ZooKeeper.

    ``close`` ends all connections and accepts no data, ``hold`` lets nothing through but keeps them
    open (a silent partition), ``deaf`` lets requests through and swallows the answers, ``open`` is
    normal.
    """

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._mode = "open"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._stopping = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, mode: str) -> None:
        with self._lock:
            self._mode = mode
            if mode == "close":
                for pair in self._pairs:
                    self._end(pair)
                self._pairs.clear()

    @staticmethod
    def _end(pair: tuple[socket.socket, socket.socket]) -> None:
        for sock in pair:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with self._lock:
                if self._mode == "close":
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                except OSError:
                    client.close()
                    continue
                pair = (client, server)
                self._pairs.append(pair)
                thread = threading.Thread(
                    target=self._pump, args=pair, name="proxy pump", daemon=True
                )
                self._threads.append(thread)
            thread.start()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while not self._stopping:
                if self._mode == "hold":
                    time.sleep(0.02)
                    continue
                for sock in select.select([client, server], [], [], 0.1)[0]:
                    data = sock.recv(65536)
                    if not data:
                        return
                    while self._mode == "hold" and not self._stopping:
                        time.sleep(0.02)
                    if self._mode == "deaf" and sock is server:
                        continue
                    (server if sock is client else client).sendall(data)
        except OSError:
            pass
        finally:
            self._end((client, server))
            client.close()
            server.close()

    def stop(self) -> None:
        self.set("close")
        self._stopping = True
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


class Zuul:
    """Submits requests, takes and returns nodes, and keeps count of what it was given."""

    def __init__(self, client: ZooKeeperClient) -> None:
        self.connection = client
        kazoo = client.client
        assert kazoo is not None
        self.kazoo = kazoo
        for path in ("/nodepool/requests", "/nodepool/nodes"):
            kazoo.ensure_path(path)
        self.submitted: list[str] = []
        #: node id -> requests that were given this node.
        self.given: dict[str, list[str]] = {}
        self.external: Counter[str] = Counter()
        self._locks: dict[str, str] = {}

    def submit(self, *labels: str, priority: str = "200") -> str:
        now = time.time()
        record = {
            "requestor_data": {},
            "node_types": list(labels),
            "requestor": "zuul",
            "created_time": now,
            "provider": None,
            "state": "requested",
            "state_time": now,
            "relative_priority": 0,
            "event_id": uuid.uuid4().hex,
            "tenant_name": None,
        }
        path = self.kazoo.create(
            f"/nodepool/requests/{priority}-", json.dumps(record).encode(), sequence=True
        )
        request_id = str(path).rsplit("/", 1)[1]
        self.submitted.append(request_id)
        return request_id

    def read(self, kind: str, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Records of ``requests`` or ``nodes`` by id."""
        base = f"/nodepool/{kind}"
        if names is None:
            names = self.kazoo.get_children(base)
        found = {}
        for name, answer in [(n, self.kazoo.get_async(f"{base}/{n}")) for n in names]:
            with contextlib.suppress(NoNodeError):
                data = answer.get(timeout=20)[0]
                found[name] = json.loads(data) if data else {}
        return found

    def states(self, ids: list[str]) -> Counter[str]:
        records = self.read("requests", ids)
        return Counter(records[i]["state"] if i in records else "LOST" for i in ids)

    def wait_states(
        self,
        ids: list[str],
        check: Callable[[Counter[str]], bool],
        timeout: float = 30.0,
        idle: Callable[[], Any] = lambda: None,
    ) -> Counter[str]:
        deadline = time.monotonic() + timeout
        while True:
            try:
                states = self.states(ids)
            except KazooException:
                states = Counter()  # no server at the moment
            if check(states):
                return states
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"requests after {timeout:g} s: {dict(states)}; nodes: "
                    f"{Counter(n.get('state') for n in self.read('nodes').values())}"
                )
            idle()
            time.sleep(0.03)

    def wait_fulfilled(
        self, ids: list[str], timeout: float = 30.0, idle: Callable[[], Any] = lambda: None
    ) -> None:
        self.wait_states(ids, lambda states: states["fulfilled"] == len(ids), timeout, idle)

    def accept(self, request_id: str) -> list[str]:
        """Check and lock the nodes of a fulfilled request, remove the request, start to use the
        nodes.
        """
        request = self.read("requests", [request_id])[request_id]
        assert request["state"] == "fulfilled", request
        nodes = self.read("nodes", request["nodes"])
        assert len(nodes) == len(request["node_types"]), (
            f"{request_id} names nodes {request['nodes']}, have {nodes}"
        )
        for node_id, node in nodes.items():
            assert node["allocated_to"] == request_id and node["state"] == "ready", (
                request_id,
                node_id,
                node,
            )
            self.given.setdefault(node_id, []).append(request_id)
            self.external[json.dumps(node["external_id"])] += 1
            directory = f"/nodepool/nodes/{node_id}/lock"
            with contextlib.suppress(NodeExistsError):
                self.kazoo.create(directory)
            self._locks[node_id] = self.kazoo.create(
                f"{directory}/{uuid.uuid4().hex}__lock__", ephemeral=True, sequence=True
            )
            assert len(self.kazoo.get_children(directory)) == 1, (
                f"node {node_id} is locked by somebody else, too"
            )
        self.kazoo.delete(f"/nodepool/requests/{request_id}")
        for node_id in nodes:
            self._write(node_id, state="in-use")
        return list(nodes)

    def _write(self, node_id: str, **values: Any) -> None:
        path = f"/nodepool/nodes/{node_id}"
        record = json.loads(self.kazoo.get(path)[0])
        self.kazoo.set(path, json.dumps({**record, "state_time": time.time(), **values}).encode())

    def give_back(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self._write(node_id, state="used")
            self.kazoo.delete(self._locks.pop(node_id))

    def hold(self, node_id: str, expiration: int) -> None:
        """Keep a node that was taken for ``expiration`` seconds."""
        self._write(node_id, state="hold", hold_expiration=expiration)
        self.kazoo.delete(self._locks.pop(node_id))

    def use(self, ids: list[str]) -> None:
        """Take and return all nodes of these requests."""
        taken = [node_id for request_id in ids for node_id in self.accept(request_id)]
        self.give_back(*taken)

    def twice(self) -> list[str]:
        """Nodes and instances that were handed out more than once."""
        return [n for n, ids in self.given.items() if len(ids) > 1] + [
            i for i, n in self.external.items() if n > 1
        ]

    def pools(self) -> list[dict[str, Any]]:
        try:
            return list(self.read("components/pool").values())
        except NoNodeError:
            return []


class Bench:
    """One test: its chroot, its cloud, its launchers."""

    def __init__(self, settings: dict[str, Any], tmp: pathlib.Path) -> None:
        self.settings = settings
        self.tmp = tmp
        tmp.mkdir(parents=True, exist_ok=True)
        self.chroot = f"/fault-{uuid.uuid4().hex[:16]}"
        self.journal = tmp / "journal"
        self.cloud = DiskCloud(tmp / "cloud")
        self.launchers: list[LauncherProcess] = []
        self._count = 0
        # Zuul's session outlives all that the launchers go through.
        client = ZooKeeperClient(
            f"{settings['hosts']}{self.chroot}",
            timeout=60,
            tls_cert=settings["cert"],
            tls_key=settings["key"],
            tls_ca=settings["ca"],
        )
        client.connect(timeout=30)
        self.zuul = Zuul(client)

    def provider(
        self, name: str = "p0", labels: list[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        pool = {"name": "main", "labels": labels or ["l0"], **options.pop("pool", {})}
        return {
            "name": name,
            "driver": "diskcloud",
            "cloud-dir": str(self.cloud.directory),
            "pools": [pool],
            **options,
        }

    def config(
        self,
        *providers: dict[str, Any],
        labels: list[dict[str, Any]] | None = None,
        hosts: str | None = None,
        session: float = SESSION,
        **options: Any,
    ) -> pathlib.Path:
        host, port = (hosts or self.settings["hosts"]).rsplit(":", 1)
        providers = providers or (self.provider(),)
        names = {
            n if isinstance(n, str) else n["name"]
            for p in providers
            for q in p["pools"]
            for n in q["labels"]
        }
        content = {
            "zookeeper-servers": [{"host": host, "port": int(port), "chroot": self.chroot}],
            "zookeeper-tls": {k: self.settings[k] for k in ("ca", "cert", "key")},
            "zookeeper-timeout": session,
            "labels": labels or [{"name": n} for n in sorted(names)],
            "providers": list(providers),
            **options,
        }
        self._count += 1
        path = self.tmp / f"config-{self._count}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def start(
        self,
        config: pathlib.Path | None = None,
        wait: bool = True,
        crash_at: str = "",
        **environment: str,
    ) -> LauncherProcess:
        launcher = LauncherProcess(
            self,
            config or self.config(),
            f"launcher-{len(self.launchers)}",
            crash_at,
            **environment,
        )
        self.launchers.append(launcher)
        if wait:
            self.wait_ready(launcher)
        return launcher

    @staticmethod
    def wait_ready(launcher: LauncherProcess) -> None:
        def ready() -> bool:
            assert launcher.alive(), launcher.text()[-3000:]
            return launcher.ready()

        wait_for(ready, 30, "a ready launcher")

    def wait_pools(self, count: int, timeout: float = 20.0) -> None:
        wait_for(lambda: len(self.zuul.pools()) == count, timeout, f"{count} registered pools")

    # -- counting

    def left_behind(self) -> dict[str, Any]:
        """What is there although everything was returned."""
        return {
            "nodes": self.zuul.read("nodes"),
            "requests": self.zuul.read("requests"),
            "instances": self.cloud.instances(),
        }

    def wait_nothing_left(
        self, timeout: float = 20.0, idle: Callable[[], Any] = lambda: None
    ) -> float:
        """Until neither records nor instances are left; seconds it took."""
        started = time.monotonic()
        while True:
            left = self.left_behind()
            if not any(left.values()):
                return time.monotonic() - started
            if time.monotonic() - started > timeout:
                raise AssertionError(f"left behind after {timeout:g} s: {left}")
            idle()
            time.sleep(0.05)

    def check_counts(self) -> dict[str, int]:
        """Nothing lost, nothing twice, nothing leaked; numbers for people."""
        assert self.zuul.twice() == []
        left = self.left_behind()
        assert not any(left.values()), left
        return {
            "requests": len(self.zuul.submitted),
            "created": self.cloud.count("created"),
            "leaked": self.cloud.count("leaked"),
        }

    def answers(self) -> list[dict[str, Any]]:
        """What became of every transaction of every launcher."""
        try:
            return [json.loads(line) for line in self.journal.read_text().splitlines()]
        except FileNotFoundError:
            return []

    def transactions(self) -> list[dict[str, Any]]:
        """All committed transactions of all launchers, in the order of the server."""
        return sorted(
            (line for line in self.answers() if not line["refused"]), key=lambda line: line["zxid"]
        )

    def check_fencing(self) -> None:
        """Who has been replaced as the writer of a record writes it again only after taking its
        lock again.
        """
        last: dict[str, int] = {}
        seen: dict[str, set[int]] = {}
        for line in self.transactions():
            session = line["session"]
            locked = {_record_locked(op) for op in line["ops"]}
            for op in line["ops"]:
                path = op["path"]
                if (
                    op["op"] not in ("SetData", "Delete")
                    or path.count("/") != 3
                    or not path.startswith(("/nodepool/nodes/", "/nodepool/requests/"))
                ):
                    continue
                if last.get(path, session) != session and session in seen[path]:
                    assert path in locked, (
                        f"session {session} overwrote {path}, which others had taken over: {line}"
                    )
                last[path] = session
                seen.setdefault(path, set()).add(session)

    def close(self) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                launcher.send(signal.SIGCONT)
            launcher.kill()
        for child in list(self.zuul.kazoo.get_children("/")):
            self.zuul.kazoo.delete(f"/{child}", recursive=True)
        self.zuul.connection.disconnect()


def _record_locked(op: dict[str, Any]) -> str | None:
    """The node or request that this operation locks (or proves to be unlocked by removing the
    lock's directory).
    """
    parts = op["path"].split("/")[2:]
    if op["op"] not in ("Create", "Delete") or (op["op"] == "Delete" and "__lock__" in parts[-1]):
        return None
    if parts[0] == "requests-lock":
        return f"/nodepool/requests/{parts[1]}"
    return f"/nodepool/nodes/{parts[1]}" if parts[0] == "nodes" and "lock" in parts[2:] else None


@contextlib.contextmanager
def own_server() -> Iterator[dict[str, Any]]:
    """A ZooKeeper of the test's own, which it may stop and start (``stop()``, ``start()``)."""
    from tests.conftest import load_tool

    tool = load_tool("zookeeper")
    root = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-fault-zk-"))

    def stop() -> None:
        tool.stop(root)
        for process in tool.processes:
            process.wait(10)

    try:
        settings = tool.start(root)
        yield {
            "hosts": f"127.0.0.1:{settings['port']}",
            "port": settings["port"],
            "data": root / "data",
            "ca": settings["ca"],
            "cert": settings["cert"],
            "key": settings["key"],
            "start": lambda: tool.start(root),
            "stop": stop,
        }
    finally:
        stop()
        shutil.rmtree(root, ignore_errors=True)
