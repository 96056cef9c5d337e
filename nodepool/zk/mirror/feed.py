"""Events in the cluster: changes that the mirror sees, and events of this launcher.

An event is a JSON object with ``number`` (increasing by one within a process, and larger than
those of earlier processes), ``time`` (UNIX seconds), ``type`` (:data:`TYPES`) and the fields of
its object; ``zxid`` is the transaction that changed it. Events are kept for a while in memory, for
subscribers, and in ZooKeeper (:mod:`nodepool.zk.history`).
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nodepool.base.problems import one_line
from nodepool.texts import counted, killed
from nodepool.zk.components import ComponentTree
from nodepool.zk.mirror.images import ImageTree
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.mirror.notes import NoteTree
from nodepool.zk.mirror.progress import ProgressTree
from nodepool.zk.mirror.requests import RequestTree
from nodepool.zk.records import (
    ABORTED,
    BUILDING,
    DELETING,
    FAILED,
    FULFILLED,
    HOLD,
    IN_USE,
    LARGEST,
    READY,
    USED,
    Node,
    NodeRequest,
)
from nodepool.zk.reports import ReportTree

Event = dict[str, Any]
#: The type that is written to the history immediately.
KILLED = "node-killed"
Listener = Callable[[Event], Any]

TYPES = {
    "request-submitted": "a request was created",
    "request-changed": "the state of a request has changed",
    "request-declined": "a pool has declined a request",
    "request-removed": "a request was deleted: its requestor has accepted or withdrawn it",
    "node-created": "a node record was created: the node is being launched",
    "node-changed": "the state of a node has changed",
    "node-allocated": "a node was allocated to a request, or deallocated",
    "node-removed": "a node was deleted",
    "node-reconciled": "a launcher deletes or deallocates a node that nobody uses, and why",
    "node-step": "a launcher reports the progress of a launch",
    "launch-failed": "an attempt to launch a node failed",
    "node-usage": "what a sliver has used until its end, from its node manager",
    KILLED: "a process was killed because the node's memory limit was reached",
    "console-log": "the last console lines of a machine that did not respond",
    "image-changed": "builds, uploads or the pause of an image have changed",
    "action": "somebody has changed something with a command or over the API",
    "drain-changed": "a drain was begun, changed or ended",
    "component-changed": "a launcher, builder or pool was registered or unregistered",
}
#: Key in the data that Zuul or a lease stores -> field of an event and title of a fact.
USER = {
    "tenant_name": "tenant",
    "project_name": "project",
    "pipeline_name": "pipeline",
    "job_name": "job",
    "build": "build",
    "build_set_uuid": "buildset",
    "owner": "owner",
}
#: Events in memory.
KEPT = 5000


#: Not a recorded event: it says that data based on the reports have to be read again.
REPORTED: Event = {"number": 0, "time": 0.0, "type": "report-changed"}


class Mirror:
    """The mirrors of a facade.

    None for trees that are not mirrored: with ``enable_cache`` off, or in builders.
    """

    node_tree: NodeTree
    request_tree: RequestTree
    image_tree: ImageTree
    component_tree: ComponentTree
    progress_tree: ProgressTree
    report_tree: ReportTree
    note_tree: NoteTree


class Feed:
    """The events of one process.

    Listeners are called on the thread that brings the event, and must not block.
    """

    log = logging.getLogger("nodepool.Feed")

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: collections.deque[Event] = collections.deque(maxlen=KEPT)
        # Milliseconds: clients continue after a restart with the number of an earlier process, and
        # none records 1000 events per second for long.
        self._number = self._first = time.time_ns() // 10**6
        #: Events up to this number are in ZooKeeper.
        self.stored = self._first
        #: Listener -> whether it also gets changes of reports.
        self._listeners: dict[Listener, bool] = {}
        #: The initial content of the mirror causes no events.
        self._begun = False

    def attach(self, zk: Mirror) -> None:
        """Listen to the trees of this facade, which has a mirror."""
        zk.node_tree.listeners.append(self._node_changed)
        zk.request_tree.listeners.append(self._request_changed)
        zk.image_tree.listeners.append(self._image_changed)
        zk.component_tree.listeners.append(self._component_changed)
        zk.report_tree.listeners.append(self._report_changed)

    def begin(self) -> None:
        """Start to record events: the mirror is complete."""
        self._begun = True

    # -- subscribers

    def subscribe(self, listener: Listener, reports: bool = False) -> None:
        """Add a listener.

        :param reports: it also gets :data:`REPORTED` when a launcher updates its report.
        """
        with self._lock:
            self._listeners[listener] = reports

    def unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.pop(listener, None)

    @property
    def number(self) -> int:
        return self._number

    def since(self, number: int) -> tuple[list[Event], bool]:
        """Return the later events that are still kept, and whether these are all.

        A number outside those of this process is from another one: all kept events may be new.
        """
        with self._lock:
            if not self._first <= number <= self._number:
                return list(self._events), False
            found = [event for event in self._events if event["number"] > number]
            return found, number >= self._number - len(found)

    # -- sources

    def note(self, kind: str, **fields: object) -> None:
        """Record an event that only this process knows; None and empty values are omitted."""
        self._add(kind, {"noted": True, **fields})

    def _add(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            self._number += 1
            event: Event = {"number": self._number, "time": round(self._clock(), 3), "type": kind}
            event.update(
                (name, value) for name, value in fields.items() if value not in (None, "", [])
            )
            self._events.append(event)
            listeners = list(self._listeners)
        self._notify(listeners, event)

    def _notify(self, listeners: Iterable[Listener], event: Event) -> None:
        for listener in listeners:
            try:
                listener(event)
            except Exception:  # it affects that listener only
                self.log.exception("A listener failed with event %s:", event["type"])

    def _node_changed(self, node_id: str, old: Node | None, new: Node | None) -> None:
        if not self._begun:
            return
        node = new or old
        if node is None:
            return
        fields = {
            "node": node_id,
            "provider": node.provider,
            "pool": node.pool,
            "labels": list(node.type),
            "zxid": node.stat.mzxid if node.stat is not None else None,
        }
        if old is None:
            self._add("node-created", {**fields, "state": node.state, "request": node.allocated_to})
        elif new is None:
            self._add("node-removed", {**fields, "before": old.state})
        else:
            if old.state != new.state:
                external = new.external_id if isinstance(new.external_id, str) else None
                launched = (
                    seconds_between(new.created_time, new.state_time)
                    if (old.state, new.state) == (BUILDING, READY)
                    else None
                )
                more = {"request": new.allocated_to, "external_id": external, "seconds": launched}
                if new.state in (IN_USE, HOLD):
                    more |= user_of(new.tenant_name, new.user_data)
                self._add(
                    "node-changed", {**fields, "state": new.state, "before": old.state, **more}
                )
            if old.allocated_to != new.allocated_to:
                self._add(
                    "node-allocated",
                    {
                        **fields,
                        "state": new.state,
                        "request": new.allocated_to or old.allocated_to,
                        "taken": not new.allocated_to,
                    },
                )

    def _request_changed(
        self, request_id: str, old: NodeRequest | None, new: NodeRequest | None
    ) -> None:
        request = new or old
        if not self._begun or request is None:
            return
        fields = {
            "request": request_id,
            "labels": list(request.node_types),
            "requestor": request.requestor,
            "zxid": request.stat.mzxid if request.stat is not None else None,
        }
        if old is None:
            user = user_of(request.tenant_name, request.requestor_data)
            self._add("request-submitted", {**fields, "state": request.state, **user})
        elif new is None:
            self._add("request-removed", {**fields, "before": old.state})
        else:
            for launcher_id in new.declined_by:
                if launcher_id not in old.declined_by:
                    self._add("request-declined", {**fields, "launcher": launcher_id})
            if old.state != new.state:
                waited = (
                    seconds_between(new.created_time, new.state_time)
                    if new.state == FULFILLED
                    else None
                )
                more = {"nodes": list(new.nodes), "seconds": waited}
                self._add(
                    "request-changed", {**fields, "state": new.state, "before": old.state, **more}
                )

    def _image_changed(self, image: str) -> None:
        if self._begun:
            self._add("image-changed", {"image": image})

    def _component_changed(self, path: str, gone: bool) -> None:
        if self._begun:
            kind, _, name = path.rpartition("/components/")[2].partition("/")
            self._add(
                "component-changed",
                {"kind": kind, "component": name, "state": "gone" if gone else "registered"},
            )

    def _report_changed(self) -> None:
        if self._begun:
            with self._lock:
                listeners = [listener for listener, reports in self._listeners.items() if reports]
            self._notify(listeners, REPORTED)


def user_of(tenant: str | None, data: object) -> dict[str, str]:
    """Return who uses a node or has submitted a request, by the values of ``USER``.

    :param data: of the requestor: Zuul's, or one with the terms of a lease.
    """
    stored = data if isinstance(data, dict) else {}
    terms = stored.get("lease")
    values = {
        **stored,
        **(terms if isinstance(terms, dict) else {}),
        "tenant_name": tenant or stored.get("tenant_name"),
    }
    return {
        field: one_line(value)
        for key, field in USER.items()
        if isinstance(value := values.get(key), str) and value
    }


def seconds_between(begin: object, end: object) -> float | None:
    """Return the seconds between two times; None if a clock was wrong or a time is missing."""
    if not isinstance(begin, (int, float)) or not isinstance(end, (int, float)):
        return None
    # Compared first: a number in a record may be too large for a subtraction.
    return (
        round(float(end - begin), 3)
        if abs(begin) < LARGEST and abs(end) < LARGEST and 0 <= end - begin < 1e9
        else None
    )


def matches(event: Event, filters: Mapping[str, Iterable[str]]) -> bool:
    """Return whether the event has, for each field, one of the values.

    A list field must contain one of them.
    """
    for name, wanted in filters.items():
        value = event.get(name)
        values = value if isinstance(value, list) else [value]
        if not {str(item) for item in values if item is not None} & set(wanted):
            return False
    return True


#: State of a node before it is deleted -> why; for others a launcher or an operator has decided it:
#: a separate event.
_WHY_DELETED = {
    (DELETING, USED): ": its user has returned it",
    (DELETING, IN_USE): ": its user released or lost its lock without returning it",
    (DELETING, BUILDING): ": its launch failed or was abandoned",
    (DELETING, FAILED): ": its launch failed",
    (DELETING, ABORTED): ": the cloud had no capacity for it",
}


def _mib(value: object) -> str:
    return f"{value / (1 << 20):.0f}" if isinstance(value, (int, float)) else "?"


def _usage(event: Event) -> str:
    """Return what a node has used until its end; unknown values are ``?``.

    A node without a network has no values for it.
    """
    cpu, kills = event.get("cpu_usec"), event.get("oom_kills")
    seconds = f"{cpu / 1e6:.1f}" if isinstance(cpu, (int, float)) else "?"
    return (
        f"used {seconds} s of CPU in {event.get('seconds', '?')} s, at most "
        f"{_mib(event.get('memory_peak'))} of {_mib(event.get('memory_limit'))} MiB memory and "
        f"{_mib(event.get('disk_peak'))} MiB disk"
        + (
            f", sent {_mib(event.get('net_tx_bytes'))} and "
            f"received {_mib(event.get('net_rx_bytes'))} MiB"
            if "net_tx_bytes" in event
            else ""
        )
        + (f"; kills for memory: {kills}" if kills else "")
        + ("" if event.get("complete") else " (incomplete)")
    )


def describe(event: Event) -> str:
    """Return the event in one line for users, without its time."""
    kind = event["type"]
    subject, _, what = kind.partition("-")
    place = "-".join(str(event[key]) for key in ("provider", "pool") if event.get(key))
    labels = counted(map(str, event.get("labels") or ()))
    name = (
        event.get("node")
        or event.get("request")
        or event.get("image")
        or event.get("component")
        or ""
    )
    texts = {
        "request-submitted": f"submitted by {event.get('requestor')} for {labels}",
        "request-changed": f"{event.get('state')} (was {event.get('before')})",
        "request-declined": f"declined by {event.get('launcher')}",
        "request-removed": f"removed (was {event.get('before')})",
        "node-created": f"created in {place} for {labels}"
        + (f", request {event['request']}" if event.get("request") else ""),
        "node-changed": f"{event.get('state')} (was {event.get('before')})"
        + _WHY_DELETED.get((str(event.get("state")), str(event.get("before"))), ""),
        "node-allocated": f"{'deallocated from' if event.get('taken') else 'allocated to'} request "
        f"{event.get('request')}",
        "node-removed": f"removed (was {event.get('before')})",
        "node-reconciled": f"{str(event.get('what')).lower()}, because {event.get('reason')}",
        "node-step": f"launch: {event.get('step')}",
        "launch-failed": f"launch attempt {event.get('attempt', '')} failed: {event.get('reason')}",
        "node-usage": _usage(event),
        KILLED: killed(event),
        "console-log": "the console of the machine said last",
        "image-changed": "changed",
        "component-changed": str(event.get("state")),
        "drain-changed": f"now {counted(event.get('drains') or ['none'])}",
        "action": f"{event.get('action')} by {event.get('owner')}: {event.get('result')}",
    }
    if kind in ("node-changed", "request-changed") and event.get("nodes"):
        texts[kind] += f", nodes {', '.join(event['nodes'])}"
    if (
        kind in texts
        and (user := [f"{key} {event[key]}" for key in USER.values() if event.get(key)])
        and kind != "action"
    ):
        texts[kind] += f" ({', '.join(user)})"
    whose = "node" if subject in ("launch", "console") else subject
    if kind in ("action", "drain-changed"):
        whose, name = "", event.get("target") or "drains"
    return one_line(f"{event.get('kind') or whose} {name}: {texts.get(kind, what)}")
