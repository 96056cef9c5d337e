"""Locate options in their file: line numbers and readable paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml


def _child(node: yaml.Node, item: object) -> tuple[yaml.Node, int] | None:
    """Return the value under *item* and the line to report for it."""
    if isinstance(node, yaml.SequenceNode):
        if isinstance(item, int) and 0 <= item < len(node.value):
            value = node.value[item]
            return value, value.start_mark.line + 1
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in reversed(node.value):  # of a repeated key, the last one counts
        if isinstance(key, yaml.ScalarNode) and key.value == str(item):
            return value, key.start_mark.line + 1
    merged: list[yaml.Node] = []
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            merged.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
    for other in merged:
        found = _child(other, item)
        if found:
            return found
    return None


def find_line(root: yaml.Node | None, path: Sequence[Any]) -> int | None:
    """Return the line of the option at *path*, or of its nearest existing parent."""
    if root is None:
        return None
    node, line = root, root.start_mark.line + 1
    for item in path:
        found = _child(node, item)
        if found is None:
            break
        node, line = found
    return line


def readable_path(data: object, path: Sequence[Any]) -> str:
    """Return a path such as ``providers[cloud1].pools[0].labels``.

    List entries are shown by name if they have one.
    """
    text = ""
    for item in path:
        child = None
        if isinstance(item, int):
            child = data[item] if isinstance(data, list) and item < len(data) else None
            name = child.get("name") if isinstance(child, dict) else None
            text += f"[{name if isinstance(name, str) else item}]"
        else:
            child = data.get(item) if isinstance(data, dict) else None
            text += f".{item}" if text else str(item)
        data = child
    return text


def duplicate_keys(
    node: yaml.Node | None, seen: set[yaml.Node | None]
) -> Iterator[tuple[str, int]]:
    """Yield keys that occur twice in one dictionary, with the line of the later one.

    :param seen: nodes to skip; one with an anchor occurs several times.
    """
    if node in seen:
        return
    seen.add(node)
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from duplicate_keys(value, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    yield key.value, key.start_mark.line + 1
                keys.add(key.value)
            yield from duplicate_keys(value, seen)
