"""Generated references: of all metrics, from their definitions, and of all options, from the schema of the configuration.

``.. metric-reference::`` and ``.. option-reference:: DRIVER`` (without a driver: what is above the providers).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

SCHEMA = pathlib.Path(__file__).resolve().parent.parent.parent / "etc" / "nodepool.schema.json"
TYPES = {"string": "str", "integer": "int", "boolean": "bool", "object": "dict", "array": "list", "null": "null"}


def metrics() -> list[tuple[str, str, str]]:
    """statsd name, family of Prometheus with its labels, meaning; by statsd name."""
    from nodepool import metrics
    from nodepool.metrics import Definition

    found = {each for each in vars(metrics).values() if isinstance(each, Definition)}
    return sorted(
        (f"``{each.statsd}``", f"``{each.family}`` " + (f"({', '.join(each.labels)})" if each.labels else ""), each.help)
        for each in found
    )


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value may be; a variable of the environment may stand for each number and is not named each time."""
    found = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [item for each in found for item in (_alternatives(each) if each is not schema else [each]) if "pattern" not in item]


def kind(schema: dict[str, Any]) -> str:
    """The type, in words."""
    words: list[str] = []
    for each in _alternatives(schema):
        if "enum" in each or "const" in each:
            words += [f"``{json.dumps(value).strip(chr(34))}``" for value in each.get("enum", [each.get("const")])]
            continue
        types = each.get("type", [])
        for name in [types] if isinstance(types, str) else types:
            inner = kind(each["items"]) if name == "array" and isinstance(each.get("items"), dict) else ""
            words.append(f"list of {inner}" if inner else TYPES.get(name, name))
    return ", ".join(dict.fromkeys(words)) or "any"


def options(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Key with its path, type, and whether it is required; outer ones first."""
    inner: list[tuple[str, dict[str, Any]]] = []
    for each in _alternatives(schema):
        while isinstance(each.get("items"), dict):
            each = each["items"]
        for part in _alternatives(each):
            required = part.get("required", ())
            for name, value in part.get("properties", {}).items():
                yield f"``{path}{name}``", kind(value), "required" if name in required else ""
                inner.append((f"{path}{name}.", value))
    for where, value in inner:
        yield from options(value, where)


def schema_of(driver: str | None) -> dict[str, Any]:
    """:raises KeyError: there is no such driver."""
    whole: dict[str, Any] = json.loads(SCHEMA.read_text())
    if driver is None:
        whole["properties"] = {name: value for name, value in whole["properties"].items() if name != "providers"}
        return whole
    for branch in whole["properties"]["providers"]["items"]["allOf"]:
        condition = json.dumps(branch["if"])
        # The driver fake is chosen by names of providers.
        if f'"const": "{driver}"' in condition or (driver == "fake" and condition.startswith('{"properties": {"name":')):
            found: dict[str, Any] = branch["then"]
            return found
    raise KeyError(driver)


def _unique(rows: Iterator[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Once each: alternatives of an object share most of their keys."""
    return list({row[0]: row for row in rows}.values())


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], widths: str) -> list[str]:
    """As reStructuredText."""
    found = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in [head, *rows]:
        found += [f"   {'*' if not index else ' '} - {cell}" for index, cell in enumerate(row)]
    return [*found, ""]


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class Reference(SphinxDirective):
        def show(self, lines: list[str]) -> list[nodes.Node]:
            parent = nodes.Element()
            self.state.nested_parse(StringList(lines, source=self.name), self.content_offset, parent)
            return list(parent.children)

    class MetricReference(Reference):
        def run(self) -> list[nodes.Node]:
            return self.show(table(("statsd", "Prometheus (labels)", "Meaning"), list(metrics()), "40 35 25"))

    class OptionReference(Reference):
        optional_arguments = 1

        def run(self) -> list[nodes.Node]:
            self.env.note_dependency(str(SCHEMA))
            try:
                schema = schema_of(self.arguments[0] if self.arguments else None)
            except KeyError as error:
                raise self.error(f"no driver {error}") from error
            return self.show(table(("Key", "Type", ""), list(_unique(options(schema))), "55 35 10"))

    app.add_directive("metric-reference", MetricReference)
    app.add_directive("option-reference", OptionReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
