"""Schemas of configurations: lists that report every invalid entry, and suggestions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import voluptuous as v

from nodepool.base.names import did_you_mean


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


class WithGroups:
    """A dictionary with exclusive options, all of whose errors are reported.

    voluptuous reports a violation of a group alone.
    """

    def __init__(self, options: dict[Any, Any]) -> None:
        self.schema = options
        groups = {key: object for key in options if isinstance(key, v.Exclusive)}
        self._groups = v.Schema(groups, extra=v.ALLOW_EXTRA)
        self._each = v.Schema(
            {
                v.Optional(key.schema) if key in groups else key: part
                for key, part in options.items()
            }
        )

    def __call__(self, data: object) -> Any:
        errors: list[v.Invalid] = []
        for part in (self._groups, self._each) if isinstance(data, dict) else (self._each,):
            try:
                part(data)
            except v.MultipleInvalid as exc:
                errors += exc.errors
        if errors:
            raise v.MultipleInvalid(errors)
        return data


def thorough(schema: dict[Any, Any]) -> Any:
    """Return the same schema, which reports every invalid entry of lists."""
    if isinstance(schema, v.Schema):
        return thorough(schema.schema)
    if isinstance(schema, dict):
        options = {key: thorough(value) for key, value in schema.items()}
        return (
            WithGroups(options) if any(isinstance(key, v.Exclusive) for key in options) else options
        )
    if isinstance(schema, list) and schema:
        return ListOf(schema)
    if type(schema) in (v.All, v.Any):
        return type(schema)(*[thorough(item) for item in schema.validators])
    return schema


def _dict_schema(schema: object) -> dict[Any, Any] | None:
    if isinstance(schema, v.Schema | WithGroups):
        return _dict_schema(schema.schema)
    if isinstance(schema, dict):
        return schema
    if isinstance(schema, v.All | v.Any):
        return next(
            (found for item in schema.validators if (found := _dict_schema(item)) is not None), None
        )
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
        schema = (
            None
            if options is None
            else next((value for key, value in options.items() if str(key) == item), None)
        )
    options = _dict_schema(schema)
    return sorted(str(key) for key in options if isinstance(key, str | v.Marker)) if options else []


#: What to use instead of options that people expect: by the last two parts of the path.
INSTEAD: dict[tuple[object, ...], str] = {
    ("verify", "flavor"): ": define a label with this flavor and the image, and name it with "
    "`label`"
}


def advice(schema: object, error: v.Invalid) -> str:
    """Return what would be right, as an addition to the message; may be empty."""
    if error.error_message != "extra keys not allowed" or not error.path:
        return ""
    if instead := INSTEAD.get(tuple(error.path[-2:])):
        return instead
    keys = known_keys(schema, error.path[:-1])
    if not keys:
        return ""
    return did_you_mean(error.path[-1], keys, cutoff=0.7) or f"; known are {', '.join(keys)}"
