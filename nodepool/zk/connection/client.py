"""Connection to ZooKeeper: TLS, chroot, session states (ZK-2)."""

from __future__ import annotations

import contextlib
import datetime
import logging
import pathlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from nodepool.base.connection_string import TLS_REQUIRED, split_hosts
from nodepool.exceptions import ConfigurationError
from nodepool.zk.connection.previous_session import SessionFile, end_session
from nodepool.zk.connection.protocol import Handler, SessionClient, ThreadEnd

if TYPE_CHECKING:
    from nodepool.config.model import Config

#: Seconds between two messages while no server answers.
CONNECT_MESSAGE_INTERVAL = 10.0
#: Seconds until the first of them.
FIRST_MESSAGE_AFTER = 2.0


class RepeatFilter(logging.Filter):
    """Rate-limits messages that kazoo repeats with every attempt to connect."""

    def __init__(self, interval: float) -> None:
        super().__init__()
        self._interval = interval
        self._seen: dict[str, float] = {}
        #: The last error, logged or not.
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return False  # kazoo prints whole records, which may contain credentials
        if record.exc_info and isinstance(
            record.args, tuple
        ):  # the same, when it cannot read an answer
            record.args = tuple(type(value).__name__ for value in record.args)
        now = time.monotonic()
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.last = message
        if now - self._seen.get(message, -self._interval) < self._interval:
            return False
        if len(self._seen) > 100:
            self._seen.clear()
        self._seen[message] = now
        return True


_calm = RepeatFilter(60.0)

StateListener = Callable[[str], Any]


class ZooKeeperClient:
    """Owns the single session of a process.

    :param hosts: ``host:port,host:port/chroot``.
    :param timeout: session time-out in seconds.
    :param insecure: allow a connection without TLS; must be requested explicitly.
    :raises ConfigurationError: TLS files missing or unreadable.
    """

    log = logging.getLogger("nodepool.zk.ZooKeeperClient")

    def __init__(
        self,
        hosts: str,
        read_only: bool = False,
        timeout: float = 10.0,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        insecure: bool = False,
        on_thread_end: ThreadEnd = lambda _error: None,
    ) -> None:
        if not (tls_cert and tls_key and tls_ca):
            if not insecure:
                raise ConfigurationError(TLS_REQUIRED)
            self._tls: dict[str, Any] = {}
        else:
            for name, path in (("cert", tls_cert), ("key", tls_key), ("ca", tls_ca)):
                try:
                    with open(path, "rb"):
                        pass
                except OSError as error:
                    raise ConfigurationError(
                        f"zookeeper-tls: {name}: cannot read {path}: {error.strerror}"
                    ) from error
            self._tls = {
                "use_ssl": True,
                "certfile": tls_cert,
                "keyfile": tls_key,
                "ca": tls_ca,
                "verify_certs": True,
                "check_hostname": False,
            }
        self.hosts = hosts
        self.read_only = read_only
        self.timeout = float(timeout)
        self.client: SessionClient | None = None
        #: File that stores the session for the next process (see ``previous_session``).
        self.session_file: SessionFile | None = None
        self.on_connect_listeners: list[Callable[[], Any]] = []
        #: (kind, id) of registrations whose result is unknown: their entries may exist.
        self.unsure_components: set[tuple[str, str | None]] = set()
        #: Called with the path of each component that no longer exists, on the connection thread;
        #: must not block.
        self.component_listeners: list[Callable[[str], Any]] = []
        #: Called with kazoo's state name on the connection thread; must not block.
        self.state_listeners: list[StateListener] = []
        self._on_thread_end = on_thread_end
        self._state: str | None = None
        self._closing = False
        #: Set once the connection that :meth:`connect` waits for is known here; kazoo's own event
        #: is set earlier.
        self._live = threading.Event()
        self.stop_connecting = threading.Event()

    @classmethod
    def from_config(
        cls,
        config: Config,
        session_file: str | None = None,
        on_thread_end: ThreadEnd = lambda _error: None,
    ) -> ZooKeeperClient:
        """Return the client for a configuration.

        :param session_file: where to store the session for the next process.
        """
        client = cls(
            config.zookeeper_servers,
            timeout=config.zookeeper_timeout,
            tls_cert=config.zookeeper_tls_cert,
            tls_key=config.zookeeper_tls_key,
            tls_ca=config.zookeeper_tls_ca,
            insecure=config.zookeeper_insecure,
            on_thread_end=on_thread_end,
        )
        client.session_file = SessionFile(session_file) if session_file is not None else None
        return client

    # -- session states

    def _state_changed(self, state: str) -> None:
        before, self._state = self._state, state
        if state == KazooState.CONNECTED:
            self._live.set()
            if before in (
                KazooState.SUSPENDED,
                KazooState.LOST,
            ):  # operators who saw the warning are informed of the end, too
                self.log.warning("ZooKeeper connection: restored")
            else:
                self.log.debug("ZooKeeper connection: connected")
            if (
                self.session_file is not None
                and self.client is not None
                and self.client.client_id is not None
            ):
                self.session_file.remember(self.hosts, self.client.client_id)
        elif state == KazooState.SUSPENDED:
            self.log.warning(
                "ZooKeeper connection: suspended; no new work is started until it is restored%s",
                self._invalid_certificate(),
            )
        elif not self._closing:
            self.log.warning("ZooKeeper connection: session lost, with its locks and registrations")
        for listener in list(self.state_listeners):
            try:
                listener(state)
            except Exception:
                self.log.exception("Error in a connection listener")

    @property
    def kazoo(self) -> SessionClient:
        """Return kazoo's client object.

        :raises RuntimeError: not connected yet.
        """
        if self.client is None:
            raise RuntimeError("not connected to ZooKeeper")
        return self.client

    @property
    def connected(self) -> bool:
        return bool(self._state == KazooState.CONNECTED)

    @property
    def suspended(self) -> bool:
        return bool(self._state == KazooState.SUSPENDED)

    @property
    def lost(self) -> bool:
        return bool(self._state == KazooState.LOST)

    @property
    def session_id(self) -> int | None:
        """Return the id of the session; locks of other sessions do not exist any more."""
        if self.client is None or not self.connected:
            return None
        client_id = self.client.client_id
        return client_id[0] if client_id else None

    def end_session(self, reason: str) -> None:
        """Start a new session; the locks of this one end by its time-out."""
        self.log.warning("ZooKeeper was restored: %s; starting a new session", reason)
        if self.client is not None:
            self.client.expire()

    # -- life cycle

    def connect(self, timeout: float | None = None) -> None:
        """Connect; retry forever (or for ``timeout`` seconds), with a log message every 10 s.

        :raises TimeoutError: no server answered in time, or :meth:`disconnect` was called
            meanwhile.
        """
        if self.client is not None:
            return
        servers, chroot = split_hosts(self.hosts)
        left_behind = self.session_file.acquire() if self.session_file is not None else None
        retry = KazooRetry(max_tries=-1, delay=0.2, backoff=1.5, max_delay=1.0, max_jitter=0.3)
        client = SessionClient(
            hosts=servers + chroot,
            timeout=self.timeout,
            read_only=self.read_only,
            handler=Handler(),
            on_loop_end=self._on_thread_end,
            connection_retry=retry,
            command_retry=KazooRetry(max_tries=2, delay=0.1, max_delay=1.0),
            **self._tls,
        )
        logging.getLogger("kazoo.client").addFilter(_calm)
        client.add_listener(self._state_changed)
        self.client = client
        _calm.last = ""
        started = time.monotonic()
        last = started - CONNECT_MESSAGE_INTERVAL + FIRST_MESSAGE_AFTER
        self._live.clear()
        client.start_async()
        while not self._live.wait(0.2):
            now = time.monotonic()
            if self.stop_connecting.is_set() or (timeout is not None and now - started > timeout):
                why = self._why()  # also log the final error
                self.disconnect()
                raise TimeoutError(f"No ZooKeeper server answers at {self.hosts}{why}")
            if now - last >= CONNECT_MESSAGE_INTERVAL:
                last = now
                self.log.warning(
                    "Waiting for ZooKeeper: no server answers at %s (for %.0f s now)%s",
                    self.hosts,
                    now - started,
                    self._why(),
                )
        if left_behind is not None:
            end_session(
                left_behind,
                self.hosts,
                lambda client_id: SessionClient(
                    hosts=servers + chroot,
                    timeout=self.timeout,
                    client_id=client_id,
                    handler=Handler("old session"),
                    **self._tls,
                ),
            )
        for listener in list(self.on_connect_listeners):
            listener()

    def _why(self) -> str:
        return self._invalid_certificate() or (
            f"; the last attempt: {_calm.last}" if _calm.last else ""
        )

    def _invalid_certificate(self) -> str:
        """Return which certificate of ours is not valid now: servers refuse it without saying
        why.
        """
        from cryptography import (
            x509,
        )  # paramiko requires it, too; only needed when no connection can be established

        now = datetime.datetime.now(datetime.UTC)
        for option, path in (("cert", self._tls.get("certfile")), ("ca", self._tls.get("ca"))):
            with contextlib.suppress(
                OSError, ValueError
            ):  # kazoo reports files that cannot be used
                certificate = x509.load_pem_x509_certificate(pathlib.Path(path or "").read_bytes())
                start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
                if not start <= now <= end:
                    return f"; zookeeper-tls: {option}: {path} " + (
                        f"expired at {end:%Y-%m-%d %H:%M:%S UTC}. Suggestion: renew the certificate"
                        if end < now
                        else f"is not valid before {start:%Y-%m-%d %H:%M:%S UTC}. Suggestion: "
                        "check the clock of this host, or the"
                        " certificate"
                    )
        return ""

    def disconnect(self) -> None:
        """End the session; ephemeral znodes and locks are deleted with it."""
        self.stop_connecting.set()
        client, self.client = self.client, None
        if client is not None:
            self._closing = True
            client.stop()
            client.close()
            # An attempt to connect that could not be interrupted ends later.
            client.remove_listener(self._state_changed)
            self._closing = False
            if self.session_file is not None:
                self.session_file.release(client.session_closed)

    def resetHosts(self, hosts: str) -> None:
        """Use other servers from the next connection on; ignored if the chroot differs."""
        if hosts == self.hosts:
            return
        servers, chroot = split_hosts(hosts)
        if chroot != split_hosts(self.hosts)[1]:
            self.log.error("zookeeper-servers: the changed chroot requires a restart of the daemon")
            return
        if self.client is not None:
            self.client.set_hosts(servers + chroot)
        self.hosts = hosts
