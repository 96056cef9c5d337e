"""Find what a name stands for, and explain hosts and tenants."""

from __future__ import annotations

import re

from nodepool.base.names import did_you_mean
from nodepool.base.problems import one_line
from nodepool.status import cluster, drains, fleets, known
from nodepool.status.explain import KINDS, Explanation, Unknown, explain
from nodepool.status.once import Facade
from nodepool.status.results import format_use
from nodepool.zk.drains import Drain, covering, host_names, shown
from nodepool.zk.history import HistoryReader

NUMBERED = re.compile(r"(\d+-)?\d{10}")
"""Ids of requests (with a dash) and nodes."""
ALL_KINDS = (*KINDS, "host", "tenant")


def names(zk: Facade) -> dict[str, set[str]]:
    """Return kind -> known names, for kinds whose objects are known by name."""
    reports, pools, counts = zk.readReports(), zk.getRegisteredPools(), zk.countNodes()
    labels = {
        label
        for request in cluster.open_requests(zk.readRequests())
        for label in request.node_types
    }
    labels |= {
        label
        for found in (*(pool.labels for pool in pools), *(report["labels"] for report in reports))
        for label in found
    }
    providers = {
        name for report in reports for name in (*report["providers"], *report["not_running"])
    }
    return {
        "label": labels | set(counts.labels),
        "image": {*known.configured_images(zk), *zk.readImages().names},
        "provider": providers | set(counts.providers) | {str(pool.provider_name) for pool in pools},
        "fleet": fleets.names(zk),
        "host": {row["host"] for row in cluster.hosts(zk).rows},
        "tenant": {row["tenant"] for row in cluster.tenants(zk).rows},
    }


def kinds_of(zk: Facade, name: str) -> list[str]:
    """Return the kinds of objects that have this id or name.

    :raises Unknown: there are none.
    """
    if NUMBERED.fullmatch(name):
        return ["request" if "-" in name else "node"]
    found = names(zk)
    kinds = [kind for kind, those in found.items() if name in those]
    if not kinds and name.isdecimal():
        return ["node"]
    if not kinds:
        hint = did_you_mean(name, set().union(*found.values()))
        raise Unknown(
            f"{name} is not known: it is neither the id of a node or request nor the name of a "
            f"{_either(list(found))}{hint}"
        )
    return kinds


def _either(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def explain_any(zk: Facade, kind: str, name: str, history: HistoryReader) -> Explanation:
    """Return the explanation of an object of one of ``ALL_KINDS``.

    :raises Unknown: it does not exist and has no history.
    """
    if kind in KINDS:
        return explain(zk, kind, name, history)
    results = cluster.hosts(zk) if kind == "host" else cluster.tenants(zk)
    rows = [row for row in results.rows if row[kind] == name]
    if not rows:
        raise Unknown(f"{kind} {name} is not known")
    found = Explanation(kind, name)
    for row in rows:
        place = (
            f"provider {row['provider']} on {row['launcher']}"
            if kind == "host"
            else f"launcher {row['launcher']}"
        )
        found.facts.append(
            (
                f"used of limits, {place}",
                format_use(row["used" if kind == "host" else "limits"] or "none reported"),
            )
        )
    if kind == "tenant":
        found.answer = "limited by tenant-resource-limits"
        return found
    found.facts.append(
        ("nodes", ", ".join(sorted({node for row in rows for node in row["nodes"]})) or "none")
    )
    found.cause = next((one_line(str(row["problem"])) for row in rows if row["problem"]), "")
    usable = any(row["state"] == "usable" for row in rows)
    found.suggestion = "" if usable else "repair the host, or remove it from the configuration"
    # The launchers may not have reported it yet.
    if (drain := covering(zk.readNotes(Drain), host_names(name))) is not None:
        usable, found.cause, found.suggestion = False, shown(drain), drains.remedy(drain)
    found.answer = (
        f"{'usable' if usable else 'not usable'}{f': {found.cause}' if found.cause else ''}"
    )
    return found
