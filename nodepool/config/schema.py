"""Schema of the main file, and checks that report every error (CFG-12.1)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import voluptuous as v

from nodepool.base.option import schema
from nodepool.base.schema import ListOf, thorough
from nodepool.config.model import Config, ProviderConfig


def top_level_schema() -> dict[Any, Any]:
    """Return the schema of the main file; its lists may be null."""
    found = schema(Config)
    return {
        key: ListOf(each, null=True) if isinstance(each, list) else each
        for key, each in found.items()
    }


def secure_schema() -> dict[Any, Any]:
    """Return the schema of the options that have an effect in the secure file."""
    main = top_level_schema()
    return {key: main[key] for key in ("zookeeper-servers", "zookeeper-tls")} | {str: object}


def provider_schema(provider: ProviderConfig) -> Any:
    """Return the schema of a provider: the options of its driver, and those of all drivers."""
    found: Any = provider.getSchema()
    found = found.schema if isinstance(found, v.Schema) else found
    # Drivers may also give other validators.
    return {**found, **ProviderConfig.getCommonSchemaDict()} if isinstance(found, dict) else found


def check(known: dict[Any, Any], data: object) -> list[v.Invalid]:
    """Return every error of *data*, each with its path."""
    try:
        v.Schema(thorough(known))(data)
    except v.MultipleInvalid as exc:
        return list(exc.errors)
    return []


#: Numbers that may be empty, and lists for which a single entry is accepted.
_MAY_BE_NULL = frozenset(
    {"priority", "pids", "max-age", "connection-port", "volume-size", "min-ram"}
)
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
    wants_container = message in (
        "expected a list",
        "expected list",
        "expected a dictionary",
        "expected dict",
    )
    if wants_container or isinstance(value, dict | list):
        return value is not None and key not in _MAY_BE_SINGLE
    if (
        message not in ("expected int", "expected float")
        or isinstance(value, int | float)
        or converted is None
    ):
        return False
    if value is None:
        return key not in _MAY_BE_NULL
    # The loader has already checked whether it is a number.
    return key not in converted
