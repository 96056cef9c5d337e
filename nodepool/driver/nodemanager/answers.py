"""Validates the answers of node managers before any other code reads them (NM-C.8).

The other end may be an older or newer release, an announced machine, or hostile. An
invalid answer counts as no answer, so that it affects only its own host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nodepool.nodemanager.client.rpc import RpcError
from nodepool.nodemanager.client.texts import clean

#: Largest plausible amount of anything; sums of such amounts stay exact.
MAX_AMOUNT = 1 << 50
MAX_TEXT = 4096
_GRANTED = ("nm_cpu_guaranteed_share", "nm_mem_limit", "nm_disk_quota")


def _bad(what: str, wanted: str, value: object) -> RpcError:
    return RpcError(f"invalid answer: {what} must be {wanted}, not {clean(repr(value)[:80])}; check the host's node manager")


def _dictionary(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(what, "a dictionary", value)
    return value


def _amounts(content: Mapping[str, Any], what: str, names: Sequence[str]) -> None:
    for name in names:
        value = content.get(name)
        # This order: comparing with NaN is always false.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_AMOUNT:
            raise _bad(f"{what}.{name}", "a finite number of at least 0", value)


def _text(value: object, what: str) -> None:
    """Check for a text without control characters, which could forge lines of a file."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or clean(value) != value:
        raise _bad(what, f"a text of at most {MAX_TEXT} characters without control characters", value)


def _optional_texts(content: Mapping[str, Any], what: str, names: Sequence[str]) -> None:
    for name in names:
        if content.get(name) is not None:
            _text(content[name], f"{what}.{name}")


def _texts(value: object, what: str) -> None:
    if not isinstance(value, list):
        raise _bad(what, "a list of texts", value)
    for item in value:
        _text(item, f"an item of {what}")


def _capacity(answer: object, _arguments: Sequence[object]) -> None:
    found = _dictionary(answer, "GetCapacity")
    _amounts(found, "GetCapacity", ("cores", "memory", "disk", "slivers", "cpu"))
    if found["cores"] < 1 or math.floor(found["cores"]) != found["cores"]:
        raise _bad("GetCapacity.cores", "a whole number of at least 1", found["cores"])
    allocated = _dictionary(found.get("allocated"), "GetCapacity.allocated")
    _amounts(allocated, "GetCapacity.allocated", ("slivers", "cpu", "memory", "disk"))
    if found.get("default") is not None:  # older node managers have none
        _amounts(_dictionary(found["default"], "GetCapacity.default"), "GetCapacity.default", ("memory", "disk"))
    if "images" in found:
        _texts(found["images"], "GetCapacity.images")
    _optional_texts(found, "GetCapacity", ("host", "group"))


def _sliver(answer: object, what: str, name: object = None) -> None:
    found = _dictionary(answer, what)
    _text(found.get("name"), f"{what}.name")
    if name is not None and found["name"] != name:
        raise _bad(f"{what}.name", repr(name), found["name"])
    _optional_texts(found, what, ("state", "username", "ssh_address"))
    # Users of the host choose the content of the metadata; see metadata_of().
    for title in ("metadata", "effective"):
        if found.get(title) is not None:
            _dictionary(found[title], f"{what}.{title}")
    effective = found.get("effective") or {}
    _amounts(effective, f"{what}.effective", [key for key in _GRANTED if key in effective])
    _amounts(found, what, [key for key in ("ssh_port", "index", "expiry") if found.get(key) is not None])
    port = found.get("ssh_port") or 0
    if not isinstance(port, int) or port > 65535:
        raise _bad(f"{what}.ssh_port", "a port", port)
    if found.get("host_keys") is not None:
        _texts(found["host_keys"], f"{what}.host_keys")


def _slivers(answer: object, _arguments: Sequence[object]) -> None:
    if not isinstance(answer, list):
        raise _bad("ListSlivers", "a list", answer)
    for item in answer:
        _sliver(item, "a sliver of ListSlivers")


def _put(answer: object, arguments: Sequence[object]) -> None:
    record = arguments[0]
    _sliver(answer, "PutRecord", record.get("name") if isinstance(record, dict) else None)


def metadata_of(sliver: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a sliver, with the texts that all users of it expect."""
    return {key: str(value) for key, value in (sliver.get("metadata") or {}).items()}


_CHECKS: dict[str, Callable[[object, Sequence[object]], None]] = {
    "GetCapacity": _capacity,
    "ListSlivers": _slivers,
    "PutRecord": _put,
    "WaitSliver": lambda answer, arguments: _sliver(answer, "WaitSliver", arguments[0]),
}


def check(method: str, arguments: Sequence[object], answer: object) -> None:
    """Check the answer to a call.

    :raises RpcError: a part that we use has an invalid type or value.
    """
    if method in _CHECKS:
        _CHECKS[method](answer, arguments)
