"""IBM's APIs by REST, with the credentials of IBM's own library (IBM-3)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nodepool.base import optional
from nodepool.cloud.http import HttpRefused, NoAccess, NoAnswer, new_session, send

VERSION = "2025-06-03"
"""Version of the VPC API. Later ones may use other names."""
PAGE = "100"
RESOURCES = "https://resource-controller.cloud.ibm.com"


class Settings:
    """Lines ``NAME=value`` of the credentials file, or the environment."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def values(self) -> dict[str, str]:
        """Return the settings. Raises NoAccess: the file cannot be read."""
        if self._path is None:
            return dict(os.environ)
        try:
            with open(self._path, encoding="utf-8-sig") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise NoAccess(f"credentials-file {self._path} cannot be read: {error}") from None
        pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def place(self) -> str:
        return f"credentials-file {self._path}" if self._path else "the environment"


def authenticator(settings: Settings, service: str = "VPC") -> Any:
    """Return an authenticator of IBM's library.

    :raises NoAccess: a required setting or library is missing.
    """
    try:
        from ibm_cloud_sdk_core import authenticators as kinds
    except ImportError:
        raise NoAccess(f"it needs {optional.missing(['ibm_cloud_sdk_core'])}") from None
    values = settings.values()

    def value(name: str) -> str | None:
        return values.get(f"{service}_{name}")

    kind = (value("AUTH_TYPE") or value("AUTHTYPE") or ("iam" if value("APIKEY") else "")).lower()
    try:
        if kind == "iam":
            return kinds.IAMAuthenticator(
                value("APIKEY") or "",
                url=value("AUTH_URL"),
                client_id=value("CLIENT_ID"),
                client_secret=value("CLIENT_SECRET"),
            )
        if kind == "bearertoken":
            return kinds.BearerTokenAuthenticator(value("BEARER_TOKEN") or "")
        if kind == "noauth":
            return kinds.NoAuthAuthenticator()
        if kind == "container":
            return kinds.ContainerAuthenticator(
                cr_token_filename=value("CR_TOKEN_FILENAME"),
                iam_profile_name=value("IAM_PROFILE_NAME"),
                iam_profile_id=value("IAM_PROFILE_ID"),
                url=value("AUTH_URL"),
            )
        if kind == "vpc":
            return kinds.VPCInstanceAuthenticator(
                iam_profile_crn=value("IAM_PROFILE_CRN"),
                iam_profile_id=value("IAM_PROFILE_ID"),
                url=value("AUTH_URL"),
            )
    except ValueError as error:
        raise NoAccess(f"{settings.place}: {service}_AUTH_TYPE {kind}: {error}") from None
    raise NoAccess(
        f"{settings.place} has no {service}_APIKEY"
        if not kind
        else f"{settings.place}: {service}_AUTH_TYPE {kind} is none of iam, bearerToken, "
        "container, vpc, noAuth"
    )


class VpcClient:
    """Calls of one provider, without rate limit and retries. NoAccess, NoAnswer, HttpRefused."""

    def __init__(self, credentials_file: str | None, region: str) -> None:
        self.session = new_session()
        self.settings = Settings(credentials_file)
        self._region = region
        self._lock = threading.Lock()
        self._authenticator: Any = None
        #: Why there are no credentials, for operators.
        self.problem: str | None = None

    def close(self) -> None:
        self.session.close()

    def _address(self, service: str) -> str:
        default = f"https://{self._region}.iaas.cloud.ibm.com/v1" if service == "VPC" else RESOURCES
        return (self.settings.values().get(f"{service}_URL") or default).rstrip("/")

    def _headers(self, renew: bool) -> dict[str, str]:
        request: dict[str, Any] = {"headers": {}}
        with self._lock:
            try:
                if self._authenticator is None or renew:
                    self._authenticator = authenticator(self.settings)
                self._authenticator.authenticate(request)
            except NoAccess as error:
                self.problem = str(error)
                raise
            except Exception as error:
                # The library would wait for a minute before it retries.
                self._authenticator = None
                status = getattr(error, "status_code", None)
                if status is None or status == 429 or status >= 500:
                    raise NoAnswer(
                        f"the token service: {type(error).__name__}: {status or ''}"
                    ) from None
                self.problem = (
                    f"IBM refuses the credentials of {self.settings.place}: "
                    f"{getattr(error, 'message', status)}"
                )
                raise NoAccess(self.problem) from None
            self.problem = None
        return dict(request["headers"])

    def send(
        self, method: str, service: str, path: str, what: str, body: object = None, **params: str
    ) -> dict[str, Any]:
        """:param service: VPC, RESOURCE_MANAGER or RESOURCE_CONTROLLER."""
        url = self._address(service) + path
        if service == "VPC":
            params = {"version": VERSION, "generation": "2", **params}
        for renew in (False, True):
            try:
                answer = send(
                    self.session,
                    method,
                    url,
                    what,
                    headers=self._headers(renew),
                    params=params,
                    body=body,
                )
            except HttpRefused as error:
                if error.status != 401 or renew:
                    raise
            else:
                break
        if answer.body is None:
            return {}
        if not isinstance(answer.body, dict):
            raise NoAnswer(f"{what}: the answer is not from IBM")
        return dict(answer.body)

    def pages(self, path: str, key: str, **params: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of a list of the VPC API."""
        asked = {"limit": PAGE, **params}
        while True:
            answer = self.send("GET", "VPC", path, f"list {key}", **asked)
            if key not in answer:
                raise NoAnswer(f"list {key}: the answer is not from IBM")
            yield from answer[key]
            start = _start_of((answer.get("next") or {}).get("href"))
            if start is None:
                return
            asked = {**asked, "start": start}


def _start_of(href: object) -> str | None:
    found = parse_qs(urlsplit(str(href or "")).query).get("start")
    return found[0] if found else None
