"""Azure Resource Manager: paths, versions, lists and long operations (AZU-2)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from nodepool import exceptions
from nodepool.answers import requested_pause
from nodepool.cloud.http import Answer, HttpRefused, NoAnswer, new_session, send
from nodepool.driver.azure.config import AzureProviderConfig
from nodepool.driver.azure.login import Login

VM = ("Microsoft.Compute/virtualMachines", "2023-03-01")
DISK = ("Microsoft.Compute/disks", "2020-06-30")
IMAGE = ("Microsoft.Compute/images", "2020-12-01")
NIC = ("Microsoft.Network/networkInterfaces", "2020-11-01")
ADDRESS = ("Microsoft.Network/publicIPAddresses", "2020-11-01")
SUBNET_VERSION, USAGES_VERSION, SKUS_VERSION = "2020-07-01", "2020-12-01", "2019-04-01"

Kind = tuple[str, str]

PAUSE = 2.0
"""Seconds between two polls of an operation if the cloud does not specify it."""
OPERATION_LIMIT = 600.0
ENDED = ("Failed", "Canceled", "Cancelled")


class OperationFailed(exceptions.LaunchStatusException):
    """``code``: Azure's error code."""

    def __init__(self, what: str, code: str, message: str) -> None:
        super().__init__(f"{what}: {code}: {message}")
        self.code = code
        self.message = message


def error_of(told: object) -> tuple[str, str]:
    """Return code and message of an operation: the innermost, which is the precise one."""
    error = told.get("error") if isinstance(told, dict) else None
    if not isinstance(error, dict):
        return "Unknown", "no reason given"
    details = error.get("details")
    if (
        isinstance(details, list)
        and details
        and isinstance(details[0], dict)
        and details[0].get("code")
    ):
        error = details[0]
    return str(error.get("code") or "Unknown"), str(error.get("message") or "no reason given")


class Arm:
    """Calls of one provider, without rate limit and retries. NoAccess, NoAnswer, HttpRefused."""

    def __init__(self, provider: AzureProviderConfig) -> None:
        self.session = new_session()
        self.login = Login(provider, self.session)
        self._group = provider.resource_group

    def close(self) -> None:
        self.session.close()

    def path(self, kind: Kind, name: str = "", group: str | None = None) -> str:
        return f"resourceGroups/{group or self._group}/providers/{kind[0]}/{name}"

    def send(
        self,
        method: str,
        path: str,
        version: str | None,
        what: str,
        body: object = None,
        **params: str,
    ) -> Answer:
        """:param path: below the subscription, or a whole address."""
        url = path
        if not path.startswith("http"):
            address, subscription = self.login.place()
            url = f"{address}subscriptions/{subscription}/{path}"
        if version is not None:
            params["api-version"] = version
        token = self.login.token()
        try:
            return self._once(method, url, what, token, params, body)
        except HttpRefused as error:
            if error.status != 401:
                raise
        return self._once(method, url, what, self.login.token(refused=token), params, body)

    def _once(
        self, method: str, url: str, what: str, token: str, params: dict[str, str], body: object
    ) -> Answer:
        headers = {"Authorization": f"Bearer {token}"}
        answer = send(self.session, method, url, what, headers=headers, params=params, body=body)
        if answer.body is not None and not isinstance(answer.body, dict):
            raise NoAnswer(f"{what}: the answer is not from Azure")
        return answer

    def get(self, kind: Kind, name: str) -> dict[str, Any]:
        return self._body(
            self.send("GET", self.path(kind, name), kind[1], f"get {kind[0]} {name}"), name
        )

    @staticmethod
    def _body(answer: Answer, what: str) -> dict[str, Any]:
        if answer.body is None:
            raise NoAnswer(f"{what}: the answer is empty")
        return dict(answer.body)

    def pages(
        self,
        path: str,
        version: str,
        what: str,
        ask: Callable[[str, Callable[[], Answer]], Answer],
        **params: str,
    ) -> Iterator[dict[str, Any]]:
        """Yield the entries of a list. ``ask`` makes each call."""
        answer = ask(what, lambda: self._page(path, version, what, **params))
        while True:
            yield from answer.body["value"] or []
            url = answer.body.get("nextLink")
            if not url:
                return
            following = str(url)
            # Only at the address of the first page: the token is sent, too.
            if not following.startswith(self.login.place()[0]):
                raise NoAnswer(f"{what}: the next page has the address of another service")
            answer = ask(what, lambda following=following: self._page(following, None, what))  # type: ignore[misc]

    def _page(self, path: str, version: str | None, what: str, **params: str) -> Answer:
        answer = self.send("GET", path, version, what, **params)
        if answer.body is None or "value" not in answer.body:
            raise NoAnswer(f"{what}: the answer is not a list from Azure")
        return answer

    # -- long operations

    @staticmethod
    def operation_of(answer: Answer) -> tuple[str, bool] | None:
        """Return the operation's URL and whether its body has a status; None: already done."""
        if url := answer.headers.get("Azure-AsyncOperation"):
            return str(url), True
        if url := answer.headers.get("Location"):
            return str(url), False
        return None

    def poll(self, operation: tuple[str, bool], what: str) -> tuple[bool, Any, float]:
        """Return whether it is done, its result, and the seconds until the next poll.

        :raises OperationFailed:
        """
        url, has_status = operation
        if not url.startswith(self.login.place()[0]):
            raise NoAnswer(f"{what}: its operation has the address of another service")
        answer = self.send("GET", url, None, what)
        pause = requested_pause(answer.headers)
        pause = PAUSE if pause is None else pause
        if not has_status:
            return answer.status != 202, answer.body, pause
        status = str((answer.body or {}).get("status") or "")
        if status in ENDED:
            raise OperationFailed(what, *error_of(answer.body))
        return status == "Succeeded", answer.body, pause

    def finish(
        self,
        answer: Answer,
        what: str,
        ask: Callable[[str, Callable[[], Any]], Any],
        pause: Callable[[float], None],
    ) -> Any:
        """Wait, in this thread, until the operation is done; return its result.

        :raises OperationFailed: it failed, or took too long.
        """
        operation = self.operation_of(answer)
        if operation is None:
            return answer.body
        until = time.monotonic() + OPERATION_LIMIT
        while True:
            done, told, seconds = ask("get_operation", lambda: self.poll(operation, what))
            if done:
                return told
            if time.monotonic() > until:
                raise OperationFailed(what, "Timeout", f"not done after {OPERATION_LIMIT:.0f} s")
            pause(seconds)


_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?\Z")


def number(text: object) -> float | None:
    return float(str(text)) if _NUMBER.match(str(text)) else None
