"""Call Gitea and Forgejo: read the queue, register and remove runners for one job."""

from __future__ import annotations

import abc
import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nodepool.adapters.runners.forge import LONGEST_REST, REST, ForgeError
from nodepool.answers import (
    UNCOMPRESSED,
    DirectSession,
    TrustingAdapter,
    content_of,
    reason_of,
    requested_pause,
)

#: Seconds to connect, and between two parts of an answer.
TIMEOUT = (10.0, 30.0)
#: Entries of one page, if the server allows, and pages after which the numbers count as wrong.
PER_PAGE, MOST_PAGES = 50, 400
#: Characters of an error of the server that are shown.
MOST_TEXT = 300


@dataclass(frozen=True)
class Job:
    """A job that waits for a runner, or that a runner has.

    :ivar runner: name of the runner that has it; empty: it waits.
    :ivar handle: names this attempt of the job; Forgejo only.
    """

    id: int
    name: str
    labels: frozenset[str]
    runner: str = ""
    handle: str = ""


@dataclass(frozen=True)
class Registration:
    """A runner that the forge knows."""

    id: int
    name: str
    online: bool


class ForgeConnection:
    """Calls of one forge.

    :param token: returns the current one.
    :param scope: empty (all of it), ``user``, ``orgs/NAME`` or ``repos/OWNER/NAME``.
    :param ca_file: of the authority that signed the forge's certificate, unless the system knows
        it.
    """

    def __init__(
        self, url: str, token: Callable[[], str], scope: str = "", ca_file: str | None = None
    ) -> None:
        self.url, self._token = url.rstrip("/"), token
        self._base = f"/api/v1/{scope or 'admin'}/actions"
        self._session = DirectSession()
        #: Until when (monotonic) the server takes no calls, and its refusal.
        self._rest = 0.0, ""
        # Not of the session: REQUESTS_CA_BUNDLE of the environment would replace it.
        self._verify: str | bool = ca_file or True
        if ca_file:
            self._session.mount("https://", TrustingAdapter())
        needed = (
            "read:admin,write:admin"
            if not scope
            else "write:repository"
            if scope.startswith("repos/")
            else ("write:user" if scope == "user" else "write:organization")
        )
        owner = "an administrator" if not scope else "an owner"
        self._rights = f"it needs the scopes {needed}, and its user must be {owner}"

    def close(self) -> None:
        self._session.close()

    def call(
        self, method: str, path: str, body: object = None, **query: str | int | Sequence[str]
    ) -> object:
        """Return the answer of a call below the actions of the scope; None: it has no content.

        :raises NotFound, ForgeError: it fails.
        """
        headers = {"Authorization": f"token {self._token()}"}
        return self._call(method, self._base + path, headers, body, query)

    def register(self, body: object) -> object:
        """Return the answer of the service for runners, whose body has the right to register."""
        path = "/api/actions/runner.v1.RunnerService/Register"
        return self._call("POST", path, {}, body, {})

    def _call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: object,
        query: Mapping[str, str | int | Sequence[str]],
    ) -> object:
        until, refusal = self._rest
        if time.monotonic() < until:
            raise ForgeError(refusal)
        try:
            answer = self._session.request(
                method,
                self.url + path,
                params=dict(query),
                json=body,
                timeout=TIMEOUT,
                stream=True,
                verify=self._verify,
                headers={
                    "Accept": "application/json",
                    "Connect-Protocol-Version": "1",
                    **UNCOMPRESSED,
                    **headers,
                },
            )
            with answer:
                content = content_of(answer)
        except OSError as error:  # requests.RequestException is one
            raise ForgeError(f"{self.url} cannot be reached: {reason_of(error)}") from error
        if answer.is_redirect:
            raise ForgeError(
                f"{self.url} redirects to {answer.headers.get('Location')}: use that as url"
            )
        if answer.status_code >= 400:
            what = f"{method} {path}: {answer.status_code} {_shortened(content)}"
            if answer.status_code == 429:
                wait = requested_pause(answer.headers, LONGEST_REST) or REST
                what += f"; no calls for {wait:.0f} s"
                self._rest = time.monotonic() + wait, f"{self.url}: {what}"
            raise self._error(answer.status_code, what)
        if not content:
            return None
        try:
            found: object = json.loads(content)
        except ValueError:
            raise ForgeError(
                f"{self.url}: {method} {path}: the answer is not JSON: {_shortened(content)}"
            ) from None
        return found

    def _error(self, status: int, what: str) -> ForgeError:
        text = f"{self.url}: {what}"
        if status == 401:
            return ForgeError(f"{text}: the token is not valid; create a new one")
        if status == 403:
            return ForgeError(f"{text}: the token may not do this; {self._rights}")
        return NotFound(text) if status in (404, 405) else ForgeError(text)


class NotFound(ForgeError):
    """What is called does not exist, or the server has no such call."""


def _shortened(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["message"])
    return text[:MOST_TEXT]


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ForgeError(f"{what}: not an object: {str(value)[:MOST_TEXT]}")
    return value


def _entries(value: object, what: str) -> list[Mapping[str, object]]:
    """Return a list of objects; Forgejo writes an empty one as null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ForgeError(f"{what}: not a list: {str(value)[:MOST_TEXT]}")
    return [_object(each, what) for each in value]


def _number(value: object, what: str) -> int:
    """Return a number; int64 is a text in the JSON of the service for runners."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    raise ForgeError(f"{what}: not a number: {str(value)[:MOST_TEXT]}")


def _labels(value: object) -> frozenset[str]:
    return frozenset(str(each) for each in value) if isinstance(value, list) else frozenset()


class Api(abc.ABC):
    """What Gitea and Forgejo have in common, and what differs.

    :ivar binds: a runner is registered for one certain job.
    :ivar command: program and arguments that start the runner, unless the configuration has others.
    :ivar no_job: exit statuses of that program that mean that there was no job.
    """

    binds: bool
    command: str
    no_job: Sequence[int] = ()

    def __init__(self, connection: ForgeConnection) -> None:
        self._connection = connection

    @abc.abstractmethod
    def queue(self) -> list[Job]:
        """Return the jobs that wait for a runner, and those that runners have.

        :raises ForgeError: the queue cannot be read; the same holds for all methods.
        """

    def runners(self) -> list[Registration]:
        return [
            Registration(
                _number(each.get("id"), "runner"),
                str(each.get("name", "")),
                each.get("status") != "offline",
            )
            for each in self._runners()
        ]

    @abc.abstractmethod
    def _runners(self) -> Iterable[Mapping[str, object]]: ...

    def exists(self, runner: int) -> bool:
        """Return whether the forge still has a runner.

        `runners` may miss some while others are added and removed.
        """
        try:
            self._connection.call("GET", f"/runners/{runner}")
        except NotFound:
            return False
        return True

    @abc.abstractmethod
    def register(self, name: str, labels: Sequence[str], job: Job | None) -> tuple[int, bytes]:
        """Register a runner; return its id and its secret.

        :param labels: as the runner's program knows them, such as ``noble:host``.
        """

    @abc.abstractmethod
    def remove(self, runner: int) -> bool:
        """Remove a runner; False: it has a job."""

    @abc.abstractmethod
    def script(self, command: str, labels: Sequence[str]) -> str:
        """Return the shell text that starts the program in a folder with the file ``secret``."""


class Gitea(Api):
    """Gitea 1.24 and later."""

    binds = False
    command = "gitea-runner daemon"

    def queue(self) -> list[Job]:
        # Of the words for states, "queued" is ready for a runner. Running jobs show which of our
        # runners are busy.
        return [
            Job(
                _number(each.get("id"), "job"),
                str(each.get("name", "")),
                _labels(each.get("labels")),
                str(each.get("runner_name") or "?") if each.get("status") == "in_progress" else "",
            )
            for each in self._pages("/jobs", "jobs", status=["queued", "in_progress"])
        ]

    def _runners(self) -> Iterable[Mapping[str, object]]:
        return self._pages("/runners", "runners")

    def _pages(
        self, path: str, key: str, **query: str | int | Sequence[str]
    ) -> Iterator[Mapping[str, object]]:
        seen: set[int] = set()
        for page in range(1, MOST_PAGES + 1):
            answer = _object(
                self._connection.call("GET", path, page=page, limit=PER_PAGE, **query), path
            )
            entries = _entries(answer.get(key), path)
            for each in entries:
                # A list that changes meanwhile shows some entries on two pages.
                number = _number(each.get("id"), path)
                if number not in seen:
                    seen.add(number)
                    yield each
            if not entries or len(seen) >= _number(answer.get("total_count"), path):
                return
        raise ForgeError(
            f"{self._connection.url}: {path} has more than {MOST_PAGES} pages; set a scope with "
            "fewer jobs"
        )

    def register(self, name: str, labels: Sequence[str], job: Job | None) -> tuple[int, bytes]:
        # The token for registrations serves anybody for years, so only what it gives leaves this
        # machine.
        token = _object(
            self._connection.call("POST", "/runners/registration-token"), "registration token"
        ).get("token")
        names = [label.partition(":")[0] for label in labels]
        body = {
            "token": token,
            "name": name,
            "version": "nodepool",
            "labels": names,
            "ephemeral": True,
        }
        answer = _object(self._connection.register(body), "Register")
        runner = _object(answer.get("runner"), "Register")
        number = _number(runner.get("id"), "Register")
        if runner.get("ephemeral") is not True:
            self.remove(number)
            raise ForgeError(
                f"{self._connection.url} makes no runners for one job: Gitea 1.24 or later is "
                "needed"
            )
        kept = {
            "WARNING": "This file belongs to a runner for one job.",
            "id": number,
            "uuid": runner.get("uuid"),
            "name": name,
            "token": runner.get("token"),
            "address": self._connection.url,
            "labels": list(labels),
            "ephemeral": True,
        }
        return number, json.dumps(kept).encode()

    def remove(self, runner: int) -> bool:
        path = f"/runners/{runner}"
        # Before 1.26 there is no such call, and a runner that had its job no longer exists.
        with contextlib.suppress(NotFound):
            if (
                _object(self._connection.call("PATCH", path, {"disabled": True}), "runner").get(
                    "busy"
                )
                is True
            ):
                return False
        # A runner that has just got a job, or that is silent for ten seconds, is not "busy" there.
        if any(
            _number(each.get("runner_id"), "job") == runner
            for each in self._pages("/jobs", "jobs", status=["in_progress"])
        ):
            return False
        with contextlib.suppress(NotFound):
            self._connection.call("DELETE", path)
        return True

    def script(self, command: str, labels: Sequence[str]) -> str:
        return f"mv secret .runner; {command}"


class Forgejo(Api):
    """Forgejo 15 and later, with its runner 12.8 and later."""

    binds = True
    command = "forgejo-runner one-job"
    no_job = (2,)

    def queue(self) -> list[Job]:
        # Its filter by labels means different things in different versions, and some list running
        # jobs, too.
        return [
            Job(
                _number(each.get("id"), "job"),
                str(each.get("name", "")),
                _labels(each.get("runs_on")),
                handle=str(each.get("handle") or ""),
            )
            for each in _entries(self._connection.call("GET", "/runners/jobs"), "jobs")
            if each.get("status") == "waiting"
        ]

    def _runners(self) -> list[Mapping[str, object]]:
        found: list[Mapping[str, object]] = []
        for page in range(1, MOST_PAGES + 1):
            entries = _entries(
                self._connection.call("GET", "/runners", page=page, limit=PER_PAGE), "runners"
            )
            if not entries or entries[0] in found:  # a server that knows no pages repeats the first
                return found
            found += entries
        raise ForgeError(f"{self._connection.url}: more than {MOST_PAGES} pages of runners")

    def register(self, name: str, labels: Sequence[str], job: Job | None) -> tuple[int, bytes]:
        body = {
            "name": name,
            "description": f"nodepool: {job.name}" if job else "nodepool",
            "ephemeral": True,
        }
        made = _object(self._connection.call("POST", "/runners", body), "runner")
        lines = [str(made.get("token", "")), str(made.get("uuid", "")), job.handle if job else ""]
        if not lines[0] or any(set(line) & set("\n\r") for line in lines):
            raise ForgeError(f"{self._connection.url}: the new runner has no token")
        return _number(made.get("id"), "runner"), "".join(f"{line}\n" for line in lines).encode()

    def remove(self, runner: int) -> bool:
        if any(
            each.get("id") == runner and each.get("status") == "active" for each in self._runners()
        ):
            return False
        with contextlib.suppress(NotFound):
            self._connection.call("DELETE", f"/runners/{runner}")
        return True

    def script(self, command: str, labels: Sequence[str]) -> str:
        given = " ".join(f"--label {shlex.quote(label)}" for label in labels)
        return (
            '{ read -r token; read -r uuid; read -r handle; } < secret; printf %s "$token" > '
            "token; "
            f'{command} --url {shlex.quote(self._connection.url)} --uuid "$uuid" --token-url '
            f'"file:$PWD/token" {given} '
            '${handle:+--handle "$handle"}'
        )


DIALECTS: Mapping[str, Callable[[ForgeConnection], Api]] = {"gitea": Gitea, "forgejo": Forgejo}
