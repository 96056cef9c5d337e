"""A cloud that fails and lies, but only when a fault says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nodepool.lab.simulation.kernel import Kernel

#: By name; the driver finds its cloud here.
clouds: dict[str, Cloud] = {}


class CloudError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP {code}")
        self.code = code


@dataclass
class Machine:
    """
    :param metadata: as the driver gave it.
    :param runs_at: when it has booted, in virtual seconds.
    :param silent: it runs, and nobody can log in.
    """

    id: str
    metadata: dict[str, Any]
    runs_at: float
    fails: bool = False
    image: Image | None = None
    silent: bool = False


@dataclass
class Image:
    """
    :param ready: it has been received completely, so that machines can be created of it.
    :param broken: how its machines fail; see :mod:`tests.world.logins`.
    """

    id: str
    name: str
    metadata: dict[str, Any]
    ready: bool = False
    broken: str | None = None


class Cloud:
    """
    :param boot: seconds that a machine needs, at least and at most.
    :param created: called with the id and the host name of each machine.
    :param destroyed: called with the id of each machine that a driver deletes.
    """

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        quota: float,
        boot: tuple[float, float],
        created: Callable[[str, str], None] = lambda _id, _hostname: None,
        destroyed: Callable[[str], None] = lambda _id: None,
    ) -> None:
        self.name = name
        self._kernel = kernel
        self.quota = quota
        self._boot = boot
        self._created = created
        self._destroyed = destroyed
        #: Called with the id of each image that a driver deletes.
        self.image_gone: Callable[[str], None] = lambda _id: None
        self.images: dict[str, Image] = {}
        #: Machines that were asked for with an image that does not exist.
        self.imageless = 0
        #: Returns how the next image is broken.
        self.quality: Callable[[], str | None] = lambda: None
        self.machines: dict[str, Machine] = {}
        self._count = 0
        self.calls = 0
        # Faults; each is a probability, or a time in seconds.
        self.refusal = 0.0
        self.lost_answer = 0.0
        self.failing_machines = 0.0
        self.list_lag = 0.0
        self._seen: list[tuple[float, list[tuple[str, dict[str, Any]]]]] = []
        clouds[name] = self

    def heal(self) -> None:
        self.refusal = self.lost_answer = self.failing_machines = self.list_lag = 0.0

    # -- calls

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Call the cloud from a thread of the caller's process: if that is killed, the call may
        have had its effect.
        """
        future: Future[Any] = Future()
        self.calls += 1

        def run() -> None:
            random = self._kernel.random
            self._kernel.sleep(random.uniform(0.02, 0.2))
            try:
                if random.random() < self.refusal:
                    raise CloudError(random.choice((429, 500, 503)))
                result = function()
                self._kernel.sleep(random.uniform(0.02, 0.2))
                if random.random() < self.lost_answer:
                    self._kernel.sleep(3600.0)
                if random.random() < self.refusal / 4:
                    raise CloudError(502)
            except CloudError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=f"cloud-{self.name}", daemon=True).start()
        return future

    # -- what it does

    def create(self, hostname: str, metadata: dict[str, Any], image: str | None = None) -> str:
        if image is not None and not (image in self.images and self.images[image].ready):
            self.imageless += 1
            raise CloudError(400)
        if len(self.machines) >= self.quota:
            raise CloudError(403)
        self._count += 1
        random = self._kernel.random
        machine = Machine(
            f"{self.name}-{self._count}",
            dict(metadata),
            self._kernel.now + random.uniform(*self._boot),
        )
        machine.fails = random.random() < self.failing_machines
        machine.image = self.images.get(image or "")
        if machine.image is not None and machine.image.broken == "boot":
            machine.fails = True
        self.machines[machine.id] = machine
        self._created(machine.id, hostname)
        self._changed()
        return machine.id

    def upload(self, name: str, metadata: dict[str, Any]) -> str:
        """Receive an image. It is listed from the start, and stays there if the client ends
        meanwhile.
        """
        self._count += 1
        image = self.images[f"{self.name}-image-{self._count}"] = Image(
            f"{self.name}-image-{self._count}", name, dict(metadata), broken=self.quality()
        )
        self._kernel.sleep(self._kernel.random.uniform(0.2, 3.0))
        if image.id not in self.images:
            raise CloudError(404)
        image.ready = True
        return image.id

    def delete_image(self, image_id: str) -> bool:
        if self.images.pop(image_id, None) is None:
            raise CloudError(404)
        self.image_gone(image_id)
        return True

    def list_images(self) -> list[Image]:
        return list(self.images.values())

    def status(self, machine_id: str) -> str:
        machine = self.machines.get(machine_id)
        if machine is None:
            raise CloudError(404)
        if self._kernel.now < machine.runs_at:
            return "building"
        return "error" if machine.fails else "running"

    def delete(self, machine_id: str) -> bool:
        if machine_id not in self.machines:
            raise CloudError(404)
        self._destroyed(machine_id)
        self.vanish(machine_id)
        return True

    def vanish(self, machine_id: str) -> None:
        del self.machines[machine_id]
        self._changed()

    def _changed(self) -> None:
        if self.list_lag or self._seen:
            self._seen.append((self._kernel.now, self._all()))

    def _all(self) -> list[tuple[str, dict[str, Any]]]:
        return [(machine.id, machine.metadata) for machine in self.machines.values()]

    def list(self) -> list[tuple[str, dict[str, Any]]]:
        """A list may be out of date, as in clouds with several API servers."""
        if not self.list_lag:
            self._seen.clear()
            return self._all()
        old = [content for when, content in self._seen if when <= self._kernel.now - self.list_lag]
        return old[-1] if old else self._all()
