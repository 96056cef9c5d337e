"""Where records come from: slices.xml and ZooKeeper (nodemanager.md A.2, C.6).

A source that cannot be reached changes nothing: only a complete, readable, authenticated update may remove a sliver.
"""

from __future__ import annotations

import json
import logging
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import slicesxml
from nodepool.nodemanager.config import NodeManagerConfig

log = logging.getLogger("nodepool.nodemanager.sources")

INTERVAL = 10.0
#: Part of the interval that is added at random, so that hosts do not ask all at once.
JITTER = 0.1
FETCH_TIMEOUT = 30.0
SLICES = "/nodemanager/slices"
HOSTS = "/nodemanager/hosts"
#: Seconds; all slices are read again at least so often.
RESYNC = 300.0

Deliver = Callable[[str, float, list[Any], bool], Any]


class Source(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


def make(config: NodeManagerConfig, manager: Any) -> list[Source]:
    """The sources of a configuration, not started."""
    found: list[Source] = []
    for number, options in enumerate(config.sources):
        if "slices-xml" in options:
            found.append(SlicesXmlSource(f"slices-xml-{number}", options["slices-xml"], config, manager.deliver))
        else:
            found.append(ZooKeeperSource(options["zookeeper"], config, manager))
    if config.delegates:
        manager.deliver("configuration", time.time(), [
            {"account_type": "delegate", "name": entry["name"], "plc_instantiated": True,
             "ssh_keys": "\n".join(entry["ssh-keys"]) if isinstance(entry.get("ssh-keys"), list) else entry.get("ssh-keys", "")}
            for entry in config.delegates], True)
    return found


class SlicesXmlSource:
    """Fetches a file or https document again and again; a copy of the last good one is kept for restarts."""

    def __init__(self, name: str, options: Mapping[str, Any], config: NodeManagerConfig, deliver: Deliver) -> None:
        self.name = name
        self._url = options.get("url")
        self._file = options.get("file")
        self._interval = float(options.get("interval", INTERVAL))
        self._node_id = node_id(config)
        self._deliver = deliver
        self._copy = os.path.join(config.state_dir, f"{name}.xml")
        self._context: ssl.SSLContext | None = None
        if self._url is not None:
            if not self._url.startswith("https://"):
                raise ConfigurationError(f"sources: slices-xml: {self._url} is not https")
            try:
                self._context = ssl.create_default_context(cafile=options.get("ca"))
                if options.get("cert"):
                    self._context.load_cert_chain(options["cert"], options.get("key"))
            except OSError as error:
                raise ConfigurationError(f"sources: slices-xml: cannot read the certificates: {error}") from error
        self._etag: str | None = None
        self._seen: tuple[Any, ...] | None = None
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"Thread-nm-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._interval * (1 + JITTER * random.random()))

    def look(self) -> bool:
        """Fetch once; True when an update was delivered."""
        try:
            document = self._fetch()
            if document is None:
                self._good()
                return False
            records = slicesxml.parse(document, self._node_id)
        except (OSError, ValueError) as error:
            self._bad(error)
            return False
        except Exception:
            log.exception("Error reading %s:", self._url or self._file)
            return False
        self._deliver(self.name, time.time(), records, True)
        self._keep(document)
        self._good()
        return True

    def _good(self) -> None:
        if self._problem:
            log.info("%s can be read again", self._url or self._file)
        self._problem = ""

    def _bad(self, error: Exception) -> None:
        if str(error) != self._problem:
            self._problem = str(error)
            log.error("%s cannot be used, slivers stay as they are: %s", self._url or self._file, error)

    def _fetch(self) -> bytes | None:
        """None: unchanged."""
        if self._file is not None:
            with open(self._file, "rb") as stream:
                state = os.fstat(stream.fileno())
                seen = (state.st_mtime_ns, state.st_size, state.st_ino)
                if seen == self._seen:
                    return None
                document = stream.read(slicesxml.MAX_SIZE + 1)
            self._seen = seen
            return document
        request = urllib.request.Request(str(self._url), headers={"If-None-Match": self._etag} if self._etag else {})
        try:
            with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT, context=self._context) as answer:
                document = answer.read(slicesxml.MAX_SIZE + 1)
                self._etag = answer.headers.get("ETag")
                return bytes(document)
        except urllib.error.HTTPError as error:
            if error.code == 304:
                return None
            raise

    def _keep(self, document: bytes) -> None:
        try:
            temporary = f"{self._copy}.new"
            with open(temporary, "wb") as stream:
                stream.write(document)
            os.replace(temporary, self._copy)
        except OSError as error:
            log.warning("Cannot keep a copy of %s: %s", self._url or self._file, error)


def node_id(config: NodeManagerConfig) -> str:
    """First line of /etc/planetlab/node_id, as it was, else the name of the host."""
    try:
        with open("/etc/planetlab/node_id", encoding="utf-8") as stream:
            return stream.readline().strip() or config.host_name
    except OSError:
        return config.host_name


class ZooKeeperSource:
    """Slices below ``/nodemanager/slices``, watched; and the announcement of this host."""

    name = "zookeeper"

    def __init__(self, options: Mapping[str, Any], config: NodeManagerConfig, manager: Any) -> None:
        from nodepool.config.zookeeper import buildZooKeeperHosts, connections
        from nodepool.zk.client import ZooKeeperClient

        tls = options.get("tls") or {}
        self._config = config
        self._manager = manager
        self._client = ZooKeeperClient(
            buildZooKeeperHosts(connections(list(options["servers"]))), timeout=float(options.get("timeout", 10)),
            tls_cert=tls.get("cert"), tls_key=tls.get("key"), tls_ca=tls.get("ca"), insecure=bool(options.get("insecure")))
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._announced = ""
        self._thread = threading.Thread(target=self._run, name="Thread-nm-zookeeper", daemon=True)

    def start(self) -> None:
        self._client.state_listeners.append(self._state_changed)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._client.stop_connecting.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._client.disconnect()

    def _state_changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self._announced = ""
        self._wake.set()

    def _run(self) -> None:
        try:
            self._client.connect()
        except TimeoutError:
            return
        assert self._client.client is not None
        self._client.client.add_persistent_watch(SLICES, lambda _kind, _path: self._wake.set())
        while not self._stop.is_set():
            self._wake.clear()
            if self._client.connected:
                try:
                    self._look()
                except KazooException as error:
                    log.warning("Slices cannot be read from ZooKeeper now, slivers stay as they are: %r", error)
                except Exception:
                    log.exception("Error reading slices from ZooKeeper:")
            self._wake.wait(RESYNC)

    def _look(self) -> None:
        kazoo = self._client.client
        assert kazoo is not None
        self._announce(kazoo)
        try:
            names = kazoo.get_children(SLICES)
        except NoNodeError:
            kazoo.ensure_path(SLICES)
            names = []
        records: list[Any] = []
        for name in sorted(names):
            try:
                text, stat = kazoo.get(f"{SLICES}/{name}")
                children = kazoo.get_children(f"{SLICES}/{name}")
                here = self._config.host_name in children
                if not here:
                    continue
                own, _ = kazoo.get(f"{SLICES}/{name}/{self._config.host_name}")
            except NoNodeError:
                continue
            try:
                record = {**json.loads(text or b"{}"), **json.loads(own or b"{}")}
            except (ValueError, TypeError) as error:
                log.error("Slice %s/%s is no JSON object, its sliver stays as it is: %s", SLICES, name, error)
                records.append({"record_key": f"sliver_{name}"})
                continue
            records.append({"account_type": "sliver", "plc_instantiated": True, "timestamp": stat.mtime / 1000, **record,
                            "name": name})
        self._manager.deliver(self.name, time.time(), records, True)

    def _announce(self, kazoo: Any) -> None:
        """An ephemeral record by which launchers find this host."""
        capacity = self._manager.capacity()
        tls = self._config.tls
        text = json.dumps({
            "api": f"https://{self._config.ssh_address}:{tls.port}" if tls else f"unix:{self._config.unix_socket}",
            "ssh_address": self._config.ssh_address, "capacity": {k: v for k, v in capacity.items() if k != "allocated"},
            "allocated": capacity["allocated"], "images": capacity["images"], "backends": [capacity["backend"]]}, sort_keys=True)
        if text == self._announced:
            return
        path = f"{HOSTS}/{self._config.host_name}"
        try:
            kazoo.create(path, text.encode(), ephemeral=True, makepath=True)
        except NodeExistsError:
            stat = kazoo.exists(path)
            if stat is not None and stat.ephemeralOwner not in (0, self._client.session_id):
                kazoo.delete(path)  # of our session before
                kazoo.create(path, text.encode(), ephemeral=True)
            else:
                kazoo.set(path, text.encode())
        self._announced = text
