"""The schemas of the configuration as one JSON schema.

Editors use it to complete and check YAML while it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import voluptuous as v

from nodepool.base.schema import ListOf
from nodepool.config.drivers import drivers
from nodepool.config.model import ProviderConfig, get_provider_config
from nodepool.config.schema import provider_schema, top_level_schema
from nodepool.exceptions import FOREIGN, ConfigurationError

log = logging.getLogger("nodepool.config")

Json = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
#: References to environment variables, replaced before parsing; allowed for everything that is not
#: text.
VARIABLE: Json = {"type": "string", "pattern": r"^%\([A-Z0-9_]+\)$"}
_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}


def document(names: Iterable[str] | None = None) -> Json:
    """Return the schema of ``nodepool.yaml``.

    :param names: of the drivers; default: all that can be loaded.
    """
    schema = convert(top_level_schema())
    known, conditions = [], []
    for name in sorted(names if names is not None else drivers().known()):
        try:
            conditions.append(_condition(name))
        except ConfigurationError:
            continue  # from another release, or a library is missing
        except FOREIGN:
            log.exception("Cannot read the option schema of driver %s:", name)
            continue
        known.append(name)
    common = convert(ProviderConfig.getCommonSchemaDict())
    common["properties"]["driver"] = {"enum": known}
    del common["additionalProperties"]
    providers = {"type": "array", "items": {**common, "allOf": conditions}}
    schema["properties"]["providers"] = _or_null(providers)
    return {"$schema": DIALECT, "title": "Configuration of Nodepool (nodepool.yaml)", **schema}


def _condition(name: str) -> Json:
    """Return a condition: options of a provider of this driver are those of the driver."""
    options = convert(
        provider_schema(
            get_provider_config({"name": "fake-x" if name == "fake" else "x", "driver": name})
        )
    )
    # The name has precedence, and openstack is the default.
    fake: Json = {"properties": {"name": {"pattern": "^fake"}}, "required": ["name"]}
    if name == "fake":
        return {"if": fake, "then": options}
    asked: Json = {"properties": {"driver": {"const": name}}}
    if name != "openstack":
        asked["required"] = ["driver"]
    return {"if": {"allOf": [asked, {"not": fake}]}, "then": options}


def _or_null(schema: Json) -> Json:
    """Allow a key without a value.

    Alternatives are not used, since editors cannot explain errors in them.
    """
    return {**schema, "type": [schema["type"], "null"]}


def convert(schema: object) -> Json:
    """Convert a schema of voluptuous as far as JSON schema supports it.

    ``config-validate`` checks the rest.
    """
    if isinstance(schema, v.Schema):
        return convert(schema.schema)
    if isinstance(schema, dict):
        return _object(schema)
    if isinstance(schema, ListOf):
        items: Json = {"type": "array", "items": convert(schema.schema)}
        return _or_null(items) if schema.null else items
    if isinstance(schema, list):
        return (
            {"type": "array", "items": _any([convert(item) for item in schema])}
            if schema
            else {"type": "array"}
        )
    if isinstance(schema, v.Any):
        return _any([convert(item) for item in schema.validators])
    if isinstance(schema, v.All):
        return _all([convert(item) for item in schema.validators])
    return _scalar(schema)


def _scalar(schema: object) -> Json:
    if schema is None:
        return {"type": "null"}
    if isinstance(schema, v.Coerce):
        return _scalar(schema.type)
    if isinstance(schema, v.Range):
        return {
            key: value
            for key, value in (("minimum", schema.min), ("maximum", schema.max))
            if value is not None
        }
    if isinstance(schema, v.Length):
        return {
            key: value
            for key, value in (("minLength", schema.min), ("maxLength", schema.max))
            if value is not None
        }
    if isinstance(schema, v.In):
        return {"enum": sorted(cast("Iterable[Any]", schema.container))}
    if isinstance(schema, type):
        if schema in (int, float, bool):
            return {"anyOf": [{"type": _TYPES[schema]}, VARIABLE]}
        return {"type": _TYPES[schema]} if schema in _TYPES else {}
    return {} if callable(schema) else {"const": schema}


def _any(options: list[Json]) -> Json:
    if {} in options:
        return {}
    flat: list[Json] = []
    for option in options:
        for item in option["anyOf"] if set(option) == {"anyOf"} else [option]:
            if item not in flat:
                flat.append(item)
    if all(set(item) == {"const"} for item in flat):
        return {"enum": [item["const"] for item in flat]}
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _all(parts: list[Json]) -> Json:
    parts = [part for part in parts if part]
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}


def _object(schema: dict[Any, Any]) -> Json:
    found: Json = {"type": "object", "properties": {}, "additionalProperties": False}
    required = []
    for key, value in schema.items():
        name = key.schema if isinstance(key, v.Marker) else key
        if name is str or key is v.Extra:
            found["additionalProperties"] = convert(value) or True
            continue
        found["properties"][str(name)] = convert(value)
        if isinstance(key, v.Required):
            required.append(str(name))
    if required:
        found["required"] = sorted(required)
    return found
