"""Sources of records: slices.xml and ZooKeeper (NM-A.2, NM-C.6).

An unreachable source changes nothing: only a complete, readable, authenticated update may remove a
sliver.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPMessage
from typing import IO, Any

from nodepool.base.files import open_now
from nodepool.base.tls import TlsContext, trusting
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.sources import slices_xml
from nodepool.nodemanager.sources.zookeeper import RESYNC, Deliver, ZooKeeperSource

log = logging.getLogger("nodepool.nodemanager.sources")

INTERVAL = 10.0
#: Random part of the interval, so that hosts do not send their requests simultaneously.
JITTER = 0.1
#: Seconds for one step of a transfer, and for all of it.
FETCH_TIMEOUT = 10.0
FETCH_LIMIT = 60.0

#: Delegates of nodemanager.yaml.
CONFIGURATION = "configuration"
#: Sources outside of the configuration: records from launchers, and tickets.
OTHER_SOURCES = ("driver", "ticket")


def make(
    config: NodeManagerConfig,
    database: Database,
    deliver: Deliver,
    capacity: Callable[[], dict[str, Any]],
) -> list[Source]:
    """Create the configured sources, not started, and store the configured delegates."""
    found: list[Source] = []
    names = {CONFIGURATION, *OTHER_SOURCES}
    for number, options in enumerate(config.sources):
        source: Source
        if "slices-xml" in options:
            name = f"slices-xml-{number}"
            source = SlicesXmlSource(
                name, options["slices-xml"], config, deliver, new=database.serial(name) == 0
            )
        else:
            source = ZooKeeperSource(options["zookeeper"], config, deliver, capacity)
        names.add(source.name)
        found.append(source)
    if left := database.abandon(names):
        log.warning(
            "No source of the configuration has these records any more, they stay until one "
            "delivers them or they expire: %s",
            ", ".join(left),
        )
    # Also when there are none: delegates of a previous configuration must be deleted.
    deliver(
        CONFIGURATION,
        None,
        [
            {
                "account_type": "delegate",
                "name": entry["name"],
                "plc_instantiated": True,
                "methods": list(entry.get("methods", ())),
                "ssh_keys": "\n".join(entry["ssh-keys"])
                if isinstance(entry.get("ssh-keys"), list)
                else entry.get("ssh-keys", ""),
            }
            for entry in config.delegates
        ],
        True,
    )
    return found


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirection only to an address that is authenticated, too."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> Any:
        if not newurl.startswith("https://"):
            fp.close()
            raise urllib.error.URLError(f"it is redirected to {newurl[:200]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class SlicesXmlSource:
    """Fetches a file or https document periodically; keeps a copy of the last good one.

    :param new: the database has no records of this source: while it cannot be read, the copy is
        used.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        config: NodeManagerConfig,
        deliver: Deliver,
        new: bool = False,
    ) -> None:
        self.name = name
        self._url = options.get("url")
        self._file = options.get("file")
        self._interval = float(options.get("interval", INTERVAL))
        self._node_id = node_id(config)
        self._default_slice = options.get("default-slice", slices_xml.DEFAULT_SLICE) or None
        self._deliver = deliver
        self._copy = os.path.join(config.state_dir, f"{name}.xml")
        self._use_copy = new
        self._tls: TlsContext | None = None
        if self._url is not None:
            if not self._url.startswith("https://"):
                raise ConfigurationError(f"sources: slices-xml: {self._url} is not https")
            ca, cert, key = (options.get(name) for name in ("ca", "cert", "key"))

            def load() -> ssl.SSLContext:
                context = trusting(ca)
                if cert:
                    context.load_cert_chain(cert, key)
                return context

            try:
                self._tls = TlsContext(load, ca, cert, key)
            except OSError as error:
                raise ConfigurationError(
                    f"sources: slices-xml: cannot read the certificates: {error}"
                ) from error
        #: Of the last document that was applied: ETag, or state of the file; checksum; time.
        self._mark: str | None = None
        self._digest = b""
        self._delivered = 0.0
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"Thread-nm-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def changed(self) -> None:
        """Nothing of this host is published here."""

    def _run(self) -> None:
        while not self._stop.is_set():
            self.fetch()
            self._stop.wait(self._interval * (1 + JITTER * random.random()))

    def fetch(self) -> bool:
        """Fetch once; return True when an update was delivered."""
        try:
            return self._fetch_once()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._bad(error)
        except Exception:
            log.exception("Error reading %s:", self._url or self._file)
        self._deliver_copy()
        return False

    def _fetch_once(self) -> bool:
        # Apply everything periodically, whatever has happened to slivers meanwhile.
        again = time.monotonic() - self._delivered >= RESYNC
        document, mark = self._read_file(again) if self._file is not None else self._fetch(again)
        if document is None:
            self._good()
            return False
        digest = hashlib.sha256(document).digest()
        delivered = False
        if digest != self._digest or again:
            records = self._parse(document)
            if self._stop.is_set():
                return False
            self._deliver(self.name, None, records, True)
            self._use_copy = False
            self._delivered = time.monotonic()
            if digest != self._digest:
                self._keep(document)
            self._digest = digest
            delivered = True
        self._mark = mark
        self._good()
        return delivered

    def _parse(self, document: bytes) -> list[dict[str, Any]]:
        return slices_xml.parse(document, self._node_id, default_slice=self._default_slice)

    def _good(self) -> None:
        if self._problem:
            log.info("%s can be read again", self._url or self._file)
        self._problem = ""

    def _bad(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._problem:
            self._problem = text
            log.error(
                "%s cannot be used, keeping slivers unchanged: %s", self._url or self._file, text
            )

    def _read_file(self, again: bool) -> tuple[bytes | None, str | None]:
        """Return the document of a file; None: unchanged."""
        with open(str(self._file), "rb", opener=open_now) as stream:
            status = os.fstat(stream.fileno())
            mark = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_size} {status.st_ino}"
            if mark == self._mark and not again:
                return None, mark
            return stream.read(slices_xml.MAX_SIZE + 1), mark

    def _fetch(self, again: bool) -> tuple[bytes | None, str | None]:
        """Return the document of a URL; None: unchanged."""
        assert self._tls is not None
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=self._tls.current()), _HttpsOnly()
        )
        deadline = time.monotonic() + FETCH_LIMIT
        request = urllib.request.Request(
            str(self._url),
            headers={"If-None-Match": self._mark} if self._mark and not again else {},
        )
        try:
            with opener.open(request, timeout=FETCH_TIMEOUT) as answer:
                document = bytearray()
                while piece := answer.read1(1 << 16):
                    document += piece
                    if len(document) > slices_xml.MAX_SIZE:
                        raise ValueError(f"it has more than {slices_xml.MAX_SIZE} bytes")
                    if time.monotonic() > deadline or self._stop.is_set():
                        raise TimeoutError(f"it did not arrive within {FETCH_LIMIT:g} s")
                expected = answer.headers.get("Content-Length")
                if expected is not None and expected.isdigit() and int(expected) != len(document):
                    raise ValueError(f"only {len(document)} of {expected} bytes arrived")
                return bytes(document), answer.headers.get("ETag")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 304:
                return None, self._mark
            raise

    def _keep(self, document: bytes) -> None:
        try:
            temporary = f"{self._copy}.new"
            with open(temporary, "wb") as stream:
                stream.write(document)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self._copy)
        except OSError as error:
            log.warning("Cannot keep a copy of %s: %s", self._url or self._file, error)

    def _deliver_copy(self) -> None:
        """Deliver the saved copy once, if the database was lost; it only adds records."""
        if not self._use_copy:
            return
        self._use_copy = False
        try:
            with open(self._copy, "rb") as stream:
                records = self._parse(stream.read(slices_xml.MAX_SIZE + 1))
            self._deliver(self.name, None, records, False)
            log.warning("%s: using the last good copy %s", self._url or self._file, self._copy)
        except FileNotFoundError:
            pass
        except Exception as error:
            log.error("The copy %s cannot be used: %s", self._copy, error)


#: Sources are started, stopped, and notified of changes of this host's capacity.
Source = SlicesXmlSource | ZooKeeperSource


def node_id(config: NodeManagerConfig) -> str:
    """Return the configured node id, or /etc/planetlab/node_id's first line, or the host name."""
    if config.node_id:
        return config.node_id
    try:
        with open("/etc/planetlab/node_id", encoding="utf-8") as stream:
            return stream.readline().strip() or config.host_name
    except (OSError, ValueError):
        return config.host_name
