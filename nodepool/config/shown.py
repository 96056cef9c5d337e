"""The configuration for users: only what cannot be a secret shows its value."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import voluptuous as v

from nodepool.base.problems import one_line
from nodepool.base.schema import ListOf
from nodepool.config.model import Config, ProviderConfig
from nodepool.config.schema import provider_schema
from nodepool.exceptions import FOREIGN

log = logging.getLogger("nodepool.config.shown")

#: Declared options that contain secrets; ``value`` belongs to a ``name`` that says what it is.
_SECRET = re.compile(
    r"pass|pwd|secret|token|credential|user-?data|custom-data|env|auth|licen[cs]e|signature|^sig$|"
    r"key$|^values?$",
    re.IGNORECASE,
)
#: Name and password in an address, even with "/" or "@" in the password; and queries.
_USER = re.compile(r"(?<=://)\S*@")
_QUERY = re.compile(r"(?<=\?)\S*=\S*")
REDACTED = "(redacted)"


def hidden(value: object) -> Any:
    """Return the value with its structure and keys, but without its texts and numbers."""
    if isinstance(value, dict):
        return {str(key): hidden(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(item) for item in value]
    return value if value is None or isinstance(value, bool) else REDACTED


def visible(value: object, schema: object) -> Any:
    """Return the value without possible secrets and values that the schema does not declare.

    Keys that a dictionary may choose freely are shown, their values are not, except numbers where
    the schema requires numbers.
    """
    alternatives = list(_alternatives(schema))
    if isinstance(value, dict):
        return {str(key): _option(key, item, alternatives) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [visible(item, v.Any(*_items(alternatives))) for item in value]
    # A single item is accepted in place of some lists.
    if (
        value is None
        or isinstance(value, bool)
        or not any(map(_is_leaf, [*alternatives, *_items(alternatives)]))
    ):
        return hidden(value)
    return (
        _QUERY.sub(REDACTED, _USER.sub(f"{REDACTED}@", value)) if isinstance(value, str) else value
    )


def _option(key: object, value: object, alternatives: Iterable[object]) -> Any:
    declared, free = [], []
    for options in alternatives:
        for name, schema in options.items() if isinstance(options, dict) else ():
            name = name.schema if isinstance(name, v.Marker) else name
            if name == key:
                declared.append(schema)
            elif not isinstance(name, str):
                free.append(schema)
    if declared and not _SECRET.search(str(key)):
        return visible(value, v.Any(*declared))
    numbers = (
        not declared
        and bool(free)
        and all(alternative in (int, float) for s in free for alternative in _alternatives(s))
    )
    return value if numbers and isinstance(value, (int, float)) else hidden(value)


def _alternatives(schema: object) -> Iterator[object]:
    if isinstance(schema, v.Schema):
        yield from _alternatives(schema.schema)
    elif isinstance(schema, (v.Any, v.All)):
        for part in schema.validators:
            yield from _alternatives(part)
    else:
        yield schema


def _items(alternatives: Iterable[object]) -> list[object]:
    found: list[object] = []
    for schema in alternatives:
        for item in (
            schema
            if isinstance(schema, list)
            else [schema.schema]
            if isinstance(schema, ListOf)
            else ()
        ):
            found.extend(_alternatives(item))
    return found


def _is_leaf(schema: object) -> bool:
    return not isinstance(schema, (dict, list, ListOf)) and schema not in (dict, list, object)


def schema_of(provider: ProviderConfig) -> object:
    """Return the schema of a provider; only the common options if its driver has none."""
    try:
        return provider_schema(provider)
    except FOREIGN:
        log.exception(
            "Driver %s has no schema; values of provider %s are not shown:",
            provider.driver.name,
            provider.name,
        )
        return ProviderConfig.getCommonSchemaDict()


def shown(config: Config) -> dict[str, Any]:
    """Return the configuration in force as JSON."""
    content = {
        "labels": {
            name: {"min-ready": label.min_ready} for name, label in sorted(config.labels.items())
        },
        "diskimages": {
            name: {
                "elements": image.elements,
                "formats": sorted(image.image_types),
                "release": image.release,
                "rebuild-age": image.rebuild_age,
                "pause": image.pause,
            }
            for name, image in sorted(config.diskimages.items())
        },
        "providers": {
            name: visible(entry.provider, schema_of(entry))
            for name, entry in sorted(config.providers.items())
        },
        "tenant-resource-limits": config.tenant_resource_limits,
    }
    # YAML types that JSON does not have, such as dates, become text.
    found: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return found


def differences(old: object, new: object, place: str = "") -> Iterator[str]:
    """Yield ``PATH: BEFORE -> AFTER`` for each value that differs.

    :param old: result of :func:`shown`, or a part of it.
    """
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and all(isinstance(i, dict) and "name" in i for i in (*old, *new))
    ):
        old, new = ({f"[{item['name']}]": item for item in items} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(
                old.get(key), new.get(key), f"{place}{'.' if place and key[:1] != '[' else ''}{key}"
            )
    elif old != new:
        yield f"{place}: {_value(old)} -> {_value(new)}"


def _value(value: object) -> str:
    return "not set" if value is None else one_line(value)[:80]
