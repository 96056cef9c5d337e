"""Parser for slices.xml, the list of slices that an authority publishes (NM-A.10)."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from nodepool.nodemanager.client import safe_xml
from nodepool.nodemanager.records import rspec
from nodepool.nodemanager.records.records import RecordError, clean_keys
from nodepool.nodemanager.records.rspec import RESOURCES, SYNONYMS

log = logging.getLogger("nodepool.nodemanager.slicesxml")

#: Bytes; a larger document is refused.
MAX_SIZE = 64 << 20
#: (delegate, method): what delegates may call for records of this source.
DELEGATIONS = (("del_snoop", "GetRSpec"),)
#: Not a sliver: this slice has the defaults of the others (B.2: <prefix>_default).
DEFAULT_SLICE = "pl_default"


class SlicesXmlError(ValueError):
    """The document cannot be used as a whole; the text contains the reason."""


@dataclass
class _Slice:
    name: str | None
    id: int | None
    expiry: int | None
    version: int | None = None
    here: bool = False
    #: It names nodes.
    placed: bool = False
    people: list[str] = field(default_factory=list)
    rspec: dict[str, int] = field(default_factory=dict)


class _Reader:
    """Collects elements in document order: those after a ``slice`` belong to it."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._resource: str | None = None
        self.root: str | None = None
        self.slices: list[_Slice] = []
        self.keys: dict[str, list[str]] = defaultdict(list)

    def start(self, tag: str, element: dict[str, Any]) -> None:
        if self.root is None:
            self.root = tag
        if tag == "slice":
            self.slices.append(
                _Slice(
                    element.get("name"), _whole(element.get("id")), _whole(element.get("expiry"))
                )
            )
            self._resource = None
        elif tag == "key":
            self._key(element.get("person_id"), (element.get("value") or "").strip())
        elif self.slices:
            self._detail(tag, element, self.slices[-1])

    def _key(self, person: str | None, value: str) -> None:
        if not person or not value:
            return
        try:
            for key in clean_keys(value).splitlines():
                if key not in self.keys[person]:
                    self.keys[person].append(key)
        except RecordError as error:
            log.error("slices.xml: ignoring a key of person %s: %s", person[:40], error)

    def _detail(self, tag: str, element: Any, current: _Slice) -> None:
        if tag == "timestamp":
            current.version = _whole(element.get("value"))
        elif tag == "node":
            current.placed = True
            current.here = current.here or element.get("id") == self._node_id
        elif tag == "user" and element.get("person_id"):
            current.people.append(element.get("person_id"))
        elif tag == "resource":
            self._resource = element.get("name")

    def end(self, tag: str, element: Any) -> None:
        if tag != "value" or not self.slices or self._resource is None:
            return
        name, self._resource = self._resource, None
        amount = _whole("".join(element.itertext()).strip())
        if amount is not None and (name in RESOURCES or name in SYNONYMS):
            self.slices[-1].rspec[name] = amount


def parse(
    document: bytes,
    node_id: int | str,
    initscript: bytes | None = None,
    delegations: Sequence[tuple[str, str]] = DELEGATIONS,
    default_slice: str | None = DEFAULT_SLICE,
) -> list[dict[str, Any]]:
    """Return the records of the slivers that belong on this node.

    The order of elements within a slice does not matter, and a person may be in several slices.
    Invalid keys are ignored; so are unknown resources and amounts that are not whole numbers.

    :param node_id: ours; slices of other nodes are ignored.
    :param default_slice: name of the slice with the default resources of all others here; it is not
        a sliver. It applies if it is on our node, or on no node in particular. None: there is no
        such slice.
    :raises SlicesXmlError: not well-formed, too large, with entities, or another document.
    """
    if len(document) > MAX_SIZE:
        raise SlicesXmlError(f"slices.xml has more than {MAX_SIZE} bytes")
    reader = _Reader(str(node_id))
    depth = 0
    root: Any = None
    try:
        safe_xml.check(document, types=True)
        for event, element in ElementTree.iterparse(io.BytesIO(document), events=("start", "end")):
            tag = element.tag.rpartition("}")[2]
            if event == "start":
                root = element if root is None else root
                depth += 1
                reader.start(tag, element)
                continue
            depth -= 1
            reader.end(tag, element)
            if tag != "value" and depth > 1:
                element.clear()
            elif depth == 1:
                root.clear()  # memory for one slice at a time, not for all
    except (safe_xml.UnsafeXml, ElementTree.ParseError) as error:
        raise SlicesXmlError(f"slices.xml: {error}") from None
    # An empty list removes every sliver: make sure that this is a list of slices.
    if not reader.slices and not any(
        word in (reader.root or "").lower() for word in ("slice", "planetlab")
    ):
        raise SlicesXmlError(
            f"slices.xml has no slices, and its root is {str(reader.root)[:40]!r}; is it a "
            "slices.xml?"
        )
    defaults: dict[str, int] = {}
    slivers = []
    for found in reader.slices:
        if default_slice is not None and found.name == default_slice:
            if (found.here or not found.placed) and (
                found.expiry is None or found.expiry >= time.time()
            ):
                defaults |= _defaults(found)
        elif found.here:
            slivers.append(found)
    for found in slivers:
        if defaults:
            # An invalid one stays as it is: the record is refused with the reason.
            with contextlib.suppress(rspec.RSpecError):
                found.rspec = rspec.overlay(defaults, found.rspec)
    return [_record(found, reader.keys, initscript, delegations) for found in slivers]


def _defaults(found: _Slice) -> dict[str, int]:
    """Return the usable part of the default slice: an error in it must not refuse all slivers."""
    usable: dict[str, int] = {}
    for name, amount in found.rspec.items():
        try:
            usable |= rspec.validate({**usable, name: amount})
        except rspec.RSpecError as error:
            log.error("slices.xml: ignoring an attribute of slice %s: %s", found.name, error)
    return usable


def _record(
    found: _Slice,
    keys: dict[str, list[str]],
    initscript: bytes | None,
    delegations: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    ours = [key for person in dict.fromkeys(found.people) for key in keys.get(person, [])]
    record: dict[str, Any] = {
        "account_type": "sliver",
        "name": found.name,
        "id": found.id,
        "rspec": found.rspec,
        "ssh_keys": "\n".join(dict.fromkeys(ours)),
        "delegations": [list(pair) for pair in delegations],
        "plc_instantiated": True,
    }
    if initscript is not None:
        record["initscript"] = base64.b64encode(initscript).decode()
    if found.expiry is not None:
        record["expiry"] = found.expiry
    if found.version is not None:
        record["timestamp"] = found.version
    return record


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text is not None and len(text) <= 20 else None
    except ValueError:
        return None
