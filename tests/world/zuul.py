"""A client that behaves like Zuul: it submits requests, locks and uses nodes, and returns them."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from nodepool.lab.simulation.kernel import Kernel, Process
from nodepool.lab.simulation.zookeeper import ADDRESS
from tests.world.history import History

#: Seconds after which a build is given up if its request does not end.
PATIENCE = 1800.0
LOST = (KazooException, OSError, TimeoutError)


def _token(record: dict[str, Any]) -> object:
    return (record["requestor_data"] or {}).get("build_set_uuid")


class Request:
    """What a build wants; times in virtual seconds."""

    def __init__(
        self,
        scheduler: int,
        labels: list[str],
        arrives: float,
        lasts: float,
        priority: int,
        relative: int,
    ) -> None:
        self.scheduler = scheduler
        self.labels = labels
        self.arrives = arrives
        self.lasts = lasts
        self.priority = priority
        self.relative = relative
        #: Withdrawn this many seconds after it was submitted.
        self.cancelled: float | None = None
        self.reprioritized: float | None = None
        self.tenant: str | None = None
        #: The nodes are held after the build, as for an autohold, for this many seconds; 0: until
        #: an operator deletes them.
        self.held: float | None = None


class Zuul:
    """One scheduler; it can be killed and started again."""

    def __init__(
        self, kernel: Kernel, name: str, demand: list[Request], on_event: Any, history: History
    ) -> None:
        self.name = name
        self._history = history
        self._kernel = kernel
        self._event = on_event
        self.process: Process = kernel.process(name)
        self.client: Any = None
        #: Builds that have not begun, or have to be repeated.
        self.waiting = list(demand)
        self._begun: list[Request] = []
        #: Of the requests that this process has made.
        self._tokens: set[str] = set()
        self.ended = 0
        self.failed = 0
        self.latencies: list[tuple[float, Request]] = []

    @property
    def done(self) -> bool:
        return not self.waiting and not self._begun

    def start(self) -> None:
        self.process = self._kernel.process(self.name)
        self.waiting += self._begun
        self._begun.clear()
        self._tokens.clear()
        self._kernel.spawn(
            threading.Thread(target=self._run, name=self.name).start, process=self.process
        )

    def _run(self) -> None:
        self.client = KazooClient(f"{ADDRESS[0]}:{ADDRESS[1]}", timeout=10.0)
        while not self.client.connected:
            with contextlib.suppress(
                KazooTimeoutError
            ):  # the connection has broken as soon as it was made
                self.client.start(timeout=3600)
        # Builds that a killed scheduler had begun are started again.
        self._withdraw(lambda record: bool(record["requestor"] == self.name))
        random_ = random.Random(self._kernel.random.random())
        for request in sorted(self.waiting, key=lambda request: request.arrives):
            wait = request.arrives - self._kernel.now
            if wait > 0:
                time.sleep(wait)
            self.waiting.remove(request)
            self._begun.append(request)
            threading.Thread(target=self._build, args=(request, random_), name="build").start()

    def _withdraw(self, ours: Callable[[dict[str, Any]], bool]) -> None:
        """Remove requests, for as long as it takes."""
        while True:
            try:
                self.client.ensure_path("/nodepool/requests")
                for name in self.client.get_children("/nodepool/requests"):
                    try:
                        if ours(json.loads(self.client.get(f"/nodepool/requests/{name}")[0])):
                            self.client.delete(f"/nodepool/requests/{name}")
                    except NoNodeError:
                        continue
                return
            except LOST:
                time.sleep(1.0)

    def forget_killed(self) -> None:
        """Remove requests of killed processes that arrived late: those of Zuul end with its
        session, these do not.
        """

        def late(record: dict[str, Any]) -> bool:
            return bool(record["requestor"] == self.name and _token(record) not in self._tokens)

        work = threading.Thread(target=self._withdraw, args=(late,), name="late requests")
        self._kernel.spawn(work.start, process=self.process)

    # -- one build

    def _build(self, request: Request, random_: random.Random) -> None:
        while not self._attempt(request):
            time.sleep(1.0 + random_.random())
        self._begun.remove(request)

    def _attempt(self, request: Request) -> bool:
        """Return whether it has ended, well or not; otherwise it has to begin again."""
        path, token = "", str(uuid.uuid4())
        self._tokens.add(token)
        try:
            path = self._submit(request, token)
            began = self._kernel.now
            record = self._wait(path, request, began)
            if record is None:
                return request.cancelled is not None
            if record["state"] == "failed":
                self.failed += 1
                self._delete(path)
                return True
            self.latencies.append((self._kernel.now - began, request))
            return self._use(path, record, request)
        except LOST:
            # The answer to the creation may be lost, too.
            self._withdraw(lambda record: _token(record) == token)
            return False

    def _submit(self, request: Request, token: str) -> str:
        record = {
            "requestor_data": {
                "build_set_uuid": token,
                "tenant_name": "t",
                "pipeline_name": "check",
                "job_name": "j",
            },
            "node_types": request.labels,
            "requestor": self.name,
            "created_time": time.time(),
            "provider": None,
            "state": "requested",
            "state_time": time.time(),
            "relative_priority": request.relative,
            "event_id": "event",
            "tenant_name": request.tenant,
        }
        prefix, data = f"/nodepool/requests/{request.priority}-", json.dumps(record).encode()
        return str(self.client.create(prefix, data, sequence=True, makepath=True))

    def _wait(self, path: str, request: Request, began: float) -> Any:
        """Return the record of the ended request; None: it was withdrawn, or has vanished."""
        while self._kernel.now - began < PATIENCE:
            changed = threading.Event()
            try:
                data, stat = self.client.get(
                    path, watch=lambda _event, changed=changed: changed.set()
                )
            except NoNodeError:
                return None
            record = json.loads(data)
            if record["state"] in ("fulfilled", "failed"):
                return record
            age = self._kernel.now - began
            if request.cancelled is not None and age >= request.cancelled:
                self._delete(path)
                return None
            if request.reprioritized is not None and age >= request.reprioritized:
                request.reprioritized = None
                record["relative_priority"] += 1
                try:
                    self.client.set(path, json.dumps(record).encode(), version=stat.version)
                except KazooException:
                    continue
            moments = [
                each - age
                for each in (request.cancelled, request.reprioritized)
                if each is not None
            ]
            changed.wait(min([60.0, *moments]))
        self._event(
            "stuck",
            f"request {path.rpartition('/')[2]} of {self.name} did not end within {PATIENCE:.0f} s",
        )
        self._delete(path)
        return None

    def _delete(self, path: str) -> None:
        while self.process.alive:
            try:
                self.client.delete(path)
                return
            except NoNodeError:
                return
            except LOST:
                time.sleep(1.0)

    def _use(self, path: str, record: dict[str, Any], request: Request) -> bool:
        """Lock the nodes, use them and give them back; return False if they were lost."""
        request_id = path.rpartition("/")[2]
        locks: list[Any] = []
        try:
            for node_id in record["nodes"]:
                lock = self.client.Lock(f"/nodepool/nodes/{node_id}/lock", self.name)
                locks.append(lock)
                data, _stat = self.client.get(f"/nodepool/nodes/{node_id}")
                if json.loads(data).get("allocated_to") != request_id or not lock.acquire(
                    blocking=False
                ):
                    return False
            if any(
                json.loads(self.client.get(f"/nodepool/nodes/{name}")[0])["state"] != "ready"
                for name in record["nodes"]
            ):
                return False  # an operator was quicker
            session = self.client.client_id
            self._history.locked(request_id)
            self._delete(path)
            if not self._same(session):
                return False  # it took too long
            self._event("used", f"{self.name} uses {', '.join(record['nodes'])} of {request_id}")
            self._write(record["nodes"], "in-use")
            end = self._kernel.now + request.lasts
            while self._kernel.now < end:
                time.sleep(min(5.0, end - self._kernel.now + 0.001))
                if not self._same(session):
                    return False
            self._history.releasing(request_id)
            if request.held is None:
                self._write(record["nodes"], "used")
            else:
                self._write(
                    record["nodes"],
                    "hold",
                    hold_job="tenant project job",
                    hold_expiration=request.held,
                    comment="held",
                )
            self.ended += 1
            return True
        finally:
            self._delete(path)
            for lock in locks:
                self._release(lock)
            self._history.released(request_id)

    def _same(self, session: Any) -> bool:
        return bool(self.client.state != KazooState.LOST and self.client.client_id == session)

    def _release(self, lock: Any) -> None:
        session = self.client.client_id
        while self._same(session):
            try:
                lock.release()
                return
            except NoNodeError:
                return
            except LOST:
                time.sleep(1.0)

    def _write(self, node_ids: list[str], state: str, **more: Any) -> None:
        for node_id in node_ids:
            path = f"/nodepool/nodes/{node_id}"
            data, stat = self.client.get(path)
            record = {**json.loads(data), "state": state, "state_time": time.time(), **more}
            if state == "in-use":
                record["user_data"] = {"zuul_system": self.name}
            self.client.set(path, json.dumps(record).encode(), version=stat.version)
