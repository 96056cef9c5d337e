"""Find all errors in a file without contacting anything (CFG-12).

``config-validate`` and daemons, when they load a file, use the same checks. What 11.0.0 accepted
and tolerated is at most an error of ``config-validate``; a daemon refuses only what would harm it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import voluptuous as v

from nodepool.base.schema import advice
from nodepool.config.checks.crosschecks import OfferedLabel, backing_labels, nobody_offers, numbers
from nodepool.config.checks.likely import entries, likely_mistakes, missing_elements, offered_labels
from nodepool.config.diskimages import lineage
from nodepool.config.drivers import drivers
from nodepool.config.errors import DriverLoadError, ProviderUnavailable, UnknownDriver
from nodepool.config.loading import driver_directories
from nodepool.config.location import find_line, readable_path
from nodepool.config.model import Config, ProviderConfig, get_provider_config
from nodepool.config.reading import leftover_references
from nodepool.config.schema import check, harmful, provider_schema, secure_schema, top_level_schema
from nodepool.config.source import Source
from nodepool.config.zookeeper import connections
from nodepool.exceptions import ConfigError

SCHEMA = "Schema validation failed: "
#: Options of providers that the launcher itself interprets, for every driver.
COMMON_NUMBERS = (["max-concurrency"], ["max-servers"], ["priority"])
#: Options that the loader converts to numbers if they are text.
CONVERTED = {
    "openstack": ("rate", "connection-port"),
    "fake": ("rate", "connection-port"),
    "static": ("timeout", "connection-port"),
}


@dataclasses.dataclass
class Problem:
    """A finding; warnings leave the file valid. Daemons refuse a file with a ``fatal`` one."""

    text: str
    line: int | None = None
    path: str = ""
    error: bool = True
    fatal: bool = False

    def format(self, file: str) -> str:
        place = f"{file}:{self.line}" if self.line else file
        return f"{place}: {self.path}: {self.text}" if self.path else f"{place}: {self.text}"


class Validation:
    """One run over one file.

    :param replaced: options that the secure file replaces.
    :param by_daemon: the file will also be loaded, which finds missing drivers; and only files of
        this machine count.
    """

    def __init__(
        self, source: Source, replaced: Collection[str] = (), by_daemon: bool = False
    ) -> None:
        self.source = source
        self.path = source.path
        self.data: Any = source.data
        if isinstance(self.data, dict):
            self.data = {key: value for key, value in self.data.items() if key not in replaced}
        self.replaced = replaced
        self.by_daemon = by_daemon
        self.problems: list[Problem] = []

    def note(
        self, text: str, where: Sequence[Any] = (), error: bool = True, fatal: bool = False
    ) -> None:
        line, path = find_line(self.source.root, where), readable_path(self.data, where)
        self.problems.append(Problem(text, line, path, error, fatal))

    def run(self) -> list[Problem]:
        """Return all findings, in the order of the file."""
        self._text()
        if not isinstance(self.data, dict):
            what = "is empty" if self.data is None else "must be a dictionary of options at the top"
            self.note(f"{SCHEMA}the configuration {what}")
            return self.problems
        self._sections(top_level_schema())
        self._check(self._zookeeper)
        if not self.by_daemon:
            self._check(self._files)
        self._check(self._duplicates, "labels", "label")
        self._check(self._diskimages)
        self._check(self._providers)
        self._check(self._crosschecks)
        self.problems.sort(key=lambda problem: problem.line or 0)
        return self.problems

    def run_secure(self) -> list[Problem]:
        """As :meth:`run`, for a secure file."""
        self._text()
        if isinstance(self.data, dict):
            self._sections(secure_schema())
        return self.problems

    def _check(self, step: Callable[..., None], *arguments: object) -> None:
        """Run one group of checks.

        Its exceptions are reported, unless the schema has reported their cause.
        """
        before = any(problem.error for problem in self.problems)
        try:
            step(*arguments)
        except Exception as error:
            if not before:
                self.note(f"cannot be checked: {type(error).__name__}: {error}")

    def _text(self) -> None:
        for name, line in leftover_references(self.source.text):
            self.problems.append(
                Problem(f"%({name}) is not set in the environment", line, error=False)
            )
        for key, line in self.source.duplicates:
            text = f"{key!r} is given twice in one dictionary; the later wins"
            self.problems.append(Problem(text, line, error=False))

    def _schema(
        self,
        schema: dict[Any, Any],
        data: object,
        prefix: tuple[Any, ...],
        fatal: Callable[[v.Invalid], bool],
    ) -> None:
        for error in check(schema, data):
            path = [str(item) if isinstance(item, v.Marker) else item for item in error.path]
            self.note(
                f"{SCHEMA}{error.error_message}{advice(schema, error)}",
                (*prefix, *path),
                fatal=fatal(error),
            )

    def _sections(self, schema: dict[Any, Any]) -> None:
        """Check the top of the file; the loader refuses or converts values that are not numbers."""
        self._schema(schema, self.data, (), lambda error: harmful(error, self.data, None))

    def _names(self, key: str) -> set[Any]:
        return {
            item.get("name")
            for _, item in entries(self.data.get(key))
            if isinstance(item.get("name"), str)
        }

    def _duplicates(self, key: str, kind: str, error: bool = False) -> None:
        seen: Counter[str] = Counter()
        for index, item in entries(self.data.get(key)):
            name = item.get("name")
            if not isinstance(name, str):
                continue
            if not name:
                self.note(f"{SCHEMA}a {kind} must have a name", (key, index, "name"))
                continue
            seen[name] += 1
            if seen[name] > 1:
                self.note(f"{kind} {name} already defined", (key, index), error)
            if "/" in name or name in (".", ".."):
                self.note(
                    f"{kind} {name!r}: the name is used in paths and must not contain '/'",
                    (key, index),
                    False,
                )

    def _zookeeper(self) -> None:
        servers = self.data.get("zookeeper-servers")
        if not servers and "zookeeper-servers" in self.data:
            text = "no servers here: the daemons do not start unless the secure file has them"
            self.note(text, ("zookeeper-servers",), error=False)
        if isinstance(servers, list):
            try:
                connections(servers)
            except ConfigError as exc:
                said = any(problem.error for problem in self.problems)  # by the schema
                if not said or not exc.message.startswith(
                    ("required key", "zookeeper-servers: entry")
                ):
                    self.note(exc.message, exc.where)
        if (
            servers
            and not self.data.get("zookeeper-tls")
            and "zookeeper-tls" not in self.replaced
            and self.data.get("zookeeper-insecure") is not True
        ):
            self.note(
                "zookeeper-tls with cert, key and ca is required, here or in the secure file",
                ("zookeeper-servers",),
                error=False,
            )

    def _files(self) -> None:
        """Check files; those that may exist on another machine only cause warnings."""
        tls = self.data.get("zookeeper-tls")
        wanted: list[tuple[tuple[str, ...], Any]]
        wanted = (
            [(("zookeeper-tls", key), value) for key, value in tls.items()]
            if isinstance(tls, dict)
            else []
        )
        wanted.append((("images-dir",), self.data.get("images-dir")))
        elements = self.data.get("elements-dir")
        wanted += (
            [(("elements-dir",), item) for item in elements.split(":")]
            if isinstance(elements, str)
            else []
        )
        for where, path in wanted:
            if isinstance(path, str) and path and not os.path.exists(os.path.expanduser(path)):
                self.note(f"{path} does not exist on this machine", where, error=False)
        if isinstance(log := self.data.get("usage-log"), str):
            folder = os.path.dirname(log)
            if not os.path.isabs(log):
                self.note(f"{log} is not an absolute path", ("usage-log",))
            elif not os.access(log if os.path.exists(log) else folder, os.W_OK):
                text = f"{log} cannot be written on this machine by user {os.geteuid()}"
                self.note(text, ("usage-log",), error=False)

    def _diskimages(self) -> None:
        self._duplicates("diskimages", "diskimage", error=True)
        images = entries(self.data.get("diskimages"))
        known = {
            item["name"]: (index, item)
            for index, item in images
            if isinstance(item.get("name"), str)
        }
        said: set[tuple[Any, ...]] = set()
        for name in known:
            try:
                lineage(known, name)
            except ConfigError as exc:
                place = subject = exc.where
                if "cycle" in exc.message:
                    place = ("diskimages", known[name][0], "parent")
                    subject = tuple(sorted(set(exc.message.partition(": ")[2].split(" -> "))))
                if subject not in said:
                    said.add(subject)
                    self.note(exc.message, place)
        for name, (index, item) in known.items():
            variables = item.get("env-vars")
            for key, value in variables.items() if isinstance(variables, dict) else ():
                if isinstance(value, bool):
                    self.note(
                        f"diskimage {name}: a boolean here is ambiguous, put it in quotes",
                        ("diskimages", index, "env-vars", key),
                        error=False,
                    )

    def _providers(self) -> None:
        self._duplicates("providers", "provider")
        try:
            paths = driver_directories(self.data.get("drivers-path"), self.path)
            if paths:
                drivers().load(paths)
        except ConfigError:
            pass  # reported by the schema
        providers = self.data.get("providers")
        for index, item in enumerate(providers if isinstance(providers, list) else ()):
            where = ("providers", index)
            if not isinstance(item, dict):
                self.note(f"{SCHEMA}expected a dictionary", where)
            elif not isinstance(item.get("name"), str):
                what = "expected str" if "name" in item else "required key not provided"
                self.note(f"{SCHEMA}{what}", (*where, "name"))
            else:
                self._provider(item, where)

    def _crosschecks(self) -> None:
        offers = []
        for index, item in entries(self.data.get("providers")):
            for place, label, options in offered_labels(item):
                backing = options.get("backing-label") or item.get("backing-label")
                where = ("providers", index, *place)
                offers.append(
                    OfferedLabel(label, where, backing if isinstance(backing, str) else None)
                )
        findings = [*numbers(self.data), *backing_labels(offers, self._names("labels"))]
        findings += nobody_offers(self.data.get("labels"), offers)
        findings += likely_mistakes(self.data)
        if not self.by_daemon:  # the files of a builder
            findings += missing_elements(self.data)
        for finding in findings:
            self.note(finding.text, finding.where, finding.error, finding.fatal)

    def _provider(self, item: dict[str, Any], where: tuple[Any, ...]) -> None:
        name = item["name"]
        asked = item.get("driver", "openstack")
        if not isinstance(asked, str):
            self.note(f"{SCHEMA}expected str", (*where, "driver"))
            return
        if name.startswith("fake") and asked not in ("fake", "openstack"):
            self.note(
                f"provider {name} uses driver fake because of its name",
                (*where, "driver"),
                error=False,
            )
        try:
            config = get_provider_config(dict(item))
            options = provider_schema(config)
        except (UnknownDriver, DriverLoadError, ImportError) as exc:
            advice_missing = isinstance(exc, UnknownDriver) and ";" not in str(exc)
            if not self.by_daemon:
                known = f"; known are {', '.join(drivers().known())}" if advice_missing else ""
                self.note(f"{exc}{known}", (*where, "driver"))
            return
        except Exception as exc:
            self.note(f"provider {name}: {type(exc).__name__}: {exc}", where)
            return
        if type(config).__module__.startswith("nodepool.driver."):
            converted = CONVERTED.get(str(config.driver.name), ())
            self._schema(options, item, where, lambda error: harmful(error, item, converted))
        else:  # the types of other drivers are not known here
            self._schema(
                options,
                item,
                where,
                lambda error: error.path[-1:] in COMMON_NUMBERS and harmful(error, item, ()),
            )
        self._references(item, where)
        self._pools(item, where)
        if config.driver.name == "metastatic":
            self._metastatic(item, where)
        if not self.by_daemon and not any(problem.error for problem in self.problems):
            self._load(config, where)

    def _load(self, config: ProviderConfig, where: tuple[Any, ...]) -> None:
        """Report what a driver refuses in a provider without other errors."""
        try:
            config.load(self.loaded)
            self.loaded.providers[config.name] = config
        except ProviderUnavailable:
            pass  # it may exist on another machine
        except ConfigError as exc:
            self.note(
                exc.message, exc.where if exc.where[:1] == ("providers",) else (*where, *exc.where)
            )
        except Exception as exc:
            self.note(f"provider {config.name}: {type(exc).__name__}: {exc}", where)

    @functools.cached_property
    def loaded(self) -> Config:
        """Return sections for drivers and loaded providers; used if they have no errors."""
        config = Config()
        config.setDiskImages(self.data.get("diskimages"))
        config.setLabels(self.data.get("labels"))
        for driver in drivers().loaded():
            driver.reset()
        return config

    def _references(self, item: dict[str, Any], where: tuple[Any, ...]) -> None:
        """Check that images and labels are defined."""
        name, images, labels = item["name"], self._names("diskimages"), self._names("labels")
        for index, image in entries(item.get("diskimages")):
            if isinstance(image.get("name"), str) and image["name"] not in images:
                text = (
                    f"diskimage {image['name']} in provider {name} is not defined in the main "
                    "diskimages list"
                )
                self.note(text, (*where, "diskimages", index))
        cloud_images = {image.get("name") for _, image in entries(item.get("cloud-images"))}
        for place, label, options in offered_labels(item):
            here = (*where, *place)
            if label not in labels:
                self.note(f"label {label} in provider {name} not in top-level labels", here)
            used = options.get("diskimage")
            if isinstance(used, str) and used not in images:
                text = f"label {label} in provider {name} uses diskimage {used}"
                self.note(
                    f"{text} which is not defined in the main diskimages list", (*here, "diskimage")
                )
            cloud = options.get("cloud-image")
            if isinstance(cloud, str) and cloud not in cloud_images:
                text = (
                    f"cloud-image {cloud} does not exist in provider {name} but is referenced "
                    f"in label {label}"
                )
                self.note(text, (*here, "cloud-image"))

    def _pools(self, item: dict[str, Any], where: tuple[Any, ...]) -> None:
        seen: set[Any] = set()
        for index, pool in entries(item.get("pools")):
            name = pool.get("name")
            if isinstance(name, str) and name in seen:
                self.note(
                    f"pool {name} already defined; the later wins",
                    (*where, "pools", index),
                    error=False,
                )
            seen.add(name if isinstance(name, str) else None)
            for number, node in entries(pool.get("nodes")):
                if "ssh-port" in node:
                    here = (*where, "pools", index, "nodes", number, "ssh-port")
                    self.note("ssh-port is the old name of connection-port", here, error=False)
        if item.get("driver") == "ibmvpc" and "_" in item["name"]:
            self.note(
                f"provider {item['name']}: the cloud does not allow '_' in names",
                (*where, "name"),
                error=False,
            )

    def _metastatic(self, item: dict[str, Any], where: tuple[Any, ...]) -> None:
        backing: dict[str, tuple[str, dict[str, Any]]] = {}
        defaults = {
            "max-parallel-jobs": 1,
            "grace-time": 60,
            "min-retention-time": 0,
            "max-age": None,
        }
        for place, label, options in offered_labels(item):
            name = options.get("backing-label")
            if not isinstance(name, str):
                continue
            settings = {key: options.get(key, value) for key, value in defaults.items()}
            other, known = backing.setdefault(name, (label, settings))
            if known != settings:
                text = (
                    f"Multiple label definitions for backing label {name} with different settings"
                )
                self.note(f"{text}: {other} and {label}", (*where, *place))
            age, retention = settings["max-age"], settings["min-retention-time"]
            if isinstance(age, int) and isinstance(retention, int) and age < retention:
                self.note(
                    f"label {label}: max-age is smaller than min-retention-time", (*where, *place)
                )
