"""Current problems, for ``/ready?verbose`` and ``nodepool problem-list``."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nodepool.texts import LONGEST as LONGEST
from nodepool.texts import one_line as one_line
from nodepool.texts import printable as printable

OVERDUE = 3600.0
"""Seconds after which an overdue attempt of an image is no longer expected."""
MOST_PUBLISHED = 200
"""Problems in a component record: ZooKeeper closes the connection of a client that sends more
than 1 MiB.
"""


def error_line(error: BaseException) -> str:
    """Return type and text of an error in one line, even if its ``__str__`` raises."""
    return one_line("".join(traceback.format_exception_only(error)))


def may_be_bug(error: BaseException) -> bool:
    """Return whether our code may have caused an error, and not a cloud or the network."""
    return type(error).__module__ == "builtins" and not isinstance(error, OSError)


def log_failure(
    log: logging.Logger | logging.LoggerAdapter[Any], error: BaseException, text: str, *args: object
) -> None:
    """Log a failure; with its traceback only if it may be a bug, or while debugging."""
    trace = may_be_bug(error) or log.isEnabledFor(logging.DEBUG)
    log.error(f"{text}: %s", *args, error_line(error), exc_info=error if trace else None)


@dataclass(frozen=True)
class Problem:
    """A problem of a provider, of one of its labels, or of the whole launcher."""

    text: str
    provider: str | None = None
    label: str | None = None
    #: The affected daemon, if it is not the launcher that reports the problem.
    host: str | None = None
    #: Suggestion for the operator.
    help: str = ""
    #: UNIX seconds, if known.
    since: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        place = ", ".join(
            f"{kind} {name}"
            for kind, name in (("provider", self.provider), ("label", self.label))
            if name
        )
        text = with_suggestion(self.text, self.help)
        return f"{place}: {text}" if place else text

    def record(self) -> dict[str, Any]:
        """Return the problem as stored in the launcher's component record."""
        found = {"provider": self.provider, "label": self.label, "problem": self.text}
        return found | {
            key: value for key, value in (("help", self.help), ("since", self.since)) if value
        }


def with_suggestion(text: str, suggestion: str) -> str:
    return f"{text}. Suggestion: {suggestion}" if suggestion else text


REMEDIES = {
    "flavor": "correct the flavor of the label, or create it in the cloud",
    "image": "correct the image of the label, or upload the image to the cloud",
    "held image": "see `nodepool explain image`",
    "quota": "raise the quota of the cloud, or use a smaller flavor",
    "launch": "repair what the message names; each request for the label retries",
    "scan": "check that sshd starts on the machine, that the launcher may reach its port "
    "(firewall, security group), and that "
    "`boot-timeout` is longer than its boot; each request for the label retries",
    "calls": "check the state of the cloud's API, the network to it, and the credentials; calls "
    "are retried",
    "sold-out": "add offers to `alternatives` of the labels; these are tried again at that time",
    "record": "repair or remove the damaged record in ZooKeeper, which the traceback in the "
    "launcher's log leads to",
    "deletion": "repair what the message names; the deletion is retried until it succeeds",
    "former driver": "restore the former driver of the provider, which deletes the node, and give "
    "the new driver a provider with another name",
}
"""What an operator can do about a problem, by the step that failed."""
LOG = "see the launcher's log for the reason"
"""What an operator can do if nothing else is known."""
DELETION = "deletion of node "
"""Prefix of problems that concern a node, but not its label."""


#: Reason of a build that nobody continues, until a builder of its machine starts.
BUILDER_ENDED = "its builder has ended, or has lost ZooKeeper, during the build"


def image_problems(progress: Any, clock: Callable[[], float] = time.time) -> list[Problem]:
    """Return images whose last build failed, and failed uploads, until one succeeds; by image.

    Failures whose next attempt is long overdue are omitted: the image was removed or paused.

    :param progress: records of the builders (``ProgressData``).
    """
    oldest = clock() - OVERDUE
    newest: dict[str, Any] = {}
    for build in progress.builds.values():
        other = newest.get(build.image)
        if not build.running and (other is None or (build.started or 0) > (other.started or 0)):
            newest[build.image] = build
    found = [
        Problem(
            one_line(f"image {image}: the last build failed: {build.reason or 'see its log'}"),
            host=build.builder or None,
            since=build.ended,
            help=f"start nodepool-builder on {build.builder}"
            if build.reason == BUILDER_ENDED
            else f"see `nodepool explain image {image}` for the end of its log",
        )
        for image, build in sorted(newest.items())
        if build.state == "failed" and (build.next_try is None or build.next_try > oldest)
    ]
    return found + [
        Problem(
            one_line(
                f"image {failure.image}: the last upload failed: "
                f"{failure.reason or 'see the log of its builder'}"
            ),
            failure.provider,
            help=""
            if not failure.reason
            else "repair what the message names; the upload is retried"
            if failure.next_try is not None
            else f"run `nodepool image-build {failure.image}`",
            since=failure.time,
        )
        for _key, failure in sorted(progress.failures.items())
        if failure.next_try is None or failure.next_try > oldest
    ]


def as_record_list(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return the problems for the component record, shortened to what it can hold."""
    shown = [problem.record() for problem in problems[:MOST_PUBLISHED]]
    if left := len(problems) - len(shown):
        shown.append(Problem(f"and {left} more; /ready?verbose of this launcher has all").record())
    return shown


class LabelProblems:
    """Why labels of one provider do not work; kept until the same step succeeds.

    The failed step (``what``) is a key of :data:`REMEDIES`, or the pool of a driver that raised an
    exception.
    """

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Problem] = {}
        self._solved: dict[tuple[str, str], Callable[[], bool]] = {}

    def note(
        self,
        label: str,
        what: str,
        reason: object,
        solved: Callable[[], bool] = lambda: False,
        remedy: str | None = None,
    ) -> None:
        """Note why a step has failed.

        :param solved: returns whether others have solved it, although the step was not repeated.
        :param remedy: key of :data:`REMEDIES`; default: the step.
        """
        text = one_line(reason)
        # Messages for the log name the pool or label already.
        start, sep, rest = text.partition(f", label {label}: ")
        if sep and start.startswith(f"provider {self.provider}"):
            text = rest
        suggestion = REMEDIES.get(remedy or what, "")
        if not text:
            text, suggestion = (
                f"{what} failed without a message ({type(reason).__name__})",
                suggestion if remedy else LOG,
            )
        with self._lock:
            self._known[label, what] = Problem(text, self.provider, label, help=suggestion)
            self._solved[label, what] = solved

    def driver_failed(self, labels: Iterable[str], pool: str, error: BaseException) -> None:
        """Note an exception of the driver; kept until the pool fulfills a request for the
        labels.
        """
        for label in set(labels):
            self.note(label, pool, f"pool {pool}: its driver failed: {error!r}")

    def clear(self, label: str, what: str) -> None:
        if self._known:
            with self._lock:
                self._known.pop((label, what), None)

    def of(self, labels: Iterable[str | None]) -> list[Problem]:
        """Return what is wrong with these labels."""
        wanted = set(labels)
        return [
            problem
            for problem in self.listed()
            if problem.label in wanted and not problem.text.startswith(DELETION)
        ]

    def listed(self) -> list[Problem]:
        with self._lock:
            return [
                problem for key, problem in sorted(self._known.items()) if not self._solved[key]()
            ]
