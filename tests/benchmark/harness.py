"""Parts of the benchmark: the launcher under test, and a client that plays Zuul."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import yaml
from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Create, Delete, GetData, SetData, Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import CHANGED, CREATED, DELETED
from nodepool.zk.connection.reply import Reply

HERE = pathlib.Path(__file__).resolve().parent
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """The ZooKeeper server that both releases use."""

    def __init__(self, tool: Any, directory: pathlib.Path) -> None:
        self.settings = tool.start(directory, heap="1g")

    def counters(self) -> dict[str, float]:
        """Reads and updates that the server has answered so far."""
        with socket.create_connection(
            ("127.0.0.1", self.settings["plain_port"]), timeout=5
        ) as sock:
            sock.sendall(b"mntr")
            text = b""
            while chunk := sock.recv(65536):
                text += chunk
        values = {}
        for line in text.decode().splitlines():
            name, _, value = line.partition("\t")
            if name in ("zk_cnt_readlatency", "zk_cnt_updatelatency"):
                values[name.split("_")[2].removesuffix("latency")] = float(value)
        return values


class Launcher:
    """One launcher process."""

    def __init__(
        self, python: str, config: pathlib.Path, log: pathlib.Path, environment: dict[str, str]
    ) -> None:
        self.log = log
        self.started = time.monotonic()
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [python, str(HERE / "serve.py"), str(config)],
                stdout=out,
                stderr=out,
                cwd="/",
                env={**os.environ, **environment},
            )

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = (
            pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        )
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> float:
        """Resident memory in MB."""
        return self._status("VmRSS") / 1024

    def threads(self) -> float:
        return self._status("Threads")

    def _status(self, key: str) -> int:
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
        return 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


class Zuul:
    """Submits requests, notices their ends by watching, uses and returns nodes; counts its own
    operations.
    """

    def __init__(self, server: Server, chroot: str) -> None:
        s = server.settings
        self.client = ZooKeeperClient(
            f"127.0.0.1:{s['port']}{chroot}",
            timeout=30,
            tls_cert=s["cert"],
            tls_key=s["key"],
            tls_ca=s["ca"],
        )
        self.client.connect(timeout=30)
        self.kazoo = self.client.client
        assert self.kazoo is not None
        self.reads = self.updates = 0
        self.condition = threading.Condition()
        self.submitted: dict[str, float] = {}
        self.ended: dict[str, tuple[float, dict[str, Any]]] = {}
        self.nodes_gone: dict[str, float] = {}
        self.node_count = 0
        #: When nodes were last about to be returned.
        self.used_at = 0.0
        for path in ("/nodepool/requests", "/nodepool/nodes"):
            self.kazoo.ensure_path(path)
        for root, callback in (
            ("/nodepool/requests", self._request_event),
            ("/nodepool/nodes", self._node_event),
        ):
            self.kazoo.add_persistent_watch(root, callback)
            armed = threading.Event()
            self.kazoo.arm_persistent_watch(root, Reply(lambda *_a, armed=armed: armed.set()))
            assert armed.wait(10)

    def _request_event(self, kind: int, path: str) -> None:
        if kind != CHANGED:
            return
        now = time.monotonic()
        self.reads += 1
        assert self.kazoo is not None
        self.kazoo.submit(
            GetData(self.kazoo.full_path(path), None),
            Reply(
                lambda result, error, _z: self._request_read(
                    path.rsplit("/", 1)[1], now, result, error
                )
            ),
        )

    def _request_read(
        self, request_id: str, seen: float, result: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            return
        record = json.loads(result[0])
        if record["state"] in ("fulfilled", "failed"):
            with self.condition:
                self.ended.setdefault(request_id, (seen, record))
                self.condition.notify_all()

    def _node_event(self, kind: int, path: str) -> None:
        if path.count("/") != 3:
            return
        if kind == CREATED:
            self.node_count += 1
        elif kind == DELETED:
            with self.condition:
                self.nodes_gone[path.rsplit("/", 1)[1]] = time.monotonic()
                self.condition.notify_all()

    def request_data(
        self, labels: list[str], relative_priority: int = 0, tenant: str | None = None
    ) -> bytes:
        now = time.time()
        return json.dumps(
            {
                "requestor_data": {
                    "build_set_uuid": "b",
                    "tenant_name": tenant,
                    "pipeline_name": "check",
                    "job_uuid": "j",
                    "job_name": "unit",
                    "span_info": None,
                },
                "node_types": labels,
                "requestor": "bench",
                "created_time": now,
                "provider": None,
                "state": "requested",
                "state_time": now,
                "relative_priority": relative_priority,
                "event_id": uuid.uuid4().hex,
                "tenant_name": tenant,
            }
        ).encode()

    def submit(self, labels: list[str], priority: str = "200", relative_priority: int = 0) -> str:
        """One request; returns its id."""
        assert self.kazoo is not None
        start = time.monotonic()
        self.updates += 1
        path = self.kazoo.create(
            f"/nodepool/requests/{priority}-",
            self.request_data(labels, relative_priority),
            sequence=True,
        )
        request_id = str(path).rsplit("/", 1)[1]
        self.submitted[request_id] = start
        return request_id

    def submit_many(self, many: list[list[str]], priority: str = "200") -> list[str]:
        """All concurrently, pipelined."""
        assert self.kazoo is not None
        start = time.monotonic()
        answers = [
            self.kazoo.create_async(
                f"/nodepool/requests/{priority}-", self.request_data(labels), sequence=True
            )
            for labels in many
        ]
        self.updates += len(many)
        ids = [str(a.get(timeout=60)).rsplit("/", 1)[1] for a in answers]
        for request_id in ids:
            self.submitted[request_id] = start
        return ids

    def wait(self, ids: list[str], timeout: float = 300.0) -> float:
        """Wait until all have ended; the time of the last end."""
        deadline = time.monotonic() + timeout
        with self.condition:
            while not all(i in self.ended for i in ids):
                if not self.condition.wait(max(0.0, deadline - time.monotonic())):
                    missing = [i for i in ids if i not in self.ended]
                    raise TimeoutError(f"{len(missing)} requests have not ended: {missing[:5]}")
        failed = [i for i in ids if self.ended[i][1]["state"] != "fulfilled"]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[:5]}")
        return max(self.ended[i][0] for i in ids)

    def wait_any(self, ids: list[str], count: int, timeout: float = 300.0) -> None:
        """Wait until this many of these have ended."""
        deadline = time.monotonic() + timeout
        with self.condition:
            while (ended := sum(i in self.ended for i in ids)) < count:
                if not self.condition.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{ended} of {count} requests have ended")

    def latency(self, request_id: str) -> float:
        """Milliseconds from submission to the end."""
        return (self.ended[request_id][0] - self.submitted[request_id]) * 1000

    def nodes(self, ids: list[str]) -> list[str]:
        return [n for i in ids for n in self.ended[i][1]["nodes"]]

    def use(self, ids: list[str]) -> list[str]:
        """Delete the requests and mark their nodes used, as an executor does at its end (locks
        omitted).
        """
        assert self.kazoo is not None
        full = self.kazoo.full_path
        nodes = self.nodes(ids)
        reads = [(n, self.kazoo.get_async(f"/nodepool/nodes/{n}")) for n in nodes]
        self.reads += len(nodes)
        writes = []
        for node_id, answer in reads:
            record = json.loads(answer.get(timeout=60)[0])
            record["state"], record["state_time"] = "used", time.time()
            writes.append(
                SetData(full(f"/nodepool/nodes/{node_id}"), json.dumps(record).encode(), -1)
            )
        writes += [Delete(full(f"/nodepool/requests/{i}"), -1) for i in ids]
        # One by one, as Zuul writes them.
        done = threading.Semaphore(0)
        self.used_at = time.monotonic()
        for write in writes:
            self.kazoo.submit(write, Reply(lambda *_a: done.release()))
        for _ in writes:
            assert done.acquire(timeout=60)
        self.updates += len(writes)
        return nodes

    def wait_gone(self, nodes: list[str], timeout: float = 300.0) -> float:
        deadline = time.monotonic() + timeout
        with self.condition:
            while not all(n in self.nodes_gone for n in nodes):
                if not self.condition.wait(max(0.0, deadline - time.monotonic())):
                    missing = [n for n in nodes if n not in self.nodes_gone]
                    raise TimeoutError(f"{len(missing)} nodes are not gone: {missing[:5]}")
        return max(self.nodes_gone[n] for n in nodes)

    def create_nodes(self, count: int, **values: Any) -> list[str]:
        """Idle ready nodes, written directly."""
        assert self.kazoo is not None
        now = time.time()
        record = {
            "state": "ready",
            "state_time": now,
            "created_time": now,
            "provider": "p0",
            "pool": "main",
            "type": ["idle"],
            "allocated_to": None,
            "launcher": "bench",
            "external_id": "x",
            "interface_ip": "192.0.2.1",
            "connection_port": 22,
            "host_keys": ["ssh-ed25519 AAAA"],
            "username": "zuul",
            "resources": {"cores": 1, "instances": 1, "ram": 1024},
            **values,
        }
        ids: list[str] = []
        data = json.dumps(record).encode()
        for start in range(0, count, 100):
            operations = [
                Create(self.kazoo.full_path("/nodepool/nodes/"), data, OPEN_ACL_UNSAFE, 2)
                for _ in range(min(100, count - start))
            ]
            answer = self.kazoo.handler.async_result()
            self.kazoo.submit(Transaction(operations), answer)
            ids += [str(p).rsplit("/", 1)[1] for p in answer.get(timeout=60)]
        return ids

    def wait_pools(self, count: int, timeout: float = 60.0) -> None:
        """Until this many pools are registered."""
        assert self.kazoo is not None
        deadline = time.monotonic() + timeout
        while True:
            try:
                if len(self.kazoo.get_children("/nodepool/components/pool")) >= count:
                    return
            except NoNodeError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"the launcher did not register {count} pools")
            time.sleep(0.05)

    def close(self) -> None:
        self.client.disconnect()


class Bench:
    """One run of one scenario with one release."""

    def __init__(self, server: Server, python: str, work: pathlib.Path, name: str) -> None:
        self.server = server
        self.python = python
        self.name = name
        self.work = work / f"{name}-{uuid.uuid4().hex[:8]}"
        self.work.mkdir(parents=True)
        (self.work / "log").mkdir()
        self.chroot = f"/bench-{uuid.uuid4().hex[:12]}"
        (self.work / "clouds.yaml").write_text(
            "clouds: {fake: {auth: {username: u, password: p, project_name: n, auth_url: "
            "'http://fake.example'}}}"
        )
        self.environment = {"OS_CLIENT_CONFIG_FILE": str(self.work / "clouds.yaml")}
        self.zuul: Zuul
        self.launcher: Launcher

    def start(self, config: dict[str, Any], timeout: float = 10.0) -> None:
        s = self.server.settings
        full = {
            "zookeeper-servers": [{"host": "127.0.0.1", "port": s["port"], "chroot": self.chroot}],
            "zookeeper-tls": {"ca": s["ca"], "cert": s["cert"], "key": s["key"]},
            "zookeeper-timeout": timeout,
            "webapp": {"port": 0},
            **config,
        }
        self.config_path = self.work / "nodepool.yaml"
        self.config_path.write_text(yaml.safe_dump(full))
        if not hasattr(self, "zuul"):
            self.zuul = Zuul(self.server, self.chroot)
        self.run_launcher()
        self.zuul.wait_pools(sum(len(p["pools"]) for p in config["providers"]))

    def run_launcher(self) -> None:
        self.launcher = Launcher(
            self.python, self.config_path, self.work / "log" / "launcher.log", self.environment
        )

    def close(self) -> None:
        self.launcher.stop()
        self.zuul.close()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
