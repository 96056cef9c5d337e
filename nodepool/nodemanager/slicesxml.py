"""Reading slices.xml, the list of slices that an authority publishes (nodemanager.md A.10)."""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import Any

from nodepool.nodemanager.rspec import RESOURCES

#: Bytes; a larger document is refused.
MAX_SIZE = 64 << 20
#: Who may look at what, in records of this source.
DELEGATIONS = [["del_snoop", "GetRSpec"]]


class SlicesXmlError(ValueError):
    """The document cannot be used as a whole; the text says why."""


def parse(document: bytes, node_id: int | str, initscript: bytes | None = None) -> list[dict[str, Any]]:
    """Records of the slivers that belong on this node.

    The order of elements does not matter, and a person may be in several slices.

    :param node_id: ours; slices of other nodes are left out.
    :raises SlicesXmlError: not well-formed, too large, or with entities.
    """
    from defusedxml import ElementTree
    from defusedxml.common import DefusedXmlException

    if len(document) > MAX_SIZE:
        raise SlicesXmlError(f"slices.xml has more than {MAX_SIZE} bytes")
    try:
        root = ElementTree.fromstring(document, forbid_dtd=True)
    except DefusedXmlException as error:
        raise SlicesXmlError(f"slices.xml has a document type or entities, which are refused: {error!r}") from None
    except ElementTree.ParseError as error:
        raise SlicesXmlError(f"slices.xml is not well-formed: {error}") from None
    keys: dict[str, list[str]] = defaultdict(list)
    for element in root.iter("key"):
        value = (element.get("value") or "").strip()
        person = element.get("person_id")
        if person and value and value not in keys[person]:
            keys[person].append(value)
    slices = list(root.iter("slice"))
    if not slices and root.tag not in ("slices", "slice", "planetlab"):
        raise SlicesXmlError(f"slices.xml has no slices, and its root is {root.tag[:40]!r}; is it another document?")
    return [record for element in slices if (record := _slice(element, str(node_id), keys, initscript)) is not None]


def _slice(element: Any, node_id: str, keys: dict[str, list[str]], initscript: bytes | None) -> dict[str, Any] | None:
    node = next((n for n in element.iter("node") if n.get("id") == node_id), None)
    if node is None:
        return None
    rspec: dict[str, int] = {}
    for resource in element.iter("resource"):
        name = resource.get("name")
        value = resource.find("value")
        if name not in RESOURCES or value is None:
            continue
        try:
            rspec[name] = int("".join(value.itertext()).strip())
        except ValueError:
            continue
    people = dict.fromkeys(u.get("person_id") for u in element.iter("user") if u.get("person_id"))
    ours = [key for person in people for key in keys.get(str(person), [])]
    record: dict[str, Any] = {
        "account_type": "sliver", "name": element.get("name"), "id": _whole(element.get("id")), "rspec": rspec,
        "ssh_keys": "\n".join(dict.fromkeys(ours)), "delegations": DELEGATIONS, "plc_instantiated": True}
    if initscript is not None:
        record["initscript"] = base64.b64encode(initscript).decode()
    expiry = _whole(element.get("expiry"))
    if expiry is not None:
        record["expiry"] = expiry
    timestamp = element.find("timestamp")
    version = _whole(timestamp.get("value")) if timestamp is not None else None
    if version is not None:
        record["timestamp"] = version
    return record


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None
