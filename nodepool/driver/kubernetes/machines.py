"""State machines for namespaces and pods (KUB-7, KUB-8).

A node is a namespace, a namespace with a pod, or a pod.
Every call runs on the threads of the provider's lanes. While a machine waits for an object, the
server reports its changes.
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
from nodepool.driver.statemachine.model import Instance
from nodepool.driver.statemachine.steps import SteppedMachine, Steps, Wait
from nodepool.logconfig import Log

#: Seconds for the cluster to create a token, and for a pod to run.
TOKEN_TIMEOUT, POD_TIMEOUT = 30.0, 300.0
#: Seconds after which the events of a pod are read if the pod gives no reason why it does not run.
SILENCE = 30.0
#: Seconds in which a new object may not be visible yet.
SETTLING = 10.0
#: Seconds after which a namespace that still exists is reported.
STUCK = 60.0


@dataclass
class Job:
    """The objects that are created for one node."""

    external_id: str
    namespace: str
    #: None: the node is the namespace.
    pod: str | None
    label: KubernetesLabel
    #: Labels of all created objects.
    labels: dict[str, str]
    log: Log
    #: None: no object has its own token here.
    token: str | None = USER
    #: The launch is over: nothing more is created.
    given_up: threading.Event = field(default_factory=threading.Event)
    #: Some object may exist that has to be deleted.
    begun: bool = True


@dataclass(frozen=True)
class Target:
    """The object whose deletion deletes the node."""

    kind: Kind
    name: str
    namespace: str | None = None


class Maker(Protocol):
    """Interface of the adapter for machines."""

    calls: CloudCalls

    def make(self, job: Job) -> None:
        """Create everything; on a thread of the lane "write"."""

    def remove(self, target: Target) -> str | None:
        """Delete it and return its uid; None: missing or not ours. On a thread of lane "delete"."""

    def find(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        """Return the object; None: it does not exist."""

    def warning(self, kind: Kind, name: str, namespace: str | None) -> str | None:
        """Return the latest warning about an object; None: none is known."""

    def target(self, external_id: str) -> Target: ...

    def wait_for(
        self, kind: Kind, name: str, namespace: str | None, wake: Callable[[], None]
    ) -> Waiting: ...

    def instance(self, job: Job, secret: Object | None, pod: Object | None) -> Instance: ...


@dataclass(frozen=True)
class Seen:
    """Current knowledge about an object; None: it does not exist."""

    found: Object | None


class News:
    """Changes of one object that the server reports, and the answers to our own queries."""

    def __init__(self, maker: Maker, target: Target, wake: Callable[[], None]) -> None:
        self._maker = maker
        self._target = target
        self.waiting = maker.wait_for(target.kind, target.name, target.namespace, wake)
        self._call: Future[Object | None] | None = None
        self._ask_at: float | None = None

    def next(self, until: float = math.inf, uid: str | None = None) -> Steps[Seen | None]:
        """Wait for the next change or answer. Return None at ``until``.

        :param uid: of an object that is being deleted: no query is needed once the server reports
            its deletion.
        """
        maker, target, waiting = self._maker, self._target, self.waiting
        while not uid or waiting.deleted != uid:
            news = waiting.take()
            if news is not None:
                return Seen(news)
            if self._call is not None and self._call.done():
                call, self._call = self._call, None
                return Seen(call.result())
            now = time.monotonic()
            if now >= until:
                return None
            if self._ask_at is None:
                self._ask_at = now + waiting.pause()
            if self._call is None and (waiting.doubtful() or now >= self._ask_at):
                self._ask_at = now + waiting.pause()
                self._call = maker.calls.run(
                    lambda: maker.find(target.kind, target.name, target.namespace), lane="read"
                )
            yield Wait(self._call, min(self._ask_at, until))
        return Seen(None)


class _Machine(SteppedMachine):
    def __init__(self, maker: Maker, log: Log) -> None:
        super().__init__()
        self._maker = maker
        self._log = log
        self._news: list[News] = []

    def _wait_for(self, target: Target) -> News:
        news = News(self._maker, target, self._wake)
        self._news.append(news)
        return news

    def _wait_no_more(self) -> None:
        for news in self._news:
            news.waiting.end()
        self._news = []

    def abandon(self) -> None:
        self._wait_no_more()
        super().abandon()


class CreateMachine(_Machine):
    def __init__(self, maker: Maker, job: Job) -> None:
        super().__init__(maker, job.log)
        self.job = job
        self.external_id = job.external_id

    def steps(self) -> Steps[Instance]:
        maker, job = self._maker, self.job
        # Before anything is created, so that no change is missed.
        token = (
            self._wait_for(Target(SECRET, job.token, job.namespace))
            if job.token is not None
            else None
        )
        pod = self._wait_for(Target(POD, job.pod, job.namespace)) if job.pod is not None else None
        try:
            yield from self.call(
                maker.calls.run(lambda: maker.make(job), lane="write"), self._remove_late
            )
        except Exception as error:
            self._wait_no_more()
            if not job.begun:
                self.external_id = None
            told = translate(error, classify, ErrorKind.QUOTA)
            if told is error:
                raise
            raise told from error
        secret = (yield from self._token(token)) if token is not None else None
        found = (yield from self._running(pod)) if pod is not None else None
        self._wait_no_more()
        self.trouble = None
        return maker.instance(job, secret, found)

    def _token(self, news: News) -> Steps[Object]:
        job, until = self.job, time.monotonic() + TOKEN_TIMEOUT
        while (seen := (yield from news.next(until))) is not None:
            if seen.found is not None and token_of(seen.found) is not None:
                return seen.found
        raise exceptions.LaunchNodepoolException(
            f"namespace {job.namespace}: the cluster has created no token of {job.token} after "
            f"{TOKEN_TIMEOUT:.0f} s"
        )

    def _running(self, news: News) -> Steps[Object]:
        job, since, warning, last = self.job, time.monotonic(), None, Seen(None)
        pod, silent_until = f"pod {job.pod} of namespace {job.namespace}", since + SILENCE
        while True:
            seen = yield from news.next(min(since + POD_TIMEOUT, silent_until))
            if seen is None:
                if silent_until > since + POD_TIMEOUT:
                    break
                silent_until = math.inf
                if self.trouble is None:
                    warning = yield from self._warning()
                    self.trouble = warning = warning or trouble.unnoticed(last.found or {})
            elif seen.found is not None:
                last, reason = seen, trouble.failed(seen.found)
                if reason is not None:
                    raise exceptions.LaunchStatusException(f"{pod}: {reason}")
                if trouble.is_running(seen.found):
                    return seen.found
                self.trouble = trouble.waits(seen.found) or warning
            elif time.monotonic() - since > SETTLING:
                raise exceptions.LaunchStatusException(f"{pod} has vanished")
        text = f"{pod} does not run after {POD_TIMEOUT:.0f} s"
        raise exceptions.LaunchNodepoolException(
            f"{text}: {self.trouble}" if self.trouble else text
        )

    def _warning(self) -> Steps[str | None]:
        job = self.job
        return (
            yield from self.call(
                self._maker.calls.run(
                    lambda: self._maker.warning(POD, str(job.pod), job.namespace), lane="read"
                )
            )
        )

    def abandon(self) -> None:
        self.job.given_up.set()
        super().abandon()

    def _remove_late(self, _call: Future[Any]) -> None:
        """Delete again: a call in progress may have created something after the deletion."""
        if self.job.begun:
            maker, target = self._maker, self._maker.target(self.job.external_id)
            maker.calls.run(lambda: maker.remove(target), lane="delete")


class DeleteMachine(_Machine):
    def __init__(self, maker: Maker, external_id: object, log: Log) -> None:
        super().__init__(maker, log)
        self.external_id = external_id
        self._target = maker.target(str(external_id)) if external_id else None

    def steps(self) -> Steps[None]:
        maker, target = self._maker, self._target
        if target is None:
            return
        since, news = time.monotonic(), self._wait_for(target)
        try:
            uid = yield from self.call(maker.calls.run(lambda: maker.remove(target), lane="delete"))
        except exceptions.FOREIGN:
            self._wait_no_more()
            raise
        if uid is not None:
            yield from self._wait_deleted(target, news, uid, since)
        self._wait_no_more()

    def _wait_deleted(self, target: Target, news: News, uid: str, since: float) -> Steps[None]:
        told: str | None = None
        while True:
            try:
                seen = yield from news.next(uid=uid)
            except ApiError as error:
                # Query again: only "not found" means that it no longer exists.
                self._log.warning(
                    "Checking the deletion of %s %s failed: %s",
                    target.kind.name,
                    target.name,
                    error,
                )
                continue
            if seen is None or seen.found is None:
                return
            if time.monotonic() - since > STUCK:
                self.trouble = trouble.stuck(seen.found)
                if self.trouble != told:
                    told = self.trouble
                    self._log.warning(
                        "%s %s is still being deleted: %s",
                        target.kind.name.capitalize(),
                        target.name,
                        told,
                    )


def token_of(secret: Object) -> str | None:
    """Return the decoded token once the cluster has added it and the CA certificate."""
    data = secret.get("data") or {}
    if not data.get("token") or not data.get("ca.crt"):
        return None
    try:
        return base64.b64decode(data["token"]).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
