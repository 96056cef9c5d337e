"""State machines for making and deleting what a node is: a namespace, a namespace with a pod, or a pod (KUB-7, KUB-8).

Every call runs on the threads of the provider's lanes. While a machine waits for an object the server tells it what changes.
"""

from __future__ import annotations

import base64
import binascii
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.cloud import CloudCalls, ErrorKind, translate
from nodepool.driver.kubernetes import trouble
from nodepool.driver.kubernetes.api.client import Object
from nodepool.driver.kubernetes.api.errors import ApiError, classify
from nodepool.driver.kubernetes.api.kinds import POD, SECRET, Kind
from nodepool.driver.kubernetes.api.watches import Waiting
from nodepool.driver.kubernetes.bodies import USER
from nodepool.driver.kubernetes.config import KubernetesLabel
from nodepool.driver.statemachine.model import Instance, StateMachine
from nodepool.logconfig import Log

#: Seconds for the cluster to fill in a token, and for a pod to run.
TOKEN_TIMEOUT, POD_TIMEOUT = 30.0, 300.0
#: Seconds in which a new object may not be shown yet.
SETTLING = 10.0
#: Seconds after which a namespace that is still there is told of.
STUCK = 60.0


@dataclass
class Job:
    """What is made for one node."""

    external_id: str
    namespace: str
    #: None: the node is the namespace.
    pod: str | None
    label: KubernetesLabel
    #: Labels of all that is made.
    labels: dict[str, str]
    log: Log
    #: None: nothing has a token of its own here.
    token: str | None = USER
    #: The launch is over: nothing more is made.
    given_up: threading.Event = field(default_factory=threading.Event)
    #: The token's secret, where it is known when everything has been made.
    secret: dict[str, Any] | None = None
    #: Something may be there, that has to be deleted.
    begun: bool = True


@dataclass(frozen=True)
class Target:
    """The object whose deletion deletes the node."""

    kind: Kind
    name: str
    namespace: str | None = None


class Maker(Protocol):
    """The adapter, as machines see it."""

    calls: CloudCalls

    def make(self, job: Job) -> None:
        """Create everything; on a thread of the lane "write"."""

    def remove(self, target: Target) -> str | None:
        """Delete it, and tell its uid; None: it was not there, or is none of ours. On a thread of the lane "delete"."""

    def find(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        """The object; None: it is not there."""

    def target(self, external_id: str) -> Target: ...

    def wait_for(self, kind: Kind, name: str, namespace: str | None, wake: Callable[[], None]) -> Waiting: ...

    def instance(self, job: Job, secret: Object | None, pod: Object | None) -> Instance: ...


@dataclass(frozen=True)
class Seen:
    """What is known of an object now; None: it is not there."""

    found: Object | None


class _Machine(StateMachine):
    """Waits for one call, or for news of one object, at a time."""

    def __init__(self, maker: Maker, log: Log) -> None:
        super().__init__()
        self._maker = maker
        self._log = log
        self._call: Future[Any] | None = None
        self._waitings: list[Waiting] = []
        self._ask_at = math.inf

    def _submit(self, function: Callable[[], Any], lane: str) -> None:
        self._call = self.waiting_future = self._maker.calls.run(function, lane=lane)

    def _result(self) -> Any:
        call, self._call, self.waiting_future = self._call, None, None
        assert call is not None
        return call.result()

    def _wake(self) -> None:
        if self.wake is not None:
            self.wake()

    def _wait_for(self, kind: Kind, name: str, namespace: str | None) -> Waiting:
        waiting = self._maker.wait_for(kind, name, namespace, self._wake)
        self._waitings.append(waiting)
        return waiting

    def _wait_no_more(self) -> None:
        for waiting in self._waitings:
            waiting.end()
        self._waitings = []

    def _begin(self, waiting: Waiting) -> None:
        self._ask_at = time.monotonic() + waiting.pause()

    def _look(self, waiting: Waiting, kind: Kind, name: str, namespace: str | None) -> Seen | None:
        """What the server tells, or has answered; None: nothing new."""
        news = waiting.take()
        if news is not None:
            return Seen(news)
        if self._call is not None:
            return Seen(self._result()) if self._call.done() else None
        now = time.monotonic()
        if waiting.doubtful() or now >= self._ask_at:
            self._ask_at = now + waiting.pause()
            self._submit(lambda: self._maker.find(kind, name, namespace), "read")
        self.next_wake = self._ask_at
        return None


class CreateMachine(_Machine):
    MAKING, TOKEN, POD, COMPLETE = "making", "waiting for the token", "waiting for the pod", "complete"

    def __init__(self, maker: Maker, job: Job) -> None:
        super().__init__(maker, job.log)
        self.job = job
        self.external_id = job.external_id
        self._secret: Object | None = None
        self._pod: Object | None = None
        self._token_news: Waiting | None = None
        self._pod_news: Waiting | None = None
        self._since = 0.0

    def advance(self) -> Instance | None:
        if self.state == self.START:
            job = self.job
            # Before anything is made, so that no change is missed.
            if job.token is not None:
                self._token_news = self._wait_for(SECRET, job.token, job.namespace)
            if job.pod is not None:
                self._pod_news = self._wait_for(POD, job.pod, job.namespace)
            self._submit(lambda: self._maker.make(job), "write")
            self.state = self.MAKING
        if self.state == self.MAKING:
            assert self._call is not None
            if not self._call.done():
                return None
            self._made()
            self._secret = self.job.secret
            self._next(self.TOKEN, self._token_news)
        if self.state == self.TOKEN:
            if self._token_news is not None and self._secret is None and not self._has_token(self._token_news):
                return None
            self._next(self.POD, self._pod_news)
        if self.state == self.POD:
            if self._pod_news is not None and not self._runs(self._pod_news):
                return None
            self.state = self.COMPLETE
        self._wait_no_more()
        self.trouble = None
        self.complete = True
        return self._maker.instance(self.job, self._secret, self._pod)

    def _next(self, state: str, waiting: Waiting | None) -> None:
        self.state = state
        self._since = time.monotonic()
        if waiting is not None:
            self._begin(waiting)

    def _made(self) -> None:
        try:
            self._result()
        except Exception as error:
            if not self.job.begun:
                self.external_id = None
            told = translate(error, classify, ErrorKind.QUOTA)
            if told is error:
                raise
            raise told from error

    def _has_token(self, news: Waiting) -> bool:
        job = self.job
        assert job.token is not None
        seen = self._look(news, SECRET, job.token, job.namespace)
        if seen is not None and seen.found is not None and token_of(seen.found) is not None:
            self._secret = seen.found
            return True
        self._check_time(TOKEN_TIMEOUT, f"namespace {job.namespace}: the cluster has filled in no token of {job.token}")
        return False

    def _runs(self, news: Waiting) -> bool:
        job = self.job
        assert job.pod is not None
        seen = self._look(news, POD, job.pod, job.namespace)
        if seen is not None:
            self._pod = seen.found
            if seen.found is None:
                if time.monotonic() - self._since > SETTLING:
                    raise exceptions.LaunchStatusException(f"pod {job.pod} of namespace {job.namespace} has vanished")
            else:
                reason = trouble.failed(seen.found)
                if reason is not None:
                    raise exceptions.LaunchStatusException(f"pod {job.pod} of namespace {job.namespace}: {reason}")
                if trouble.is_running(seen.found):
                    return True
                self.trouble = trouble.waits(seen.found)
        text = f"pod {job.pod} of namespace {job.namespace} does not run"
        self._check_time(POD_TIMEOUT, f"{text}: {self.trouble}" if self.trouble else text)
        return False

    def _check_time(self, limit: float, text: str) -> None:
        left = self._since + limit - time.monotonic()
        if left <= 0:
            raise exceptions.LaunchNodepoolException(f"{text} after {limit:.0f} s")
        self.next_wake = min(self._ask_at, time.monotonic() + left)

    def abandon(self) -> None:
        self._wait_no_more()
        self.job.given_up.set()
        call, making = self._call, self.state == self.MAKING
        if call is not None and making and not call.cancel():
            call.add_done_callback(self._remove_late)

    def _remove_late(self, _call: Future[Any]) -> None:
        """What was under way when the launch was given up may have come after what was deleted."""
        if self.job.begun:
            maker, target = self._maker, self._maker.target(self.job.external_id)
            maker.calls.run(lambda: maker.remove(target), lane="delete")


class DeleteMachine(_Machine):
    ASKING, DELETING, COMPLETE = "asking for the deletion", "deleting", "complete"

    def __init__(self, maker: Maker, external_id: object, log: Log) -> None:
        super().__init__(maker, log)
        self.external_id = external_id
        self._target = maker.target(str(external_id)) if external_id else None
        self._news: Waiting | None = None
        self._since = time.monotonic()
        self._told: str | None = None
        self._uid: str | None = None

    def advance(self) -> None:
        target = self._target
        if target is None:
            self.complete = True
            return
        if self.state == self.START:
            self._news = self._wait_for(target.kind, target.name, target.namespace)
            self._submit(lambda: self._maker.remove(target), "delete")
            self.state = self.ASKING
        if self.state == self.ASKING:
            assert self._call is not None and self._news is not None
            if not self._call.done():
                return
            self._begin(self._news)
            self._uid = self._asked()
            self.state = self.DELETING if self._uid is not None else self.COMPLETE
        if self.state == self.DELETING and self._gone(target):
            self.state = self.COMPLETE
        if self.state == self.COMPLETE:
            self._wait_no_more()
            self.complete = True

    def _asked(self) -> str | None:
        try:
            uid: str | None = self._result()
            return uid
        except BaseException:
            self._wait_no_more()
            raise

    def _gone(self, target: Target) -> bool:
        assert self._news is not None
        if self._uid and self._news.deleted == self._uid:
            return True
        try:
            seen = self._look(self._news, target.kind, target.name, target.namespace)
        except ApiError as error:
            # Asked again: only "not found" means that it is gone.
            self._log.warning("Cannot tell whether %s %s is gone: %s", target.kind.name, target.name, error)
            return False
        if seen is None:
            return False
        if seen.found is not None and time.monotonic() - self._since > STUCK:
            self.trouble = trouble.stuck(seen.found)
            if self.trouble != self._told:
                self._told = self.trouble
                self._log.warning(
                    "%s %s is still being deleted: %s", target.kind.name.capitalize(), target.name, self.trouble
                )  # fmt: skip
        return seen.found is None

    def abandon(self) -> None:
        self._wait_no_more()


def token_of(secret: Object) -> str | None:
    """The token in the clear, once the cluster has filled in both it and the CA's certificate."""
    data = secret.get("data") or {}
    if not data.get("token") or not data.get("ca.crt"):
        return None
    try:
        return base64.b64decode(data["token"]).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
