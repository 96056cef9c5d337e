"""State machines for creating and deleting an instance and its dedicated host (AWS-2.2 and AWS-2.5).

Nothing blocks here: calls run on the adapter's threads, and an object is looked at together with all others waited for.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.driver.aws.config import AwsLabel
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.objects import AwsInstance, state_of
from nodepool.driver.statemachine.model import Adapter
from nodepool.driver.statemachine.watching import WatchingMachine
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

HOST_GONE = ("released", "released-permanent-failure")
HOST_FAILED = ("permanent-failure", *HOST_GONE)
INSTANCE_FAILED = ("shutting-down", "terminated", "stopping", "stopped")
SIZE_WAIT = 30.0
"""Seconds that a running instance waits at most until its size is known."""
FIRST_LOOK = 4
"""Times the shortest pause: an instance of which nothing is known yet does not run earlier."""
CONFIRM_ABSENT = 2.0
"""Seconds between two looks that must both miss a thing before it counts as gone: EC2 shows new ones late."""


class _AwsMachine(WatchingMachine):
    def _submit(self, future: Future[Any]) -> None:
        self.waiting_future = future
        self.next_wake = None

    def _result(self) -> Any:
        future, self.waiting_future = self.waiting_future, None
        return future.result()

    def _look_at(self, watched: Any, key: str, kind: object, **options: float) -> None:
        self.waiting_future = None
        self.look_at(watched.watch(key, self._wake, kind, **options))


class AwsDeleteStateMachine(_AwsMachine):
    INSTANCE_DELETING_START = "start deleting instance"
    INSTANCE_DELETING = "deleting instance"
    HOST_CLEARING_START = "start clearing host"
    HOST_LOOKING = "looking at host"
    HOST_CLEARING = "clearing host"
    HOST_RELEASING_START = "start releasing host"
    HOST_RELEASING = "releasing host"
    COMPLETE = "complete"

    def __init__(self, adapter: Adapter, external_id: object, log: Log) -> None:
        super().__init__(adapter, log)
        # Records of old releases have the instance's id only.
        self.external_id = {"instance": external_id} if isinstance(external_id, str) else external_id
        self._missed: float | None = None
        #: Instances on the host that the record does not have.
        self._left: list[str] = []

    def advance(self) -> None:
        ids = self.external_id or {}
        if self.state == self.START:
            self.state = self.INSTANCE_DELETING_START

        if self.state == self.INSTANCE_DELETING_START:
            if ids.get("instance"):
                self._submit(self.adapter.deletes.delete("instance", ids["instance"]))
                self.state = self.INSTANCE_DELETING
            else:
                self.state = self.HOST_CLEARING_START

        if self.state == self.INSTANCE_DELETING:
            if not self._gone(self.adapter.watched_instances, ids["instance"], "instance", ("terminated",)):
                return
            self.adapter.gone.add(ids["instance"])
            self.state = self.HOST_CLEARING_START

        if self.state == self.HOST_CLEARING_START:
            if ids.get("host"):
                self._submit(self.adapter.calls.run(lambda: self.adapter.cloud.left_on_host(ids["host"])))
                self.state = self.HOST_LOOKING
            else:
                self.state = self.COMPLETE

        if self.state == self.HOST_LOOKING:
            if not self.waiting_future.done():
                return
            self._left = self._result()
            self.state = self.HOST_CLEARING
            self._clear()

        if self.state == self.HOST_CLEARING:
            if not self._cleared():
                return
            self.state = self.HOST_RELEASING_START

        if self.state == self.HOST_RELEASING_START:
            self._submit(self.adapter.deletes.delete("host", ids["host"]))
            self.state = self.HOST_RELEASING

        if self.state == self.HOST_RELEASING:
            if not self._gone(self.adapter.watched_hosts, ids["host"], "host", HOST_GONE):
                return
            self.state = self.COMPLETE

        if self.state == self.COMPLETE:
            self.complete = True

    def _clear(self) -> None:
        """Delete the next of them; a host that is not empty is never released.

        The launch ended before the id of the instance was known, and the search for leaks spares what has a record.
        """
        if self._left:
            self.log.warning("Host %s has an instance without a node, deleting it: %s", self.external_id["host"], self._left[0])
            self._submit(self.adapter.deletes.delete("instance", self._left[0]))

    def _cleared(self) -> bool:
        while self._left:
            if not self._gone(self.adapter.watched_instances, self._left[0], "instance", ("terminated",)):
                return False
            self.adapter.gone.add(self._left.pop(0))
            self._clear()
        return True

    def _gone(self, watched: object, key: str, kind: str, ends: tuple[str, ...]) -> bool:
        """True when AWS itself says, after it took the deletion, that the thing is gone."""
        if self._watch is None:
            if not self.waiting_future.done():
                return False
            try:
                self._result()
            except BaseException:
                # The framework starts another deletion; this machine is done with.
                self.state = self.START
                raise
            self._missed = None
            self._look_at(watched, key, ("delete", kind), patience=self.adapter.DELETE_PATIENCE)
        assert self._watch is not None
        look = self._watch.look
        if look is None:
            return False
        if look.value is not None:
            self._missed = None
            if state_of(look.value) not in ends:
                return False
        elif self._missed is None:
            self._missed = look.asked
            self._watch.again(CONFIRM_ABSENT)
            return False
        elif look.asked - self._missed < CONFIRM_ABSENT:
            return False
        else:
            self.log.warning("%s %s is not there any more", kind.capitalize(), key)
        self.looked_away()
        return True


class AwsCreateStateMachine(_AwsMachine):
    HOST_ALLOCATING_START = "start allocating host"
    HOST_ALLOCATING_SUBMIT = "submit allocating host"
    HOST_ALLOCATING = "allocating host"
    INSTANCE_CREATING_START = "start creating instance"
    INSTANCE_CREATING_SUBMIT = "submit creating instance"
    INSTANCE_CREATING = "creating instance"
    COMPLETE = "complete"

    def __init__(
        self, adapter: Adapter, hostname: str, label: AwsLabel, image_external_id: str | None, metadata: dict[str, Any],
        request: NodeRequest, log: Log,
    ) -> None:  # fmt: skip
        super().__init__(adapter, log)
        self.hostname = hostname
        self.label = label
        self.image_external_id = image_external_id
        self.tags = parameters.node_tags(hostname, label, metadata, request, log)
        self.rung: object = None
        self.host: dict[str, Any] | None = None
        self.instance: dict[str, Any] | None = None
        self._quota: QuotaInformation | None = None

    def _add_id(self, kind: str, value: str) -> None:
        # A new object each time: the framework compares it with what it has written.
        self.external_id = {**(self.external_id or {}), kind: value}

    def advance(self) -> AwsInstance | None:
        if self.state == self.START:
            self.state = self.HOST_ALLOCATING_START if self.label.dedicated_host else self.INSTANCE_CREATING_START

        if self.state == self.HOST_ALLOCATING_START:
            launching = self.adapter.launching
            self._submit(self.adapter.calls.run(lambda: launching.allocate_host(self.label, self.tags), lane="write"))
            self.state = self.HOST_ALLOCATING_SUBMIT

        if self.state == self.HOST_ALLOCATING_SUBMIT:
            if not self.waiting_future.done():
                return None
            host_id = self._result()
            self._add_id("host", host_id)
            self._look_at(self.adapter.watched_hosts, host_id, ("allocate", self.label.name))
            self.state = self.HOST_ALLOCATING

        if self.state == self.HOST_ALLOCATING:
            self.host = self._reached("available", HOST_FAILED)
            if self.host is None:
                return None
            self.state = self.INSTANCE_CREATING_START

        if self.state == self.INSTANCE_CREATING_START:
            launching, host_id = self.adapter.launching, (self.external_id or {}).get("host")
            self._submit(
                self.adapter.calls.run(
                    lambda: launching.launch(self.label, self.image_external_id, self.tags, host_id), lane="write"
                )
            )
            self.state = self.INSTANCE_CREATING_SUBMIT

        if self.state == self.INSTANCE_CREATING_SUBMIT:
            if not self.waiting_future.done():
                return None
            started, self.rung = self._result()
            self._add_id("instance", started["InstanceId"])
            # Asked for while it boots; the question needs no answer here.
            self.adapter.calls.run(lambda: self.adapter.launching.know_type(started.get("InstanceType")))
            self._look_at(
                self.adapter.watched_instances,
                started["InstanceId"],
                ("launch", self.label.name),
                first=FIRST_LOOK * self.adapter.LOOK_FLOOR,
            )
            self.state = self.INSTANCE_CREATING

        if self.state == self.INSTANCE_CREATING:
            if self.instance is None:
                running = self._reached("running", INSTANCE_FAILED)
                if running is None:
                    return None
                self.instance = running
                self._submit(self.adapter.calls.run(lambda: self.adapter.quota.of_instance(running)))
                self.next_wake = time.monotonic() + SIZE_WAIT
            if not self.waiting_future.done() and time.monotonic() < (self.next_wake or 0.0):
                return None
            self._quota = self._size()
            self.state = self.COMPLETE

        if self.state == self.COMPLETE:
            assert self.instance is not None
            self.complete = True
            return AwsInstance(self.adapter.provider, self.instance, self.host, self._quota, self.label)
        return None

    def _reached(self, wanted: str, failed: tuple[str, ...]) -> dict[str, Any] | None:
        """The thing once it has the state; None while it has not, or is not shown yet."""
        assert self._watch is not None
        look = self._watch.look
        if look is None or look.value is None:
            return None
        state = state_of(look.value)
        if state == wanted:
            self.looked_away()
            found: dict[str, Any] = look.value
            return found
        if state in failed:
            self.looked_away(reached=False)
            if "InstanceId" in look.value:
                raise self.adapter.launching.ended(look.value, self.rung)
            raise exceptions.LaunchStatusException(f"Host {look.value.get('HostId')} is in state {state}")
        return None

    def _size(self) -> QuotaInformation:
        """What it really takes; the volume as the label says, because its own is not looked at."""
        assert self.instance is not None
        quota = QuotaInformation(instances=1)
        try:
            future, self.waiting_future, self.next_wake = self.waiting_future, None, None
            quota = future.result(0)
        except Exception as error:
            # It runs: a question about its type that fails is no reason to throw it away.
            self.log.warning(
                "Size of instance %s is not known, it is counted without cores and memory: %s: %s",
                self.instance["InstanceId"],
                type(error).__name__,
                error,
            )
        quota.add(self.adapter.quota.of_volume(self.label))
        return quota

    def abandon(self) -> None:
        future, state = self.waiting_future, self.state
        self.waiting_future = None
        self.looked_away(reached=False)
        if future is None or state not in (self.HOST_ALLOCATING_SUBMIT, self.INSTANCE_CREATING_SUBMIT) or future.cancel():
            return
        future.add_done_callback(lambda done: self._remove_late(state, done))

    def _remove_late(self, state: str, future: Future[Any]) -> None:
        """The call that is not waited for any more has made something."""
        if future.cancelled() or future.exception() is not None:
            return
        if state == self.HOST_ALLOCATING_SUBMIT:
            kind, key = "host", future.result()
        else:
            kind, key = "instance", future.result()[0]["InstanceId"]
        self.log.warning("%s %s came after its launch was given up, deleting it", kind.capitalize(), key)
        self.adapter.deletes.delete(kind, key)
