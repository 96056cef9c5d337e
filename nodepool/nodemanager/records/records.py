"""Records of authorities about slivers, delegates and the node (NM-A.5, NM-B.2, NM-C.6)."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from nodepool.nodemanager.client import privileges
from nodepool.nodemanager.records import rspec
from nodepool.nodemanager.records.rspec import check_name

SLIVER, DELEGATE = "sliver", "delegate"
TYPES = (SLIVER, DELEGATE)
BWCAP, TIMESTAMP = "bwcap", "timestamp"
DEFAULT_CAP = 5_000_000_000
DEFAULT_EXEMPT = ("127.0.0.1",)

MAX_KEYS = 64 * 1024
MAX_INITSCRIPT = 256 * 1024
MAX_RECORD = 512 * 1024
# The type must be one of sshd's: "cert-authority rsa AAAA..." would be a key with an option.
# The only options are those of a CA whose certificates must name a host: they cannot run programs.
_KEY_LINE = re.compile(
    r"(?:cert-authority,principals=\"[A-Za-z0-9._,-]+\" )?"
    r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[A-Za-z0-9+/]+=*( [^\x00-\x1f\x7f]*)?",
    re.ASCII,
)
_ROOT = re.compile(
    r"host|(?:dir|tar):/[^\x00-\x1f\x7f]+|image:[A-Za-z0-9][\w.-]{0,127}"
    r"|oci:[A-Za-z0-9][\w./:@-]{0,254}",
    re.ASCII,
)
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,61}[A-Za-z0-9])?", re.ASCII)
#: Networks that a sliver may have.
NETWORK = re.compile(r"none|nat|bridge:[A-Za-z0-9_.-]{1,15}", re.ASCII)
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}", re.ASCII)


class RecordError(ValueError):
    """A record cannot be used; the text has record, field and remedy."""


def record_key(account_type: str, name: str) -> str:
    return f"{account_type}_{name}"


def clean_keys(text: object) -> str:
    """Return the SSH public keys, one per line.

    Options before a key are refused, as they could run programs, but for a CA with named
    principals.

    :raises RecordError: a line is not a public key.
    """
    if not isinstance(text, str):
        raise RecordError("ssh_keys: must be a text with one public key per line")
    if len(text) > MAX_KEYS:
        raise RecordError(f"ssh_keys: more than {MAX_KEYS} characters")
    keys = [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]
    for number, line in enumerate(keys, 1):
        if not _KEY_LINE.fullmatch(line):
            raise RecordError(f"ssh_keys: line {number} is not a public key ({line[:30]!r}...)")
    return "\n".join(keys)


def decode_initscript(text: object) -> bytes | None:
    """Return the init script from its base64 form.

    :raises RecordError: it is not base64, or too long.
    """
    if text in (None, ""):
        return None
    if not isinstance(text, str):
        raise RecordError("initscript: must be base64 text")
    try:
        script = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RecordError("initscript: not base64") from None
    if len(script) > MAX_INITSCRIPT:
        raise RecordError(f"initscript: more than {MAX_INITSCRIPT} bytes")
    return script


def number(record: Mapping[str, Any], field: str) -> float | None:
    """Return the time in seconds, or None when it is missing.

    :raises RecordError: it is not a number.
    """
    value = record.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise RecordError(f"{field}: must be seconds, not {value!r}"[:200])
    return float(value)


def parse_record(given: object) -> dict[str, Any]:
    """Return a checked copy; unknown fields are kept.

    :raises RecordError: it cannot be used.
    """
    if not isinstance(given, Mapping):
        raise RecordError("a record must be a dictionary")
    record = dict(given)
    try:
        size = len(json.dumps(record))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"a record may contain JSON values only: {error}") from None
    if size > MAX_RECORD:
        raise RecordError(f"a record may have at most {MAX_RECORD} bytes")
    _plain(record)
    number(record, "timestamp")
    number(record, "expiry")
    if (account_type := record.get("account_type")) is not None:
        try:
            return _account(record, account_type)
        except (RecordError, rspec.RSpecError) as error:
            raise RecordError(f"{account_type} {str(record.get('name'))[:63]!r}: {error}") from None
    if record.get("record_key") == BWCAP or record.get("type") == BWCAP:
        return _bwcap(record)
    if record.get("type") == TIMESTAMP or record.get("record_key") == TIMESTAMP:
        return {**record, "record_key": TIMESTAMP}
    raise RecordError("neither account_type nor a known record_key (bwcap, timestamp)")


def _plain(value: object) -> None:
    """Check for 64-bit integers and string keys, which the API can encode."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"a record must have strings as keys, not {type(key).__name__}")
            _plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _plain(item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RecordError("a number has more than 64 bits")


def _account(record: dict[str, Any], account_type: object) -> dict[str, Any]:
    if account_type not in TYPES:
        raise RecordError(f"account_type must be one of {', '.join(TYPES)}")
    try:
        name = check_name(record.get("name"))
    except ValueError as error:
        raise RecordError(str(error)) from None
    record["record_key"] = record_key(account_type, name)
    record["ssh_keys"] = clean_keys(record.get("ssh_keys") or "")
    record["plc_instantiated"] = bool(record.get("plc_instantiated", account_type == DELEGATE))
    if account_type == DELEGATE:
        return record
    if not isinstance(record.get("rspec") or {}, Mapping):
        raise RecordError("rspec: must be a dictionary of resources")
    record["rspec"] = rspec.validate(record.get("rspec") or {})
    decode_initscript(record.get("initscript"))
    for field, pattern, default in (
        ("image", _ROOT, "host"),
        ("network", NETWORK, None),
        ("username", _USER, None),
        ("hostname", _HOSTNAME, None),
    ):
        value = record.get(field, default)
        if value is not None and (not isinstance(value, str) or not pattern.fullmatch(value)):
            raise RecordError(f"{field}: {str(value)[:60]!r} is not possible here")
        if value is not None:
            record[field] = value
    try:
        record["privileges"] = privileges.check(record.get("privileges") or [])
    except ValueError as error:
        raise RecordError(f"privileges: {error}") from None
    kind, _, path = record["image"].partition(":")
    if kind in ("dir", "tar") and (
        posixpath.normpath(path) in ("/", "//") or ".." in path.split("/")
    ):
        raise RecordError("image: must not be the root directory or a path with ..")
    if not isinstance(record.get("metadata") or {}, Mapping):
        raise RecordError("metadata: must be a dictionary")
    record["delegations"] = _delegations(record.get("delegations") or [])
    return record


def _delegations(given: object) -> list[list[str]]:
    if not isinstance(given, (list, tuple)):
        raise RecordError("delegations: must be a list of (caller, method)")
    result = []
    for item in given:
        if (
            not isinstance(item, (list, tuple))
            or len(item) != 2
            or not all(isinstance(part, str) for part in item)
        ):
            raise RecordError("delegations: each must be (caller, method)")
        result.append([item[0], item[1]])
    return result


def _bwcap(record: dict[str, Any]) -> dict[str, Any]:
    cap = record.get("cap", DEFAULT_CAP)
    exempt = record.get("exempt_ips", list(DEFAULT_EXEMPT))
    if isinstance(cap, bool) or not isinstance(cap, int) or cap <= 0:
        raise RecordError(f"bwcap: cap must be bit/s above 0, not {cap!r}"[:200])
    if not isinstance(exempt, (list, tuple)) or not all(isinstance(item, str) for item in exempt):
        raise RecordError("bwcap: exempt_ips must be a list of addresses")
    try:
        addresses = [
            str(ipaddress.ip_network(item, strict=False))
            if "/" in item
            else str(ipaddress.ip_address(item))
            for item in exempt
        ]
    except ValueError as error:
        raise RecordError(f"bwcap: exempt_ips: {error}"[:200]) from None
    return {**record, "record_key": BWCAP, "cap": cap, "exempt_ips": addresses}
