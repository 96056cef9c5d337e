"""State machines of slivers on backing nodes."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from nodepool.driver.backing.records import BackingNodeRecord
from nodepool.driver.nodemanager.config import NodeManagerCloudImage, NodeManagerLabel
from nodepool.driver.nodemanager.host import INTERNAL
from nodepool.driver.nodemanager.pushed.machines import BackedCreateMachine
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk import zookeeper as zk

READY = {"name": "np1", "state": "ready"}


class Host:
    """A node manager that answers each record with the same error or sliver."""

    cores, group, capacity, options = 4, None, None, SimpleNamespace(ssh_address="192.0.2.1")

    def __init__(self, name: str, answer: Exception | dict[str, Any]) -> None:
        self.name = name
        self.answer = answer
        self.usable = True
        self.asked: list[str] = []

    def ask(self, method: str, *_arguments: object, **_options: object) -> Future[Any]:
        self.asked.append(method)
        call: Future[Any] = Future()
        if isinstance(self.answer, Exception):
            self.usable = isinstance(self.answer, RpcFault)
            call.set_exception(self.answer)
        else:
            call.set_result(self.answer)
        return call

    def reserve(self, _label: object) -> None: ...

    def forget(self) -> None: ...

    def refresh(self) -> None: ...


class Slots:
    """Has one backing node per host and gives them out in this order. Each is shared with
    another node.
    """

    provider = SimpleNamespace(name="slivers", lease_time=60, keys_of=lambda _name, keys: keys)

    def __init__(self, *hosts: Host) -> None:
        self.hosts = self
        self.get = {host.name: host for host in hosts}.get
        self._free = [host.name for host in hosts]

    def allocate(self, machine: Any) -> None:
        machine.record = BackingNodeRecord("big", 40)
        machine.record.node_id = self._free.pop(0)
        machine.slot = machine.record.allocateSlot(machine.node_id)
        machine.record.allocateSlot("other")

    def poll(self, machine: Any) -> zk.Node:
        return zk.Node(machine.record.node_id)

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: None


def machine_on(*hosts: Host) -> BackedCreateMachine:
    slots: Any = Slots(*hosts)
    unused: Any = None
    log: Any = logging.getLogger("test")
    label = NodeManagerLabel()
    label.cloud_image = NodeManagerCloudImage()
    return BackedCreateMachine(slots, "np1", label, "image", {"nodepool_node_id": "1"}, unused, log)


def test_sliver_that_a_shared_backing_node_refuses_for_quota_goes_to_another() -> None:
    machine = machine_on(Host("a", RpcFault(INTERNAL, "quota: no memory")), Host("b", READY))
    instance = machine.advance()
    assert instance is not None
    assert instance.host_id == "b"
    assert [record.node_id for record in machine.refused] == ["a"]
    assert machine.external_id == {"host": "b", "sliver": "np1"}


def test_node_manager_that_does_not_answer_gets_the_record_again_only_when_it_answers() -> None:
    host = Host("a", RpcError("connection refused"))
    machine = machine_on(host)
    for _ in range(3):
        assert machine.advance() is None
        assert machine.next_wake is not None
        assert machine.next_wake > time.monotonic()
    assert host.asked == ["PutRecord"]
    host.answer, host.usable = READY, True
    assert machine.advance() is not None
    assert machine.external_id == {"host": "a", "sliver": "np1"}
