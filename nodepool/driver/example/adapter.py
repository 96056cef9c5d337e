"""Adapter of the example driver: implements the framework's calls with the cloud's API."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodepool import exceptions
from nodepool.config.model import Label
from nodepool.driver import statemachine
from nodepool.driver.example.config import ExampleProviderConfig
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation, RateLimiter
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

BOOT_SECONDS = 0.05


class ExampleCloud:
    """Stands for the library of a real cloud: a few calls, all slow in reality."""

    def __init__(self) -> None:
        self._vms: dict[str, dict[str, Any]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def create_vm(self, **properties: object) -> str:
        with self._lock:
            vm_id = f"vm-{next(self._ids)}"
            self._vms[vm_id] = {"id": vm_id, "created": time.monotonic(), **properties}
        return vm_id

    def list_vms(self) -> list[dict[str, Any]]:
        with self._lock:
            vms = list(self._vms.values())
        now = time.monotonic()
        return [
            {**vm, "status": "running" if now - vm["created"] >= BOOT_SECONDS else "booting"}
            for vm in vms
        ]

    def delete_vm(self, vm_id: str) -> None:
        with self._lock:
            self._vms.pop(vm_id, None)


class ExampleInstance(statemachine.Instance):
    """A VM for the framework."""

    def __init__(self, vm: dict[str, Any], provider: ExampleProviderConfig) -> None:
        super().__init__()
        self.external_id = vm["id"]
        self.metadata = vm["metadata"]
        self.ready = vm["status"] == "running"
        self.public_ipv4 = "fake"
        self.private_ipv4 = "fake"
        self.interface_ip = self.public_ipv4
        self.cloud = "example"
        self.region = provider.region
        self.az = vm["zone"]

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(instances=1)


class ExampleResource(statemachine.Resource):
    def __init__(self, vm: dict[str, Any]) -> None:
        super().__init__(vm["metadata"], "instance")
        self.id = vm["id"]


class ExampleCreateStateMachine(statemachine.StateMachine):
    """Creates a machine. ``advance`` never blocks: it checks futures of the executor."""

    SUBMITTED = "submit creating vm"
    VM_CREATING = "creating vm"
    COMPLETE = "complete"

    def __init__(self, adapter: ExampleAdapter, properties: dict[str, Any], log: Log) -> None:
        super().__init__()
        self.adapter = adapter
        self.properties = properties
        self.log = log

    def advance(self) -> ExampleInstance | None:
        if self.state == self.START:
            # The framework wakes this machine when the future is done.
            self.waiting_future = self.adapter.submit(
                self.adapter.cloud.create_vm, **self.properties
            )
            self.state = self.SUBMITTED

        if self.state == self.SUBMITTED:
            if not self.waiting_future.done():
                return None
            # From now on the framework can delete the VM, whatever happens to this machine.
            self.external_id = self.waiting_future.result()
            self.waiting_future = None
            self.state = self.VM_CREATING

        if self.state == self.VM_CREATING:
            vm = self.adapter.find(self.external_id)
            if vm is None:
                raise exceptions.LaunchStatusException(f"VM {self.external_id} vanished")
            if vm["status"] != "running":
                return None
            self.state = self.COMPLETE
            self.complete = True
            return ExampleInstance(vm, self.adapter.provider)
        return None


class ExampleDeleteStateMachine(statemachine.StateMachine):
    VM_DELETING = "deleting vm"
    COMPLETE = "complete"

    def __init__(self, adapter: ExampleAdapter, external_id: object, log: Log) -> None:
        super().__init__()
        self.adapter = adapter
        self.external_id = external_id
        self.log = log

    def advance(self) -> None:
        if self.state == self.START:
            self.waiting_future = self.adapter.submit(
                self.adapter.cloud.delete_vm, self.external_id
            )
            self.state = self.VM_DELETING

        if self.state == self.VM_DELETING:
            if not self.waiting_future.done():
                return
            self.waiting_future.result()
            if self.adapter.find(self.external_id) is None:
                self.state = self.COMPLETE
                self.complete = True


class ExampleAdapter(statemachine.Adapter):
    def __init__(self, provider_config: ExampleProviderConfig) -> None:
        super().__init__(provider_config)
        self.log = logging.getLogger(f"nodepool.ExampleAdapter.{provider_config.name}")
        self.provider = provider_config
        self.cloud = ExampleCloud()
        self.rate_limiter = RateLimiter(provider_config.name, provider_config.rate_limit)
        self.executor = ThreadPoolExecutor(
            max_workers=4, thread_name_prefix="ThreadPoolExecutor-example"
        )

    def stop(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *args: object, **kw: object) -> Any:
        """Run a call of the cloud's API in the background, within its rate limit."""

        def call() -> Any:
            with self.rate_limiter(self.log.debug, f"API call {function.__name__}"):
                return function(*args, **kw)

        return self.executor.submit(call)

    def find(self, vm_id: str) -> dict[str, Any] | None:
        # A real driver keeps the list for a second: see LazyExecutorTTLCache in
        # nodepool.driver.utils.
        return next((vm for vm in self.cloud.list_vms() if vm["id"] == vm_id), None)

    def getCreateStateMachine(
        self,
        hostname: str,
        label: DriverLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> ExampleCreateStateMachine:
        properties = {
            "name": hostname,
            "image": label.cloud_image.external_name,
            "type": label.instance_type,
            # The metadata identify the VM after a crash: never launch without them.
            "metadata": metadata,
            "zone": az,
        }
        return ExampleCreateStateMachine(self, properties, log)

    def getDeleteStateMachine(self, external_id: object, log: Log) -> ExampleDeleteStateMachine:
        return ExampleDeleteStateMachine(self, external_id, log)

    def listInstances(self) -> Iterator[ExampleInstance]:
        for vm in self.cloud.list_vms():
            yield ExampleInstance(vm, self.provider)

    def listResources(self) -> Iterator[ExampleResource]:
        for vm in self.cloud.list_vms():
            yield ExampleResource(vm)

    def deleteResource(self, resource: statemachine.Resource) -> None:
        self.cloud.delete_vm(resource.id)

    def getQuotaLimits(self) -> QuotaInformation:
        return QuotaInformation(default=float("inf"))

    def getQuotaForLabel(self, label: Label) -> QuotaInformation:
        return QuotaInformation(instances=1)


# Short names of earlier releases.
Adapter = ExampleAdapter
CreateStateMachine = ExampleCreateStateMachine
DeleteStateMachine = ExampleDeleteStateMachine
Instance = ExampleInstance
