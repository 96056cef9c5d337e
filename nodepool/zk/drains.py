"""Drains: what operators have taken out of service."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from nodepool.texts import one_line
from nodepool.zk.records import Node, RecordError

#: A path of an upload, as in nodes of disk images; a host with several entries.
_IMAGE, _ENTRY = re.compile(r"/nodepool/images/([^/]+)/builds/"), re.compile(r".+@(.+) port \d+\Z")


@dataclass(frozen=True)
class Order:
    """What an operator has ordered for a target.

    :cvar KINDS: what it can be ordered for.
    :param kind: one of :attr:`KINDS`.
    :param target: its name; of a pool ``PROVIDER-POOL``, of a launcher its host name.
    :param since: UNIX seconds, for people.
    :param by: the operator.
    """

    KINDS: ClassVar[tuple[str, ...]]
    kind: str
    target: str
    since: float
    reason: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"

    def values(self) -> dict[str, Any]:
        """Return the stored values."""
        values = asdict(self)
        del values["kind"], values["target"]
        return values

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Return the record.

        :raises RecordError: it is not valid.
        """
        kind, _, target = name.partition(" ")
        if kind not in cls.KINDS or not target:
            raise RecordError(f"{name!r} does not name one of {', '.join(cls.KINDS)}")
        reason, by = (one_line(str(values.get(key) or "")) for key in ("reason", "by"))
        return cls(kind, target, seconds_in(values.get("since")), reason, by)


@dataclass(frozen=True)
class Drain(Order):
    """Something gets no new nodes, and its idle ones are deleted.

    :param until: UNIX seconds of its end; None: an operator ends it.
    :param keep_idle: idle nodes are kept until the end, and not assigned.
    """

    KINDS = ("provider", "pool", "host", "image", "label", "launcher")
    until: float | None = None
    keep_idle: bool = False

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> Self:
        until = values.get("until")
        until = None if until is None else seconds_in(until)
        keep_idle = values.get("keep_idle") is True
        return replace(super().parse(name, values), until=until, keep_idle=keep_idle)


def seconds_in(value: object) -> float:
    """Return a time in seconds.

    :raises RecordError: it is not valid.
    """
    # NaN fails the comparison.
    if not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise RecordError(f"{value!r} is not a time in seconds")
    return value


def names_of(node: Node) -> set[str]:
    """Return the names of the drains that apply to a node, whatever the configuration is."""
    place = node.external_id
    found = (node.hostname, node.host_id, place.get("host") if isinstance(place, dict) else None)
    hosts = {host for host in found if host and isinstance(host, str)}
    names = {f"provider {node.provider}", f"pool {node.provider}-{node.pool}"}
    names |= {f"host {host}" for host in hosts}
    # As the static driver names hosts that have several entries.
    names.add(f"host {node.username}@{node.hostname} port {node.connection_port}")
    image = _IMAGE.match(node.image_id) if isinstance(node.image_id, str) else None
    names |= {f"image {image[1]}"} if image else set()
    return names | ({f"label {node.type[0]}"} if len(node.type) == 1 else set())


def host_names(name: str) -> set[str]:
    """Return the names of the drains that apply to a host which its driver calls so."""
    found = _ENTRY.match(name)
    return {f"host {name}"} | ({f"host {found[1]}"} if found else set())


def covering(drains: Iterable[Drain], names: Container[str]) -> Drain | None:
    """Return the first drain with one of these names."""
    return next((drain for drain in drains if drain.name in names), None)


def of_node(
    drains: Collection[Drain], node: Node, read: Callable[[str], Node | None]
) -> Drain | None:
    """Return the drain that applies to a node, or to the backing node whose slot it is.

    :param read: returns the node with an id.
    """
    found, place = covering(drains, names_of(node)) if drains else None, node.driver_data
    if drains and found is None and isinstance(place, dict) and "backing_node" in place:
        backing = read(str(place["backing_node"]))
        found = None if backing is None else covering(drains, names_of(backing))
    return found


def describe(drain: Drain) -> str:
    """Return the end and the reason of a drain, to follow its name."""
    end = "" if drain.until is None else f" until {moment(drain.until)}"
    return f"{end}{f': {drain.reason}' if drain.reason else ''}"


def shown(drain: Drain | None) -> str:
    """Return what is drained, with the end and the reason; empty: nothing is."""
    return "" if drain is None else f"{drain.name} is drained{describe(drain)}"


def moment(seconds: float) -> str:
    """Return a time in UTC, such as ``2026-11-29 14:30 UTC``."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M UTC}"
