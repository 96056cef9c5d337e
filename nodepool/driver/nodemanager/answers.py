"""Validates the answers of node managers before any other code reads them (NM-C.8).

The other end may be an older or newer release, an announced machine, or hostile. An
invalid answer counts as no answer, so that it affects only its own host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import voluptuous as v

from nodepool.nodemanager.client.rpc import RpcError
from nodepool.nodemanager.client.texts import clean
from nodepool.ssh import PLAIN

#: Largest plausible amount of anything; sums of such amounts stay exact.
MAX_AMOUNT = 1 << 50
MAX_TEXT = 4096
#: Maximum number of errors that are named.
MAX_ERRORS = 3


def _bad(wanted: str, value: object) -> v.Invalid:
    return v.Invalid(f"must be {wanted}, not {clean(repr(value)[:80])}")


def _amount(value: Any) -> Any:
    # This order: comparing with NaN is always false.
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= MAX_AMOUNT
    ):
        raise _bad("a finite number of at least 0", value)
    return value


def _count(value: Any) -> Any:
    if _amount(value) < 1 or value % 1:
        raise _bad("a whole number of at least 1", value)
    return value


def _port(value: object) -> object:
    if type(value) is not int or not 0 <= value <= 65535:
        raise _bad("a port", value)
    return value


def _text(value: object) -> object:
    """Check for a text without control characters, which could forge lines of a file."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or clean(value) != value:
        raise _bad(f"a text of at most {MAX_TEXT} characters without control characters", value)
    return value


def _plain(value: object) -> object:
    """Check a user or an address for the files of ssh, and of Ansible, which runs templates."""
    if value and not (isinstance(value, str) and PLAIN.match(value)):
        raise _bad("a plain name or address", value)
    return _text(value)


def _amounts(*names: str) -> dict[Any, Any]:
    return {v.Required(name): _amount for name in names}


_CAPACITY = v.Schema(
    {
        v.Required("cores"): _count,
        **_amounts("memory", "disk", "slivers", "cpu"),
        v.Required("allocated"): _amounts("slivers", "cpu", "memory", "disk"),
        # Older node managers have none.
        "default": v.Any(_amounts("memory", "disk"), None),
        "images": [_text],
        "host": v.Any(_text, None),
        "group": v.Any(_text, None),
    },
    extra=v.ALLOW_EXTRA,
)
_SLIVER = v.Schema(
    {
        v.Required("name"): _text,
        "state": v.Any(_text, None),
        "username": v.Any(_plain, None),
        "ssh_address": v.Any(_plain, None),
        "ssh_port": v.Any(_port, None),
        "host_keys": v.Any([_text], None),
        "index": v.Any(_amount, None),
        "expiry": v.Any(_amount, None),
        # Users of the host choose its content; see metadata_of().
        "metadata": v.Any(dict, None),
        "effective": v.Any(
            {"nm_cpu_guaranteed_share": _amount, "nm_mem_limit": _amount, "nm_disk_quota": _amount},
            None,
        ),
    },
    extra=v.ALLOW_EXTRA,
)
_OF_EVENTS: dict[Any, Any] = dict.fromkeys(
    (
        *("pid", "seconds", "memory_limit", "cpu_usec", "throttled_usec", "memory_peak"),
        *("oom_kills", "pids_peak", "disk_bytes", "disk_peak"),
        *("net_tx_bytes", "net_rx_bytes"),
        *("cpu_stalled_usec", "memory_stalled_usec", "io_stalled_usec"),
    ),
    _amount,
)
#: What is known of an event; other values are dropped.
_EVENT = v.Schema(
    {
        v.Required("number"): _count,
        v.Required("kind"): v.Any("ended", "killed"),
        v.Required("time"): _amount,
        "metadata": v.Any(dict, None),
        "complete": bool,
        "program": _text,
        **_OF_EVENTS,
    },
    extra=v.REMOVE_EXTRA,
)
_ANSWERS = {
    "GetCapacity": _CAPACITY,
    "ListSlivers": v.Schema([_SLIVER]),
    "PutRecord": _SLIVER,
    "WaitSliver": _SLIVER,
}


def metadata_of(sliver: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a sliver, with the texts that all users of it expect."""
    return {key: str(value) for key, value in (sliver.get("metadata") or {}).items()}


def event_of(value: object) -> dict[str, Any] | None:
    """Return what is known of an event; None: it is not valid, or of an unknown kind."""
    try:
        return dict(_EVENT(value))
    except v.Invalid:
        return None


def check(method: str, arguments: Sequence[Any], answer: Any) -> None:
    """Check the answer to a call.

    :raises RpcError: a part that we use has an invalid type or value.
    """
    if method not in _ANSWERS:
        return
    try:
        _ANSWERS[method](answer)
        if _ANSWERS[method] is _SLIVER:
            name = arguments[0]["name"] if method == "PutRecord" else arguments[0]
            if answer["name"] != name:
                raise _bad(repr(name), answer["name"])
    except v.Invalid as error:
        errors = error.errors if isinstance(error, v.MultipleInvalid) else [error]
        texts = sorted(f"{'.'.join(map(str, (method, *each.path)))} {each.msg}" for each in errors)
        raise RpcError(
            f"invalid answer: {'; '.join(texts[:MAX_ERRORS])}; check the host's node manager"
        ) from None
