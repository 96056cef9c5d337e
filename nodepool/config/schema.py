"""Schema of the main file, and checks that report every error (CFG-12.1)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import voluptuous as v

from nodepool.base.option import schema
from nodepool.base.schema import ListOf, thorough
from nodepool.config.access import AccessConfig

TEXT = str
NUMBER = v.Any(float, int)


def top_level_schema() -> dict[Any, Any]:
    diskimage = {
        v.Required("name"): str,
        "abstract": bool,
        "parent": str,
        "formats": [str],
        "keep-formats": [str],
        "delete-after-upload": bool,
        "rebuild-age": int,
        "build-timeout": int,
        "dib-cmd": str,
        "elements": [str],
        "env-vars": {str: v.Any(str, bool, int, float)},
        "release": v.Any(str, int, float),
        "pause": bool,
        "username": str,
        "python-path": str,
        "shell-type": v.Any(str, None),
        "metadata": dict,
    }
    tenant = {v.Required("tenant-name"): str, "max-cores": int, "max-ram": int, "max-servers": int, str: int}
    return {
        "webapp": {"port": int, "listen_address": str, "pages": v.Any("loopback", "everywhere", "off", False)},
        "access": schema(AccessConfig),
        "elements-dir": str,
        "images-dir": str,
        "build-log-dir": str,
        "build-log-retention": int,
        "failed-build-retention": int,
        "build-min-free": int,
        "max-hold-age": int,
        "zookeeper-servers": ListOf([{v.Required("host"): str, "port": int, "chroot": str}], null=True),
        "zookeeper-tls": {v.Required("cert"): str, v.Required("key"): str, v.Required("ca"): str},
        "zookeeper-timeout": NUMBER,
        "zookeeper-insecure": bool,
        "drivers-path": v.Any(str, [str]),
        "labels": ListOf([{v.Required("name"): str, "min-ready": int, "max-ready-age": int}], null=True),
        "diskimages": ListOf([diskimage], null=True),
        "providers": ListOf([object], null=True),
        "tenant-resource-limits": ListOf([tenant], null=True),
    }


def secure_schema() -> dict[Any, Any]:
    """Return the schema of the options that have an effect in the secure file."""
    main = top_level_schema()
    return {key: main[key] for key in ("zookeeper-servers", "zookeeper-tls")} | {str: object}


def check(schema: dict[Any, Any], data: object) -> list[v.Invalid]:
    """Return every error of *data*, each with its path."""
    try:
        v.Schema(thorough(schema))(data)
    except v.MultipleInvalid as exc:
        return list(exc.errors)
    return []


#: Numbers that may be empty, and lists for which a single entry is accepted.
_MAY_BE_NULL = frozenset({"priority", "pids", "max-age", "connection-port", "volume-size", "min-ram"})
_MAY_BE_SINGLE = frozenset({"security-groups", "nodes"})


def harmful(error: v.Invalid, data: Any, converted: Collection[str] | None) -> bool:
    """Return whether *error* is a value of a wrong type that would fail in use.

    The loader corrects some wrong types.

    :param data: what was checked.
    :param converted: options whose text the loader converts to a number; None: of all.
    """
    message = error.error_message
    if not message.startswith("expected "):
        return False
    value, key = data, None
    for item in error.path:
        try:
            value = value[str(item) if isinstance(item, v.Marker) else item]
        except (LookupError, TypeError):
            return False
        key = item if isinstance(item, str) else key
    wants_container = message in ("expected a list", "expected list", "expected a dictionary", "expected dict")
    if wants_container or isinstance(value, dict | list):
        return value is not None and key not in _MAY_BE_SINGLE
    if message not in ("expected int", "expected float") or isinstance(value, int | float) or converted is None:
        return False
    if value is None:
        return key not in _MAY_BE_NULL
    # The loader has already checked whether it is a number.
    return key not in converted
