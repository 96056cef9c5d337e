"""Explain the state of an object: one explanation for command line, pages and API."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodepool.base.offered_labels import joined, why_not_offered
from nodepool.base.problems import image_problems
from nodepool.reasons import Code
from nodepool.status import causes, cluster, drains, fleets, known
from nodepool.status import nodes as node_facts
from nodepool.status.causes import FLOWING, groups_of
from nodepool.status.image_details import facts_of as image_facts
from nodepool.status.images import build_request_state
from nodepool.status.known import Cause
from nodepool.status.once import Facade, Once
from nodepool.status.results import format_duration, use_text
from nodepool.status.rotations import rotation_of
from nodepool.status.timeline import steps_of
from nodepool.texts import counted, printable
from nodepool.zk.components import RegisteredPool
from nodepool.zk.drains import Drain, covering, shown
from nodepool.zk.history import HistoryReader, unique
from nodepool.zk.mirror.feed import KILLED, USER, Event, describe
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    FULFILLED,
    INIT,
    PENDING,
    READY,
    REQUESTED,
    NodeRequest,
    RecordError,
)

#: Types of events that node managers report.
REPORTED_BY_HOSTS = (KILLED, "node-usage")
KINDS = ("request", "label", "node", "image", "provider", "fleet")
MOST_NODES = 10
"""Nodes of a request whose events are part of its timeline, and whose use it shows."""
LAUNCHING, POOL_PAUSED = Code.LAUNCHING.word, Code.POOL_PAUSED.word
Clock = Callable[[], float]


class Unknown(Exception):
    """The object does not exist, and did not exist recently."""


@dataclass
class Candidate:
    """A pool or provider that may serve it, and what prevents that."""

    name: str
    verdict: str
    #: Seconds since it is so, if known.
    age: float | None = None
    help: str = ""


@dataclass
class Explanation:
    kind: str
    name: str
    #: One sentence; includes the cause if something is wrong.
    answer: str = ""
    #: The cause alone, and what an operator can do; empty: nothing is wrong, or nothing can be
    #: done.
    cause: str = ""
    suggestion: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: Title -> last lines of a log.
    logs: dict[str, str] = field(default_factory=dict)
    history: list[Event] = field(default_factory=list)
    #: Of a request: result of :func:`.timeline.steps_of`.
    timeline: list[dict[str, Any]] = field(default_factory=list)
    #: Events of the last seconds may not be written yet.
    history_is_late: bool = False
    #: It does not exist any more; all is from the history.
    gone: bool = False

    def record(self) -> dict[str, Any]:
        """Return the explanation as JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "answer": self.answer,
            "cause": self.cause,
            "suggestion": self.suggestion,
            "facts": dict(self.facts),
            "candidates": [vars(candidate) for candidate in self.candidates],
            "problems": self.problems,
            "logs": self.logs,
            "timeline": self.timeline,
            "gone": self.gone,
            "history": [{**event, "text": describe(event)} for event in self.history],
        }

    def text(self) -> str:
        lines = [f"{self.kind} {self.name}: {self.answer}"]
        if self.suggestion:
            lines.append(f"  suggestion: {self.suggestion}")
        lines += [f"  {title}: {value}" for title, value in self.facts]
        for candidate in self.candidates:
            age = f" (for {format_duration(candidate.age)})" if candidate.age is not None else ""
            lines.append(f"  {candidate.name}: {candidate.verdict}{age}")
            if candidate.help:
                lines.append(f"    suggestion: {candidate.help}")
        lines += [f"  problem: {problem}" for problem in self.problems]
        for title, text in self.logs.items():
            lines += [f"  {title}:", *(f"    | {line}" for line in text.splitlines())]
        if self.history:
            lines.append("  history:")
            for event in self.history:
                lines.append(f"    {_moment(event['time'])}  {describe(event)}")
                lines += [f"      | {line}" for line in str(event.get("tail", "")).splitlines()]
        if self.history_is_late:
            lines.append(
                "  (the last seconds may not be in the history yet; the pages of a launcher have "
                "it)"
            )
        # Fields with values from others must not start new lines.
        return "\n".join(printable(line.replace("\n", "\\n")) for line in lines)


LATE = " (deleted ones appear in the history after up to 5 s)"


def _moment(seconds: float) -> str:
    moment = time.localtime(seconds)
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", moment)
        + f".{int(seconds % 1 * 1000):03} {moment.tm_zone}"
    )


def explain(
    zk: Facade,
    kind: str,
    name: str,
    history: HistoryReader,
    recent: Sequence[Event] = (),
    clock: Clock = time.time,
) -> Explanation:
    """Return the explanation of an object.

    :param recent: events of this process, of which some are not written yet.
    :raises Unknown: the object does not exist and has no history.
    :raises KazooException: ZooKeeper cannot be reached.
    """
    found = _EXPLAIN[kind](Once(zk), name, clock)
    if kind in ("request", "node"):
        found.history = _history(zk, history, recent, kind, name)
        if kind == "request":
            nodes = {
                str(node)
                for event in found.history
                for node in (event.get("node"), *event.get("nodes", ()))
                if node
            }
            of_nodes = [
                _history(zk, history, recent, "node", node) for node in sorted(nodes)[:MOST_NODES]
            ]
            found.timeline = steps_of(itertools.chain(found.history, *of_nodes))
            found.history += [
                event for event in itertools.chain(*of_nodes) if event["type"] in REPORTED_BY_HOSTS
            ]
            found.history.sort(key=lambda event: event["time"])
        if found.history and not found.answer:
            _set_past(
                found, _history(zk, history, recent, "request", _request_of(found.history)), clock()
            )
        found.history = _folded(zk, found.history)
    if not found.answer:
        missing = (
            why_not_offered([name], zk.getRegisteredPools(), "launcher")
            if kind == "label"
            else None
        )
        missing = fleets.UNKNOWN if kind == "fleet" else missing
        raise Unknown(
            f"{kind} {name} is not known"
            + (f": {missing}" if missing else LATE * (kind in ("request", "node")))
        )
    return found


def _request_of(events: Sequence[Event]) -> str:
    """Return the last request that these events name; empty: none."""
    return next((str(event["request"]) for event in reversed(events) if event.get("request")), "")


def _set_past(found: Explanation, of_request: Sequence[Event], now: float) -> None:
    """Explain a deleted request or node by its events and those of its last request."""
    fields: dict[str, Any] = {}
    for event in (*of_request, *found.history):
        fields |= event
    found.gone = True
    found.facts = [
        (key, counted(fields[key]) if isinstance(fields[key], list) else str(fields[key]))
        for key in _PAST
        if key in fields and key.removesuffix("s") != found.kind
    ]
    removed = next(
        (event for event in reversed(found.history) if event["type"] == f"{found.kind}-removed"),
        None,
    )
    ends = {
        FULFILLED: "served: its requestor accepted the nodes",
        FAILED: "failed, and was removed by its requestor",
    }
    found.answer = "no longer exists"
    if removed is not None:
        before = str(removed.get("before"))
        what = "deleted" if found.kind == "node" else ends.get(before, f"canceled (was {before})")
        found.answer = f"{what} {format_duration(max(0.0, now - removed['time']))} ago"


_PAST = ("labels", "requestor", "nodes", "provider", "pool", "request", *USER.values())
"""Fields of events that are facts of what no longer exists."""


def _history(
    zk: Facade, history: HistoryReader, recent: Sequence[Event], kind: str, name: str
) -> list[Event]:
    found = unique(
        [
            *history.read(zk.kazoo_client, kind, name),
            *(event for event in recent if event.get(kind) == name),
        ]
    )
    # Node managers report what they like; other events are of launchers.
    known = {event.get("provider") for event in found if event["type"] not in REPORTED_BY_HOSTS}
    return [
        event
        for event in found
        if event["type"] not in REPORTED_BY_HOSTS or event.get("provider") in known or not known
    ]


def _folded(zk: Facade, events: list[Event]) -> list[Event]:
    """Return the events, with all declines of the request combined at the time of the last."""
    declined = [event for event in events if event["type"] == "request-declined"]
    if not declined:
        return events
    name, others = known.place_of(zk, str(declined[0].get("launcher"))), len(declined) - 1
    name += f" and {known.count_of(others, 'other pool')}" if others else ""
    return [
        {**event, "launcher": name} if event is declined[-1] else event
        for event in events
        if event not in declined[:-1]
    ]


def _problems(zk: Facade, concerns: Callable[[object, object], bool]) -> list[str]:
    """Return the published problems whose label and provider concern the caller."""
    rows = [row for row in known.published_problems(zk) if concerns(row["label"], row["provider"])]
    places = [
        "".join(f", {key} {row[key]}" for key in ("provider", "label") if row[key]).removeprefix(
            ", "
        )
        for row in rows
    ]
    return sorted(
        {
            f"{place}: {row['problem']}" if place else str(row["problem"])
            for place, row in zip(places, rows, strict=True)
        }
    )


# -- requests


def places(requests: Iterable[NodeRequest]) -> dict[str, int]:
    """Return open request id -> its queue position.

    The position is the number of earlier requests that share a label, plus one.
    """
    ordered = []
    for request in requests:
        if request.state in (REQUESTED, PENDING):
            with contextlib.suppress(RecordError):
                ordered.append((request.priority, frozenset(request.node_types), request.id or ""))
    ordered.sort(key=lambda entry: entry[0])
    #: Of the requests so far: number per set of labels, and the sets that contain a label.
    count: Counter[frozenset[str]] = Counter()
    having: dict[str, set[frozenset[str]]] = {}
    found = {}
    for _priority, labels, request_id in ordered:
        found[request_id] = 1 + sum(
            count[each] for each in set().union(*(having.get(label, ()) for label in labels))
        )
        count[labels] += 1
        for label in labels:
            having.setdefault(label, set()).add(labels)
    return found


def _request(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("request", name)
    request = zk.getNodeRequest(name, cached=True) if "/" not in name else None
    now = clock()
    if request is None:
        found.answer = node_facts.held_after(zk, name, now)
        return found
    found.facts = [
        ("labels", counted(request.node_types)),
        ("state", f"{request.state} for {format_duration(now - (request.state_time or now))}"),
    ]
    for title, value in (
        ("requestor", request.requestor),
        ("tenant", request.tenant_name),
        ("nodes", ", ".join(request.nodes)),
    ):
        if value:
            found.facts.append((title, str(value)))
    found.facts += node_facts.data_of(request.requestor_data, "requestor data")
    pools = zk.getRegisteredPools()
    found.problems = _problems(zk, lambda label, _provider: label in request.node_types)
    if request.state == FULFILLED:
        found.answer = "fulfilled; its requestor has to accept it"
        return found
    found.candidates = _declined(zk, request)
    cause = causes.of_request(zk, request, clock)
    _set(found, cause, "failed" if request.state == FAILED else "")
    if request.state == FAILED:
        return found
    _open_request(zk, request, found, pools, now, cause)
    return found


def _set(found: Explanation, cause: Cause | None, prefix: str = "") -> None:
    """Set the answer to the cause."""
    if cause is not None:
        found.answer = f"{prefix}: {cause.text}" if prefix else cause.text
        found.cause, found.suggestion = cause.text, cause.remedy


def _declined(zk: Facade, request: NodeRequest) -> list[Candidate]:
    """Return the pools that declined it.

    Those that merely do not offer its labels are combined in one line.
    """
    found: list[Candidate] = []
    others: list[Candidate] = []
    for place, said in known.declines_of(zk, request):
        why = said.text.partition(": ")[2]
        (others if why.startswith(causes.NOT_OFFERED) else found).append(
            Candidate(place, f"declined: {why}", help=said.help)
        )
    if len(others) > 1:
        name = f"{len(others)}{' other' if found else ''} pools"
        return [*found, Candidate(name, f"do not offer {joined(set(request.node_types))}")]
    return found + others


def _open_request(
    zk: Facade,
    request: NodeRequest,
    found: Explanation,
    pools: list[RegisteredPool],
    now: float,
    cause: Cause,
) -> None:
    reports = zk.readReports()
    groups = groups_of(reports, request.id or "")
    place = places(zk.readRequests()).get(request.id or "")
    if place is not None:
        if place > 1 or cause.code != POOL_PAUSED:  # otherwise a request for other labels is first
            found.facts.append(("queue position", f"{place}"))
        expected = (
            expected_wait(rates(reports), request.node_types, place)
            if cause.code in FLOWING
            else None
        )
        if expected is not None:
            found.facts.append(
                (
                    "estimated wait",
                    f"about {known.seconds_text(_rounded(expected))} (from recently served "
                    "requests)",
                )
            )
    age = now - (request.created_time or request.state_time or now)
    told = _reasons(groups, found, now, max(0.0, age))
    offering = [
        pool
        for pool in pools
        if set(request.node_types) <= pool.labels and pool.id not in request.declined_by
    ]
    launching = cause.code == LAUNCHING
    for pool in sorted(offering, key=lambda pool: str(pool.id)):
        label = f"{pool.provider_name}-{pool.name}"
        if label not in told:
            first = causes.pending_at(zk, label)
            verdict = "offers it; its launcher reports no reason why it does not serve it"
            if not pool.is_open_to(frozenset(request.node_types)):
                verdict = f"full; request {first} comes first there" if first else "full"
            if launching:
                verdict = "not needed: another pool launches the nodes"
            found.candidates.append(Candidate(known.place_of(zk, str(pool.id)), verdict))


def _rounded(seconds: float) -> float:
    """Round an estimate to its precision."""
    return (
        seconds
        if seconds < 10
        else round(seconds / 10) * 10
        if seconds < 120
        else round(seconds / 60) * 60
    )


def _reasons(
    groups: list[tuple[dict[str, Any], dict[str, Any]]],
    found: Explanation,
    now: float,
    longest: float,
) -> set[str]:
    """Add what launchers report of their pools; return these pools.

    :param longest: the age of the request, which limits the age of a reason.
    """
    pools = set()
    for report, group in groups:
        age = min(longest, now - group["since"])
        for reason in group["reasons"]:
            pools.add(reason["pool"])
            where = (
                f"{reason['pool']} on {report['name']}"
                if reason["pool"]
                else f"launcher {report['name']}"
            )
            found.candidates.append(Candidate(where, reason["text"], age, reason["help"]))
    return pools


def rates(reports: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return label -> recently served requests per minute, if known."""
    found: dict[str, float] = {}
    for report in reports:
        for label, entry in report["lately"].items():
            if (rate := entry.get("a_minute", 0.0)) > 0:
                found[label] = max(rate, found.get(label, 0.0))
    return found


def expected_wait(served: Mapping[str, float], labels: Iterable[str], place: int) -> float | None:
    """Return the expected seconds, for the slowest label; None: unknown.

    :param served: result of :func:`rates`.
    """
    slowest = min((served.get(label, 0.0) for label in labels), default=0.0)
    return 60.0 * place / slowest if slowest > 0 else None


# -- other objects


def _node(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("node", name)
    node = zk.getNode(name, cached=True) if "/" not in name else None
    if node is None:
        return found
    now = clock()
    place = f"{node.provider}-{node.pool}"
    age = format_duration(now - (node.state_time or now))
    found.facts = [
        ("labels", ", ".join(node.type)),
        ("state", f"{node.state} for {age}"),
        ("pool", place),
    ]
    found.facts += node_facts.facts_of(zk, node, now)
    holders = zk.getNodeLockContenders(node)
    found.facts.append(
        (
            "lock",
            f"held by {holders[0] or 'a client without a name, such as Zuul'}"
            if holders
            else "free",
        )
    )
    if node.state not in ("ready", "in-use", "hold"):
        found.problems = _problems(
            zk, lambda label, provider: label in node.type and provider == node.provider
        )
    found.answer = {
        "init": "queued for launch",
        "building": "the machine is being launched",
        "ready": "given to a request" if node.allocated_to else "free",
        "in-use": "in use",
        "used": "used; it is deleted as soon as its lock is released",
        "hold": f"held; `nodepool delete {node.id}` releases it",
        "deleting": "the machine is being deleted; the deletion is retried until it succeeds",
        "failed": "its launch failed; it is being deleted",
        "aborted": "its launch was aborted because of a quota; it is being deleted",
    }.get(str(node.state), str(node.state))
    if node.state in (INIT, BUILDING, DELETING):
        # A failed deletion is a problem of the provider, not of a label.
        stalled = (
            "the deletion has not succeeded" if node.state == DELETING else "the launch is stalled"
        )
        _set(found, causes.of_building(zk, node, clock), stalled)
    elif (stuck := known.of_node(zk, node, clock)) is not None:
        _set(found, stuck)
    elif (stranded := known.of_stranded(zk, node)) is not None:
        _set(found, stranded, found.answer)
    elif node.state == READY and (drain := drains.of_free_node(zk, node)) is not None:
        _set(found, causes.of_drain(drain), found.answer)
    elif node.state == READY and (rotation := rotation_of(zk, node)) is not None:
        when = "" if node.allocated_to is None else " if it becomes free again"
        found.answer += f"; it is replaced{when}: {rotation.why}"
    if node.provider not in known.served_providers(zk):
        found.answer += (
            f"; no launcher has provider {node.provider}: nothing is done with it until one has"
        )
    return found


def _pools(
    zk: Facade, pools: list[RegisteredPool], does: str, labels: Collection[str] = ()
) -> Iterator[Candidate]:
    for pool in sorted(pools, key=lambda pool: str(pool.id)):
        verdict = "full" if pool.paused else f"{does}, priority {pool.priority:g}"
        yield Candidate(
            known.place_of(zk, pool.id), shown(drains.of_pool(zk, pool, labels)) or verdict
        )


def _counts(states: Counter[str] | None) -> str:
    return (
        ", ".join(f"{count} {state}" for state, count in sorted((states or {}).items())) or "none"
    )


def _label(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("label", name)
    reports, pools = zk.readReports(), zk.getRegisteredPools()
    nodes = zk.countNodes().labels.get(name)
    waiting = [
        r for r in zk.readRequests() if name in r.node_types and r.state in (REQUESTED, PENDING)
    ]
    configured = [report for report in reports if name in report["labels"]]
    offering = [pool for pool in pools if name in pool.labels]
    providers = {pool.provider_name for pool in offering}
    if not (nodes or waiting or configured or offering):
        return found
    found.facts = [("nodes", _counts(nodes)), ("requests waiting", str(len(waiting)))]
    wanted = causes.min_ready_of(zk).get(name, 0)
    if wanted:
        found.facts.append(("min-ready", f"{zk.countNodes().free[name]} of {wanted} ready"))
    for report in configured:
        lately = report["lately"].get(name, {})
        times = ", ".join(
            f"{key} {known.seconds_text(lately[key])}"
            for key in ("launch", "wait")
            if key in lately
        )
        found.facts.append((f"launcher {report['name']}", times or "not launched recently"))
    found.candidates += _pools(zk, offering, "offers it", [name])
    found.problems = _problems(
        zk, lambda label, provider: label == name or (not label and provider in providers)
    )
    user_requests = [request for request in waiting if request.requestor != MIN_READY]
    number = len(user_requests)
    cause = causes.of_label(zk, name, clock)
    if cause is None and user_requests:
        cause = causes.of_request(
            zk, min(user_requests, key=lambda request: str(request.id)), clock=clock
        )
    if cause is None and wanted:
        cause = causes.of_min_ready(zk, name, wanted, clock)
    found.answer = "offered; no request waits for it"
    _set(found, cause, f"{number} request{'s' * (number != 1)} waiting" if number else "")
    return found


def _image(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("image", name)
    data, progress = zk.readImages(), known.read_progress(zk)
    builds = [build for build in data.builds if build.image_name == name]
    configured = known.configured_images(zk).get(name)
    if name not in data.names and not builds and configured is None:
        return found
    uploads = [upload for upload in data.uploads if upload.image_name == name]
    now = clock()
    found.facts += image_facts(zk, name, now)
    found.facts += [
        (
            f"build {build.id}",
            f"{build.state} for {format_duration(now - (build.state_time or now))}",
        )
        for build in sorted(builds, key=lambda build: build.state_time or 0)
    ]
    running = [each for each in progress.builds.values() if each.image == name and each.running]
    if name in data.requests:
        waits = "" if zk.getBuilders() else "; no builder is running"
        found.facts.append(("build request", f"{build_request_state(name, data)}{waits}"))
    problems = [
        problem for problem in image_problems(progress, clock) if f"image {name}:" in problem.text
    ]
    found.problems = [
        f"provider {problem.provider}: {problem.text}" if problem.provider else problem.text
        for problem in problems
    ]
    last_failed = any(problem.provider is None for problem in problems)
    failed = [
        each
        for each in progress.builds.values()
        if each.image == name and each.state == FAILED and last_failed
    ]
    # The logs of earlier failures add nothing.
    for each in [*running, *sorted(failed, key=lambda each: each.ended or 0)[-1:]]:
        if each.tail:
            title = (
                f"end of the log of build {each.build} ({each.state} on {each.builder}, {each.log})"
            )
            found.logs[title] = "\n".join(each.tail)
    ready = sum(1 for upload in uploads if upload.state == "ready" and not upload.held_back)
    found.answer = f"{ready} upload{'s' * (ready != 1)} can be used"
    _set(found, known.of_image(zk, name, configured, clock))
    if "nodepool explain image" in found.suggestion:  # this is its answer
        found.suggestion = "repair what the end of its log says; the build is retried"
    if not found.cause and (drain := covering(zk.readNotes(Drain), [f"image {name}"])) is not None:
        _set(found, causes.of_drain(drain), found.answer)
    if ready and name in data.paused:
        found.answer = f"paused; {found.answer}; `nodepool image-unpause {name}` resumes its builds"
    elif ready and running:
        found.answer = f"being built; {found.answer}"
    elif not ready and not found.cause:
        found.answer = "no upload can be used yet"
    return found


def _provider(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("provider", name)
    reports = zk.readReports()
    nodes = zk.countNodes().providers.get(name)
    pools = [pool for pool in zk.getRegisteredPools() if pool.provider_name == name]
    having = [
        report for report in reports if name in {**report["providers"], **report["not_running"]}
    ]
    if not (nodes or pools or having):
        return found
    found.facts.append(("nodes", _counts(nodes)))
    running, refused = False, "no launcher runs it; its nodes remain unchanged"
    for report in having:
        host = f"launcher {report['name']}"
        why = report["not_running"].get(name)
        if why is not None:
            found.candidates.append(Candidate(host, f"does not run it: {why}"))
            refused = f"does not run: {why}"
            continue
        running = True
        entry = report["providers"][name]
        found.facts.append(
            (
                host,
                f"driver {entry['driver']}, launching "
                f"{known.count_of(entry['launching'] or 0, 'node')}",
            )
        )
        calls = cluster.calls_of(entry["calls"])
        if calls["pace"]:
            found.facts.append(("call rate", calls["pace"]))
        if calls["error"]:
            age = (
                format_duration(clock() - calls["error_time"])
                if calls["error_time"] is not None
                else "some time"
            )
            found.facts.append(("last failed call", f"{age} ago, {calls['error']}"))
        for resource, limit in sorted(entry["limits"].items()):
            used = entry["used"].get(resource, 0)
            if limit or used:
                found.facts.append(
                    (f"limit of {resource}", f"{use_text(resource, used, limit)} used by our nodes")
                )
    found.candidates += _pools(zk, pools, "takes requests")
    found.problems = _problems(zk, lambda _label, provider: provider == name)
    found.answer = "runs" if running or pools else refused
    _set(found, causes.of_provider(zk, name, clock), found.answer)
    return found


def _fleet(zk: Facade, name: str, clock: Clock) -> Explanation:
    found = Explanation("fleet", name)
    waiting, working = fleets.leases_of(zk, name)
    found.facts = list(fleets.facts_of(waiting, working))
    if waiting:
        oldest = min(waiting, key=lambda request: str(request.id))
        _set(
            found,
            causes.of_request(zk, oldest, clock=clock),
            f"{known.count_of(len(waiting), 'runner')} waiting for a node",
        )
    elif working:
        found.answer = f"no runner waits for a node; {fleets.ELSEWHERE}"
    return found


_EXPLAIN: dict[str, Callable[[Facade, str, Clock], Explanation]] = {
    "request": _request,
    "label": _label,
    "node": _node,
    "image": _image,
    "provider": _provider,
    "fleet": _fleet,
}
