"""A provider whose servers exist immediately: what is measured is the launcher.

Written against the plug-in API of release 11.0.0, so that both releases run it unchanged.
Everything stands in this file because that release cannot import siblings of a driver on a search
path.
"""

import itertools
import math

import voluptuous as v

from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig, statemachine
from nodepool.driver.utils import QuotaInformation


class InstantImage(ConfigValue):
    def __init__(self):
        self.name = "none"
        self.username = "bench"
        self.python_path = "auto"
        self.shell_type = None
        self.connection_port = 22
        self.connection_type = "ssh"


class InstantLabel(ConfigValue):
    ignore_equality = ["pool"]

    def __init__(self, name, pool):
        self.name = name
        self.pool = pool
        self.diskimage = None
        self.cloud_image = InstantImage()
        self.host_key_checking = False


class InstantPool(ConfigPool):
    ignore_equality = ["provider"]

    def load(self, pool_config, full_config, provider):
        super().load(pool_config)
        self.name = pool_config["name"]
        self.provider = provider
        self.use_internal_ip = False
        self.host_key_checking = False
        self.max_cores = self.max_ram = None
        self.max_resources = {}
        self.labels = {}
        for name in pool_config["labels"]:
            self.labels[name] = InstantLabel(name, self)
            full_config.labels[name].pools.append(self)


class InstantProviderConfig(ProviderConfig):
    def __init__(self, driver, provider):
        super().__init__(provider)
        self._pools = {}
        self.launch_retries = 3
        self.launch_timeout = 60
        self.boot_timeout = 10
        self.diskimages = {}
        self.cloud_images = {}

    @property
    def pools(self):
        return self._pools

    @property
    def manage_images(self):
        return False

    def load(self, newconfig):
        for pool_config in self.provider.get("pools", []):
            pool = InstantPool()
            pool.load(pool_config, newconfig, self)
            self._pools[pool.name] = pool

    def getSchema(self):
        return v.Schema({"pools": list}, extra=v.ALLOW_EXTRA)

    def getSupportedLabels(self, pool_name=None):
        return {
            label
            for pool in self._pools.values()
            if pool_name in (None, pool.name)
            for label in pool.labels
        }


class InstantInstance(statemachine.Instance):
    def __init__(self, external_id, metadata):
        super().__init__()
        self.ready = True
        self.external_id = external_id
        self.metadata = metadata
        self.interface_ip = self.public_ipv4 = "192.0.2.1"
        self.cloud = "instant"

    def getQuotaInformation(self):
        return QuotaInformation(cores=1, instances=1, ram=1024)


class InstantCreate(statemachine.StateMachine):
    def __init__(self, adapter, metadata):
        super().__init__()
        self.adapter = adapter
        self.metadata = metadata

    def advance(self):
        if self.state == self.START:
            self.external_id = f"i-{next(self.adapter.numbers)}"
            self.instance = InstantInstance(self.external_id, self.metadata)
            self.adapter.instances[self.external_id] = self.instance
            self.state = "complete"
            self.complete = True
        return self.instance


class InstantDelete(statemachine.StateMachine):
    def __init__(self, adapter, external_id):
        super().__init__()
        self.adapter = adapter
        self.external_id = external_id

    def advance(self):
        self.adapter.instances.pop(self.external_id, None)
        self.complete = True


class InstantAdapter(statemachine.Adapter):
    def __init__(self, provider_config):
        self.provider = provider_config
        self.numbers = itertools.count()
        self.instances = {}

    def getCreateStateMachine(self, hostname, label, image_external_id, metadata, request, az, log):
        return InstantCreate(self, metadata)

    def getDeleteStateMachine(self, external_id, log):
        return InstantDelete(self, external_id)

    def listInstances(self):
        return list(self.instances.values())

    def listResources(self):
        return []

    def getQuotaLimits(self):
        return QuotaInformation(default=math.inf)

    def getQuotaForLabel(self, label):
        return QuotaInformation(cores=1, instances=1, ram=1024)


class InstantDriver(statemachine.StateMachineDriver):
    name = "instant"

    def getProviderConfig(self, provider):
        return InstantProviderConfig(self, provider)

    def getAdapter(self, provider_config):
        return InstantAdapter(provider_config)
