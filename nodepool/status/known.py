"""Known facts about single objects: published problems, pools, nodes, images.

:mod:`.causes` builds on it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodepool.base.clock import MOST_SKEW
from nodepool.base.problems import BUILDER_ENDED, DELETION, image_problems
from nodepool.status.once import Facade, remembered
from nodepool.status.results import format_duration
from nodepool.zk import declines
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    FULFILLED,
    HOLD,
    READY,
    USED,
    ImageBuild,
    Node,
    NodeRequest,
)
from nodepool.zk.records.progress import BuildProgress, ProgressData
from nodepool.zk.reports import number
from nodepool.zk.rollback import unused, why_unused

Clock = Callable[[], float]
UNKNOWN = "its reason is no longer known"
PATIENCE = 300.0
"""Seconds for the owner of a node to accept or release it; later this is reported as a problem."""


@dataclass(frozen=True)
class Cause:
    """A cause and a suggestion.

    :param code: of the reason that it comes from; empty if it comes from none.
    :param blocker: key of what blocks the request; equal for all requests that it blocks.
    :param headline: the cause without details of one request; empty: the text.
    """

    text: str
    remedy: str = ""
    code: str = ""
    blocker: str = ""
    headline: str = ""


def published_problems(zk: Facade) -> list[dict[str, Any]]:
    """Return the problems that launchers publish."""
    return remembered(zk, "published problems", lambda: _published_problems(zk))


def _published_problems(zk: Facade) -> list[dict[str, Any]]:
    return [
        {
            "launcher": content.get("hostname"),
            **{key: problem.get(key) for key in ("provider", "label", "problem", "help")},
            "since": number(problem.get("since")),
        }
        for content in zk.getLaunchers()
        if isinstance(problems := content.get("problems"), list)
        for problem in problems
        if isinstance(problem, dict)
    ]


def is_of_host(text: object) -> bool:
    return str(text).startswith("host ")


def cause_of_row(row: dict[str, Any]) -> Cause:
    """Return the cause for a published problem."""
    where = f"provider {row['provider']}: " if row["provider"] else ""
    if is_of_host(row["problem"]):
        return Cause(
            f"{where}{row['problem']}",
            "repair the host, or remove it from the configuration",
            "host-down",
        )
    return Cause(
        f"{where}{row['problem']}",
        str(row.get("help") or "repair what the message names; it is retried"),
        "label",
    )


def declines_of(zk: Facade, request: NodeRequest) -> list[tuple[str, declines.Decline]]:
    """Return declining pools, named as by :func:`place_of`, with their reasons."""
    said = declines.read(
        zk.kazoo_client, ((request.id or "", launcher_id) for launcher_id in request.declined_by)
    )
    found = []
    for launcher_id in request.declined_by:
        place = place_of(zk, launcher_id)
        found.append(
            (
                place,
                said.get((request.id or "", launcher_id))
                or declines.Decline(f"{place}: {UNKNOWN}", ""),
            )
        )
    return found


def place_of(zk: Facade, launcher_id: str) -> str:
    """Return a name of a registered pool: ``PROVIDER-POOL on LAUNCHER``.

    The launcher is named as in its report.
    """
    for report in zk.readReports():
        for provider, entry in report["providers"].items():
            for pool, values in entry["pools"].items():
                if values["id"] == launcher_id:
                    return f"{provider}-{pool} on {report['name']}"
    return declines.pool_of(launcher_id)


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def seconds_text(seconds: float) -> str:
    """Return a measured duration; a short one has two digits."""
    return f"{seconds:.2g} s" if seconds < 9.95 else format_duration(round(seconds))


def hold_text(node: Node, clock: Clock) -> str:
    who = [str(value) for value in (node.hold_job, node.comment) if value]
    text = f"{node.id} by {', '.join(who)}" if who else f"{node.id} without a comment"
    left = _hold_left(node, clock)
    if left is None:
        return f"{text} until it is deleted"
    return (
        f"{text} for another {format_duration(left)}"
        if left > 0
        else f"{text}, expired {format_duration(-left)} ago"
    )


def _hold_left(node: Node, clock: Clock) -> float | None:
    """Return the seconds until the hold expires, negative afterwards; None: it does not."""
    if (
        isinstance(node.hold_expiration, (int, float))
        and node.hold_expiration > 0
        and node.state_time
    ):
        return float(node.state_time + node.hold_expiration - clock())
    return None


def nodes_of_pool(zk: Facade, pool: str) -> list[Node]:
    """Return the nodes of ``PROVIDER-POOL``."""
    return _index(zk, "pool", lambda node: f"{node.provider}-{node.pool}").get(pool, [])


def nodes_of_request(zk: Facade, request_id: str) -> list[Node]:
    return _index(zk, "request", lambda node: str(node.allocated_to)).get(request_id, [])


def nodes_on(zk: Facade, node_id: str) -> list[Node]:
    """Return the nodes that are slots of this node."""
    return _index(zk, "backing node", _backing_of).get(node_id, [])


def _backing_of(node: Node) -> str:
    return str(node.driver_data.get("backing_node")) if isinstance(node.driver_data, dict) else ""


def _index(zk: Facade, name: str, key: Callable[[Node], str]) -> dict[str, list[Node]]:
    def make() -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = defaultdict(list)
        for node in zk.readNodes():
            found[key(node)].append(node)
        return found

    return remembered(zk, f"nodes by {name}", make)


def stuck_nodes(zk: Facade, clock: Clock = time.time) -> dict[str, Cause]:
    """Return node id -> result of :func:`of_node`, if it is a cause."""

    def stuck() -> dict[str, Cause]:
        return {
            str(node.id): cause
            for node in zk.readUnreleasedNodes()
            if (cause := of_node(zk, node, clock)) is not None
        }

    return remembered(zk, "stuck nodes", stuck)


def of_node(zk: Facade, node: Node, clock: Clock = time.time) -> Cause | None:
    """Return why an unused node keeps its capacity; None: it is used, or being deleted."""
    age = clock() - (node.state_time or clock())
    if node.state == DELETING:
        return next(
            (
                cause_of_row(row)
                for row in published_problems(zk)
                if f"{DELETION}{node.id} " in str(row["problem"])
            ),
            None,
        )
    if node.state == USED and age > PATIENCE and node.provider in served_providers(zk):
        text = (
            f"node {node.id} has been used for {format_duration(age)}, but its owner has not "
            "released its lock"
        )
        return Cause(
            text, "restart the process that holds the lock (Zuul's executor or scheduler)", "owner"
        )
    if node.state == HOLD and (left := _hold_left(node, clock)) is not None and left < -PATIENCE:
        text = (
            f"the hold of node {node.id} expired {format_duration(-left)} ago, but it is still "
            "locked or not deleted"
        )
        return Cause(text, f"delete it with `nodepool delete {node.id}`", "owner")
    if (
        node.state == HOLD
        and node.stat is not None
        and (node.state_time or 0) - node.stat.mtime / 1000 > MOST_SKEW
    ):
        ahead = format_duration((node.state_time or 0) - node.stat.mtime / 1000)
        text = (
            f"node {node.id} was leased by a client whose clock is {ahead} ahead of that of "
            "ZooKeeper: it ends that much later"
        )
        return Cause(text, "synchronize the clocks (NTP)", "owner")
    if node.state == READY and node.allocated_to and age > PATIENCE:
        request = zk.getNodeRequest(node.allocated_to, cached=True)
        if request is not None and request.state == FULFILLED:
            waited = format_duration(clock() - (request.state_time or clock()))
            text = (
                f"node {node.id} is ready, but {request.requestor} has not accepted request "
                f"{request.id} for {waited}"
            )
            return Cause(
                text,
                "check that the requestor (Zuul's scheduler) runs, or cancel the request",
                "owner",
            )
    return None


def served_providers(zk: Facade) -> set[str | None]:
    """Return the providers that a launcher has, even without pools."""

    def make() -> set[str | None]:
        found = {pool.provider_name for pool in zk.getRegisteredPools()}
        return found.union(*(report["providers"] for report in zk.readReports()))

    return remembered(zk, "served providers", make)


def unserved_nodes(zk: Facade) -> dict[str, Counter[str]]:
    """Return the providers that no launcher has -> their nodes by state."""
    served = served_providers(zk)
    return {
        name: states
        for name, states in sorted(zk.countNodes().providers.items())
        if name not in served
    }


#: Labels of registered pools by provider and pool.
_Offers = dict[str | None, dict[str | None, set[str]]]


def stranded_nodes(zk: Facade) -> dict[str, list[Node]]:
    """Return why no request gets idle nodes of registered providers -> these nodes."""
    offers = _offers(zk)
    # Usually there are none: the nodes are not read then.
    idle = zk.countNodes().idle
    if all(_why_not(offers, *key) is None for key in idle):
        return {}
    found: dict[str, list[Node]] = defaultdict(list)
    for node in zk.readNodes():
        if (why := _why_stranded(offers, node)) is not None:
            found[why].append(node)
    return found


def of_stranded(zk: Facade, node: Node) -> Cause | None:
    """Return why no request gets an idle node; None: requests get it, or it is not idle."""
    why = _why_stranded(_offers(zk), node)
    if why is None:
        return None
    return Cause(
        f"no request gets it: {why}",
        f"delete it with `nodepool delete {node.id}`, or offer its label there again",
    )


def _why_stranded(offers: _Offers, node: Node) -> str | None:
    if node.state != READY or node.allocated_to is not None:
        return None
    return _why_not(offers, node.provider, node.pool, node.type)


def _why_not(
    offers: _Offers, provider: str | None, pool: str | None, types: Sequence[str]
) -> str | None:
    """Return why the pool serves no request for these labels; None: it does, or is unknown."""
    named = offers.get(provider)
    if named is None:
        return None
    labels = named.get(pool, named.get(None))  # another release may omit the name
    if labels is None:
        return f"pool {provider}-{pool} is no longer configured"
    if labels.isdisjoint(types):
        what = ", ".join(types) or "nodes without a label"
        return f"pool {provider}-{pool} no longer offers {what}"
    return None


def _offers(zk: Facade) -> _Offers:
    found: _Offers = defaultdict(dict)
    for pool in zk.getRegisteredPools():
        found[pool.provider_name].setdefault(pool.name, set()).update(pool.labels)
    return found


def configured_images(zk: Facade) -> dict[str, dict[str, Any]]:
    """Return the disk images in the configurations of all launchers.

    Includes whether one is paused there, its rebuild-age in seconds if known, its labels and
    providers.
    """
    found: dict[str, dict[str, Any]] = {}
    for report in zk.readReports():
        for name, entry in report["images"].items():
            row = found.setdefault(
                name, {"paused": False, "rebuild_age": None, "labels": set(), "providers": set()}
            )
            row["paused"] |= entry["paused"]
            row["rebuild_age"] = entry["rebuild_age"] or row["rebuild_age"]
            for key in ("labels", "providers"):
                row[key].update(entry[key])
    return found


def backing_of(zk: Facade, label: str) -> list[str]:
    """Return the labels of backing nodes for this label."""
    found = {
        name
        for report in zk.readReports()
        for name in report["labels"].get(label, {}).get("backing", ())
    }
    return sorted(found - {label})


def images_of(zk: Facade, label: str) -> dict[str, dict[str, Any]]:
    return {
        name: entry for name, entry in configured_images(zk).items() if label in entry["labels"]
    }


def read_progress(zk: Facade) -> ProgressData:
    """Return the progress of builds and uploads; a build whose builder has ended has failed.

    Its record lasts until the builder starts again. A builder holds the lock of the image from
    before the record until after the result.
    """
    # In this order: a build that begins meanwhile has its lock.
    progress = zk.readProgress()
    return judged(progress, zk.readImages())


def judged(progress: ProgressData, images: ImageData) -> ProgressData:
    """Return the progress as :func:`read_progress`, from data that were read already."""
    states = {build.id: build.state for build in images.builds}

    def checked(build: BuildProgress) -> BuildProgress:
        held = images.build_locks.get(build.image, (0.0, False))[1]
        if not build.running or held or states.get(build.build, BUILDING) != BUILDING:
            return build
        return replace(build, state=FAILED, reason=BUILDER_ENDED, ended=build.updated)

    return replace(
        progress, builds={name: checked(build) for name, build in progress.builds.items()}
    )


def of_image(
    zk: Facade, name: str, entry: dict[str, Any] | None = None, clock: Clock = time.time
) -> Cause | None:
    """Return why nodes of an image cannot be launched; None: all its providers have uploads."""
    entry = (
        entry
        or configured_images(zk).get(name)
        or {"paused": False, "labels": set(), "providers": set()}
    )
    data, progress = zk.readImages(), read_progress(zk)
    ready = {
        upload.provider_name
        for upload in data.uploads
        if upload.image_name == name and upload.state == READY and not upload.held_back
    }
    if ready and entry["providers"] <= ready:
        return None
    for provider in sorted(entry["providers"] - ready):
        upload = unused(data, name, provider)
        if upload is not None and upload.rolled_back is not None:
            use = f"`nodepool image-rollforward {name} --provider {provider}`"
            return Cause(
                f"image {name}: no upload is used in provider {provider}: "
                + why_unused(data, name, provider),
                f"{use} uses it without verification"
                if upload.rolled_back.unverified
                else f"repair the image and run `nodepool image-build {name}`, or use this build "
                f"with {use}",
                "image",
            )
    lacking = ", ".join(sorted(entry["providers"] - ready))
    where = f" in provider {lacking}" if lacking else ""
    if name in data.paused:
        return Cause(
            f"image {name} is paused and has no usable upload{where}",
            f"run `nodepool image-unpause {name}`",
            "image",
        )
    if entry["paused"]:
        return Cause(
            f"image {name} is paused by the option pause of its diskimage and has no usable "
            f"upload{where}",
            "set `pause: false`, or remove the option",
            "image",
        )
    running = [build for build in progress.builds.values() if build.image == name and build.running]
    if running:
        age = format_duration(clock() - (running[0].started or clock()))
        return Cause(
            f"image {name} is being built for {age} on {running[0].builder} "
            f"({running[0].phase or 'starting'})",
            f"wait for the build; `nodepool image-log {name} --follow` shows it",
            "building",
        )
    failed = [
        problem
        for problem in image_problems(progress, clock)
        if problem.text.startswith(f"image {name}:")
        and problem.provider in (None, *(entry["providers"] or {problem.provider}))
    ]
    if failed:
        return Cause(failed[0].text, failed[0].help, "image")
    builds = [build for build in data.builds if build.image_name == name]
    if not builds and not zk.getBuilders():
        return Cause(
            f"image {name} has never been built: no builder is running",
            "start nodepool-builder",
            "image",
        )
    if not builds:
        return Cause(
            f"image {name} has not been built yet",
            "check that the builder's configuration has this diskimage",
            "image",
        )
    return _not_uploaded(zk, name, builds, where)


def _not_uploaded(zk: Facade, name: str, builds: list[ImageBuild], where: str) -> Cause:
    """Return why a build has no upload: in `where`, or because no provider wants one."""
    if not where:
        return Cause(
            f"image {name} is built, and is not uploaded: no provider of a running launcher has it",
            "name it in the `diskimages` of a provider",
            "image",
        )
    built = f"image {name} is built, but has no usable upload{where}"
    # Only the builder of a build has its files. Those of 11.0.0 report no id.
    living = zk.getBuilders()
    alive = {str(builder["builder_id"]) for builder in living if builder.get("builder_id")}
    alive |= {str(builder.get("hostname")).partition(".")[0] for builder in living}
    holders = [build for build in builds if build.state == READY and build.builder]
    if holders and not any(
        build.builder_id in alive or str(build.builder).partition(".")[0] in alive
        for build in holders
    ):
        hosts = ", ".join(sorted({str(build.builder) for build in holders}))
        return Cause(
            f"{built}: the builder on {hosts}, which has its files, is not running",
            f"start nodepool-builder on {hosts}, or run `nodepool image-build {name}` for a build "
            "on another builder",
            "image",
        )
    return Cause(built, "wait for the upload, or see `nodepool image-list --detail`", "uploading")
