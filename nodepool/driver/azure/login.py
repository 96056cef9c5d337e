"""Credentials: the file of a service principal, or Microsoft's own library (AZU-3)."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import requests

from nodepool.answers import CloudSession
from nodepool.base import optional
from nodepool.cloud.http import HttpRefused, NoAccess, NoAnswer, send
from nodepool.driver.azure.config import AzureProviderConfig

LOGIN, MANAGEMENT = "https://login.microsoftonline.com", "https://management.azure.com/"
CLOUDS = {
    "public": (LOGIN, MANAGEMENT),
    "china": ("https://login.chinacloudapi.cn", "https://management.chinacloudapi.cn/"),
    "us-government": ("https://login.microsoftonline.us", "https://management.usgovcloudapi.net/"),
}
RENEW = 60.0
"""Seconds before the expiry of a token at which it is renewed."""
SHORTEST = 120.0
"""Minimum seconds that a new token is used, whatever our clock says about its expiry."""


class Login:
    """The subscription and its tokens. Thread-safe.

    ``problem``: why there is no token, for operators; None if there is one.
    """

    def __init__(self, provider: AzureProviderConfig, session: requests.Session) -> None:
        self._provider = provider
        self._session = session
        self._lock = threading.Lock()
        self._token: str | None = None
        self._until = 0.0
        self.problem: str | None = None
        self._place: tuple[str, str] | None = None

    def place(self) -> tuple[str, str]:
        """Return the API's URL, with a slash at the end, and the subscription.

        :raises NoAccess: the file cannot be used.
        """
        if self._place is None:
            auth = self._provider.auth or {}
            if auth:
                self._place = CLOUDS[auth.get("cloud", "public")][1], auth["subscription-id"]
            else:
                told = self._file()
                address = told.get("resourceManagerEndpointUrl") or MANAGEMENT
                self._place = address.rstrip("/") + "/", told["subscriptionId"]
        return self._place

    def token(self, refused: str | None = None) -> str:
        """:param refused: a token that does not work; another one is fetched.

        :raises NoAccess, NoAnswer:
        """
        with self._lock:
            now = time.monotonic()
            if self._token is None or self._token == refused or now >= self._until:
                try:
                    token, seconds = (
                        self._from_library() if self._provider.auth else self._from_file()
                    )
                except NoAccess as error:
                    self.problem = str(error)
                    raise
                self.problem = None
                self._token, self._until = token, now + max(seconds - RENEW, SHORTEST)
            return self._token

    # -- a service principal with a secret

    def _file(self) -> dict[str, str]:
        path = self._provider.auth_path or ""
        try:
            with open(path, encoding="utf-8-sig") as file:
                told = json.load(file)
        except OSError as error:
            raise NoAccess(f"auth-path {path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise NoAccess(
                f"auth-path {path} is not JSON; create it with 'az ad sp create-for-rbac "
                "--sdk-auth'"
            ) from None
        missing = [
            key
            for key in ("clientId", "clientSecret", "subscriptionId", "tenantId")
            if not isinstance(told, dict) or not isinstance(told.get(key), str)
        ]
        if missing:
            raise NoAccess(
                f"auth-path {path} has no {missing[0]}; create it with 'az ad sp create-for-rbac "
                "--sdk-auth'"
            )
        return dict(told)

    def _from_file(self) -> tuple[str, float]:
        told = self._file()
        login = (told.get("activeDirectoryEndpointUrl") or LOGIN).rstrip("/")
        form = {
            "grant_type": "client_credentials",
            "client_id": told["clientId"],
            "client_secret": told["clientSecret"],
            "resource": told.get("resourceManagerEndpointUrl") or MANAGEMENT,
        }
        try:
            answer = send(
                self._session,
                "POST",
                f"{login}/{told['tenantId']}/oauth2/token",
                "log in",
                data=form,
            ).body
        except HttpRefused as error:
            if error.status == 429 or error.status >= 500:
                raise NoAnswer(f"the login service: {error}") from None
            # The first line has the reason; the others are numbers for Microsoft.
            reason = error.message.partition("\n")[0]
            raise NoAccess(
                f"Azure refuses the service principal of auth-path {self._provider.auth_path}: "
                f"{error.code}: {reason}"
            ) from None
        try:
            seconds = (
                float(answer["expires_in"])
                if "expires_in" in answer
                else float(answer["expires_on"]) - time.time()
            )
            return str(answer["access_token"]), seconds
        except (KeyError, TypeError, ValueError):
            raise NoAnswer("log in: the answer has no token") from None

    # -- all the others

    def _from_library(self) -> tuple[str, float]:
        auth = self._provider.auth or {}
        login, management = CLOUDS[auth.get("cloud", "public")]
        try:
            import azure.core.exceptions
        except ImportError:
            raise NoAccess(
                f"auth of type {auth['type']} needs "
                f"{optional.missing(['azure.core', 'azure.identity'])}"
            ) from None
        try:
            # A new one each time: it would keep its token, even if Azure refuses that, and the
            # certificate that it was created with.
            with CloudSession() as session, self._credential(auth, login, session) as credential:
                found = credential.get_token(f"{management}.default")
        except (azure.core.exceptions.ClientAuthenticationError, OSError, ValueError) as error:
            raise NoAccess(
                f"no credentials for Azure (auth, type {auth['type']}): {_first_line(error)}"
            ) from None
        except azure.core.exceptions.AzureError as error:
            raise NoAnswer(f"the login service: {_first_line(error)}") from None
        return str(found.token), float(found.expires_on) - time.time()

    @staticmethod
    def _credential(auth: dict[str, Any], login: str, session: requests.Session) -> Any:
        import azure.identity as identity
        from azure.core.pipeline.transport import RequestsTransport

        bounded = RequestsTransport(session=session, session_owner=False)
        kind, tenant, client = auth["type"], auth.get("tenant-id"), auth.get("client-id")
        if kind == "certificate":
            return identity.CertificateCredential(
                str(tenant),
                str(client),
                auth["certificate-path"],
                authority=login,
                transport=bounded,
            )
        if kind == "workload-identity":
            return identity.WorkloadIdentityCredential(
                tenant_id=tenant, client_id=client, authority=login, transport=bounded
            )
        if kind == "managed-identity":
            return identity.ManagedIdentityCredential(client_id=client, transport=bounded)
        if kind == "cli":
            return identity.AzureCliCredential(tenant_id=tenant or "")
        return identity.DefaultAzureCredential(
            authority=login, managed_identity_client_id=client, transport=bounded
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
