"""Adapter of the fake driver; tests set its knobs while the service runs (driver-fake-test-example.md 1.1)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nodepool.driver.fake.cloud import (
    FakeDeleteImageFailCloud,
    FakeLaunchAndDeleteFailCloud,
    FakeLaunchAndGetFaultCloud,
    FakeOpenStackCloud,
    FakeUploadFailCloud,
    _creation_error,
)
from nodepool.driver.fake.objects import Dummy
from nodepool.driver.openstack.adapter import OpenStackAdapter

__all__ = [
    "Dummy",
    "FakeAdapter",
    "FakeDeleteImageFailCloud",
    "FakeLaunchAndDeleteFailCloud",
    "FakeLaunchAndGetFaultCloud",
    "FakeOpenStackCloud",
    "FakeUploadFailCloud",
]


class FakeAdapter(OpenStackAdapter):
    fake_cloud: Any = FakeOpenStackCloud

    def __init__(self, provider_config: Any) -> None:
        self.createServer_fails = 0
        self.createServer_fails_with_external_id = 0
        self._fake = type(self).fake_cloud()
        self._made: set[str] = set()
        super().__init__(provider_config)

    def _getClient(self) -> Any:
        return self._fake

    def _initLookups(self, executor: Any, ttl: float = 0) -> None:
        # Looking is free in memory: no cache, hence no waiting for one.
        super()._initLookups(executor, ttl)
        for name in ("_listServers", "_listVolumes", "_listFloatingIps"):
            self.__dict__.pop(name, None)

    def _submitApi(self, api: Callable[..., Any], *args: Any, **kw: Any) -> Future[Any]:
        # Nothing blocks here, so that a thread of its own would only cost.
        future: Future[Any] = Future()
        try:
            future.set_result(api(*args, **kw))
        except Exception as exc:
            future.set_exception(exc)
        return future

    def _submitDelete(self, api: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._submitApi(api, *args)

    def _createServer(self, *args: Any, **kwargs: Any) -> Any:
        if self.createServer_fails > 0:
            self.createServer_fails -= 1
            raise Exception("Expected createServer exception")
        if self.createServer_fails_with_external_id > 0:
            self.createServer_fails_with_external_id -= 1
            raise _creation_error("fakeid")
        server = super()._createServer(*args, **kwargs)
        self._made.add(server["id"])
        return server

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Of servers made here only: the cloud is this process's own, while other launchers share the records."""
        return super().findMissingInstances([external_id for external_id in external_ids if external_id in self._made])

    def _expandServer(self, server: Any) -> Any:
        return server

    def _listServers(self) -> list[Any]:
        servers: list[Any] = self._client.list_servers()
        return servers

    def _getServer(self, external_id: str) -> Any:
        server = self._client.get_server_by_id(external_id)
        if server is None and external_id in self._made:
            return Dummy(Dummy.INSTANCE, id=external_id, status="DELETED")  # somebody else was quicker
        return server

    def _activeAt(self, server: Any) -> float | None:
        ready_at: float | None = getattr(server, "_ready_at", None)
        return ready_at if ready_at is not None and ready_at != float("inf") and not server._paused else None
