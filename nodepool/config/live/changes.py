"""Describe changes of a configuration for the log, without values: some are secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nodepool.config.model import Config

SECTIONS = {
    "labels": "labels",
    "diskimages": "diskimages",
    "providers": "providers",
    "tenant_resource_limits": "tenant-resource-limits",
}


def summary(config: Config) -> str:
    """Return a summary such as ``2 labels, 1 provider``."""
    counts = [
        (len(config.labels), "label"),
        (len(config.diskimages), "diskimage"),
        (len(config.providers), "provider"),
    ]
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)


def applied_message(old: Config | None, new: Config, path: str) -> str:
    """Return one line for the log when the configuration is applied."""
    if old is None:
        return f"The configuration {path} is in force: {summary(new)}"
    return (
        "The configuration has changed and is in force now: "
        f"{changes(old, new) or 'nothing that matters'}"
    )


def changes(old: Config, new: Config) -> str:
    """Return the differences by name; empty if none of them matters."""
    found = []
    for attribute, title in SECTIONS.items():
        names = _names(getattr(old, attribute), getattr(new, attribute))
        if names:
            found.append(f"{title}: {names}")
    skipped = {*SECTIONS, "providers_not_running", *Config.ignore_equality}
    others = sorted({*vars(old), *vars(new)} - skipped)
    found += [
        name.replace("_", "-")
        for name in others
        if getattr(old, name, None) != getattr(new, name, None)
    ]
    return "; ".join(found)


def _names(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    parts = [
        ("new", new.keys() - old.keys()),
        ("removed", old.keys() - new.keys()),
        ("changed", {name for name in old.keys() & new.keys() if old[name] != new[name]}),
    ]
    return ", ".join(f"{what} {' '.join(sorted(names))}" for what, names in parts if names)
