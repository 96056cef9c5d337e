"""Single requests to the cloud's services through the SDK's sessions, with time limits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlparse

from nodepool.cloud import CloudCalls
from nodepool.cloud.answer_cache import AnswerCache
from nodepool.driver.openstack.api.errors import (
    BadAnswer,
    CredentialsRefused,
    TokenRefused,
    sdk_error,
    status_of,
    tidy,
)
from nodepool.driver.openstack.config import OpenStackProviderConfig

if TYPE_CHECKING:  # the SDK is imported when a provider uses it
    from openstack.connection import Connection
    from requests import Response

API_TIMEOUT = 60.0
"""Seconds without a byte from the cloud after which a call fails, unless clouds.yaml has
``api_timeout``.
"""
DEADLINE = 120.0
"""Seconds for a call with its pauses and retries."""
CONNECTIONS = 32
"""Connections per service that are kept open."""

DELETED = (202, 204)
"""Statuses of the services for deletions; anything else is from something else, such as a proxy."""
LANES = {"compute": "read", "network": "network", "block_storage": "volume", "image": "image"}
AS_IT_IS: dict[str, Any] = {"allow_reauth": False, "status_code_retries": 0, "connect_retries": 0}
"""Options for the SDK's requests: new tokens and retries are done here, at our pace."""
IDENTITY = "identity"
"""Lane of the calls for tokens."""
NEVER = -1.0
"""Age in seconds up to which a login is used for later callers."""

LISTINGS = 3
"""How often a listing is begun, if a page after the first one is refused."""

T = TypeVar("T")


def prepare(client: Connection) -> Any:
    """Set limits for calls of an SDK connection, and allow a connection per thread."""
    from keystoneauth1 import session as keystone

    from nodepool.answers import CloudSession, TrustingAdapter

    class Trusting(TrustingAdapter, keystone.TCPKeepAliveAdapter):
        """For a cloud whose authority clouds.yaml names."""

    session = client.session
    session.session = CloudSession()
    if session.timeout is None:
        session.timeout = API_TIMEOUT
    kind = Trusting if isinstance(session.verify, str) else keystone.TCPKeepAliveAdapter
    for scheme in ("http://", "https://"):
        session.session.mount(scheme, kind(pool_connections=8, pool_maxsize=CONNECTIONS))
    return client


class Transport:
    """Requests of one provider; errors: the SDK's, BadAnswer and CredentialsRefused."""

    def __init__(
        self, client: Any, calls: CloudCalls, provider: OpenStackProviderConfig, log: logging.Logger
    ) -> None:
        self.client = client
        self.calls = calls
        self.provider = provider
        self.log = log
        #: One thread logs in, or queries the versions of a service; the others wait for its result.
        self._shared = AnswerCache()

    def has(self, service: str) -> bool:
        """Return whether the cloud has the service, according to clouds.yaml and the catalog."""
        # The SDK treats an unavailable catalog as one without the service.
        self.authenticate()
        return bool(self.client.has_service(service.replace("_", "-")))

    # -- tokens

    def authenticate(self, refused: str | None = None) -> None:
        """Ensure a valid token, with the pace and the errors of the identity service.

        :param refused: a token that a service did not accept.
        """
        auth = self.client.session.auth
        if hasattr(auth, "auth_ref") and not _is_valid(auth, refused):
            self._shared.get("token", None, lambda: self._log_in(auth, refused), NEVER)

    def _log_in(self, auth: Any, refused: str | None) -> None:
        if not _is_valid(auth, refused):  # another thread may have logged in just now
            auth.invalidate()
            self.calls.call(
                "get_token",
                self._get_token,
                auth,
                lane=IDENTITY,
                deadline=DEADLINE,
                idempotent=True,
            )

    def _get_token(self, auth: Any) -> None:
        try:
            auth.get_access(self.client.session)
        except Exception as error:
            self._forget_versions()
            if sdk_error(error, "Unauthorized", "AuthorizationFailure"):
                raise self.refused(error) from error
            if status_of(error) == 404:
                # It must not be interpreted as an answer to the call that the token is for.
                raise BadAnswer(
                    f"the identity service of cloud {self.provider.cloud_config.name}: {error}"
                ) from error
            raise

    def authenticated(self, call: Callable[[], T]) -> T:
        """Return the result of a call, retried with a new token if the first was refused."""
        self.authenticate()
        try:
            return call()
        except TokenRefused as error:
            if error.token is None:
                raise
            self.authenticate(refused=error.token)
        return call()

    def _check_token(self, response: Response) -> None:
        if response.status_code == 401:
            raise TokenRefused(
                str(self.refused(response.text[:200])), response.request.headers.get("X-Auth-Token")
            )

    @staticmethod
    def _check_found(response: Response, method: str, path: str) -> None:
        """Raise BadAnswer for a gateway's 404: services send JSON, or (glance) HTML with the
        name.
        """
        if (
            response.status_code == 404
            and response.text.lstrip()[:1] == "<"
            and path.rpartition("/")[2] not in response.text
        ):
            raise BadAnswer(f"{method} {path}: {_excerpt(response)}")

    # -- requests

    def service(self, name: str) -> Any:
        """Return the SDK's proxy of a service; the first use queries its versions."""
        return self._shared.get("service", name, lambda: self._find_service(name))

    def _find_service(self, name: str) -> Any:
        proxy = getattr(self.client, name)
        # An absent service raises here.
        url = proxy.endpoint_override or proxy.get_endpoint() or ""
        if not re.search(r"/v\d", urlparse(url).path):
            # Its version document could not be read; the SDK would permanently continue without the
            # version.
            self.client._proxies.pop(proxy.service_type, None)
            self._forget_versions()
            raise BadAnswer(
                f"the {name.replace('_', '-')} service of cloud {self.provider.cloud_config.name} "
                "does not"
                f" report its versions at {url or 'the address in the catalogue'}"
            )
        return proxy

    def _forget_versions(self) -> None:
        """Let the SDK read version documents again: it keeps also one that lists no version."""
        session = self.client.session
        for owner in (session, session.auth):
            getattr(owner, "_discovery_cache", {}).clear()

    def request(
        self,
        operation: str,
        service: str,
        method: str,
        path: str,
        *,
        lane: str | None = None,
        wanted: str | None = None,
        idempotent: bool | None = None,
        missing_ok: bool = False,
        **kw: object,
    ) -> Any:
        """Return the JSON of the answer, True for a deletion, None when there is no body.

        :param wanted: a key that it must contain.
        :param missing_ok: return None when the object does not exist.
        """
        try:
            return self.authenticated(
                lambda: self.calls.call(
                    operation,
                    self.send,
                    service,
                    method,
                    path,
                    wanted,
                    kw,
                    lane=lane or LANES[service],
                    deadline=DEADLINE,
                    idempotent=method in ("GET", "DELETE") if idempotent is None else idempotent,
                    missing_ok=missing_ok,
                )
            )
        except Exception as error:
            if missing_ok and sdk_error(error, "NotFoundException"):
                return None
            raise

    def single(
        self, operation: str, service: str, path: str, wanted: str, method: str = "GET", **kw: Any
    ) -> dict[str, Any]:
        """Return one object, which the answer has under the name ``wanted``."""
        found: dict[str, Any] = self.request(operation, service, method, path, wanted=wanted, **kw)[
            wanted
        ]
        return found

    def find(
        self, operation: str, service: str, path: str, wanted: str, **kw: Any
    ) -> dict[str, Any] | None:
        """Return one object, or None when it does not exist."""
        answer = self.request(operation, service, "GET", path, wanted=wanted, missing_ok=True, **kw)
        return None if answer is None else answer[wanted]

    def delete(self, operation: str, service: str, path: str, lane: str | None = None) -> bool:
        """Delete one object; return False when it does not exist."""
        return bool(self.request(operation, service, "DELETE", path, lane=lane, missing_ok=True))

    def many(
        self,
        operation: str,
        service: str,
        path: str,
        key: str,
        params: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Return all objects; the next page is linked in JSON or header."""
        first, left = params or {}, LISTINGS
        found: list[dict[str, Any]] = []
        markers: set[str] = set()
        params = first
        while True:
            try:
                data = self.request(operation, service, "GET", path, wanted=key, params=params)
            except Exception as error:
                left -= 1
                if not (markers and left and status_of(error) in (400, 404)):
                    raise
                # The object that ended a page was deleted before the next page was read.
                found, markers, params = [], set(), first
                continue
            found += data[key]
            links = data.get(f"{key}_links") or ()
            following = next(
                (link["href"] for link in links if link.get("rel") == "next"), None
            ) or data.get("next")
            if not following:
                return found
            params = {
                name: values[-1] for name, values in parse_qs(urlparse(following).query).items()
            }
            marker = params.get("marker")
            if marker is None or marker in markers:
                raise BadAnswer(f"{path}: the cloud returned the page {following!r} again")
            markers.add(marker)

    def send(
        self, service: str, method: str, path: str, wanted: str | None, kw: dict[str, Any]
    ) -> Any:
        """Send one request, without pacing, retries and metrics."""
        try:
            response = self.service(service).request(path, method, **AS_IT_IS, **kw)
        except Exception as error:
            if sdk_error(error, "Unauthorized", "AuthorizationFailure"):
                raise self.refused(error) from error
            raise
        self._check_token(response)
        self._check_found(response, method, path)
        _check_status(response, kw)
        if method == "DELETE":
            if response.status_code not in DELETED:
                raise BadAnswer(f"{method} {path}: {_excerpt(response)}")
            return True
        text = response.text
        if response.status_code in (202, 204) and not text and wanted is None:
            return None
        try:
            data = response.json() if text or wanted else None
        except ValueError:
            raise BadAnswer(f"{method} {path}: {_excerpt(response)}") from None
        if wanted is not None and not (isinstance(data, dict) and wanted in data):
            raise BadAnswer(f"{method} {path}: no {wanted!r} in the answer: {_excerpt(response)}")
        following = response.links.get("next")
        if following and isinstance(data, dict):
            data.setdefault("next", following["url"])
        return data

    def refused(self, why: object) -> CredentialsRefused:
        return CredentialsRefused(
            f"cloud {self.provider.cloud_config.name} of provider {self.provider.name} refuses the "
            "credentials in clouds.yaml"
            f" (option cloud): {why}"
        )


def _is_valid(auth: Any, refused: str | None) -> bool:
    known = auth.auth_ref
    if known is None or known.auth_token == refused:
        return False
    return not auth.reauthenticate or not known.will_expire_soon(auth.MIN_TOKEN_LIFE_SECONDS)


def _check_status(response: Response, kw: dict[str, Any]) -> None:
    """Raise the SDK's error, with a text for everybody.

    :param kw: of the request.
    """
    from openstack import exceptions as sdk

    try:
        sdk.raise_from_response(response)
    except Exception as error:
        body = kw.get("json")
        server = body.get("server") if isinstance(body, dict) else None
        secret = server.get("user_data") if isinstance(server, dict) else None
        tidy(error, *([secret] if secret else ()))
        raise


def _excerpt(response: Response) -> str:
    text = " ".join(response.text.split())
    kind = response.headers.get("Content-Type", "no content type")
    return (
        f"HTTP {response.status_code}, {kind}, {text[:120]!r}"
        if text
        else f"HTTP {response.status_code}, empty"
    )
