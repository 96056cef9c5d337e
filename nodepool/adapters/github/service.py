"""Calls of GitHub's service for runner scale sets."""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import os
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

import jwt
import requests
import requests.adapters

from nodepool.adapters.runners.forge import LONGEST_REST, REST, ForgeError
from nodepool.adapters.runners.program import ConfigError
from nodepool.answers import (
    UNCOMPRESSED,
    DirectSession,
    TrustingAdapter,
    content_of,
    is_untrusted,
    reason_of,
    requested_pause,
)
from nodepool.client import is_protected

log = logging.getLogger("nodepool.adapters.github")

#: Seconds for an answer, for a poll (the service holds it for about 50), and for calls repeated
#: after failures.
ANSWER, POLL, REPEAT = 30.0, 120.0, 90.0
#: Seconds before its end at which the admin token is renewed.
SOON = 60.0
#: Longest name of an exception, text, or body of an answer that is shown.
TEXT = 300
API = "6.0-preview"
HOSTED = ("github.com", "www.github.com", "github.localhost")
NO_ID = "00000000-0000-0000-0000-000000000000"


class ServiceError(ForgeError):
    """The service refuses a call.

    :ivar status: of HTTP; 0: no answer.
    :ivar kind: the service's name of the exception, or empty.
    """

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Place:
    """What the scale sets belong to.

    :param rest: base of the REST API.
    :param path: of the owner below it.
    """

    url: str
    rest: str
    path: str

    @classmethod
    def read(cls, url: str) -> Place:
        """Read the URL of an organization, a repository or an enterprise.

        :raises ConfigError: it is none.
        """
        parts = urllib.parse.urlsplit(url.strip().rstrip("/"))
        words = [word for word in parts.path.split("/") if word]
        host = (parts.hostname or "").lower()
        if not host or len(words) not in (1, 2) or not is_protected(url):
            raise ConfigError(
                f"github: url: {url!r} is not the https URL of an organization, a repository or an "
                "enterprise"
            )
        if len(words) == 1:
            path = f"/orgs/{words[0]}"
        else:
            path = (
                f"/enterprises/{words[1]}"
                if words[0].lower() == "enterprises"
                else f"/repos/{words[0]}/{words[1]}"
            )
        if (host in HOSTED or host.endswith(".ghe.com")) and not os.environ.get(
            "GITHUB_ACTIONS_FORCE_GHES"
        ):
            return cls(parts.geturl(), f"https://api.{host.removeprefix('www.')}", path)
        return cls(parts.geturl(), f"{parts.scheme}://{parts.netloc}/api/v3", path)


def app_token(client: str, key: str) -> str:
    """Return the JWT by which a GitHub App logs in.

    :param key: private key, PEM.
    :raises ConfigError: the key is not one.
    """
    now = int(time.time())
    try:
        return jwt.encode(
            {"iss": client, "iat": now - 60, "exp": now + 480}, key, algorithm="RS256"
        )
    except (ValueError, TypeError, jwt.PyJWTError) as error:
        raise ConfigError(f"github: app: key-file is not a private RSA key: {error}") from error


@dataclass(frozen=True)
class Session:
    """The right to read the messages of a scale set.

    :param statistics: numbers of jobs and runners at its opening.
    """

    id: str
    queue: str
    token: str
    statistics: Mapping[str, object]


class Service:
    """The service of one organization, repository or enterprise.

    :param credential: returns the personal access token, or the JWT of an App.
    :param installation: of the App; empty: the credential is a token.
    :param certificates: file with those of the authorities of an Enterprise Server.
    """

    def __init__(
        self,
        place: Place,
        credential: Callable[[], str],
        stopping: threading.Event,
        installation: str = "",
        certificates: str = "",
    ) -> None:
        self.place = place
        self._credential, self._installation, self._stopping = credential, installation, stopping
        self._http = DirectSession()
        # Not of the session: REQUESTS_CA_BUNDLE of the environment would replace it.
        self._verify: str | bool = certificates or True
        self._http.trust_env = not place.rest.startswith("http://")
        kind = TrustingAdapter if certificates else requests.adapters.HTTPAdapter
        adapter = kind(pool_connections=8, pool_maxsize=64)
        for scheme in ("https://", "http://"):
            self._http.mount(scheme, adapter)
        #: Why the last call is being repeated; empty: the last call was answered.
        self.trouble = ""
        #: Per host: until when (monotonic) it takes no calls, and its refusal.
        self._resting: dict[str, tuple[float, ServiceError]] = {}
        self._lock = threading.Lock()
        self._base, self._token, self._ends = "", "", 0.0
        agent = {
            "system": "nodepool",
            "version": metadata.version("nodepool"),
            "subsystem": "listener",
            "kind": "scaleset",
        }
        self._always = {
            "Accept": f"application/json; api-version={API}",
            "User-Agent": json.dumps(agent),
            **UNCOMPRESSED,
        }

    # -- the chain of tokens

    def _admin(self, old: str = "") -> tuple[str, str]:
        """Return base URL and admin token.

        :param old: the service no longer takes this token.
        """
        with self._lock:
            if self._token and self._token != old and time.time() < self._ends - SOON:
                return self._base, self._token
            token = self._credential()
            if self._installation:
                path = (
                    f"/app/installations/{urllib.parse.quote(self._installation, safe='')}/"
                    "access_tokens"
                )
                answer = self._rest(path, f"Bearer {token}", "application/vnd.github+json")
                token = _text(answer, "token")
            path = f"{self.place.path}/actions/runners/registration-token"
            answer = self._rest(path, f"Bearer {token}", "application/vnd.github.v3+json")
            body = {"url": self.place.url, "runner_event": "register"}
            # Fresh registration tokens take a moment until they are known everywhere.
            answer = self._rest(
                "/actions/runner-registration",
                f"RemoteAuth {_text(answer, 'token')}",
                "application/json",
                body,
                (401, 403),
            )
            base, self._token = _text(answer, "url").rstrip("/") + "/", _text(answer, "token")
            if not is_protected(base):
                raise ServiceError(0, "", f"the service is at {base}, which is not https")
            self._base, self._ends = base, _end_of(self._token)
            return self._base, self._token

    def _rest(
        self,
        path: str,
        credential: str,
        kind: str,
        body: Mapping[str, object] | None = None,
        again: tuple[int, ...] = (),
    ) -> Mapping[str, object]:
        headers = {"Authorization": credential, "Content-Type": kind}
        data = None if body is None else json.dumps(body)
        return _mapping(self._send("POST", self.place.rest + path, headers, data, again=again)[1])

    # -- calls

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        repeat: bool = True,
        timeout: float = ANSWER,
    ) -> object:
        base, token = self._admin()
        for last in (False, True):
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            url = f"{base}{path}{'&' if '?' in path else '?'}api-version={API}"
            try:
                data = None if body is None else json.dumps(body)
                return self._send(method, url, headers, data, repeat=repeat, timeout=timeout)[1]
            except ServiceError as error:
                if error.status != 401 or last:
                    raise
                base, token = self._admin(token)
        raise AssertionError("not reached")

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        data: str | None = None,
        *,
        repeat: bool = True,
        again: tuple[int, ...] = (),
        timeout: float = ANSWER,
    ) -> tuple[int, object]:
        """Return status and parsed body of a good answer.

        :param repeat: whether the call is sent again when it may have arrived.
        :param again: statuses that may go by themselves.
        :raises ServiceError: the service refuses it, or nothing helped for `REPEAT` seconds.
        """
        deadline, pause = time.monotonic() + REPEAT, 1.0
        while True:
            self._await_rest(url, deadline)
            wait = pause
            try:
                answer = self._http.request(
                    method,
                    url,
                    data=data,
                    headers={**self._always, **headers},
                    timeout=(10.0, timeout),
                    stream=True,
                    verify=self._verify,
                )
                with answer:
                    content = content_of(answer)
            except (requests.RequestException, OSError) as error:
                failure = ServiceError(
                    0, "", f"{_place_of(url)} does not answer: {_short(reason_of(error))}"
                )
                unsent = isinstance(
                    error, requests.exceptions.ConnectTimeout | requests.exceptions.SSLError
                )
                if is_untrusted(error) or not (repeat or unsent):
                    raise failure from error
            except Exception as error:  # of the library's lower layers
                failure = ServiceError(
                    0,
                    "",
                    f"{_place_of(url)} does not answer: {type(error).__name__}: "
                    f"{_short(str(error))}",
                )
                if not repeat:
                    raise failure from error
            else:
                if answer.status_code < 300:
                    self.trouble = ""
                    return answer.status_code, _parsed(content)
                failure = _failure(url, answer, content)
                requested = _requested_pause(answer, content)
                if requested is not None:
                    wait = min(requested, LONGEST_REST)
                    failure = ServiceError(
                        failure.status, failure.kind, f"{failure}; no calls for {wait:.0f} s"
                    )
                    rest = time.monotonic() + wait, failure
                    self._resting[urllib.parse.urlsplit(url).netloc] = rest
                elif (
                    not (answer.status_code >= 500 and answer.status_code != 501 and repeat)
                    and answer.status_code not in again
                ):
                    raise failure
            if time.monotonic() + wait >= deadline or self._repeats(failure, wait):
                raise failure
            pause = min(30.0, pause * 2)

    def _await_rest(self, url: str, deadline: float) -> None:
        """Wait until the host takes calls again, whichever call it has refused.

        :raises ServiceError: that is after the deadline.
        """
        until, refusal = self._resting.get(urllib.parse.urlsplit(url).netloc, (0.0, None))
        left = until - time.monotonic()
        if refusal is not None and left > 0 and (until >= deadline or self._repeats(refusal, left)):
            raise ServiceError(refusal.status, refusal.kind, str(refusal))

    def _repeats(self, failure: ServiceError, wait: float) -> bool:
        """Wait before a call is repeated; return whether the program is stopping."""
        if not self.trouble:
            log.warning("%s; the call is repeated for up to %.0f s", failure, REPEAT)
        self.trouble = str(failure)
        return self._stopping.wait(wait)

    # -- scale sets

    def group(self, name: str) -> int:
        """Return the id of a runner group."""
        if name.lower() == "default":
            return 1
        found = _list(self._call("GET", f"_apis/runtime/runnergroups/?groupName={_quote(name)}"))
        if len(found) != 1:
            raise ServiceError(
                404,
                "",
                f"there are {len(found)} runner groups {name}: create it in GitHub, or change the "
                "group",
            )
        return _number(found[0], "id")

    def find(self, name: str, group: int) -> Mapping[str, object] | None:
        """Return a scale set."""
        found = _list(
            self._call(
                "GET", f"_apis/runtime/runnerscalesets?runnerGroupId={group}&name={_quote(name)}"
            )
        )
        return found[0] if found else None

    def create(self, name: str, group: int, labels: list[str]) -> Mapping[str, object]:
        body = {
            "name": name,
            "runnerGroupId": group,
            "labels": [{"type": "System", "name": each} for each in labels or [name]],
            "RunnerSetting": {"disableUpdate": True},
        }
        return _mapping(self._call("POST", "_apis/runtime/runnerscalesets", body, repeat=False))

    def delete(self, number: int) -> None:
        self._call("DELETE", f"_apis/runtime/runnerscalesets/{number}")

    # -- sessions and messages

    def open(self, number: int, owner: str) -> Session:
        """Open the session of a scale set; there is one at most (409)."""
        body = {"sessionId": NO_ID, "ownerName": owner}
        return _session(
            self._call(
                "POST", f"_apis/runtime/runnerscalesets/{number}/sessions", body, repeat=False
            )
        )

    def renew(self, number: int, session: Session) -> Session:
        return _session(
            self._call("PATCH", f"_apis/runtime/runnerscalesets/{number}/sessions/{session.id}")
        )

    def close(self, number: int, session: Session, timeout: float) -> None:
        self._call(
            "DELETE",
            f"_apis/runtime/runnerscalesets/{number}/sessions/{session.id}",
            repeat=False,
            timeout=timeout,
        )

    def poll(self, session: Session, last: int, capacity: int) -> Mapping[str, object] | None:
        """Wait for a message; None: there is none."""
        url = session.queue
        if last:
            url += f"{'&' if '?' in url else '?'}lastMessageId={last}"
        headers = {
            "Authorization": f"Bearer {session.token}",
            "X-ScaleSetMaxCapacity": str(capacity),
        }
        status, found = self._send("GET", url, headers, timeout=POLL)
        if status == 202 or found is None:
            return None
        message = _mapping(found)
        if message.get("messageType") != "RunnerScaleSetJobMessages":
            raise ServiceError(
                status,
                "",
                f"a message of the unknown type {_short(str(message.get('messageType')))}",
            )
        return message

    def acknowledge(self, session: Session, message: int) -> None:
        parts = urllib.parse.urlsplit(session.queue)
        url = parts._replace(path=f"{parts.path}/{message}").geturl()
        try:
            self._send("DELETE", url, {"Authorization": f"Bearer {session.token}"})
        except ServiceError as error:
            if error.status != 404:
                raise

    def acquire(self, number: int, session: Session, requests_: list[int]) -> None:
        """Take jobs that are offered; who takes them has to run them."""
        base, _token = self._admin()
        url = f"{base}_apis/runtime/runnerscalesets/{number}/acquirejobs?api-version={API}"
        headers = {"Authorization": f"Bearer {session.token}", "Content-Type": "application/json"}
        self._send("POST", url, headers, json.dumps(requests_))

    # -- runners

    def register(self, number: int, name: str) -> str:
        """Register a one-job runner; return its secret configuration.

        :raises ServiceError: with ``AgentExists`` in its kind: the name is taken.
        """
        body = {"name": name, "workFolder": ""}
        answer = _mapping(
            self._call("POST", f"_apis/runtime/runnerscalesets/{number}/generatejitconfig", body)
        )
        return _text(answer, "encodedJITConfig")

    def runner(self, name: str) -> Mapping[str, object] | None:
        found = _list(
            self._call("GET", f"_apis/distributedtask/pools/0/agents?agentName={_quote(name)}")
        )
        return found[0] if found else None

    def remove(self, runner: int) -> bool:
        """Remove a runner, if it exists; False: it runs a job."""
        try:
            self._call("DELETE", f"_apis/distributedtask/pools/0/agents/{runner}")
        except ServiceError as error:
            if "JobStillRunning" in error.kind:
                return False
            if "AgentNotFound" not in error.kind and error.status != 404:
                raise
        return True


# -- answers, of which nothing is certain


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content.decode("utf-8-sig")) if content.strip() else None
    except ValueError as error:
        raise ServiceError(
            0, "", f"the service's answer is not JSON: {_short(content.decode('utf-8', 'replace'))}"
        ) from error


def _mapping(found: object) -> Mapping[str, object]:
    if not isinstance(found, dict):
        raise ServiceError(0, "", f"the service's answer is not an object: {_short(str(found))}")
    return found


def _list(found: object) -> list[Mapping[str, object]]:
    values = _mapping(found).get("value")
    return [_mapping(each) for each in values] if isinstance(values, list) else []


def _text(found: Mapping[str, object], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise ServiceError(0, "", f"the service's answer has no {name}")
    return value


def _number(found: Mapping[str, object], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int):
        raise ServiceError(0, "", f"the service's answer has no number {name}")
    return value


def _session(found: object) -> Session:
    answer = _mapping(found)
    queue, statistics = _text(answer, "messageQueueUrl"), answer.get("statistics")
    if not is_protected(queue):
        raise ServiceError(0, "", f"the queue is at {_place_of(queue)}, which is not https")
    numbers = statistics if isinstance(statistics, dict) else {}
    return Session(
        str(uuid.UUID(_text(answer, "sessionId"))),
        queue,
        _text(answer, "messageQueueAccessToken"),
        numbers,
    )


def _failure(url: str, answer: requests.Response, content: bytes) -> ServiceError:
    kind, text = "", content.decode("utf-8-sig", "replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        kind, text = (
            str(found.get("typeName") or found.get("exceptionName") or ""),
            str(found.get("message") or ""),
        )
    ids = " ".join(
        f"{name} {answer.headers[name]}"
        for name in ("ActivityId", "X-GitHub-Request-Id")
        if name in answer.headers
    )
    where = f"{answer.request.method} {_place_of(url)}"
    return ServiceError(
        answer.status_code,
        kind[:TEXT],
        f"{where}: status {answer.status_code}: {_short(text) or kind} {ids}".strip(),
    )


def _requested_pause(answer: requests.Response, content: bytes) -> float | None:
    """Return the seconds that the service wants us to wait."""
    if answer.status_code not in (403, 429):
        return None
    after = requested_pause(answer.headers, LONGEST_REST)
    if after is not None:
        return after
    reset = answer.headers.get("X-RateLimit-Reset", "")
    if answer.headers.get("X-RateLimit-Remaining") == "0":
        return max(1.0, float(reset) - _time_of(answer)) if reset.isdecimal() else REST
    limited = answer.status_code == 429 or b"secondary rate limit" in content.lower()
    return REST if limited else None


def _time_of(answer: requests.Response) -> float:
    """Return the Unix time by the clock of the service; by ours if it does not say."""
    try:
        return email.utils.parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def _end_of(token: str) -> float:
    """Return the Unix time at which a JWT ends; it is not verified. Unknown: in ten minutes."""
    try:
        return float(jwt.decode(token, options={"verify_signature": False})["exp"])
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        return time.time() + 600


def _place_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _short(text: str) -> str:
    return text.strip()[:TEXT]


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def moment(text: object) -> datetime.datetime | None:
    """Return a time of the service; None: not yet."""
    try:
        found = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.year > 1 else None
