"""Calls of the API server with dicts, over one connection pool per provider."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, InsecureRequestWarning, SSLError

from nodepool.answers import UNCOMPRESSED, body_of
from nodepool.cloud.http import NoAccess, NoAnswer
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.errors import ApiError, from_answer
from nodepool.driver.kubernetes.api.kinds import Kind
from nodepool.version import get_version_string

#: Seconds for one call, and for establishing a connection.
TIMEOUT, CONNECT_TIMEOUT = 60.0, 10.0
#: Maximum number of idle connections that are kept.
CONNECTIONS = 32
#: Maximum objects in one answer to a list.
PAGE = 2000

#: How often a list is begun, if it expires before all of its pages are read.
LISTINGS = 3

Object = dict[str, Any]
Objects = list[Object]


class _Untrusted(NoAccess):
    """The certificate of the API server is not accepted."""


class Stream:
    """Events of a watch as they arrive; ended by :meth:`close` from any thread."""

    def __init__(self, response: urllib3.BaseHTTPResponse, what: str) -> None:
        self._response: Any = response
        self._what = what

    def __iter__(self) -> Iterator[Object]:
        """Yield events until the server ends the watch. Raises NoAnswer."""
        rest = b""
        try:
            while chunk := self._response.read1():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        event = json.loads(line)
                        if not isinstance(event, dict):
                            raise NoAnswer(f"{self._what}: received data is not an event")
                        yield event
        except (HTTPError, OSError, ValueError) as error:
            raise NoAnswer(f"{self._what}: {error}") from error
        finally:
            self._response.close()

    def close(self) -> None:
        """Close the stream and wake its reader."""
        with contextlib.suppress(HTTPError, OSError, ValueError):  # it has ended
            self._response.shutdown()


def _proxy(address: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    """Return a pool of connections through a proxy. Raises NoAccess."""
    user, _, place = address.rpartition("@")
    login = urllib.parse.unquote(user.partition("://")[2]) or None
    headers = urllib3.make_headers(proxy_basic_auth=login)
    try:
        return urllib3.ProxyManager(address, proxy_headers=headers, **options)
    except (HTTPError, ValueError):
        scheme = f"{user.partition('://')[0]}://" if user else ""
        raise NoAccess(
            f"proxy {scheme}{place}: use an http or https proxy in proxy-url of the kubeconfig, or "
            "in the environment"
        ) from None


class ClusterClient:
    """An API server. Thread-safe; calls raise ApiError, NoAnswer and NoAccess."""

    def __init__(self, access: KubeconfigAccess, log: logging.Logger) -> None:
        self.access = access
        self.host = access.host
        self.skip_tls = not access.verify_ssl
        self._log = log
        self._lock = threading.Lock()
        self._pool = self._make_pool()
        self._renewed = 0
        if self.skip_tls:
            # Logged once; the library would warn with each call.
            urllib3.disable_warnings(InsecureRequestWarning)
            log.warning(
                "Certificates of %s are not verified, as the kubeconfig says "
                "(insecure-skip-tls-verify)",
                self.host,
            )

    def _make_pool(self) -> urllib3.PoolManager:
        options: dict[str, Any] = {
            "num_pools": 1,
            "maxsize": CONNECTIONS,
            "retries": False,
            "headers": {"User-Agent": f"nodepool/{get_version_string()}"},
        }
        if self.host.startswith("https:"):
            options |= self.access.tls()
        if self.access.proxy:
            return _proxy(self.access.proxy, options)
        return urllib3.PoolManager(**options)

    # -- calls

    def create(self, kind: Kind, body: Object, namespace: str | None = None) -> Object:
        name = (body.get("metadata") or {}).get("name", "")
        return self._call("POST", kind, f"create {kind.name} {name}", kind.path(namespace), body)

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return self._call("GET", kind, f"get {kind.name} {name}", kind.path(namespace, name))

    def delete(
        self, kind: Kind, name: str, namespace: str | None = None, grace: int | None = None
    ) -> None:
        """Delete an object in the background.

        :param grace: seconds until the processes of a pod are killed; None: what the pod says.
        """
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        body["propagationPolicy"] = "Background"
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        self._call("DELETE", kind, f"delete {kind.name} {name}", kind.path(namespace, name), body)

    def list(
        self, kind: Kind, selector: str = "", namespace: str | None = None, fields: str = ""
    ) -> Objects:
        return self.list_versioned(kind, selector, namespace, fields)[0]

    def list_versioned(
        self, kind: Kind, selector: str = "", namespace: str | None = None, fields: str = ""
    ) -> tuple[Objects, str]:
        """Return all objects, and the version after which changes can be watched."""
        found: Objects = []
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(PAGE)}
        query = {name: value for name, value in query.items() if value}
        left = LISTINGS
        while True:
            try:
                answer = self._call(
                    "GET", kind, f"list {kind.plural}", kind.path(namespace), query=query
                )
            except ApiError as error:
                left -= 1
                if error.status != 410 or not left or query.pop("continue", None) is None:
                    raise
                found = []  # it has expired: begin with the first page
                continue
            items = answer.get("items")
            found += (
                [item for item in items if isinstance(item, dict)]
                if isinstance(items, list)
                else []
            )
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion") or "")
            query["continue"] = str(metadata["continue"])

    def watch(
        self, kind: Kind, selector: str, version: str, seconds: int, namespace: str | None = None
    ) -> Stream:
        """Return a stream of changes after that version, for at most `seconds`."""
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        what = f"watch {kind.plural}"
        response = self._send(
            "GET", kind.path(namespace), what, None, query, read_timeout=seconds + 30.0
        )
        return Stream(response, what)

    def close(self) -> None:
        self._pool.clear()

    # -- HTTP

    def _call(
        self,
        method: str,
        kind: Kind,
        what: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
    ) -> Object:
        response = self._send(method, path, what, body, query)
        data = self._read(response, what)
        try:
            answer = json.loads(data)
        except ValueError:
            raise NoAnswer(f"{what}: the answer is not JSON ({len(data)} bytes)") from None
        if not isinstance(answer, dict):
            raise NoAnswer(f"{what}: the answer is not a {kind.name} ({len(data)} bytes)")
        return answer

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        body: Object | None,
        query: dict[str, str] | None,
        read_timeout: float = TIMEOUT,
    ) -> urllib3.BaseHTTPResponse:
        """Return a successful response; access that one side refuses is loaded again once.

        A token, a certificate or the authority may have been renewed since the file was read.
        """
        renewed = self._renewed
        try:
            response = self._send_once(method, path, what, body, query, read_timeout)
        except _Untrusted as error:
            self._renew(renewed, str(error))
        else:
            if response.status != 401:
                return self._checked(response, what)
            response.close()
            self._renew(renewed, f"{self.host} does not accept our credentials (401)")
        response = self._send_once(method, path, what, body, query, read_timeout)
        return self._checked(response, what)

    def _checked(self, response: urllib3.BaseHTTPResponse, what: str) -> urllib3.BaseHTTPResponse:
        if response.status < 300:
            return response
        raise from_answer(what, response.status, response.headers, self._read(response, what))

    def _read(self, response: urllib3.BaseHTTPResponse, what: str) -> bytes:
        try:
            return body_of(response)
        except OSError as error:
            response.close()
            raise NoAnswer(f"{what} at {self.host}: {error}") from error

    def _renew(self, seen: int, reason: str) -> None:
        """Load the kubeconfig once for all calls that were refused together."""
        with self._lock:
            if self._renewed != seen:
                return
            self._log.info("Loading the access to the cluster again: %s", reason)
            self.access.renew()
            self._pool = self._make_pool()
            self._renewed += 1

    def _send_once(
        self,
        method: str,
        path: str,
        what: str,
        body: Object | None,
        query: dict[str, str] | None,
        read_timeout: float,
    ) -> urllib3.BaseHTTPResponse:
        headers = {**self._pool.headers, **UNCOMPRESSED, "Accept": "application/json"}
        authorization = self.access.authorization()
        if authorization:
            headers["Authorization"] = authorization
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        url = self.host + path + ("?" + urllib.parse.urlencode(query) if query else "")
        try:
            return self._pool.request(
                method,
                url,
                body=data,
                headers=headers,
                preload_content=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT, read=read_timeout),
            )
        except SSLError as error:
            if "certificate verify failed" not in str(error).lower():
                raise NoAnswer(f"{what} at {self.host}: {error}") from error
            raise _Untrusted(
                f"the certificate of {self.host} is not accepted: {error}; correct "
                "certificate-authority in the kubeconfig"
            ) from error
        except (HTTPError, OSError) as error:
            raise NoAnswer(f"{what} at {self.host}: {error}") from error
