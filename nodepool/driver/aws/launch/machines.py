"""State machines of an instance and its dedicated host (AWS-2.2 and AWS-2.5).

Nothing blocks here: calls run on the adapter's threads, and objects are polled together.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.cloud.polling import Poller, Subscription
from nodepool.driver.aws.config import AwsLabel
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.objects import AwsInstance, state_of
from nodepool.driver.statemachine.model import Adapter
from nodepool.driver.statemachine.steps import Deletion, SteppedMachine, Steps, Wait
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

HOST_GONE = ("released", "released-permanent-failure")
HOST_FAILED = ("permanent-failure", *HOST_GONE)
INSTANCE_FAILED = ("shutting-down", "terminated", "stopping", "stopped")
SIZE_WAIT = 30.0
"""Maximum seconds that a running instance waits until its size is known."""
FIRST_LOOK = 4
"""Factor of the shortest pause for an instance of which nothing is known yet: it does not run
earlier.
"""
CONFIRM_ABSENT = 2.0
"""Seconds between two polls that must both miss an object before it counts as deleted: EC2 shows
new ones late.
"""


class AwsDeleteStateMachine(Deletion):
    def __init__(self, adapter: Adapter, external_id: object, log: Log) -> None:
        # Records of old releases have the instance's id only.
        ids = {"instance": external_id} if isinstance(external_id, str) else external_id
        super().__init__(adapter, ids, log)

    def steps(self) -> Steps[None]:
        adapter, ids = self.adapter, self.external_id or {}
        if ids.get("instance"):
            yield from self._delete_instance(ids["instance"])
        if host := ids.get("host"):
            # A host that is not empty is never released. The launch ended before the id of the
            # instance was known, and the leak cleanup keeps resources with a record.
            for left in (
                yield from self.call(adapter.calls.run(lambda: adapter.cloud.left_on_host(host)))
            ):
                self.log.warning(
                    "Host %s has an instance without a node, deleting it: %s", host, left
                )
                yield from self._delete_instance(left)
            yield from self._delete(adapter.watched_hosts, host, "host", HOST_GONE)

    def _delete_instance(self, key: str) -> Steps[None]:
        yield from self._delete(self.adapter.watched_instances, key, "instance", ("terminated",))
        self.adapter.gone.add(key)

    def _delete(
        self, watched: Poller[Any], key: str, kind: str, ends: tuple[str, ...]
    ) -> Steps[None]:
        """Delete it and wait until AWS reports that it no longer exists."""
        yield from self.call(self.adapter.deletes.delete(kind, key))
        missed: float | None = None
        watch = watched.watch(
            key, self._wake, ("delete", kind), patience=self.adapter.DELETE_PATIENCE
        )
        while True:
            look = yield from self.answer(watch)
            if look.value is not None:
                missed = None
                if state_of(look.value) in ends:
                    break
            elif missed is None:
                missed = look.asked
                watch.again(CONFIRM_ABSENT)
            elif look.asked - missed >= CONFIRM_ABSENT:
                self.log.warning("%s %s no longer exists", kind.capitalize(), key)
                break
        watch.end()


class AwsCreateStateMachine(SteppedMachine):
    HOST_ALLOCATING_SUBMIT = "submit allocating host"
    HOST_ALLOCATING = "allocating host"
    INSTANCE_CREATING_SUBMIT = "submit creating instance"
    INSTANCE_CREATING = "creating instance"

    def __init__(
        self,
        adapter: Adapter,
        hostname: str,
        label: AwsLabel,
        image_external_id: str | None,
        metadata: dict[str, Any],
        request: NodeRequest,
        log: Log,
    ) -> None:
        super().__init__()
        self.adapter: Any = adapter
        self.log = log
        self.hostname = hostname
        self.label = label
        self.image_external_id = image_external_id
        self.tags = parameters.node_tags(hostname, label, metadata, request, log)
        self.offer: object = None

    def _add_id(self, kind: str, value: str) -> None:
        # A new object each time: the framework compares it with the one it has stored.
        self.external_id = {**(self.external_id or {}), kind: value}

    def steps(self) -> Steps[AwsInstance]:
        adapter, launching, label = self.adapter, self.adapter.launching, self.label
        host_id = host = None
        if label.dedicated_host:
            self.state = self.HOST_ALLOCATING_SUBMIT
            call = adapter.calls.run(
                lambda: launching.allocate_host(label, self.tags), lane="write"
            )
            host_id = yield from self.call(call, undo=functools.partial(self._remove_late, "host"))
            self._add_id("host", host_id)
            self.state = self.HOST_ALLOCATING
            watch = adapter.watched_hosts.watch(host_id, self._wake, ("allocate", label.name))
            host = yield from self._reached(watch, "available", HOST_FAILED)

        self.state = self.INSTANCE_CREATING_SUBMIT
        call = adapter.calls.run(
            lambda: launching.launch(label, self.image_external_id, self.tags, host_id),
            lane="write",
        )
        started, self.offer = yield from self.call(
            call, undo=functools.partial(self._remove_late, "instance")
        )
        key = started["InstanceId"]
        self._add_id("instance", key)
        self.state = self.INSTANCE_CREATING
        first = FIRST_LOOK * adapter.LOOK_FLOOR
        watch = adapter.watched_instances.watch(
            key, self._wake, ("launch", label.name), first=first
        )
        instance = yield from self._reached(watch, "running", INSTANCE_FAILED)

        size, until = (
            adapter.calls.run(lambda: adapter.quota.of_instance(instance)),
            time.monotonic() + SIZE_WAIT,
        )
        while not size.done() and time.monotonic() < until:
            yield Wait(size, until)
        return AwsInstance(adapter.provider, instance, host, self._size(key, size), label)

    def _reached(
        self, watch: Subscription[dict[str, Any]], wanted: str, failed: tuple[str, ...]
    ) -> Steps[dict[str, Any]]:
        """Wait until the thing has the state; it may not be shown yet."""
        while True:
            found = (yield from self.answer(watch)).value
            if found is None:
                continue
            state = state_of(found)
            if state == wanted:
                watch.end()
                return found
            if state in failed:
                if "InstanceId" in found:
                    raise self.adapter.launching.ended(found, self.offer)
                raise exceptions.LaunchStatusException(
                    f"Host {found.get('HostId')} is in state {state}"
                )

    def _size(self, key: str, size: Future[QuotaInformation]) -> QuotaInformation:
        """Return the instance's usage; the volume's is that of the label, as it is not queried."""
        quota = QuotaInformation(instances=1)
        try:
            quota = size.result(0)
        except Exception as error:
            # It runs: do not discard it because a query of its type has failed.
            self.log.warning(
                "Size of instance %s is not known, it is counted without cores and memory: %s: %s",
                key,
                type(error).__name__,
                error,
            )
        quota.add(self.adapter.quota.of_volume(self.label))
        return quota

    def _remove_late(self, kind: str, call: Future[Any]) -> None:
        """Delete what an abandoned call has created after all."""
        if call.cancelled() or call.exception() is not None:
            return
        key = call.result() if kind == "host" else call.result()[0]["InstanceId"]
        self.log.warning(
            "%s %s was created after its launch was abandoned, deleting it", kind.capitalize(), key
        )
        self.adapter.deletes.delete(kind, key)
