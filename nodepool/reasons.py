"""Reasons why a request waits or is declined, with parameters, and their texts.

The same value decides which requests are rechecked when something changes, and is shown in
``/waiting-list``, logs, commands and metrics.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class _Text(enum.Enum):
    """An enumeration whose values are texts."""

    @property
    def word(self) -> str:
        """Return the code for JSON and metrics."""
        return self.name.lower().replace("_", "-")


class Declined(_Text):
    """Why a pool can never serve a request; other pools may."""

    POOL_DISABLED = "pool is disabled by max_servers"
    NOT_OFFERED = "does not offer {labels}"
    UNAVAILABLE = "node type(s) [{labels}] not available"
    NO_IMAGE = "images are not available"
    OVER_QUOTA = "it would exceed quota"
    OVER_LIMIT = "it would exceed quota ({limit})"
    LABEL_BROKEN = "node type(s) [{labels}] cannot work"
    LABEL_PROBLEM = "{problem}"
    NODES_FAILED = "launch of node {nodes} failed"
    NOT_CREATED = "launch of node {nodes} failed, no machine was created"
    ERROR = "error: {error}"
    #: Text of a driver that decides without the launcher.
    BY_DRIVER = "{text}"


class Code(_Text):
    """Why a request waits; doc/operation/waiting.rst explains each reason."""

    NOT_LOOKED_AT = "queued for scheduling"
    BUSY = "scheduler busy"
    NOT_RUNNING = "not running"
    PROVIDER_NOT_RUNNING = "the provider is not running"
    SWITCHED_OFF = "max-concurrency is 0"
    DRAINED = "{what} is drained{why}"
    MAX_CONCURRENCY = "max-concurrency reached: {active} launches are running"
    LAUNCHES_FAIL = "launches of {labels} keep failing: {error}"
    NO_FREE_NODE = "no free node of {labels}"
    BEING_TAKEN = "all free nodes are being assigned to earlier requests: {labels}"
    NOTHING_FREE = "nothing free"
    NOTHING_FREE_NO_EVENT = "no free node; this driver is polled every 30 s"
    POOL_PAUSED = "paused at quota: request {request} comes first"
    PROVIDER_QUOTA = "provider {provider}, {resource}: {needed} needed, {left} of {limit} left"
    POOL_LIMIT = "pool {name}, {resource}: {needed} needed, {left} of {limit} left"
    REFUSED_BY_CLOUD = "provider {provider}: cloud quota exceeded (label {label}){sold_out}"
    LIMITS_UNKNOWN = "reading the limits of provider {provider}"
    NO_ROOM = "no capacity for {labels}"
    TENANT_LIMIT = (
        "tenant {tenant} is limited to {limit} {resource}, {used} in use, {needed} needed"
    )
    BETTER_PRIORITY = "a pool of better priority is open"
    OTHER_LAUNCHER = "another launcher can serve it"
    REGISTERING = "pools of this launcher are still being registered"
    OTHERS_DECLINE = "not offered by this launcher; waiting for the others"
    AFTER_SESSION_LOSS = "ZooKeeper session was lost; waiting for other launchers to register again"
    PAUSED = "paused, {why}"
    LAUNCHING = "launching nodes"
    ERROR = "error: {error}"


_BUG = "report a bug and attach the traceback from the launcher's log"
_NODES = "add nodes of the label, or wait until one is returned"
_HELD = "or delete held and forgotten nodes"
_LOG = "see `nodepool problem-list` and the launcher's log for the reason"
_START = "see `nodepool problem-list` and the launcher's log for why the provider did not start"
#: Suggestions by code, if an operator can do something; texts use the reason's parameters and
#: ``option``.
HELP: dict[_Text, str] = {
    Code.SWITCHED_OFF: "raise `max-concurrency` of the provider",
    Code.DRAINED: "`nodepool undrain {what}` ends it",
    Code.MAX_CONCURRENCY: "raise `max-concurrency` of the provider, or wait until running launches "
    "end",
    Code.LAUNCHES_FAIL: "repair what the reason names, then run `nodepool retry {labels}`; "
    "otherwise one request at a time is tried when fewer of the failures lie within the last hour",
    Code.NO_FREE_NODE: _NODES,
    Code.NOTHING_FREE: _NODES,
    Code.PROVIDER_QUOTA: f"raise the quota of provider {{provider}}, {_HELD}",
    Code.POOL_LIMIT: f"raise `{{option}}` of pool {{name}}, {_HELD}",
    Code.REFUSED_BY_CLOUD: "raise the cloud quota of provider {provider}; other users of the "
    "account count, too",
    Code.TENANT_LIMIT: "raise `{option}` of tenant {tenant} in `tenant-resource-limits`, or wait "
    "until it returns nodes",
    Code.PROVIDER_NOT_RUNNING: _START,
    Code.NOT_RUNNING: _START,
    Code.OTHERS_DECLINE: "check `nodepool status` for a registered launcher that does not work",
    Code.POOL_PAUSED: "see `nodepool explain request {request}` for what that request waits for",
    Code.PAUSED: f"raise the limit that the reason names, {_HELD}",
    Code.ERROR: _BUG,
    Declined.POOL_DISABLED: "raise `max-servers` of the pool, which is 0",
    Declined.OVER_LIMIT: "{limit_help}{smaller}",
    Declined.OVER_QUOTA: "raise the quota of the provider, or request fewer or smaller nodes",
    Declined.UNAVAILABLE: _LOG,
    Declined.LABEL_BROKEN: _LOG,
    Declined.NO_IMAGE: "check that the images of the labels are built and uploaded, or exist in "
    "the cloud",
    Declined.BY_DRIVER: _LOG,
    Declined.NOT_CREATED: "see `nodepool explain node {nodes}` for each attempt",
    Declined.NODES_FAILED: "see `nodepool explain node {nodes}` for each attempt",
    Declined.LABEL_PROBLEM: "{help}",
    Declined.ERROR: _BUG,
}
#: Text under which requests are counted together that the same thing blocks; ``use``: "20 of 20
#: instances in use".
HEADLINES: dict[_Text, str] = {
    Code.PROVIDER_QUOTA: "Quota of {provider}: {use}",
    Code.POOL_LIMIT: "Limit of pool {pool}: {use}",
    Code.TENANT_LIMIT: "Limit of tenant {tenant}: {use}",
    Code.REFUSED_BY_CLOUD: "Quota of {provider}: exceeded, according to its cloud",
    Code.LIMITS_UNKNOWN: "Limits of {provider} are being read",
    Code.MAX_CONCURRENCY: "max-concurrency of {pool} reached",
    Code.SWITCHED_OFF: "max-concurrency of {pool} is 0",
    Code.DRAINED: "Drained: {what}",
    Code.LAUNCHING: "Nodes are being launched",
    Code.NOT_LOOKED_AT: "Queued for scheduling",
    Code.BUSY: "Queued for scheduling",
    Code.LAUNCHES_FAIL: "Launches of {labels} keep failing in {provider}",
    Code.NO_FREE_NODE: "No free node of {labels}",
    Code.NO_ROOM: "No capacity for {labels}",
    Code.BEING_TAKEN: "Free nodes are being assigned: {labels}",
    Code.NOTHING_FREE: "No free node in {pool}",
    Code.NOTHING_FREE_NO_EVENT: "No free node in {pool}",
}
#: Parameters that say what blocks a request; the others differ between requests.
_BLOCKERS = ("provider", "tenant", "resource", "labels", "request", "error")
_OPTIONS = {"instances": "max-servers", "cores": "max-cores", "ram": "max-ram"}


@dataclass(frozen=True)
class Reason:
    """A code with its parameters.

    :param pool: of this launcher, as ``PROVIDER-POOL``; empty if it concerns no specific pool.
    """

    code: Code | Declined
    parameters: tuple[tuple[str, object], ...] = ()
    pool: str = ""

    def at(self, pool: str) -> Reason:
        """Return the same reason for that pool."""
        return dataclasses.replace(self, pool=pool)

    def includes(self, other: Reason) -> bool:
        """Return whether it has the code and at least the parameters of the other reason."""
        mine, theirs = dict(self.parameters), dict(other.parameters)
        return self.code is other.code and theirs.items() <= mine.items()

    @property
    def root(self) -> Reason:
        """Return the reason that blocks the request; for a paused pool, why it is paused."""
        why = dict(self.parameters).get("why")
        return why if isinstance(why, Reason) else self

    @property
    def suggestion(self) -> str:
        """Return what an operator can do; empty if the wait ends without intervention."""
        root = self.root
        values: dict[str, Any] = {"help": "", **dict(root.parameters)}
        text, limit = HELP.get(root.code, ""), values.get("limit")
        if isinstance(limit, Reason):
            values["limit_help"] = limit.suggestion.removesuffix(f", {_HELD}")
            values["smaller"] = (
                ", or request fewer or smaller nodes" if dict(limit.parameters).get("limit") else ""
            )
        if root.code is Code.TENANT_LIMIT and values["needed"] > limit:
            text = text.replace(
                ", or wait until it returns nodes", ", or request fewer nodes" if limit else ""
            )
        resource = str(values.get("resource", ""))
        return text.format(**{"option": _OPTIONS.get(resource, f"max-{resource}"), **values})

    @property
    def blocker(self) -> str:
        """Return a key of what blocks the request: equal for all requests that it blocks."""
        root, values = self.root, dict(self.root.parameters)
        found = [str(values[key]) for key in _BLOCKERS if key in values]
        if not {"provider", "tenant"} & values.keys():
            found.append(self.pool or root.pool)
        return " ".join(found)

    @property
    def headline(self) -> str:
        """Return what blocks the request, without details of this request."""
        root = self.root
        values: dict[str, Any] = {
            "pool": self.pool or root.pool or "a pool",
            **dict(root.parameters),
        }
        if "limit" in values and "resource" in values:
            used = values["used"] if "used" in values else values["limit"] - values["left"]
            values["use"] = _use(str(values["resource"]), used, values["limit"])
        return str(HEADLINES.get(root.code, root.code.value).format(**values))

    def __str__(self) -> str:
        text = self.code.value.format(**dict(self.parameters))
        return f"{self.pool}: {text}" if self.pool else text


def _use(resource: str, used: float, limit: float) -> str:
    if resource == "ram":  # in MiB
        return f"{used / 1024:.4g} of {limit / 1024:.4g} GiB of RAM in use"
    return f"{used:.6g} of {limit:.6g} {resource} in use"


def because(code: Code | Declined, **parameters: object) -> Reason:
    return Reason(code, tuple(parameters.items()))


def render(reasons: Iterable[Reason]) -> str:
    return "; ".join(map(str, reasons))
