"""Records in ZooKeeper, and the announcement of this host there (NM-C.6).

This is the only module of the node manager that uses the ZooKeeper client of launchers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss, KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState

from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.version import get_version_string
from nodepool.zk.connection.reply import Reply

log = logging.getLogger("nodepool.nodemanager.sources")

#: Seconds between a failed attempt to read or apply the slices and the next one.
RETRY = 5.0
SLICES = "/nodemanager/slices"
HOSTS = "/nodemanager/hosts"
#: Seconds; all slices are read again at least this often.
RESYNC = 300.0

Deliver = Callable[[str, float | None, list[Any], bool], Any]


def fingerprint(certificate: str) -> str:
    """Return the hex SHA-256 of the first certificate of a PEM file; empty if unreadable."""
    try:
        with open(certificate, encoding="ascii") as stream:
            text = stream.read()
        end = "-----END CERTIFICATE-----"
        first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()
    except (OSError, ValueError):
        return ""


class ZooKeeperSource:
    """Watches slices below ``/nodemanager/slices``, and announces this host."""

    name = "zookeeper"

    def __init__(
        self,
        options: Mapping[str, Any],
        config: NodeManagerConfig,
        deliver: Deliver,
        capacity: Callable[[], dict[str, Any]],
    ) -> None:
        # Imported late: the program that launchers copy to backing nodes lacks what these import.
        from nodepool.config.zookeeper import buildZooKeeperHosts, connections
        from nodepool.zk.connection.client import ZooKeeperClient

        tls = options.get("tls") or {}
        self._config = config
        self._deliver = deliver
        self._capacity = capacity
        self._client = ZooKeeperClient(
            buildZooKeeperHosts(connections(list(options["servers"]))),
            timeout=float(options.get("timeout", 10)),
            tls_cert=tls.get("cert"),
            tls_key=tls.get("key"),
            tls_ca=tls.get("ca"),
            insecure=bool(options.get("insecure")),
        )
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._announced = ""
        #: Counts connections: the server forgets watches with each, and the watch is set again.
        self._connection = 0
        self._armed = -1
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
        self._connection += 1
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
            wait = RETRY
            try:
                if self._client.connected:
                    self._read()
                wait = RESYNC
            except KazooException as error:
                log.warning(
                    "Slices cannot be read from ZooKeeper now, keeping slivers unchanged: %r", error
                )
            except Exception:
                log.exception("Error reading slices from ZooKeeper:")
            self._wake.wait(wait)

    def _arm(self, kazoo: KazooClient) -> None:
        """Set the watch before reading, so that no change is missed."""
        connection = self._connection
        answered = threading.Event()
        errors: list[BaseException] = []

        def done(_result: object, error: BaseException | None, _zxid: int) -> None:
            if error is not None:
                errors.append(error)
            answered.set()

        kazoo.arm_persistent_watch(SLICES, Reply(done))
        if not answered.wait(self._client.timeout) or errors:
            raise ConnectionLoss(str(errors[0]) if errors else "no answer")
        self._armed = connection

    def _touched(self, _event: object) -> None:
        """Check our announcement, which was changed or deleted."""
        self._wake.set()

    def changed(self) -> None:
        """Publish again what this host has and has assigned."""
        self._wake.set()

    def _read(self) -> None:
        kazoo = self._client.client
        assert kazoo is not None
        if self._armed != self._connection:
            self._arm(kazoo)
        self._announce(kazoo)
        try:
            names = kazoo.get_children(SLICES)
        except NoNodeError:
            return  # the list does not exist (any more): that is not an empty list
        records: list[Any] = []
        for name in sorted(names):
            try:
                own, _ = kazoo.get(f"{SLICES}/{name}/{self._config.host_name}")
                text, _ = kazoo.get(f"{SLICES}/{name}")
            except NoNodeError:
                continue
            try:
                record = {**json.loads(text or b"{}"), **json.loads(own or b"{}")}
            except (ValueError, TypeError, RecursionError) as error:
                log.error(
                    "Slice %s/%s is not a JSON object, keeping its sliver unchanged: %s",
                    SLICES,
                    name,
                    error,
                )
                records.append({"record_key": f"sliver_{name}"})
                continue
            # Records do not get a separate version: a session never reads backwards, while clocks
            # of servers may differ.
            records.append(
                {"plc_instantiated": True, **record, "account_type": "sliver", "name": name}
            )
        if kazoo.exists(SLICES) is not None:  # otherwise the list was being removed meanwhile
            self._deliver(self.name, None, records, True)

    def _announce(self, kazoo: KazooClient) -> None:
        """Create the ephemeral record by which launchers find this host."""
        capacity = self._capacity()
        tls = self._config.api.tls
        text = json.dumps(
            {
                "api": f"https://{self._config.ssh.address}:{tls.port}"
                if tls
                else f"unix:{self._config.api.unix}",
                "tls_fingerprint": fingerprint(tls.cert) if tls else "",
                "ssh_address": self._config.ssh.address,
                "capacity": {
                    k: v
                    for k, v in capacity.items()
                    if k not in ("allocated", "problems", "images")
                },
                "allocated": capacity["allocated"],
                "images": capacity["images"],
                "backends": [capacity["backend"]],
                "group": self._config.host_group,
                "version": get_version_string(),
            },
            sort_keys=True,
        )
        path = f"{HOSTS}/{self._config.host_name}"
        known = kazoo.exists(path, watch=self._touched)
        if text == self._announced and known is not None:
            return
        try:
            kazoo.create(path, text.encode(), ephemeral=True, makepath=True)
        except NodeExistsError:
            stat = kazoo.exists(path)
            if stat is not None and stat.ephemeralOwner not in (0, self._client.session_id):
                log.warning(
                    "%s belongs to another session: of this node manager before its restart, or "
                    "another host has this name "
                    "(host-name)",
                    path,
                )
                replacement = (
                    kazoo.transaction()
                )  # the other one announces itself again when it finds none
                replacement.delete(path)
                replacement.create(path, text.encode(), ephemeral=True)
                for result in replacement.commit():
                    if isinstance(result, Exception):
                        raise result
            else:
                kazoo.set(path, text.encode())
        self._announced = text
