"""What a seed must fulfill: nothing lost, nothing assigned twice, nothing leaked."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nodepool.zk.records import READY
from tests import REPOSITORY
from tests.ensemble.faults import KINDS, Window
from tests.ensemble.load import Event, Load
from tests.ensemble.servers import wait
from tests.world.history import NEVER, Entry

#: Seconds within which all must be deleted that was returned.
DELETION = 40.0
#: Events that are violations, unless the data of ZooKeeper were lost on purpose.
VIOLATIONS = ("stuck", "lost", "failed", "unusable", "unlocked", "gone")


def by_request(events: Iterable[Event]) -> dict[str, dict[str, Event]]:
    """Return the first event of each kind for each request."""
    found: dict[str, dict[str, Event]] = {}
    for event in events:
        if "request" in event:
            found.setdefault(event["request"], {}).setdefault(event["event"], event)
    return found


def history(events: Iterable[Event], windows: list[Window], seed: int) -> list[Entry]:
    """Return who had which node and when, as the clients saw it (see ``tests/world/history``).

    A client takes a node when it asks for it until it has locked it. A request that its client
    never locked has its nodes until it is withdrawn; one whose session ended may have lost them at
    any time since it had locked them. Node ids begin again after a loss of data.
    """
    losses = [window.served for window in windows if window.forgets]
    found: list[Entry] = []
    for name, had in by_request(events).items():
        if not {"requested", "fulfilled"} <= had.keys():
            continue
        times = {kind: int(event["t"] * 1e6) for kind, event in had.items()}
        taken = times.get("locked", times["fulfilled"])
        begin, end = times.get("releasing"), times.get("released", NEVER)
        if "locked" not in had:
            begin = times.get("withdrawn", times.get("abandoned"))
        elif had.keys() & {"expired", "abandoned", "gave-up", "gone"}:
            begin = taken
        epoch = sum(served < had["requested"]["t"] for served in losses)
        for node in had["fulfilled"]["nodes"]:
            node = f"{seed}.{epoch}:{node}"
            found.append((node, True, name, int(had["requested"]["began"] * 1e6), taken))
            if begin is not None:
                found.append((node, False, name, begin, end))
    return found


def linearizable(runs: list[dict[str, Any]]) -> list[int]:
    """Return the seeds whose history is not linearizable."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "linearizable")],
        input="\n".join(json.dumps(run) for run in runs),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    if done.returncode not in (0, 1) or len(lines) != len(runs):
        raise AssertionError(f"tools/linearizable failed: {done.stderr}")
    return [int(words[1].rstrip(":")) for words in lines if words[-1] == "false"]


@dataclass(frozen=True)
class Gap:
    """The longest time of a fault without a fulfilled request, in seconds.

    :ivar unserved: the longest time of the fault without a leader and a follower.
    :ivar longest: the limit of ``seconds``.
    """

    fault: str
    seconds: float
    unserved: float
    longest: float

    @property
    def too_long(self) -> bool:
        return self.seconds > self.longest

    def __str__(self) -> str:
        return (
            f"{self.fault}: no request fulfilled for {self.seconds:.1f} s, without a leader for "
            f"{self.unserved:.1f} s"
        )


def gaps(events: list[Event], windows: list[Window], end: float, served: list[float]) -> list[Gap]:
    """Return the gaps of all faults.

    A fault may begin before launchers have recovered from the one before, that is, before a request
    is fulfilled. It then has the larger limit of both.

    :param end: of the load.
    :param served: when there were a leader and a follower.
    """
    times = sorted(event["t"] for event in events if event["event"] == "fulfilled")
    ends = [*(window.began for window in windows[1:]), end]
    found, inherited = [], 0.0
    for window, until in zip(windows, ends, strict=True):
        longest = max(KINDS[window.fault].longest, inherited)
        found.append(
            Gap(
                window.fault,
                _longest(times, window.served, until),
                _longest(served, window.served, until),
                longest,
            )
        )
        recovered = any(window.served < t < until for t in times)
        inherited = 0.0 if recovered else longest
    return found


def _longest(times: list[float], start: float, end: float) -> float:
    points = [start, *(t for t in times if start < t < end), end]
    return max(later - sooner for sooner, later in itertools.pairwise(points))


def violations(events: Iterable[Event], windows: list[Window]) -> list[str]:
    """Return what must not have happened to requests and nodes.

    What was requested before a loss of data may get lost with it.
    """
    lost = max((window.served for window in windows if window.forgets), default=0.0)
    found = []
    for name, had in by_request(events).items():
        if "requested" in had and had["requested"]["t"] > lost:
            kinds = had.keys() & set(VIOLATIONS)
            found += [f"request {name}: {kind}: {had[kind]}" for kind in kinds]
    return found


def lost_machines(load: Load, events: Iterable[Event]) -> list[str]:
    """Return the machines of nodes that are kept and no longer exist."""
    instances = load.cloud.instances()
    events = list(events)
    # Without its session a client has no locks, and launchers delete its nodes.
    excused = {event["client"] for event in events if event["event"] == "session-lost"}
    return [
        f"machine {event['address']} of node {event['node']} was deleted while in use"
        for event in events
        if event["event"] == "kept"
        and event.get("client") not in excused
        and event["address"].removeprefix("fake-") not in instances
    ]


def leaks(load: Load) -> list[str]:
    """Wait until nothing is left of what was returned; return what is."""
    left: list[str] = []

    def empty() -> bool:
        with load.look() as zk:
            left[:] = [f"node {node.id}: {node.state}" for node in zk.nodeIterator(cached=False)]
            left.extend(f"request {name}" for name in zk.getNodeRequests())
        left.extend(f"machine {name}" for name in load.cloud.instances())
        return not left

    try:
        wait(empty, DELETION, lambda: "")
    except AssertionError:
        return [f"left: {what}" for what in left]
    return []


def images(load: Load, before: set[str], lost: bool) -> list[str]:
    """Wait for a new image, and until the cloud and the records agree; return what is wrong.

    :param before: ids of the images in the cloud at the end of the last fault.
    :param lost: the records were lost: images that only the cloud has are deleted, as an
        administrator does.
    """
    wrong: list[str] = []

    def good() -> bool:
        with load.look() as zk:
            uploads = zk.readImages(cached=False).uploads
        have = {upload.external_id for upload in uploads if upload.state == READY}
        want = set(load.image_ids())
        wrong[:] = [f"image {name} without record" for name in want - have if not lost]
        wrong.extend(f"record of image {name} without image" for name in have - want)
        if not have - before:
            wrong.append("no image was uploaded after the last fault")
        if lost and not wrong:
            load.forget_images(want - have)
        return not wrong

    try:
        wait(good, DELETION, lambda: "")
    except AssertionError:
        return wrong
    return []
