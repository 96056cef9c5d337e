"""The one cause and suggestion for a request, label, image or node with a problem.

``explain``, ``request create --wait``, ``status``, ``problem-list``, ``/ready`` and the pages all
show what this module returns. It reads the mirror and never waits for a cloud or a host.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodepool.base.offered_labels import joined, unknown_labels, why_not_offered
from nodepool.base.problems import DELETION, LOG, Problem, one_line
from nodepool.reasons import Code, Declined
from nodepool.status import drains
from nodepool.status.known import (
    Cause,
    Clock,
    backing_of,
    cause_of_row,
    configured_images,
    count_of,
    declines_of,
    hold_text,
    images_of,
    is_of_host,
    nodes_of_pool,
    nodes_of_request,
    of_image,
    of_node,
    published_problems,
    stranded_nodes,
    stuck_nodes,
    unserved_nodes,
)
from nodepool.status.once import Facade, remembered
from nodepool.status.results import format_duration
from nodepool.zk.components import RegisteredPool
from nodepool.zk.drains import Drain, shown
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import DELETING, FAILED, HOLD, PENDING, READY, REQUESTED, Node, NodeRequest
from nodepool.zk.rollback import rolled_back

#: Codes of reasons, the most informative first: the first one present is the cause.
ORDER = [
    code.word
    for code in (
        Code.LAUNCHING,
        Code.TENANT_LIMIT,
        Code.REFUSED_BY_CLOUD,
        Code.PROVIDER_QUOTA,
        Code.POOL_LIMIT,
        Code.LAUNCHES_FAIL,
        Code.NO_FREE_NODE,
        Code.NOTHING_FREE,
        Code.NOTHING_FREE_NO_EVENT,
        Code.NO_ROOM,
        Code.PAUSED,
        Code.BEING_TAKEN,
        Code.MAX_CONCURRENCY,
        Code.POOL_PAUSED,
        Code.LIMITS_UNKNOWN,
        Code.ERROR,
        Code.SWITCHED_OFF,
        Code.DRAINED,
        Code.PROVIDER_NOT_RUNNING,
        Code.NOT_RUNNING,
        Code.BUSY,
        Code.AFTER_SESSION_LOSS,
        Code.REGISTERING,
        Code.OTHERS_DECLINE,
        Code.BETTER_PRIORITY,
        Code.NOT_LOOKED_AT,
        Code.OTHER_LAUNCHER,
    )
]
RANK = {word: number for number, word in enumerate(ORDER)}
#: Causes that end without intervention when nodes are returned: a wait can be estimated.
FLOWING = frozenset(
    code.word
    for code in (
        Code.LAUNCHING,
        Code.PROVIDER_QUOTA,
        Code.POOL_LIMIT,
        Code.NO_FREE_NODE,
        Code.NOTHING_FREE,
        Code.NOTHING_FREE_NO_EVENT,
        Code.NO_ROOM,
        Code.PAUSED,
        Code.BEING_TAKEN,
        Code.MAX_CONCURRENCY,
        Code.POOL_PAUSED,
        Code.BUSY,
        Code.NOT_LOOKED_AT,
        Code.BETTER_PRIORITY,
        Code.OTHER_LAUNCHER,
    )
)
#: Causes whose text is extended by the nodes that use the capacity.
_IN_USE = frozenset(
    code.word
    for code in (
        Code.PROVIDER_QUOTA,
        Code.POOL_LIMIT,
        Code.NO_FREE_NODE,
        Code.NOTHING_FREE,
        Code.NOTHING_FREE_NO_EVENT,
        Code.NO_ROOM,
        Code.PAUSED,
        Code.REFUSED_BY_CLOUD,
    )
)
#: Causes that end when a cloud answers.
_ASKING = frozenset((Code.LIMITS_UNKNOWN.word, Code.NOT_LOOKED_AT.word))
#: Causes that are part of normal work and not a problem.
_NORMAL = frozenset(
    code.word
    for code in (Code.LAUNCHING, Code.BUSY, Code.NOT_LOOKED_AT, Code.BEING_TAKEN, Code.REGISTERING)
)
NOT_OFFERED = Declined.NOT_OFFERED.value.partition("{")[0]
OVERDUE = 60.0
"""Seconds after which a launch may need the attention of an operator."""
MOST_STUCK = 20
"""Maximum number of stuck nodes in a list of problems."""
MOST_NAMED = 3
"""Maximum number of held nodes and tenants that a text names."""


def groups_of(
    reports: Iterable[dict[str, Any]], request_id: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (report, group of waiting requests) of each launcher that processes it."""
    return [
        (report, group)
        for report in reports
        for group in report["waiting"]
        if request_id in group["ids"]
    ]


def groups_by_request(zk: Facade) -> Mapping[str, list[dict[str, Any]]]:
    """Return request id -> its group of waiting requests in the report of each launcher."""

    def index() -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for report in zk.readReports():
            for group in report["waiting"]:
                for request_id in group["ids"]:
                    found[request_id].append(group)
        return found

    return remembered(zk, "groups by request", index)


def main_reason(reasons: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the most informative of published reasons; of equal ones the first."""
    return min(reasons, key=lambda reason: RANK.get(root_code(reason), len(RANK)), default=None)


def root_code(reason: dict[str, Any]) -> str:
    """Return the code of what blocks the request; for a paused pool, why it is paused."""
    return str(reason.get("root") or reason["code"])


def worded(reason: dict[str, Any]) -> str:
    return f"{reason['pool']}: {reason['text']}" if reason["pool"] else str(reason["text"])


# -- requests


def of_published(reason: dict[str, Any]) -> Cause:
    """Return the published cause, without users, hosts and other requests."""
    code, headline = root_code(reason), str(reason.get("headline") or "")
    blocker = f"{code} {reason['blocker']}" if headline else ""
    return Cause(worded(reason), str(reason.get("help") or ""), code, blocker, headline)


def needs_help(cause: Cause) -> bool:
    """Return whether the wait ends only if somebody does something."""
    return (
        bool(cause.remedy)
        and cause.code not in FLOWING | _NORMAL
        and ", or wait until" not in cause.remedy
    )


def of_request(zk: Facade, request: NodeRequest, clock: Clock = time.time, depth: int = 1) -> Cause:
    """Return why an open or failed request is not served."""
    pools = zk.getRegisteredPools()
    labels = list(request.node_types)
    missing = why_not_offered(labels, pools, "launcher")
    if request.state == FAILED:
        return _failed(zk, request, missing, clock)
    if not pools and not zk.getLaunchers():
        return Cause(
            "no launcher is running; requests wait until one starts", "start nodepool-launcher"
        )
    if missing is not None:
        return _not_offered(zk, labels, missing)
    offering = [
        pool for pool in pools if set(labels) <= pool.labels and pool.id not in request.declined_by
    ]
    if not offering:
        return _failed(zk, request, None, clock)
    reasons = [
        reason
        for group in groups_by_request(zk).get(request.id or "", ())
        for reason in group["reasons"]
    ]
    if not nodes_of_request(zk, request.id or ""):
        # A launcher that has just passed the request on: its report is up to a few seconds old.
        reasons = [
            reason for reason in reasons if root_code(reason) != Code.LAUNCHING.word
        ] or reasons
    reason = main_reason(reasons)
    if reason is None:
        paused = all(pool.paused for pool in offering)
        names = ", ".join(sorted(f"{pool.provider_name}-{pool.name}" for pool in offering))
        text = f"offered by {names}"
        for report in zk.readReports():
            if not report["ready"] and report["details"]:
                return Cause(
                    f"launcher {report['name']} is not ready: {report['details'][0]}",
                    "see /ready of that launcher",
                )
        if request.state == PENDING:
            text = f"accepted by a pool that launches its nodes or waits for capacity: {names}"
        elif paused:
            text = f"every pool that offers it is full: {names}"
        return _with_hosts(zk, Cause(text), {str(pool.provider_name) for pool in offering}, labels)
    return _of_reason(
        zk,
        reason,
        request.id or "",
        labels,
        {str(pool.provider_name) for pool in offering},
        clock,
        depth,
    )


def _of_reason(
    zk: Facade,
    reason: dict[str, Any],
    request_id: str,
    labels: list[str],
    providers: set[str],
    clock: Clock,
    depth: int = 1,
) -> Cause:
    published = of_published(reason)
    code, remedy, text = published.code, published.remedy, published.text
    if code == Code.LAUNCHING.word:
        nodes = nodes_of_request(zk, request_id)
        for node in nodes:
            if node.state != READY and (cause := of_building(zk, node, clock, depth)) is not None:
                return cause
        return (
            _launching(zk, nodes, clock)
            if nodes
            else Cause(text, remedy, code, code, "Nodes are being launched")
        )
    blocker = str(reason.get("request") or "")
    if not blocker and code == Code.POOL_PAUSED.word:
        blocker = pending_at(zk, str(reason["pool"]))
    if blocker:
        other = zk.getNodeRequest(blocker, cached=True) if depth else None
        why = (
            of_request(zk, other, clock=clock, depth=depth - 1)
            if other is not None and blocker != request_id
            else None
        )
        if blocker not in text:
            text = f"{text}; blocked by request {blocker}"
        if why is not None:
            waits = f"{text}, which waits: {why.text}"
            return Cause(
                waits, why.remedy or remedy, code, why.blocker or why.text, why.headline or why.text
            )
        return published
    pool = str(reason["pool"])
    own = {name for name in providers if pool.startswith(f"{name}-")} or providers
    if code in _ASKING and (why := _published_of(zk, own, labels, hosts=False)) is not None:
        return replace(published, text=f"{text}; {why.text}", remedy=why.remedy, headline=why.text)
    if code in _IN_USE:
        mine = labels if code == Code.NO_FREE_NODE.word else ()
        name = f"users of {pool or sorted(providers)} {mine}"
        users, other = remembered(zk, name, lambda: _users(zk, pool, providers, mine, clock))
        return _with_hosts(
            zk, replace(published, text=text + users, remedy=other or remedy), own, labels
        )
    return published


def _launching(zk: Facade, nodes: list[Node], clock: Clock) -> Cause:
    """Return which nodes are being launched, for how long, and the usual duration."""
    ids = sorted(str(node.id) for node in nodes if node.state != READY) or sorted(
        str(node.id) for node in nodes
    )
    age = clock() - min(node.created_time or clock() for node in nodes)
    text = f"launching node{'s' * (len(ids) > 1)} {', '.join(ids)} for {format_duration(age)}"
    took = [
        entry["launch"]
        for report in zk.readReports()
        for label, entry in report["lately"].items()
        if any(label in node.type for node in nodes) and "launch" in entry
    ]
    usual = max(took, default=0.0)
    code = Code.LAUNCHING.word
    if age < max(OVERDUE, 3 * usual):
        return Cause(text, "", code, code, "Nodes are being launched")
    text += f" (usually {format_duration(usual)})" if usual else ""
    remedy = f"see `nodepool explain node {ids[0]}`, and check the state of its server in the cloud"
    return Cause(text, remedy, code, f"{code} overdue", "Launches take longer than usual")


def pending_at(zk: Facade, pool: str) -> str:
    """Return the request that has paused a pool; empty if no launcher reports one."""
    groups = (group for report in zk.readReports() for group in report["waiting"] if group["ids"])
    first = (
        group["ids"][0]
        for group in groups
        if any(one["pool"] == pool and one["code"] == Code.PAUSED.word for one in group["reasons"])
    )
    return str(next(first, ""))


def _users(
    zk: Facade, pool: str, providers: set[str], labels: Collection[str], clock: Clock
) -> tuple[str, str]:
    """Return which nodes use the capacity of a pool, and how to free one of them.

    Both are empty if nothing is known.

    :param pool: ``PROVIDER-POOL``; empty for all pools of the providers.
    """
    nodes = [
        node
        for node in (nodes_of_pool(zk, pool) if pool else zk.readNodes())
        if (pool or node.provider in providers) and (not labels or set(labels) & set(node.type))
    ]
    if not nodes:
        return "", ""
    states = Counter(
        "assigned" if node.state == READY and node.allocated_to else str(node.state)
        for node in nodes
    )
    text = f" ({count_of(len(nodes), 'node')}: " + ", ".join(
        f"{count} {state}" for state, count in states.most_common()
    )
    tenants = Counter(str(node.tenant) for node in nodes if node.tenant)
    if tenants:
        text += "; " + ", ".join(
            f"tenant {name} has {count}" for name, count in tenants.most_common(MOST_NAMED)
        )
    held = [node for node in nodes if node.state == HOLD]
    if held:
        text += f"; {len(held)} of {len(nodes)} are held: " + ", ".join(
            hold_text(node, clock) for node in held[:MOST_NAMED]
        )
        text += f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
    known = stuck_nodes(zk, clock)
    stuck = [known[node.id] for node in nodes if node.id in known]
    text += "".join(f"; {cause.text}" for cause in stuck[:MOST_NAMED])
    text += f" and {len(stuck) - MOST_NAMED} more" if len(stuck) > MOST_NAMED else ""
    return text + ")", stuck[0].remedy if stuck else ""


def _with_hosts(
    zk: Facade, cause: Cause, providers: Collection[str], labels: Collection[str]
) -> Cause:
    """Return the cause, or the unusable hosts if they explain the lack of capacity."""
    down = [
        row["problem"]
        for row in published_problems(zk)
        if row["provider"] in providers and is_of_host(row["problem"])
    ]
    if not down:
        return cause
    text = "; ".join(dict.fromkeys(down))
    remedy = "repair the host, or remove it from the configuration"
    usable = any(
        set(labels) & set(node.type) for node in zk.readNodes() if node.provider in providers
    )
    return Cause(
        f"{cause.text}; {text}" if usable else text, remedy, "host-down", f"host-down {text}", text
    )


def _of_backing(zk: Facade, node: Node, clock: Clock, depth: int) -> Cause | None:
    """Return why no backing node for this node has been launched; None: nothing is awaited."""
    for request in zk.readRequests() if depth else ():
        owner = str(request.requestor)
        if (
            owner.startswith("NodePool:")
            and owner.endswith(f":{node.provider}")
            and request.state in (REQUESTED, PENDING)
        ):
            cause = of_request(zk, request, clock=clock, depth=depth - 1)
            if cause.code not in _NORMAL:
                text = (
                    f"waiting for a backing node of {', '.join(request.node_types)} (request "
                    f"{request.id}): {cause.text}"
                )
                return Cause(text, cause.remedy, cause.code)
    return None


def of_building(zk: Facade, node: Node, clock: Clock = time.time, depth: int = 1) -> Cause | None:
    """Return why the launch or deletion of a node is stalled; None: no reason is known."""
    providers = (report["providers"].get(str(node.provider)) for report in zk.readReports())
    hosts = [host for provider in providers if provider is not None for host in provider["hosts"]]
    if hosts and not any(host["usable"] for host in hosts):
        texts = "; ".join(dict.fromkeys(host["problem"] or host["name"] for host in hosts))
        return Cause(
            f"no host of provider {node.provider} can be used: {texts}",
            "start the node manager on one of its hosts",
            "host-down",
        )
    if node.state != DELETING and (cause := _of_backing(zk, node, clock, depth)) is not None:
        return cause
    if node.state == DELETING and (cause := of_node(zk, node, clock)) is not None:
        return cause
    return _published_of(zk, {str(node.provider)}, node.type, hosts=False)


def _published_of(
    zk: Facade, providers: Collection[str], labels: Collection[str], hosts: bool
) -> Cause | None:
    """Return the first published problem of these providers, or of labels there, or None.

    :param hosts: whether a problem of a single host counts.
    """
    for row in published_problems(zk):
        mine = row["label"] in labels if row["label"] else hosts or not is_of_host(row["problem"])
        if mine and row["provider"] in providers and not str(row["problem"]).startswith(DELETION):
            return cause_of_row(row)
    return None


def _not_offered(zk: Facade, labels: Collection[str], missing: str, again: bool = False) -> Cause:
    """Return why no pool offers these labels.

    Their provider does not run, a launcher has an old configuration, or no pool has them.
    """
    then = ", then submit the request again" * again
    for report in zk.readReports():
        down = report["not_running_labels"]
        for name, offered in sorted(down.items()):
            if common := set(labels).intersection(offered):
                why = report["not_running"].get(name)
                text = f"provider {name}, which offers {joined(common)}, does not run" + (
                    f": {why}" if why else ""
                )
                remedy = "repair what the message names" if why else LOG
                return Cause(text, f"{remedy}{then}", "not-running")
        for name, why in sorted(report["not_running"].items()):
            if name not in down:  # the labels that it offers are unknown
                return Cause(
                    f"{missing}; provider {name} does not run: {why}",
                    f"repair what the message names{then}",
                    "not-running",
                )
    for report in zk.readReports():
        if report["config"]["stale_since"] is not None:
            text = (
                f"{missing}; launcher {report['name']} uses an older configuration: "
                f"{report['config']['error']}"
            )
            return Cause(text, f"correct the configuration file{then}", "stale")
    if unknown_labels(labels, zk.getRegisteredPools()):
        return Cause(
            missing, f"correct the label, or add it to a pool of a provider{then}", "not-offered"
        )
    return Cause(
        missing, "request these labels one by one, or let one pool offer all of them", "not-offered"
    )


def _failed(zk: Facade, request: NodeRequest, missing: str | None, clock: Clock) -> Cause:
    """Return the most informative of all reasons that pools report."""
    labels = list(request.node_types)
    if missing is not None:
        return _not_offered(zk, labels, missing, again=True)
    said = [decline for _place, decline in declines_of(zk, request)]
    telling = list(dict.fromkeys(decline for decline in said if NOT_OFFERED not in decline.text))
    texts = [decline.text for decline in telling]
    others = sum(NOT_OFFERED in decline.text for decline in said)
    rest = (
        f" ({count_of(others, 'other pool')} {'do' if others > 1 else 'does'} not offer it)"
        if others
        else ""
    )
    for label in labels:
        lack = _of_parts(zk, label, clock, depth=1)
        if lack is not None and (
            not telling or lack.code == "backing" or "image" in " ".join(texts)
        ):
            return Cause(f"{lack.text}{rest}", lack.remedy, lack.code)
    if not telling:
        return Cause(f"all pools that offered it have declined it{rest}", LOG)
    remedy = next((decline.help for decline in telling if decline.help), LOG)
    return Cause(
        "; ".join(texts[:MOST_NAMED]) + rest, f"{remedy}, then submit the request again", "declined"
    )


# -- images


# -- labels


def min_ready_of(zk: Facade) -> dict[str, int]:
    """Return label -> min-ready: launchers share it, so the largest value counts once."""
    found: dict[str, int] = {}
    for report in zk.readReports():
        for name, entry in report["labels"].items():
            if entry["min_ready"] is not None:
                found[name] = max(int(entry["min_ready"]), found.get(name, 0))
    return found


def of_min_ready(zk: Facade, label: str, wanted: int, clock: Clock = time.time) -> Cause | None:
    """Return why fewer than min-ready nodes are ready; None: they are, or are being launched."""
    ready = zk.countNodes().free[label]
    if ready >= wanted:
        return None
    mine = [
        r
        for r in zk.readRequests()
        if r.requestor == MIN_READY and label in r.node_types and r.state in (REQUESTED, PENDING)
    ]
    found: list[Cause | None] = [of_request(zk, request, clock=clock) for request in mine]
    found = [cause for cause in found if cause is not None and cause.code not in _NORMAL]
    if mine and not found:
        return None
    cause = found[0] if found else of_label(zk, label, clock)
    if cause is None:
        reason = main_reason(
            one
            for report in zk.readReports()
            for one in report["labels"].get(label, {}).get("declined", ())
        )
        if reason is None:
            return None
        offering = {
            str(pool.provider_name) for pool in zk.getRegisteredPools() if label in pool.labels
        }
        cause = _of_reason(zk, reason, "", [label], offering, clock)
    return Cause(
        f"{ready} of {wanted} ready (min-ready), because {cause.text}", cause.remedy, cause.code
    )


def of_drain(drain: Drain) -> Cause:
    return Cause(shown(drain), drains.remedy(drain), Code.DRAINED.word)


def of_label(zk: Facade, label: str, clock: Clock = time.time, depth: int = 1) -> Cause | None:
    """Return what prevents nodes of a label, apart from requests; None: nothing known."""
    pools = zk.getRegisteredPools()
    if not pools and not zk.getLaunchers():
        return Cause("no launcher is running", "start nodepool-launcher")
    missing = why_not_offered([label], pools, "launcher")
    if missing is not None:
        return _not_offered(zk, [label], missing)
    if (drain := drains.of_label(zk, label)) is not None:
        return of_drain(drain)
    offering = {str(pool.provider_name) for pool in pools if label in pool.labels}
    if (lack := _of_parts(zk, label, clock, depth)) is not None:
        return lack
    if (closed := _switched_off(zk, label, pools)) is not None:
        return closed
    told = [_published_of(zk, {name}, [label], hosts=True) for name in sorted(offering)]
    return told[0] if all(told) else None  # else another provider serves it


def _of_parts(zk: Facade, label: str, clock: Clock, depth: int) -> Cause | None:
    """Return problems of the images of a label, or of the label of its backing nodes.

    One provider with usable images is enough.
    """
    images = images_of(zk, label)
    lacks = [
        next(
            (
                lack
                for image, entry in images.items()
                if provider in entry["providers"]
                and (lack := of_image(zk, image, {**entry, "providers": {provider}}, clock))
            ),
            None,
        )
        for provider in sorted(
            {str(pool.provider_name) for pool in zk.getRegisteredPools() if label in pool.labels}
        )
    ]
    if lacks and all(lacks):
        return lacks[0]
    for backing in backing_of(zk, label) if depth else ():
        if (lack := of_label(zk, backing, clock, depth - 1)) is not None:
            return Cause(
                f"no backing node of {backing} can be launched: {lack.text}", lack.remedy, "backing"
            )
    return None


def _switched_off(zk: Facade, label: str, pools: Iterable[RegisteredPool]) -> Cause | None:
    """Return a cause if options disable every pool that offers the label, else None."""
    entries = {
        name: entry for report in zk.readReports() for name, entry in report["providers"].items()
    }
    said = []
    for pool in pools:
        if label in pool.labels:
            entry = entries.get(str(pool.provider_name))
            if entry is None:
                return None
            if entry["pools"].get(str(pool.name), {}).get("max_servers") == 0:
                said.append(f"`max-servers` of pool {pool.provider_name}-{pool.name}")
            elif entry["max_concurrency"] == 0:
                said.append(f"`max-concurrency` of provider {pool.provider_name}")
            else:
                return None
    text = f"every pool that offers {label} is disabled: {joined(set(said))} is 0"
    return Cause(text, f"raise {sorted(said)[0]}", "disabled") if said else None


def of_provider(zk: Facade, name: str, clock: Clock = time.time) -> Cause | None:
    """Return the first known problem of a provider, with the number of others.

    Without any, return a drain if no pool of the provider gives out nodes.
    """
    rows = [row for row in published_problems(zk) if row["provider"] == name]
    if not rows:
        pools = [pool for pool in zk.getRegisteredPools() if pool.provider_name == name]
        found = [drains.of_pool(zk, pool) for pool in pools]
        drain = next(filter(None, found), None) if all(found) else None
        return None if drain is None else of_drain(drain)
    cause = (
        of_label(zk, str(rows[0]["label"]), clock) if rows[0]["label"] else None
    ) or cause_of_row(rows[0])
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    return Cause(f"{cause.text}{more}", cause.remedy, cause.code)


# -- everything


def _rolled_back(zk: Facade) -> Iterator[Problem]:
    """Yield the images of which launchers use an earlier upload, because the newest fails.

    Those without any upload in use are known already.
    """
    for switch in rolled_back(zk.readImages()):
        image, mark = switch.used.image_name, switch.replaced.rolled_back
        if mark is not None and mark.automatic and switch.before is not None:
            yield Problem(
                one_line(f"image {image}: build {switch.replaced.build_id} was {switch.text}"),
                switch.provider,
                help=f"repair the image and run `nodepool image-build {image}`, or return to this "
                f"build with `nodepool image-rollforward {image} --provider {switch.provider}`",
                since=mark.time,
            )


def derived_problems(zk: Facade, clock: Clock = time.time) -> list[Problem]:
    """Return problems derived from the state of the whole cluster.

    These are images without uploads, automatic roll-backs of images, min-ready that is not
    reached, nodes of providers that no launcher has, idle nodes that no request gets, and stuck
    nodes.
    """
    if not zk.getLaunchers() and not zk.getRegisteredPools():
        waiting = sum(request.state in (REQUESTED, PENDING) for request in zk.readRequests())
        text = f"no launcher is running; {count_of(waiting, 'request')} waiting"
        return [Problem(text, help="start nodepool-launcher")] if waiting else []
    found = [
        Problem(one_line(shown(drain)), help=drains.remedy(drain), since=drain.since)
        for drain in zk.readNotes(Drain)
    ]
    for name, entry in sorted(configured_images(zk).items()):
        cause = of_image(zk, name, entry, clock) if entry["labels"] else None
        # Failed builds are listed together with the problems of builders.
        if cause is not None and cause.code == "image" and "failed" not in cause.text:
            found.append(Problem(one_line(cause.text), help=cause.remedy))
    found += _rolled_back(zk)
    for label, wanted in sorted(min_ready_of(zk).items()):
        cause = of_min_ready(zk, label, wanted, clock) if wanted > 0 else None
        if cause is None:
            cause = _switched_off(zk, label, zk.getRegisteredPools())
        if cause is not None:
            found.append(
                Problem(
                    one_line(cause.text),
                    label=label,
                    help=cause.remedy or "see `nodepool explain label`",
                )
            )
    for name, states in unserved_nodes(zk).items():
        number = count_of(states.total(), "node")
        some = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        found.append(
            Problem(
                one_line(
                    f"no launcher has provider {name}: its {number} ({some}) cannot be "
                    "assigned or deleted"
                ),
                name,
                help="start its launcher, or configure the provider again; if its machines no "
                f"longer exist, remove the records with `nodepool erase {name}`",
            )
        )
    for why, idle in stranded_nodes(zk).items():
        some = ", ".join(str(node.id) for node in idle[:MOST_NAMED])
        some += f" and {len(idle) - MOST_NAMED} more" if len(idle) > MOST_NAMED else ""
        found.append(
            Problem(
                one_line(f"no request gets idle node{'s' * (len(idle) > 1)} {some}: {why}"),
                str(idle[0].provider),
                help="delete them with `nodepool delete`, or offer the label there again",
            )
        )
    nodes = {node.id: node for node in zk.readUnreleasedNodes()}
    stuck = [
        Problem(
            one_line(cause.text),
            str(nodes[node_id].provider),
            help=cause.remedy,
            since=nodes[node_id].state_time,
        )
        for node_id, cause in sorted(stuck_nodes(zk, clock).items())
        if nodes[node_id].state != DELETING  # the launchers publish these
    ]
    if (more := len(stuck) - MOST_STUCK) > 0:
        stuck[MOST_STUCK:] = [Problem(f"and {more} more nodes that their owners do not release")]
    return found + stuck
