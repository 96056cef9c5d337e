"""Change single values in the text of a configuration file, and show the difference."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from nodepool.config.reading import SafeLoader, substitute_env_vars


def changed(text: str, path: Sequence[str | int], value: int, env: Mapping[str, str]) -> str | None:
    """Return the text with another value of one option; comments and the order of lines stay.

    :param path: keys and positions; the parent of the option is a mapping with a ``name``.
    :return: None if no single line decides about the value alone: it comes from an anchor or from
        the environment, for example.
    """
    shown = substitute_env_vars(text, env)
    lines = text.split("\n")
    node: Any = yaml.compose(shown, Loader=SafeLoader)
    expected = owner = _data(shown)
    for item in path[:-1]:
        node, owner = _child(node, item), owner[item]
    owner[path[-1]] = value
    old, name = _child(node, path[-1]), _child(node, "name")
    if (place := old or name) is None or len(lines) != shown.count("\n") + 1:
        return None
    number, begin, end = place.end_mark.line, place.end_mark.column, place.end_mark.column
    new = f", {path[-1]}: {value}"
    if old is not None:
        begin, new = old.start_mark.column, str(value)
    elif not node.flow_style:
        begin = end = len(lines[number])
        new = f"\n{' ' * node.value[0][0].start_mark.column}{path[-1]}: {value}"
    lines[number] = lines[number][:begin] + new + lines[number][end:]
    result = "\n".join(lines)
    try:
        return result if _data(substitute_env_vars(result, env)) == expected else None
    except yaml.YAMLError:
        return None


def _child(node: Any, item: str | int) -> Any:
    """Return the node under a key or at a position; None if it is not in this place itself."""
    if isinstance(node, yaml.MappingNode):
        # Of a repeated key, the last one counts.
        return next((value for key, value in reversed(node.value) if key.value == item), None)
    return node.value[item] if isinstance(item, int) and node is not None else None


def _data(text: str) -> Any:
    """Return the data of a YAML text, in which nothing is shared between two places."""
    return json.loads(json.dumps(yaml.load(text, Loader=SafeLoader), default=str))


def difference(before: str, after: str, name: str) -> str:
    """Return a unified diff, as ``patch`` reads it."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, name
    )
    end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + end for line in lines)
