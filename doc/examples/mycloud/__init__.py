"""A complete driver for a cloud that lives in memory: the smallest thing that works."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import voluptuous as v

from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig, statemachine
from nodepool.driver.utils import QuotaInformation


class Cloud:
    """Stands for your cloud's library: calls that take their time."""

    def __init__(self) -> None:
        self.machines: dict[str, dict[str, Any]] = {}
        self.numbers = itertools.count(1)

    def create(self, name: str, metadata: dict[str, str]) -> dict[str, Any]:
        machine_id = f"m{next(self.numbers)}"
        self.machines[machine_id] = {"id": machine_id, "name": name, "metadata": metadata}
        return self.machines[machine_id]

    def delete(self, machine_id: str) -> None:
        self.machines.pop(machine_id, None)


# -- configuration


class Image(ConfigValue):
    """What the framework copies to each node."""

    def __init__(self) -> None:
        self.name = "built-in"
        self.username = "zuul"
        self.python_path = "auto"
        self.shell_type: str | None = None
        self.connection_type = "ssh"
        self.connection_port = 22


class Label(ConfigValue):
    ignore_equality = ["pool"]  # back references would make comparisons go round in circles

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.pool = pool
        self.cloud_image = Image()
        self.diskimage = None
        self.host_key_checking = False  # this cloud has no machine behind the address


class Pool(ConfigPool):
    ignore_equality = ["provider"]

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().load(pool_config)  # max-servers, priority, node-attributes
        full_config, self.provider = args
        self.name = pool_config["name"]
        self.use_internal_ip = False
        for name in pool_config["labels"]:
            self.labels[name] = Label(name, self)
            # This pool offers the label. A label that is not at top level is an error here.
            full_config.labels[name].pools.append(self)


class MyCloudProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    def __init__(self, driver: MyCloudDriver, provider: dict[str, Any]) -> None:
        super().__init__(provider)  # name, driver, priority, max-concurrency
        self.driver_object = driver
        self._pools: dict[str, Pool] = {}
        self.boot_timeout, self.launch_timeout, self.launch_retries = 60, 600, 3

    @property
    def pools(self) -> dict[str, Pool]:  # type: ignore[override]
        return self._pools

    @property
    def manage_images(self) -> bool:
        return False

    def load(self, newconfig: Any) -> None:
        for options in self.provider["pools"]:
            pool = Pool()
            pool.load(options, newconfig, self)
            self._pools[pool.name] = pool

    def getSchema(self) -> v.Schema:
        pool = {
            **ConfigPool.getCommonSchemaDict(),
            v.Required("name"): str,
            v.Required("labels"): [str],
        }
        return v.Schema({v.Required("pools"): [pool]})

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {
            label
            for pool in self._pools.values()
            if pool_name in (None, pool.name)
            for label in pool.labels
        }


# -- machines


class MyInstance(statemachine.Instance):
    def __init__(self, machine: dict[str, Any]) -> None:
        super().__init__()
        self.ready = True
        self.external_id = machine["id"]
        self.metadata = machine["metadata"]
        self.public_ipv4 = self.interface_ip = "203.0.113.7"
        self.cloud = "mycloud"

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(instances=1)


class Create(statemachine.StateMachine):
    CREATING, COMPLETE = "creating", "complete"

    def __init__(self, adapter: MyCloudAdapter, name: str, metadata: dict[str, str]) -> None:
        super().__init__()
        self.adapter, self.name, self.metadata = adapter, name, metadata

    def advance(self) -> MyInstance | None:
        if self.state == self.START:
            # Never wait in here: the call runs on a thread of the adapter, and its end wakes this
            # machine.
            self.waiting_future = self.adapter.executor.submit(
                self.adapter.cloud.create, self.name, self.metadata
            )
            self.state = self.CREATING
        if self.state == self.CREATING and self.waiting_future.done():
            # What it raises fails this attempt; another one follows.
            machine = self.waiting_future.result()
            # From now on the framework can delete it, whatever becomes of this machine.
            self.external_id = machine["id"]
            self.state, self.complete = self.COMPLETE, True
            return MyInstance(machine)
        return None


class Delete(statemachine.StateMachine):
    DELETING, COMPLETE = "deleting", "complete"

    def __init__(self, adapter: MyCloudAdapter, external_id: str) -> None:
        super().__init__()
        self.adapter, self.external_id = adapter, external_id

    def advance(self) -> None:
        if self.state == self.START:
            self.waiting_future = self.adapter.executor.submit(
                self.adapter.cloud.delete, self.external_id
            )
            self.state = self.DELETING
        if self.state == self.DELETING and self.waiting_future.done():
            self.waiting_future.result()
            self.state, self.complete = self.COMPLETE, True


class MyResource(statemachine.Resource):
    def __init__(self, machine: dict[str, Any]) -> None:
        super().__init__(machine["metadata"], "instance")
        self.id = machine["id"]


class MyCloudAdapter(statemachine.Adapter):
    def __init__(self, provider_config: MyCloudProviderConfig) -> None:
        super().__init__(provider_config)
        self.cloud = Cloud()
        self.executor = ThreadPoolExecutor(
            4, thread_name_prefix=f"ThreadPoolExecutor-{provider_config.name}"
        )

    def stop(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    def getCreateStateMachine(
        self,
        hostname: str,
        label: Label,
        image_external_id: Any,
        metadata: dict[str, str],
        request: Any,
        az: str | None,
        log: Any,
    ) -> Create:
        return Create(self, hostname, metadata)

    def getDeleteStateMachine(self, external_id: str, log: Any) -> Delete:
        return Delete(self, external_id)

    def listInstances(self) -> Iterable[MyInstance]:
        return [MyInstance(machine) for machine in list(self.cloud.machines.values())]

    def listResources(self) -> Iterable[MyResource]:
        return [MyResource(machine) for machine in list(self.cloud.machines.values())]

    def deleteResource(self, resource: Any) -> None:
        self.cloud.delete(resource.id)


class MyCloudDriver(statemachine.StateMachineDriver):
    name = "mycloud"

    def getProviderConfig(self, provider: dict[str, Any]) -> MyCloudProviderConfig:
        return MyCloudProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> MyCloudAdapter:
        return MyCloudAdapter(provider_config)
