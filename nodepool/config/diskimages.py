"""Disk images and their inheritance (CFG-5)."""

from __future__ import annotations

import logging
from typing import Any, cast

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import REQUIRED, Section, a_list, at, entries, load, option, whole
from nodepool.config.errors import UnknownName
from nodepool.exceptions import ConfigError

log = logging.getLogger("nodepool.config")

_TEXTS = {str: v.Any(str, bool, int, float)}


def _whole(value: object) -> int:
    return int(whole(value))


def _formats(value: object) -> set[str]:
    return set(a_list(value))


def absolute(path: object) -> str:
    """Return a path that is valid in every directory."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise ValueError(f"expected an absolute path, not {path!r}")
    return path


class Verify(Section):
    """How each new upload is tried on a machine."""

    TIMEOUT = 600

    ssh_key: str = option(
        str,
        REQUIRED,
        "absolute path of the private key that logs in as ``username``, on launchers",
        convert=absolute,
    )
    command: str = option(
        str, "true", "command of the login shell; status 0 means that the image is good"
    )
    timeout: int = option(
        v.All(int, v.Range(min=1, max=86400)),
        TIMEOUT,
        "seconds for the login and the command",
        convert=lambda value: max(1, min(86400, _whole(value))),
    )
    label: str | None = option(
        str, None, "label of the machine", shown="the first of the provider with this image"
    )


class DiskImage(ConfigValue):
    BUILD_TIMEOUT = 8 * 60 * 60
    REBUILD_AGE = 24 * 60 * 60

    name: str = option(str, REQUIRED, "name of the image", stored=False)
    abstract: bool = option(bool, False, "a template of other images, not built", stored=False)
    parent: str | None = option(
        str, None, "image, also a later one, whose options are inherited", stored=False
    )
    elements: str = option(
        [str],
        cast(Any, []),
        "elements of diskimage-builder; the parent's come first",
        convert=lambda value: " ".join(map(str, a_list(value))),
        merge=lambda old, new: f"{old} {new}".strip(),
    )
    env_vars: dict[str, str] = option(
        _TEXTS, {}, "environment of the build; merged with the parent's", stored=False
    )
    image_types: set[str] = option(
        [str],
        cast(Any, []),
        "formats in addition to those that providers need",
        name="formats",
        convert=_formats,
    )
    keep_image_types: set[str] = option(
        [str],
        cast(Any, []),
        "formats to keep despite ``delete-after-upload``",
        name="keep-formats",
        convert=_formats,
    )
    delete_after_upload: bool = option(
        bool, False, "delete the files of a build when all providers have it"
    )
    dib_cmd: str = option(str, "disk-image-create", "command that builds the image")
    release: str = option(v.Any(str, int, float), "", "release of the distribution", convert=str)
    rebuild_age: int = option(
        int, REBUILD_AGE, "seconds after which the image is built again", convert=_whole
    )
    build_timeout: int = option(
        int, BUILD_TIMEOUT, "seconds after which a build is stopped", convert=_whole
    )
    pause: bool = option(bool, False, "start no builds")
    rollback_after: int = option(
        v.All(int, v.Range(min=0)),
        3,
        "failed launches in a row after which launchers return to the previous upload; 0: never",
        convert=lambda value: max(0, _whole(value)),
    )
    canary: int = option(
        v.All(int, v.Range(min=0)),
        0,
        "machines of a new upload that have to start before all launches use it",
        convert=lambda value: max(0, _whole(value)),
    )
    verify: Verify | None = option(
        Verify,
        None,
        "how a new upload is tried before launches use it",
        convert=lambda given: None if given is None else Verify(given),
        shown="not at all",
    )
    replace_idle: bool = option(
        bool, False, "replace idle nodes of an earlier build, as ``max-unready`` allows"
    )
    username: str = option(str, "zuul", "login user of jobs")
    python_path: str = option(str, "auto", "Python of the node, for Ansible")
    shell_type: str | None = option(v.Any(str, None), None, "for Ansible, for example ``cmd``")
    meta: dict[str, Any] = option(
        dict,
        {},
        "properties of uploads; merged with the parent's",
        name="metadata",
        merge=lambda old, new: {**old, **new},
    )

    def __init__(self, name: str) -> None:
        load(self, {})
        self.name = name
        self.env_vars = {}
        #: Variables whose values come from the secure file and are not logged.
        self.secret_names: set[str] = set()

    def set_env_vars(self, values: object, secret: bool = False) -> None:
        """Merge *values*; numbers become strings. Secret values are not logged."""
        if not isinstance(values, dict):
            raise ConfigError(
                f"diskimage {self.name}: env-vars must be a dictionary", where=("env-vars",)
            )
        for key, value in values.items():
            if secret:
                self.secret_names.add(str(key))
            if isinstance(value, bool):
                log.warning(
                    "diskimage %s: env-vars %s is a boolean and becomes %s; put it in quotes",
                    self.name,
                    key,
                    "a string" if secret else repr(str(value).lower()),
                )
            elif not isinstance(value, str | int | float):
                shown = "" if secret else f", not {value!r}"
                raise ConfigError(f"diskimage {self.name}: env-vars {key} must be a string{shown}")
            self.env_vars[str(key)] = str(value).lower() if isinstance(value, bool) else str(value)

    def setFromConfig(self, config: dict[str, Any]) -> None:
        """Apply one level of options on top of the present values."""
        flags = ("delete-after-upload", "pause", "rollback-after", "canary", "replace-idle")
        given = {
            key: value
            for key, value in config.items()
            if value or (key in flags and value is not None)
        }
        load(self, given, part=True)
        if "env-vars" in given:
            self.set_env_vars(given["env-vars"])


def lineage(known: dict[str, tuple[int, dict[str, Any]]], name: str) -> list[str]:
    """Return names from the oldest ancestor to *name*.

    :raises UnknownName, ConfigError: a parent is missing, or there is a cycle.
    """
    chain = [name]
    while True:
        index, entry = known[chain[-1]]
        if not entry.get("parent"):
            return chain[::-1]
        parent = str(entry["parent"])
        where = ("diskimages", index, "parent")
        if parent in chain:
            raise ConfigError(
                f"diskimage parents form a cycle: {' -> '.join([*chain, parent])}", where=where
            )
        if parent not in known:
            raise UnknownName(
                f"diskimage {chain[-1]} has non-existant parent: {parent}", where=where
            )
        chain.append(parent)


def build_disk_images(items: object) -> dict[str, DiskImage]:
    """Return the non-abstract images in file order, with parents applied."""
    known = {
        str(entry["name"]): (index, entry)
        for index, (_, entry) in enumerate(entries(items, "diskimages"))
    }
    images: dict[str, DiskImage] = {}
    for name, (_, entry) in known.items():
        ancestors = lineage(known, name)
        if entry.get("abstract"):
            continue
        images[name] = DiskImage(name)
        for index, options in map(known.__getitem__, ancestors):
            with at(("diskimages", index)):
                images[name].setFromConfig(options)
    return images
