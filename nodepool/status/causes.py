"""The one cause and the one suggestion for a request, label, image or node that is not as wanted.

``explain``, ``request create --wait``, ``status``, ``problem-list``, ``/ready`` and the pages all show what this module
returns. It reads what the mirror has and never waits for a cloud or a host.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nodepool.base.offers import joined, why_not_offered
from nodepool.base.problems import Problem, image_problems, one_line
from nodepool.reasons import Code, Declined
from nodepool.status.results import format_duration
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import DELETING, FAILED, HOLD, PENDING, READY, REQUESTED

Clock = Callable[[], float]

#: Codes of reasons, the most telling first: of several, the first is the cause.
ORDER = [
    code.word
    for code in (
        Code.LAUNCHING, Code.TENANT_LIMIT, Code.REFUSED_BY_CLOUD, Code.PROVIDER_QUOTA, Code.POOL_LIMIT, Code.NO_FREE_NODE,
        Code.NOTHING_FREE, Code.NOTHING_FREE_NO_EVENT, Code.NO_ROOM, Code.PAUSED, Code.BEING_TAKEN, Code.MAX_CONCURRENCY,
        Code.POOL_PAUSED, Code.LIMITS_UNKNOWN, Code.ERROR, Code.SWITCHED_OFF, Code.PROVIDER_NOT_RUNNING, Code.NOT_RUNNING,
        Code.BUSY, Code.AFTER_SESSION_LOSS, Code.REGISTERING, Code.OTHERS_DECLINE, Code.BETTER_PRIORITY, Code.NOT_LOOKED_AT,
        Code.OTHER_LAUNCHER,
    )
]  # fmt: skip
RANK = {word: number for number, word in enumerate(ORDER)}
#: Causes that end without anybody's help while nodes come back: a wait can be estimated.
FLOWING = frozenset(
    code.word
    for code in (
        Code.LAUNCHING, Code.PROVIDER_QUOTA, Code.POOL_LIMIT, Code.NO_FREE_NODE, Code.NOTHING_FREE, Code.NOTHING_FREE_NO_EVENT,
        Code.NO_ROOM, Code.PAUSED, Code.BEING_TAKEN, Code.MAX_CONCURRENCY, Code.POOL_PAUSED, Code.BUSY, Code.NOT_LOOKED_AT,
        Code.BETTER_PRIORITY, Code.OTHER_LAUNCHER,
    )
)  # fmt: skip
#: Causes whose text is completed with the nodes that use the capacity.
_IN_USE = frozenset(
    code.word
    for code in (
        Code.PROVIDER_QUOTA, Code.POOL_LIMIT, Code.NO_FREE_NODE, Code.NOTHING_FREE, Code.NOTHING_FREE_NO_EVENT, Code.NO_ROOM,
        Code.PAUSED, Code.REFUSED_BY_CLOUD,
    )
)  # fmt: skip
#: Causes that are part of normal work and no problem.
_NORMAL = frozenset(code.word for code in (Code.LAUNCHING, Code.BUSY, Code.NOT_LOOKED_AT, Code.BEING_TAKEN, Code.REGISTERING))
NOT_OFFERED = Declined.NOT_OFFERED.value.partition("{")[0]
MOST_NAMED = 3
"""Held nodes and tenants that a text names."""


@dataclass(frozen=True)
class Cause:
    """
    :param code: of the reason that it comes from; empty when it comes from none.
    """

    text: str
    remedy: str = ""
    code: str = ""


def groups_of(reports: Iterable[dict[str, Any]], request_id: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(report, group of waiting requests) of each launcher that deals with it."""
    return [(report, group) for report in reports for group in report["waiting"] if request_id in group["ids"]]


def main_reason(reasons: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The most telling of published reasons; of equal ones the first."""
    return min(reasons, key=lambda reason: RANK.get(root_code(reason), len(RANK)), default=None)


def root_code(reason: dict[str, Any]) -> str:
    """The code of what stops the request; of a pool that is paused, why it is."""
    return str(reason.get("root") or reason["code"])


def worded(reason: dict[str, Any]) -> str:
    return f"{reason['pool']}: {reason['text']}" if reason["pool"] else str(reason["text"])


# -- requests


def of_request(zk: Any, request: Any, declined: Sequence[str] = (), clock: Clock = time.time, depth: int = 1) -> Cause:
    """Why an open or failed request is not served.

    :param declined: what pools said that declined it, each ``POOL: why``.
    """
    pools = zk.getRegisteredPools()
    labels = list(request.node_types)
    missing = why_not_offered(labels, pools, "launcher")
    if request.state == FAILED:
        return _failed(zk, labels, missing, declined, clock)
    if not pools and not zk.getLaunchers():
        return Cause("no launcher is running; requests wait until one starts", "start nodepool-launcher")
    if missing is not None:
        return _not_offered(zk, labels, missing)
    offering = [pool for pool in pools if set(labels) <= pool.labels and pool.id not in request.declined_by]
    if not offering:
        return _failed(zk, labels, None, declined, clock)
    reasons = [reason for _report, group in groups_of(zk.readReports(), request.id or "") for reason in group["reasons"]]
    reason = main_reason(reasons)
    if reason is None:
        paused = all(pool.paused for pool in offering)
        names = ", ".join(sorted(f"{pool.provider_name}-{pool.name}" for pool in offering))
        text = f"offered by {names}"
        for report in zk.readReports():
            if not report.get("ready") and report["details"]:
                return Cause(f"launcher {report['name']} is not ready: {report['details'][0]}", "see /ready of that launcher")
        if request.state == PENDING:
            text = f"accepted by a pool that launches its nodes or waits for capacity: {names}"
        elif paused:
            text = f"every pool offering it serves another request first: {names}"
        return _with_hosts(zk, Cause(text), {str(pool.provider_name) for pool in offering}, labels)
    return _of_reason(zk, reason, request.id or "", labels, {str(pool.provider_name) for pool in offering}, clock, depth)


def _of_reason(
    zk: Any, reason: dict[str, Any], request_id: str, labels: list[str], providers: set[str], clock: Clock, depth: int = 1
) -> Cause:
    code, remedy, text = root_code(reason), str(reason.get("help") or ""), worded(reason)
    if code == Code.LAUNCHING.word:
        nodes = [node for node in zk.readNodes(with_contenders=False) if node.allocated_to == request_id]
        for node in nodes:
            if node.state != READY and (cause := of_building(zk, node, clock, depth)) is not None:
                return cause
        return Cause(f"launching nodes ({', '.join(sorted(str(n.id) for n in nodes))})" if nodes else text, remedy, code)
    blocker = str(reason.get("request") or "")
    if not blocker and code == Code.POOL_PAUSED.word:
        blocker = _pending_at(zk, str(reason["pool"]))
    if blocker:
        other = zk.getNodeRequest(blocker, cached=True) if depth else None
        why = of_request(zk, other, clock=clock, depth=depth - 1) if other is not None and blocker != request_id else None
        if blocker not in text:
            text = f"{text}; blocked by request {blocker}"
        if why is not None:
            return Cause(f"{text}, which waits: {why.text}", why.remedy or remedy, code)
        return Cause(text, remedy, code)
    if code in _IN_USE:
        pool = str(reason["pool"])
        text += _users(zk, pool, providers, labels if code == Code.NO_FREE_NODE.word else (), clock)
        own = {name for name in providers if pool.startswith(f"{name}-")} or providers
        return _with_hosts(zk, Cause(text, remedy, code), own, labels)
    return Cause(text, remedy, code)


def _pending_at(zk: Any, pool: str) -> str:
    """The request that has paused a pool; empty when no launcher reports one."""
    for report in zk.readReports():
        for group in report["waiting"]:
            if any(one["pool"] == pool and one["code"] == Code.PAUSED.word for one in group["reasons"]) and group["ids"]:
                return str(group["ids"][0])
    return ""


def _users(zk: Any, pool: str, providers: set[str], labels: Collection[str], clock: Clock) -> str:
    """Which nodes use what the pool has; empty when there are none.

    :param pool: ``PROVIDER-POOL``; empty for all pools of the providers.
    """
    nodes = [
        node
        for node in zk.readNodes(with_contenders=False)
        if (f"{node.provider}-{node.pool}" == pool if pool else node.provider in providers)
        and (not labels or set(labels) & set(node.type))
    ]
    if not nodes:
        return ""
    states = Counter(str(node.state) for node in nodes)
    text = f" ({len(nodes)} nodes: " + ", ".join(f"{count} {state}" for state, count in states.most_common())
    tenants = Counter(str(node.tenant_name) for node in nodes if node.tenant_name)
    if tenants:
        text += "; " + ", ".join(f"tenant {name} has {count}" for name, count in tenants.most_common(MOST_NAMED))
    held = [node for node in nodes if node.state == HOLD]
    if held:
        text += f"; {len(held)} of {len(nodes)} are held: " + ", ".join(_held(node, clock) for node in held[:MOST_NAMED])
        text += f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
    return text + ")"


def _held(node: Any, clock: Clock) -> str:
    who = [str(value) for value in (node.hold_job, node.comment) if value]
    text = f"{node.id} by {', '.join(who)}" if who else f"{node.id} without a comment"
    if isinstance(node.hold_expiration, (int, float)) and node.hold_expiration > 0 and node.state_time:
        return f"{text} for another {format_duration(max(0.0, node.state_time + node.hold_expiration - clock()))}"
    return f"{text} until it is deleted"


def _with_hosts(zk: Any, cause: Cause, providers: Collection[str], labels: Collection[str]) -> Cause:
    """The cause, or the hosts that cannot be used when they are the reason for the lack of capacity."""
    down = [row["problem"] for row in told_problems(zk) if row["provider"] in providers and _of_host(row["problem"])]
    if not down:
        return cause
    text = "; ".join(dict.fromkeys(down))
    remedy = "repair the host, or remove it from the configuration"
    usable = any(set(labels) & set(node.type) for node in zk.readNodes(with_contenders=False) if node.provider in providers)
    return Cause(f"{cause.text}; {text}" if usable else text, remedy, "host-down")


def _of_host(text: object) -> bool:
    return str(text).startswith("host ")


def _of_backing(zk: Any, node: Any, clock: Clock, depth: int) -> Cause | None:
    """Why the node that is to carry this one has not been launched; None: nothing is waited for."""
    for request in zk.readRequests() if depth else ():
        owner = str(request.requestor)
        if owner.startswith("NodePool:") and owner.endswith(f":{node.provider}") and request.state in (REQUESTED, PENDING):
            cause = of_request(zk, request, clock=clock, depth=depth - 1)
            if cause.code not in _NORMAL:
                text = f"waiting for a backing node of {', '.join(request.node_types)} (request {request.id}): {cause.text}"
                return Cause(text, cause.remedy, cause.code)
    return None


def of_building(zk: Any, node: Any, clock: Clock = time.time, depth: int = 1) -> Cause | None:
    """Why the launch or deletion of a node makes no progress; None: it does, as far as is known."""
    hosts = [
        host
        for report in zk.readReports()
        if isinstance(listed := report["providers"].get(str(node.provider), {}).get("hosts"), list)
        for host in listed
        if isinstance(host, dict)
    ]
    if hosts and not any(host.get("usable") for host in hosts):
        texts = "; ".join(dict.fromkeys(str(host.get("problem") or host.get("name")) for host in hosts))
        return Cause(
            f"no host of provider {node.provider} can be used: {texts}", "start the node manager on one of its hosts", "host-down"
        )
    if node.state != DELETING and (cause := _of_backing(zk, node, clock, depth)) is not None:
        return cause
    for row in told_problems(zk):
        if row["provider"] == node.provider and (
            row["label"] in node.type or (not row["label"] and not _of_host(row["problem"]))
        ):
            return Cause(f"provider {node.provider}: {row['problem']}", "repair what the message names; it is retried", "label")
    return None


def _not_offered(zk: Any, labels: Collection[str], missing: str, again: bool = False) -> Cause:
    """Why no pool offers these labels: its provider does not run, a launcher has an old configuration, or nobody has it."""
    then = ", then submit the request again" * again
    for report in zk.readReports():
        down = report.get("not_running_labels")
        for name, offered in sorted(down.items()) if isinstance(down, dict) else ():
            if isinstance(offered, list) and set(labels) & set(map(str, offered)):
                why = report["not_running"].get(name, "see the launcher's log")
                text = f"provider {name}, which offers {joined(set(labels) & set(map(str, offered)))}, does not run: {why}"
                return Cause(text, f"repair what the message names{then}", "not-running")
        for name, why in sorted(report["not_running"].items()):
            if not isinstance(down, dict) or name not in down:  # which labels it offers is not known
                return Cause(
                    f"{missing}; provider {name} does not run: {why}", f"repair what the message names{then}", "not-running"
                )
    for report in zk.readReports():
        if report["config"]["stale_since"] is not None:
            text = f"{missing}; launcher {report['name']} uses an older configuration: {report['config']['error']}"
            return Cause(text, f"correct the configuration file{then}", "stale")
    return Cause(missing, f"correct the label, or add it to a pool of a provider{then}", "not-offered")


def _failed(zk: Any, labels: list[str], missing: str | None, declined: Sequence[str], clock: Clock) -> Cause:
    """Return the most informative of all reasons that pools report."""
    if missing is not None:
        return _not_offered(zk, labels, missing, again=True)
    telling = list(dict.fromkeys(text for text in declined if NOT_OFFERED not in text))
    others = len(declined) - sum(NOT_OFFERED not in text for text in declined)
    rest = f" ({others} other pools do not offer it)" if others else ""
    for label in labels:
        for image, entry in images_of(zk, label).items():
            cause = of_image(zk, image, entry, clock)
            if cause is not None and (not telling or "image" in " ".join(telling)):
                return Cause(f"{cause.text}{rest}", cause.remedy, "image")
    if not telling:
        return Cause(f"all pools that offered it have declined it{rest}", "see the launcher's log for why")
    return Cause(
        "; ".join(telling[:MOST_NAMED]) + rest, "repair what the message names, then submit the request again", "declined"
    )


# -- images


def configured_images(zk: Any) -> dict[str, dict[str, Any]]:
    """Disk images of the configurations of all launchers: whether one is paused there, its labels and providers."""
    found: dict[str, dict[str, Any]] = {}
    for report in zk.readReports():
        images = report.get("images")
        for name, entry in images.items() if isinstance(images, dict) else ():
            if not isinstance(entry, dict):
                continue
            row = found.setdefault(str(name), {"paused": False, "labels": set(), "providers": set()})
            row["paused"] |= entry.get("paused") is True
            for key in ("labels", "providers"):
                row[key] |= {str(each) for each in entry.get(key) or ()}
    return found


def images_of(zk: Any, label: str) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in configured_images(zk).items() if label in entry["labels"]}


def of_image(zk: Any, name: str, entry: dict[str, Any] | None = None, clock: Clock = time.time) -> Cause | None:
    """Why nodes of an image cannot be launched; None: it has an upload that can be used for each of its providers."""
    entry = entry or configured_images(zk).get(name) or {"paused": False, "labels": set(), "providers": set()}
    data, progress = zk.readImages(), zk.readProgress()
    ready = {upload.provider_name for upload in data.uploads if upload.image_name == name and upload.state == READY}
    if ready and entry["providers"] <= ready:
        return None
    lacking = ", ".join(sorted(entry["providers"] - ready))
    where = f" in provider {lacking}" if lacking else ""
    if name in data.paused:
        return Cause(f"image {name} is paused and has no usable upload{where}", f"run `nodepool image-unpause {name}`", "image")
    if entry["paused"]:
        return Cause(
            f"image {name} is paused by the option pause of its diskimage and has no usable upload{where}",
            "set `pause: false`, or remove the option", "image",
        )  # fmt: skip
    running = [build for build in progress.builds.values() if build.image == name and build.running]
    if running:
        age = format_duration(clock() - (running[0].started or clock()))
        return Cause(
            f"image {name} is being built for {age} on {running[0].builder} ({running[0].phase or 'starting'})",
            f"wait for the build; `nodepool image-log {name} --follow` shows it", "building",
        )  # fmt: skip
    failed = [problem.text for problem in image_problems(progress, clock) if problem.text.startswith(f"image {name}:")]
    if failed:
        return Cause(failed[0], f"see `nodepool explain image {name}` for the end of the log", "image")
    builds = [build for build in data.builds if build.image_name == name]
    if not builds and not zk.getBuilders():
        return Cause(f"image {name} has never been built: no builder is running", "start nodepool-builder", "image")
    if not builds:
        return Cause(f"image {name} has not been built yet", "check that the builder's configuration has this diskimage", "image")
    return Cause(
        f"image {name} is built, but has no usable upload{where}",
        "wait for the upload, or see `nodepool image-list --detail`", "uploading",
    )  # fmt: skip


# -- labels


def min_ready_of(zk: Any) -> dict[str, int]:
    """Label -> its min-ready: launchers share it, so the largest value counts once."""
    found: dict[str, int] = {}
    for report in zk.readReports():
        for name, entry in report["labels"].items():
            value = entry.get("min_ready")
            if isinstance(value, int):
                found[name] = max(value, found.get(name, 0))
    return found


def of_min_ready(zk: Any, label: str, wanted: int, requests: Iterable[Any], clock: Clock = time.time) -> Cause | None:
    """Why fewer nodes than min-ready are ready; None: they are, or are being launched."""
    ready = zk.countNodes().labels.get(label, Counter())[READY]
    if ready >= wanted:
        return None
    mine = [r for r in requests if r.requestor == MIN_READY and label in r.node_types and r.state in (REQUESTED, PENDING)]
    found: list[Cause | None] = [of_request(zk, request, clock=clock) for request in mine]
    found = [cause for cause in found if cause is not None and cause.code not in _NORMAL]
    if mine and not found:
        return None
    cause = found[0] if found else of_label(zk, label, clock)
    if cause is None:
        reason = main_reason(one for report in zk.readReports() for one in report["labels"].get(label, {}).get("declined", ()))
        if reason is None:
            return None
        offering = {str(pool.provider_name) for pool in zk.getRegisteredPools() if label in pool.labels}
        cause = _of_reason(zk, reason, "", [label], offering, clock)
    return Cause(f"{ready} of {wanted} ready (min-ready), because {cause.text}", cause.remedy, cause.code)


def of_label(zk: Any, label: str, clock: Clock = time.time) -> Cause | None:
    """What stands in the way of nodes of a label, requests aside; None: nothing that is known."""
    pools = zk.getRegisteredPools()
    if not pools and not zk.getLaunchers():
        return Cause("no launcher is running", "start nodepool-launcher")
    missing = why_not_offered([label], pools, "launcher")
    if missing is not None:
        return _not_offered(zk, [label], missing)
    offering = {str(pool.provider_name) for pool in pools if label in pool.labels}
    for image, entry in images_of(zk, label).items():
        if (lack := of_image(zk, image, entry, clock)) is not None:
            return lack
    rows = [row for row in told_problems(zk) if row["label"] == label or (row["provider"] in offering and not row["label"])]
    if rows:
        row = rows[0]
        where = f"provider {row['provider']}: " if row["provider"] else ""
        return Cause(
            f"{where}{row['problem']}", "repair what the message names", "host-down" if _of_host(row["problem"]) else "label"
        )
    return None


# -- all of them


def told_problems(zk: Any) -> list[dict[str, Any]]:
    """Problems that launchers publish of themselves."""
    return [
        {"launcher": content.get("hostname"), **{key: problem.get(key) for key in ("provider", "label", "problem")}}
        for content in zk.getLaunchers()
        if isinstance(problems := content.get("problems"), list)
        for problem in problems
        if isinstance(problem, dict)
    ]


def derived_problems(zk: Any, clock: Clock = time.time) -> list[Problem]:
    """What follows from the state of the whole cluster: images without uploads, min-ready that is not reached."""
    found = []
    for name, entry in sorted(configured_images(zk).items()):
        cause = of_image(zk, name, entry, clock) if entry["labels"] else None
        # Failed builds are listed by those who list the problems of builders.
        if cause is not None and cause.code == "image" and "failed" not in cause.text:
            found.append(Problem(one_line(f"{cause.text}. Suggestion: {cause.remedy}")))
    requests = zk.readRequests()
    for label, wanted in sorted(min_ready_of(zk).items()):
        cause = of_min_ready(zk, label, wanted, requests, clock) if wanted > 0 else None
        if cause is not None:
            found.append(
                Problem(one_line(f"{cause.text}. Suggestion: {cause.remedy or 'see `nodepool explain label`'}"), label=label)
            )
    return found
