"""Reference of the options of a driver or a file, from the schema that validates it.

``.. driver-options:: aws`` makes lists of every option of the driver: name and type from the
schema, default and meaning from the declarations in ``nodepool/driver/aws/config.py``. The keys of
``CLASSES`` stand for files and for options of all drivers. ``.. driver-options:: nodepool.yaml
labels`` makes the list of ``labels`` only; ``top`` is that of the outer options. An option without
meaning is an error of the build.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, Derived, rows, schema

#: Stands for the configuration file of the node manager.
NODE_MANAGER = "nodemanager.yaml"
#: Classes with declared options that are not those of a driver.
CLASSES = {
    NODE_MANAGER: ("nodepool.nodemanager.config", "NodeManagerConfig"),
    "nodepool.yaml": ("nodepool.config.model", "Config"),
    "access": ("nodepool.config.access", "AccessConfig"),
    "providers": ("nodepool.config.model", "ProviderConfig"),
    "pools": ("nodepool.config.model", "ConfigPool"),
}
TYPES = {
    object: "dict",
    str: "str",
    int: "int",
    float: "number",
    bool: "bool",
    dict: "dict",
    list: "list",
}


class ReferenceError(Exception):
    """Schema and texts do not fit together."""


@dataclass(frozen=True)
class Option:
    path: tuple[str, ...]
    kind: str
    required: bool
    #: Others of which only one can be given.
    group: str | None

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def key(self) -> str:
        """As in the texts."""
        return ".".join(self.path)


def class_of(driver: str) -> Any:
    """The class with the declared options of a driver."""
    if driver in CLASSES:
        module, name = CLASSES[driver]
        return getattr(importlib.import_module(module), name)
    return type(_provider(driver))


def _provider(driver: str) -> Any:
    """The configuration of a provider of this driver, not loaded."""
    from nodepool.config.model import get_provider_config

    return get_provider_config({"name": "x", "driver": driver})


def schema_of(driver: str) -> dict[Any, Any]:
    """All options of a provider of this driver, the common ones included."""
    if driver in CLASSES:
        return dict(schema(class_of(driver)))
    config = _provider(driver)
    return {**config.getCommonSchemaDict(), **config.getSchema().schema}


def options(body: Any, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every option of the schema, outer ones first."""
    named = {marker: value for marker, value in _body(body).items() if not isinstance(marker, type)}
    for marker, value in named.items():
        name = str(marker)
        yield Option(
            (*path, name),
            kind(value),
            isinstance(marker, v.Required),
            getattr(marker, "group_of_exclusion", None),
        )
    for marker, value in named.items():
        for inner in _inner(value):
            yield from options(inner, (*path, str(marker)))


def _body(body: Any) -> dict[Any, Any]:
    if isinstance(body, v.Schema):
        return _body(body.schema)
    if isinstance(body, v.All):
        return _body(body.validators[0])
    assert isinstance(body, dict), body
    return body


def _inner(value: Any) -> list[Any]:
    """Return the schemas of dicts with named keys, in lists and alternatives, too."""
    while isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, v.All):
        value = value.validators[0]
    if isinstance(value, v.Any):
        return [found for item in value.validators for found in _inner(item)]
    return (
        [value]
        if isinstance(value, dict) and any(not isinstance(key, type) for key in value)
        else []
    )


def kind(value: Any) -> str:
    """The type, in words."""
    if isinstance(value, type):
        return TYPES[value]
    if isinstance(value, list):
        return "list" if _inner(value) else f"list of {kind(value[0])}"
    if isinstance(value, dict):
        return "dict" if _inner(value) else f"dict of {kind(next(iter(value.values())))}"
    if isinstance(value, v.All):
        return kind(value.validators[0])
    if isinstance(value, v.Coerce):
        return "number"
    if isinstance(value, v.Any):
        given = [item for item in value.validators if item is not None]
        found = [
            f"``{str(item).lower()}``" if isinstance(item, str | bool) else kind(item)
            for item in given
        ]
        return "number" if set(found) == {"int", "number"} else ", ".join(found)
    raise ReferenceError(f"no words for {value!r}")


def default_text(option: Any) -> str:
    """The default of a declared option."""
    value = option.default
    if option.shown is not None:
        return str(option.shown)
    if isinstance(value, Derived):
        return value.text
    if value is None or value is REQUIRED or value in ("", ()):
        return ""
    if isinstance(value, str | list | tuple | dict):
        return ", ".join(f"``{each}``" for each in ([value] if isinstance(value, str) else value))
    return "no limit" if value == math.inf else str(value).lower()


def texts(driver: str) -> dict[str, tuple[str, str]]:
    """Default and meaning of each option by its key."""
    config = class_of(driver)
    return {
        ".".join(path): (default_text(option), option.doc) for path, option in rows(config, config)
    }


def check(driver: str) -> list[str]:
    """What is wrong with the texts; empty when nothing is."""
    known, said = {option.key for option in options(schema_of(driver))}, texts(driver)
    return [
        f"{driver}: option {key} has no text"
        for key in sorted(known)
        if not said.get(key, ("", ""))[1]
    ] + [f"{driver}: there is no option {key}" for key in sorted(said.keys() - known)]


def sections(driver: str) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Yield where the options are, and rows of name, type, default and meaning, required ones
    first.
    """
    if wrong := check(driver):
        raise ReferenceError("; ".join(wrong))
    said = texts(driver)
    tables: dict[tuple[str, ...], list[tuple[str, str, str, str]]] = {}
    for option in options(schema_of(driver)):
        default, meaning = said[option.key]
        tables.setdefault(option.path[:-1], []).append(
            (
                f"``{option.name}``",
                option.kind,
                "required" if option.required else default or "none",
                meaning,
            )
        )
    for path, found in tables.items():
        top = driver if driver in CLASSES else "provider"
        yield ".".join(path) or top, sorted(found, key=lambda row: row[2] != "required")


def lines(driver: str, only: str | None = None) -> list[str]:
    """The reference as reStructuredText."""
    found: list[str] = []
    tables = list(sections(driver))
    if only is not None and not (
        tables := tables[:1] if only == "top" else [each for each in tables if each[0] == only]
    ):
        raise ReferenceError(f"{driver} has no options in {only}")
    for where, options_there in tables:
        found += [f".. rubric:: Options of ``{where}``", ""]
        for name, kind_of_value, default, meaning in options_there:
            default = default if default == "required" else f"default: {default}"
            # Any width fits, which a table of four columns does not on a phone.
            found += [f"{name} : {kind_of_value}; {default}", f"    {meaning}", ""]
    return found


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class DriverOptions(SphinxDirective):
        required_arguments = 1
        optional_arguments = 1

        def run(self) -> list[nodes.Node]:
            driver = self.arguments[0]
            self.env.note_dependency(inspect.getfile(class_of(driver)))
            try:
                content = lines(*self.arguments)
            except ReferenceError as error:
                raise self.error(str(error)) from error
            parent = nodes.Element()
            self.state.nested_parse(
                StringList(content, source=f"options of {driver}"), self.content_offset, parent
            )
            return list(parent.children)

    app.add_directive("driver-options", DriverOptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
