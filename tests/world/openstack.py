"""The cloud of the product's ``fake`` driver, shared by all launchers of a world: it runs the
OpenStack driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import yaml

from nodepool.driver.fake.adapter import FakeAdapter
from nodepool.driver.fake.cloud import FakeOpenStackCloud
from nodepool.driver.fake.objects import Dummy
from nodepool.driver.openstack.adapter import OpenStackAdapter
from nodepool.lab.simulation.kernel import Kernel

CLOUDS_FILE = "clouds.yaml"
#: Seconds after which the SDK gives up waiting for an answer.
SILENCE = 30.0


class HttpException(Exception):
    """As that of the SDK, which the driver knows by its name and its status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status_code = status


class Adapter(FakeAdapter):
    """The adapter of the fake driver, with the pace of the OpenStack driver. The cloud is that
    of all launchers.
    """

    LISTING_TTL = OpenStackAdapter.LISTING_TTL
    LOOKS = OpenStackAdapter.LOOKS
    SETTLING = OpenStackAdapter.SETTLING
    findMissingInstances = OpenStackAdapter.findMissingInstances


class OpenStack(FakeOpenStackCloud):
    """A cloud that fails and lies; see :class:`tests.world.cloud.Cloud` for its faults."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        quota: int,
        boot: tuple[float, float],
        created: Callable[[str, str], None],
        destroyed: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.name = name
        self._kernel = kernel
        self.quota = quota
        self._boot = boot
        self._created = created
        self._destroyed = destroyed
        self.refusal = self.lost_answer = self.failing_machines = self.list_lag = 0.0
        self._old: tuple[float, list[Dummy]] = (0.0, [])
        Adapter.fake_cloud = staticmethod(lambda: self)
        os.environ["OS_CLIENT_CONFIG_FILE"] = CLOUDS_FILE
        Path(CLOUDS_FILE).write_text(
            yaml.safe_dump({"clouds": {name: {"auth": {"username": "fake"}}}})
        )

    @property
    def machines(self) -> dict[str, Dummy]:
        """The servers that exist, by id."""
        return {server.id: server for server in self._server_list if server.status != "DELETED"}

    def heal(self) -> None:
        self.refusal = self.lost_answer = self.failing_machines = self.list_lag = 0.0

    def vanish(self, machine_id: str) -> None:
        server = self._server_list.by_id(machine_id)
        if server is not None:
            self._server_list.remove(server)

    def _call(self) -> None:
        random = self._kernel.random
        self._kernel.sleep(random.uniform(0.02, 0.2))
        if random.random() < self.refusal:
            raise HttpException("the cloud fails", random.choice((429, 500, 503)))

    # -- calls

    def create_server(self, name: str = "", **kwargs: object) -> Dummy:
        self._call()
        random = self._kernel.random
        if len(self.machines) >= self.quota:
            raise HttpException("Quota exceeded for instances", 403)
        server = self._make_server(name, self._azs[0], kwargs)
        status = "ERROR" if random.random() < self.failing_machines else "ACTIVE"
        server.becomes(status, self._kernel.now + random.uniform(*self._boot))
        self._server_list.append(server)
        self._created(server.id, name)
        self._call()
        if random.random() < self.lost_answer:
            self._kernel.sleep(SILENCE)
            raise TimeoutError("no answer")
        return server

    def get_server_by_id(self, server_id: str) -> Dummy | None:
        self._call()
        return super().get_server_by_id(server_id)

    def list_servers(self, **kwargs: object) -> list[Dummy]:
        self._call()
        if self.list_lag:
            since, old = self._old
            if self._kernel.now - since < self.list_lag:
                return list(old)
        self._old = (self._kernel.now, list(self.machines.values()))
        return list(self._old[1])

    def delete_server(self, name_or_id: str, **kwargs: object) -> bool:
        self._call()
        if name_or_id not in self.machines:
            return False
        self._destroyed(name_or_id)
        self.vanish(name_or_id)
        self._call()
        return True

    def get_compute_limits(self) -> Dummy:
        self._call()
        return Dummy(
            "Limits", max_total_cores=-1, max_total_instances=self.quota, max_total_ram_size=-1
        )
