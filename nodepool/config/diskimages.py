"""Disk images and their inheritance (CFG-5)."""

from __future__ import annotations

import logging
from typing import Any

from nodepool.base.config_value import ConfigValue
from nodepool.config.errors import UnknownName
from nodepool.exceptions import ConfigError

log = logging.getLogger("nodepool.config")


class DiskImage(ConfigValue):
    """An image to build; ages and time-outs in seconds."""

    BUILD_TIMEOUT = 8 * 60 * 60
    REBUILD_AGE = 24 * 60 * 60

    def __init__(self, name: str) -> None:
        self.name = name
        self.build_timeout: int = self.BUILD_TIMEOUT
        self.dib_cmd = "disk-image-create"
        self.elements = ""
        self.env_vars: dict[str, str] = {}
        #: Variables whose values come from the secure file and are not logged.
        self.secret_names: set[str] = set()
        self.image_types: set[str] = set()
        self.delete_after_upload = False
        self.keep_image_types: set[str] = set()
        self.pause = False
        self.python_path = "auto"
        self.shell_type: str | None = None
        self.rebuild_age: int = self.REBUILD_AGE
        self.release = ""
        self.username = "zuul"
        self.meta: dict[str, Any] = {}

    def set_env_vars(self, values: dict[str, Any], secret: bool = False) -> None:
        """Merge *values*; numbers become strings. Secret values are not logged."""
        for key, value in values.items():
            if secret:
                self.secret_names.add(str(key))
            if isinstance(value, bool):
                log.warning(
                    "diskimage %s: env-vars %s is a boolean and becomes %s; put it in quotes",
                    self.name, key, "a string" if secret else repr(str(value).lower()),
                )  # fmt: skip
                self.env_vars[str(key)] = str(value).lower()
            elif isinstance(value, str | int | float):
                self.env_vars[str(key)] = str(value)
            else:
                shown = "" if secret else f", not {value!r}"
                raise ConfigError(f"diskimage {self.name}: env-vars {key} must be a string{shown}")

    def setFromConfig(self, config: dict[str, Any]) -> None:
        """Apply one level of options on top of the present values."""
        for key, attribute in (("build-timeout", "build_timeout"), ("rebuild-age", "rebuild_age")):
            if config.get(key):
                try:
                    setattr(self, attribute, int(config[key]))
                except (TypeError, ValueError):
                    raise ConfigError(
                        f"diskimage {self.name}: {key} must be seconds, not {config[key]!r}", where=(key,)
                    ) from None
        for key, attribute in (
            ("dib-cmd", "dib_cmd"),
            ("username", "username"),
            ("python-path", "python_path"),
            ("shell-type", "shell_type"),
        ):
            if config.get(key):
                setattr(self, attribute, config[key])
        if config.get("release"):
            self.release = str(config["release"])
        for key, attribute in (("formats", "image_types"), ("keep-formats", "keep_image_types")):
            if config.get(key):
                setattr(self, attribute, set(self._list(config, key)))
        for key, attribute in (("delete-after-upload", "delete_after_upload"), ("pause", "pause")):
            if config.get(key) is not None:
                setattr(self, attribute, bool(config[key]))
        if config.get("elements"):
            self.elements = " ".join([*self.elements.split(), *map(str, self._list(config, "elements"))])
        for key in ("env-vars", "metadata"):
            if config.get(key) and not isinstance(config[key], dict):
                raise ConfigError(f"diskimage {self.name}: {key} must be a dictionary", where=(key,))
        if config.get("env-vars"):
            self.set_env_vars(config["env-vars"])
        if config.get("metadata"):
            self.meta = {**self.meta, **config["metadata"]}

    def _list(self, config: dict[str, Any], key: str) -> list[Any]:
        value = config[key]
        if not isinstance(value, list):
            raise ConfigError(f"diskimage {self.name}: {key} must be a list, not {value!r}", where=(key,))
        return value


def lineage(entries: dict[str, tuple[int, dict[str, Any]]], name: str) -> list[str]:
    """Return names from the oldest ancestor to *name*.

    :raises UnknownName, ConfigError: a parent is missing, or there is a cycle.
    """
    chain = [name]
    while True:
        index, entry = entries[chain[-1]]
        parent = entry.get("parent")
        if not parent:
            return chain[::-1]
        where = ("diskimages", index, "parent")
        if parent in chain:
            raise ConfigError(f"diskimage parents form a cycle: {' -> '.join([*chain, parent])}", where=where)
        if parent not in entries:
            raise UnknownName(f"diskimage {chain[-1]} has non-existant parent: {parent}", where=where)
        chain.append(parent)


def build_disk_images(items: list[dict[str, Any]]) -> dict[str, DiskImage]:
    """Return the non-abstract images in file order, with parents applied."""
    entries: dict[str, tuple[int, dict[str, Any]]] = {}
    for index, entry in enumerate(items):
        if not entry.get("name"):
            raise ConfigError("required key 'name' is missing in diskimages", where=("diskimages", index))
        entries[str(entry["name"])] = (index, entry)
    images: dict[str, DiskImage] = {}
    for name, (_, entry) in entries.items():
        ancestors = lineage(entries, name)
        if entry.get("abstract"):
            continue
        image = DiskImage(name)
        for ancestor in ancestors:
            index, options = entries[ancestor]
            try:
                image.setFromConfig(options)
            except ConfigError as exc:
                exc.where = ("diskimages", index, *exc.where)
                raise
        images[name] = image
    return images
