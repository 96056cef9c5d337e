"""Schema of the main file, and checks that report every error (CFG-12.1)."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import voluptuous as v

TEXT = str
NUMBER = v.Any(float, int)


class ListOf:
    """A list whose entries each fit one of *alternatives*; every misfit is reported."""

    def __init__(self, alternatives: Sequence[Any], null: bool = False) -> None:
        parts = [thorough(item) for item in alternatives]
        self.schema = v.Schema(parts[0] if len(parts) == 1 else v.Any(*parts))
        self.null = null

    def __call__(self, data: object) -> Any:
        if data is None and self.null:
            return data
        if not isinstance(data, list):
            raise v.Invalid("expected a list")
        errors: list[v.Invalid] = []
        for index, item in enumerate(data):
            try:
                self.schema(item)
            except v.MultipleInvalid as exc:
                for error in exc.errors:
                    error.prepend([index])
                    errors.append(error)
        if errors:
            raise v.MultipleInvalid(errors)
        return data


def thorough(schema: dict[Any, Any]) -> Any:
    """Return the same schema, which reports every invalid entry of lists."""
    if isinstance(schema, v.Schema):
        return thorough(schema.schema)
    if isinstance(schema, dict):
        return {key: thorough(value) for key, value in schema.items()}
    if isinstance(schema, list) and schema:
        return ListOf(schema)
    if type(schema) in (v.All, v.Any):
        return type(schema)(*[thorough(item) for item in schema.validators])
    return schema


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


def _dict_schema(schema: object) -> dict[Any, Any] | None:
    if isinstance(schema, v.Schema):
        return _dict_schema(schema.schema)
    if isinstance(schema, dict):
        return schema
    if isinstance(schema, v.All | v.Any):
        return next((found for item in schema.validators if (found := _dict_schema(item)) is not None), None)
    return None


def known_keys(schema: object, path: Sequence[Any]) -> list[str]:
    """Return the options that the schema knows at *path*; [] if unknown."""
    for item in path:
        if isinstance(item, int):
            if isinstance(schema, ListOf):
                schema = schema.schema
            else:
                schema = schema[0] if isinstance(schema, list) and schema else None
            continue
        options = _dict_schema(schema)
        schema = None if options is None else next((value for key, value in options.items() if str(key) == item), None)
    options = _dict_schema(schema)
    return sorted(str(key) for key in options if isinstance(key, str | v.Marker)) if options else []


def advice(schema: object, error: v.Invalid) -> str:
    """Return what would be right, as an addition to the message; may be empty."""
    if error.error_message != "extra keys not allowed" or not error.path:
        return ""
    keys = known_keys(schema, error.path[:-1])
    if not keys:
        return ""
    close = difflib.get_close_matches(str(error.path[-1]), keys, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(keys)}"
