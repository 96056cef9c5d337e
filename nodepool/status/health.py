"""The cluster in one line: its worst problems, each with the page that explains it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nodepool import status
from nodepool.base.problems import one_line
from nodepool.status.known import count_of, is_of_host
from nodepool.status.once import Facade, Once
from nodepool.zk.records import PENDING, READY, REQUESTED

GREEN, AMBER, RED = LEVELS = ("green", "amber", "red")
WORDS = {GREEN: "No problems", AMBER: "Degraded", RED: "Failing"}
"""Names of the levels for people: colors alone are no information."""
MOST = 3
"""Problems that the line names."""
_NODE = re.compile(r"(?:deletion of |the hold of )?node (\d{10})\b")
_IMAGE = re.compile(r"image (\S+?):? ")


@dataclass(frozen=True)
class Trouble:
    """A problem.

    :param kind: of the object that it concerns, or the table that explains it if ``name`` is empty.
    """

    level: str
    text: str
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Health:
    """The level of the worst problem, and all problems, the worst first."""

    troubles: tuple[Trouble, ...]

    @property
    def level(self) -> str:
        return self.troubles[0].level if self.troubles else GREEN

    def record(self) -> dict[str, Any]:
        """Return the level, its word, the worst problems and the number of others."""
        worst = [vars(trouble) for trouble in self.troubles[:MOST]]
        return {
            "level": self.level,
            "word": WORDS[self.level],
            "problems": worst,
            "more": len(self.troubles) - len(worst),
        }

    def __str__(self) -> str:
        more = len(self.troubles) - MOST
        texts = [trouble.text for trouble in self.troubles[:MOST]] + (
            [f"{more} more"] if more > 0 else []
        )
        return WORDS[self.level] + (f": {'; '.join(texts)}" if texts else "")


def health(zk: Facade, clock: Callable[[], float] = time.time) -> Health:
    """Return the health of the cluster as published and mirrored."""
    zk = zk if isinstance(zk, Once) else Once(zk)
    found = dict.fromkeys([*_of_launchers(zk), *of_problems(zk)])
    nodes = [trouble for trouble in found if trouble.kind == "node"]
    if len(nodes) > 1:  # a stuck Zuul keeps hundreds
        for trouble in nodes:
            del found[trouble]
        found[
            Trouble(
                AMBER, f"{nodes[0].text} (and {count_of(len(nodes) - 1, 'more node')})", "problems"
            )
        ] = None
    return Health(tuple(sorted(found, key=lambda trouble: -LEVELS.index(trouble.level))))


def _of_launchers(zk: Facade) -> Iterator[Trouble]:
    for report in zk.readReports():
        if not report["ready"]:
            why = f": {report['details'][0]}" if report["details"] else ""
            level = AMBER if why.startswith(": starting") else RED
            yield Trouble(
                level, one_line(f"launcher {report['name']} is not ready{why}"), "daemons"
            )
        if report["config"]["stale_since"] is not None:
            text = (
                f"launcher {report['name']} uses an older configuration: "
                f"{report['config']['error']}"
            )
            yield Trouble(AMBER, one_line(text), "config")


def of_problems(zk: Facade) -> Iterator[Trouble]:
    """Yield the level of each problem of :func:`.status.problem_rows`, in their order."""
    wanted = {
        label
        for request in zk.readRequests()
        if request.state in (REQUESTED, PENDING)
        for label in request.node_types
    }
    usable = {
        upload.image_name
        for upload in zk.readImages().uploads
        if upload.state == READY and not upload.held_back
    }
    alive = {
        name
        for report in zk.readReports()
        for name, entry in report["providers"].items()
        if any(host["usable"] for host in entry["hosts"])
    }
    for row in status.problem_rows(zk):
        text, provider, label = str(row["problem"]), row["provider"], row["label"]
        place = f"provider {provider}: " if provider else ""
        if is_of_host(text):
            yield Trouble(AMBER if provider in alive else RED, place + text, "hosts")
        elif (node := _NODE.match(text)) is not None:
            yield Trouble(AMBER, text, "node", node[1])
        elif (image := _IMAGE.match(text)) is not None:
            yield Trouble(AMBER if image[1] in usable else RED, place + text, "image", image[1])
        elif label:
            yield Trouble(
                RED if label in wanted and provider else AMBER,
                f"{place}label {label}: {text}",
                "label",
                str(label),
            )
        elif provider:
            yield Trouble(
                RED if text.startswith("not running") else AMBER,
                place + text,
                "provider",
                str(provider),
            )
        else:
            yield Trouble(RED if text.startswith("no launcher") else AMBER, text, "problems")
