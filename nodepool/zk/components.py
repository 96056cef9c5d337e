"""Registry of launchers, their pools and builders (ZK-4)."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.protocol.states import KazooState, ZnodeStat

from nodepool.version import get_version_string
from nodepool.zk import locks, paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.reading import answers, children
from nodepool.zk.records import LARGEST, RecordError, parse_object, text_of, texts_of

MODEL_API = 0
#: Seconds between two attempts to register again.
REGISTER_PAUSE = 2.0


class Component:
    """One entry of the registry, either ours (``register``) or read from ZooKeeper.

    :meth:`update` is thread-safe and writes changed attributes; after a lost session the component
        registers itself again with the same content.
    """

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"

    kind = ""
    log = logging.getLogger("nodepool.Component")

    def __init__(self, client: ZooKeeperClient, hostname: str, version: str | None = None) -> None:
        self.client = client
        self.path: str | None = None
        self.content: dict[str, Any] = {
            "hostname": hostname,
            "state": self.STOPPED,
            "kind": self.kind,
            "version": version or get_version_string(),
            "model_api": MODEL_API,
        }
        self._lock = threading.Lock()
        self._unwritten = False
        self._session: int | None = None
        #: The last entry whose deletion was reported, ours or not.
        self._gone: str | None = None
        #: Set while we are not to be registered.
        self._unregistered = threading.Event()
        self._unregistered.set()

    def __getattr__(self, name: str) -> Any:
        content = self.__dict__.get("content")
        if content is not None and name in content:
            return content[name]
        raise AttributeError(name)

    @property
    def state(self) -> str:
        return str(self.content["state"])

    @state.setter
    def state(self, value: str) -> None:
        self.update(state=value)

    def _serialize(self) -> bytes:
        return json.dumps(self.content, sort_keys=True).encode("utf8")

    def register(self) -> None:
        """Create our (ephemeral) entry; also after a lost session."""
        self._unregistered.clear()
        if self._vanished not in self.client.component_listeners:
            self.client.component_listeners.append(self._vanished)
        with self._lock:
            self._register()
        if self._state_changed not in self.client.state_listeners:
            self.client.state_listeners.append(self._state_changed)

    def _register(self) -> None:
        kazoo = self.client.kazoo
        session = self.client.session_id
        key = (self.kind, self.content.get("id"))
        self.path = self._adopt(kazoo, session) if key in self.client.unsure_components else None
        if self.path is None:
            self.client.unsure_components.add(key)
            prefix = f"{paths.COMPONENTS}/{self.kind}/{self.content['hostname']}"
            self.path = kazoo.create(
                prefix, self._serialize(), makepath=True, ephemeral=True, sequence=True
            )
        self.client.unsure_components.discard(key)
        self._unwritten = False
        self._session = session
        self.log.info("Registered component %s", self.path)
        if self.path == self._gone:
            self._start_registration(self.path)

    def _adopt(self, kazoo: KazooClient, session: int | None) -> str | None:
        """Adopt our entry if its creation succeeded but was never acknowledged.

        Return None if there is none.
        """
        parent = f"{paths.COMPONENTS}/{self.kind}"
        kazoo.sync(parent)  # this server may not know yet what the previous one has done for us
        for path, (data, stat) in answers(
            kazoo.get_async, [f"{parent}/{name}" for name in children(kazoo, parent)]
        ):
            if stat.ephemeralOwner == session and (parse_object(data) or {}).get(
                "id"
            ) == self.content.get("id"):
                kazoo.set(path, self._serialize())
                return path
        return None

    def unregister(self) -> None:
        if self._state_changed in self.client.state_listeners:
            self.client.state_listeners.remove(self._state_changed)
        if self._vanished in self.client.component_listeners:
            self.client.component_listeners.remove(self._vanished)
        self._unregistered.set()
        with self._lock:
            path, self.path = self.path, None
            if path is not None and self.client.client is not None:
                locks.withdraw(self.client.client, path)

    def _state_changed(self, state: str) -> None:
        is_current = self._session == self.client.session_id and not self._unwritten
        if state == KazooState.CONNECTED and not self._unregistered.is_set() and not is_current:
            self._start_registration()

    def _vanished(self, path: str) -> None:
        """Register again if the deleted entry was ours."""
        self._gone = path  # first: the acknowledgment of its creation may still be on its way
        if path == self.path and not self._unregistered.is_set():
            self._start_registration(path)

    def _exists(self) -> bool:
        """Return whether our entry exists.

        After the store was emptied, it can have the path of an earlier one, whose deletion is
        reported late.
        """
        stat = self.client.kazoo.exists(self.path)
        return stat is not None and stat.ephemeralOwner == self._session

    def _start_registration(self, gone: str | None = None) -> None:
        threading.Thread(
            target=self._register_again,
            args=(gone,),
            name="ThreadPoolExecutor component",
            daemon=True,
        ).start()

    def _register_again(self, gone: str | None) -> None:
        """Update or create our entry; with the next connection if this one is lost.

        :param gone: an entry that no longer exists.
        """
        while not self._unregistered.is_set() and self.client.connected:
            with self._lock:
                if self._unregistered.is_set():
                    return
                try:
                    if (
                        self._session != self.client.session_id
                        or self.path is None
                        or (self.path == gone and not self._exists())
                    ):
                        self._register()
                    elif self._unwritten:
                        self._write()
                    return
                except Exception as error:
                    self.log.warning(
                        "Cannot register component %s again: %r",
                        self.content.get("id") or self.kind,
                        error,
                    )
            self._unregistered.wait(REGISTER_PAUSE)

    def update(self, **values: object) -> None:
        """Change attributes and write them if something differs.

        Without a connection they are written as soon as there is one.
        """
        with self._lock:
            changed = {
                key: value
                for key, value in values.items()
                if key not in self.content or self.content[key] != value
            }
            if not changed:
                return
            self.content.update(changed)
            if self.path is None:
                return
            self._unwritten = True
            if self.client.client is None or not self.client.connected:
                return
            try:
                self._write()
            except KazooException as error:
                self.log.warning("Cannot update component %s: %r", self.path, error)

    def _write(self) -> None:
        kazoo = self.client.client
        if kazoo is None or self.path is None:
            return
        try:
            kazoo.set(self.path, self._serialize())  # nobody else writes it
        except NoNodeError:
            # The session was lost, and registration follows; or somebody deleted the entry.
            if self._session == self.client.session_id:
                self._start_registration(self.path)
        self._unwritten = False


class LauncherComponent(Component):
    kind = "launcher"


class BuilderComponent(Component):
    kind = "builder"


class PoolComponent(Component):
    """A pool of a launcher; ``id`` is used in ``declined_by`` and in node records."""

    kind = "pool"

    def __init__(self, client: ZooKeeperClient, hostname: str, version: str | None = None) -> None:
        super().__init__(client, hostname, version)
        self.content.update(
            id=None, name=None, provider_name=None, supported_labels=[], priority=100, paused=False
        )


class RegisteredPool:
    """A pool of any launcher as read from ZooKeeper."""

    __slots__ = (
        "content",
        "full_labels",
        "id",
        "labels",
        "name",
        "paused",
        "priority",
        "provider_name",
        "supported_labels",
    )

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.id: str = str(content.get("id"))
        self.name = text_of(content, "name")
        self.provider_name = text_of(content, "provider_name")
        self.supported_labels = texts_of(content, "supported_labels")
        self.labels = frozenset(self.supported_labels)
        priority = content.get("priority", 100)
        self.priority: float = (
            priority if isinstance(priority, (int, float)) and abs(priority) < LARGEST else 100
        )
        self.paused = bool(content.get("paused", False))
        #: Labels without capacity at present; launchers of 11.0.0 do not publish them.
        self.full_labels = frozenset(texts_of(content, "full_labels"))

    @property
    def offer(self) -> tuple[object, ...]:
        """Return what decides which requests the pool can serve, and which pool is asked first."""
        return self.id, self.provider_name, self.labels, self.priority, self.content.get("state")

    def is_open_to(self, labels: frozenset[str]) -> bool:
        """Return whether the pool of another launcher seems to have capacity for these labels."""
        return not self.paused and self.full_labels.isdisjoint(labels)


class ComponentTree(Tree[Any]):
    """All registered components; ``pools`` by path."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.COMPONENTS)
        self.components: dict[str, dict[str, Any]] = {}
        self.pools: dict[str, RegisteredPool] = {}
        #: Increases when pools are added, deleted, or offer something else: not when they merely
        #: become full.
        self.offers_version = 0
        #: Called with (path, whether it was deleted) on the connection thread.
        self.listeners: list[Callable[[str, bool], Any]] = []

    def wants_data(self, parts: list[str]) -> bool:
        return len(parts) == 2

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return len(parts) == 1

    def known_paths(self) -> set[str]:
        return set(self.components)

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        content = parse_object(data)
        if content is None:
            raise RecordError("the znode is empty")
        with self.lock:
            known = path in self.components
            if parts[0] == "pool":
                old, pool = self.pools.get(path), RegisteredPool(content)
                self.pools[path] = pool
                if old is None or old.offer != pool.offer:
                    self.offers_version += 1
            self.components[path] = content
            if known and parts[0] != "pool":
                return  # details of a daemon, which are not urgent
        self.announce(self.listeners, path, False)

    def vanished(self, parts: list[str], path: str) -> None:
        self.announce(
            self.client.component_listeners, path
        )  # also of a component that has not been read yet
        with self.lock:
            if self.components.pop(path, None) is None:
                return
            if self.pools.pop(path, None) is not None:
                self.offers_version += 1
        self.announce(self.listeners, path, True)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the components of this kind (``launcher``, ``builder``, ``pool``) by path."""
        with self.lock:
            return [
                content
                for _path, content in sorted(self.components.items())
                if content.get("kind") == kind
            ]

    def registered_pools(self) -> list[RegisteredPool]:
        with self.lock:
            return list(self.pools.values())


class _ComponentRegistry:
    """Name for test benches; each connection holds its own entries."""

    def clearRegistry(self) -> None:
        """Forget all components: none are kept here."""


COMPONENT_REGISTRY = _ComponentRegistry()
