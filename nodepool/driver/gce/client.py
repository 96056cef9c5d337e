"""Google's APIs by REST, with the credentials that Google's own library finds (GCE-3)."""

from __future__ import annotations

import json
import os
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from nodepool.answers import CloudSession, requested_pause
from nodepool.cloud.http import (
    CONNECT_TIMEOUT,
    TIMEOUT,
    HttpRefused,
    NoAccess,
    NoAnswer,
    new_session,
    plain,
)

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
COMPUTE = "https://compute.googleapis.com/compute/v1/"
STORAGE = "https://storage.googleapis.com/"
#: Overrides of the API addresses, named as in gcloud.
OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_{}"


def refusal(what: str, status: int, headers: Mapping[str, str], content: bytes) -> HttpRefused:
    code = message = ""
    try:
        error = json.loads(content)["error"]
        if isinstance(error, dict):
            message = str(error.get("message") or "")
            code = str((error.get("errors") or [{}])[0].get("reason") or error.get("status") or "")
        else:
            code = str(error)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        message = content[:300].decode("utf-8", "replace")
    return HttpRefused(what, status, code, message, requested_pause(headers))


class Transport:
    """Calls of one provider, without rate limit and retries. Thread-safe."""

    def __init__(self) -> None:
        self.session = new_session()
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._ask: Any = None
        #: Why there are no credentials, for operators.
        self.problem: str | None = None

    def _authorized(
        self, method: str, url: str, headers: Mapping[str, str], renew: bool
    ) -> dict[str, str]:
        """Return the headers with a token. Raises NoAccess, NoAnswer."""
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests

        found = dict(headers)
        with self._lock:
            try:
                if self._ask is None:
                    self._ask = google.auth.transport.requests.Request(CloudSession())
                if self._credentials is None:
                    # It may ask the metadata server.
                    self._credentials = google.auth.default(SCOPES, self._ask)[0]
                if renew:
                    self._credentials.refresh(self._ask)
                self._credentials.before_request(self._ask, method, url, found)
            except google.auth.exceptions.TransportError as error:
                raise NoAnswer(f"the token service: {type(error).__name__}") from None
            except (google.auth.exceptions.GoogleAuthError, ValueError, OSError) as error:
                text = str(error.args[0] if error.args else error)
                if getattr(error, "retryable", False) or _is_no_answer(error):
                    raise NoAnswer(f"the token service: {text}") from None
                self._credentials = None  # the file may change until then
                self.problem = (
                    f"no credentials for Google: {text}; set "
                    "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"
                )
                raise NoAccess(self.problem) from None
            self.problem = None
        return found

    def send(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str] | None = None,
        data: Any = None,
    ) -> Any:
        """Return the response, whatever its status. Refused credentials are renewed once.

        :raises NoAccess, NoAnswer:
        """
        for renew in (False, True):
            authorized = self._authorized(method, url, headers or {}, renew)
            try:
                response = self.session.request(
                    method, url, headers=authorized, data=data, timeout=(CONNECT_TIMEOUT, TIMEOUT)
                )
            except (requests.RequestException, OSError) as error:
                raise NoAnswer(f"{what}: {plain(error)}") from None
            if response.status_code != 401:
                break
        return response

    def compute(
        self,
        method: str,
        path: Sequence[str],
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> dict[str, Any]:
        """Call Compute Engine once.

        :param path: below the version: ``("projects", "p", "zones", ...)``.
        :raises NoAccess, NoAnswer, HttpRefused:
        """
        what = f"{method} {'/'.join(path)}"
        address = (os.environ.get(OVERRIDE.format("COMPUTE")) or COMPUTE).rstrip("/")
        url = "/".join([address, *(urllib.parse.quote(part, safe="") for part in path)])
        if query:
            url += f"?{urllib.parse.urlencode(query)}"
        headers, data = (
            ({}, None) if body is None else ({"Content-Type": "application/json"}, json.dumps(body))
        )
        response = self.send(method, url, what, headers, data)
        if response.status_code >= 300:
            raise refusal(what, response.status_code, response.headers, response.content)
        try:
            answer = json.loads(response.content or b"{}")
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NoAnswer(
                f"{what}: the answer is not from Google (status {response.status_code}, not a JSON "
                "object)"
            )
        return answer

    def close(self) -> None:
        self.session.close()
        if self._ask is not None:  # without the lock, which a running call may hold
            self._ask.session.close()


def _is_no_answer(error: BaseException) -> bool:
    """Return whether the token service's answer is invalid, such as a gateway's page."""
    import google.auth.exceptions

    if not isinstance(error, google.auth.exceptions.RefreshError):
        return False
    told = error.args[-1] if error.args else None
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            return True
    return not isinstance(told, dict)


def storage_address() -> str:
    return os.environ.get(OVERRIDE.format("STORAGE")) or STORAGE
