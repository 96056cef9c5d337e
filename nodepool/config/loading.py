"""Load main and secure file, and check whether they have changed (CFG-3, CFG-8, CFG-11)."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from nodepool.base.files import file_identity
from nodepool.config.drivers import drivers
from nodepool.config.location import find_line, readable_path
from nodepool.config.model import Config
from nodepool.config.schema import top_level_schema
from nodepool.config.source import Source
from nodepool.exceptions import ConfigError

log = logging.getLogger("nodepool.config")


def driver_directories(value: object, config_path: str) -> list[str]:
    """Return ``drivers-path`` as absolute directories, relative to the configuration file."""
    if value is None:
        return []
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError("drivers-path: expected a list of directories", where=("drivers-path",))
    base = os.path.dirname(os.path.abspath(config_path))
    return [os.path.join(base, os.path.expanduser(item)) for item in items]


@contextmanager
def _located(source: Source) -> Iterator[None]:
    """Add file, line and option path to every ConfigError."""
    try:
        yield
    except ConfigError as exc:
        if exc.file is None:
            exc.file = source.path
            exc.line = find_line(source.root, exc.where)
            if exc.where:
                exc.context.insert(0, readable_path(source.data, exc.where))
        raise


def loadConfig(config_path: str, env: Mapping[str, str] = os.environ) -> Config:
    """Load the main file.

    :raises ConfigError: (a ConfigurationError) says what is wrong and where.
    """
    source = Source(config_path, env)
    if isinstance(source.data, dict):
        for key in source.data.keys() - top_level_schema().keys():
            log.warning("%s: unknown option %r is ignored", config_path, key)
    return load_main(source)


def loadSecureConfig(
    config: Config, secure_config_path: str | None, env: Mapping[str, str] = os.environ
) -> None:
    """Apply the secure file to *config* in place; without a path nothing changes."""
    if secure_config_path:
        _load_secure(config, Source(secure_config_path, env))


def load_both(main: Source, secure: Source | None, providers: bool = True) -> Config:
    """Return the configuration of both files; the secure one may replace invalid options.

    :param providers: whether to load ``providers``, with their drivers and the descriptions of
        their clouds.
    """
    config = load_main(
        main, {*replaced_keys(secure), *(() if providers else ("providers", "drivers-path"))}
    )
    if secure is not None:
        _load_secure(config, secure)
    return config


def replaced_keys(secure: Source | None) -> set[str]:
    """Return the options of the main file that the secure file replaces."""
    if secure is None or not isinstance(secure.data, dict):
        return set()
    return {key for key in ("zookeeper-servers", "zookeeper-tls") if secure.data.get(key)}


def load_main(source: Source, replaced: Collection[str] = ()) -> Config:
    """Load the main file alone, without the options *replaced*."""
    newconfig = Config()
    with _located(source):
        data = source.data
        if not isinstance(data, dict):
            what = "is empty" if data is None else "must be a dictionary of options at the top"
            raise ConfigError(f"the configuration {what}")
        data = {key: value for key, value in data.items() if key not in replaced}
        paths = driver_directories(data.get("drivers-path"), source.path)
        if paths:
            drivers().load(paths)
        for driver in drivers().loaded():
            driver.reset()
        newconfig.apply(data)
        newconfig.setZooKeeperServers(data.get("zookeeper-servers"))
        newconfig.setDiskImages(data.get("diskimages"))
        newconfig.setLabels(data.get("labels"))
        newconfig.setProviders(data.get("providers"))
        newconfig.setZooKeeperTLS(data.get("zookeeper-tls"))
        newconfig.setTenantResourceLimits(data.get("tenant-resource-limits"))
    _note_file(newconfig, source)
    for driver in drivers().loaded():
        newconfig.files.update(driver.configFiles())
    return newconfig


def _note_file(config: Config, source: Source) -> None:
    config.setConfigPathMtime(source.path, source.identity[0])
    config.files[source.path] = source.identity


def _load_secure(config: Config, source: Source) -> None:
    # Recorded in every case: otherwise the file would look changed forever.
    _note_file(config, source)
    data = source.data
    if not data:
        return
    with _located(source):
        if not isinstance(data, dict):
            raise ConfigError("the secure file must be a dictionary of options at the top")
        config.setZooKeeperServers(data.get("zookeeper-servers"))
        config.setSecureDiskimageEnv(data.get("diskimages"), source.path)
        config.setZooKeeperTLS(data.get("zookeeper-tls"))


def checkRecentConfig(config: Config, config_path: str, secure_path: str | None = None) -> bool:
    """Return True if the files are those that were read for *config*.

    A missing file is not recent.
    """
    for path in filter(None, (config_path, secure_path)):
        if config.files.get(path) is None:
            return False
    return all(file_identity(path) == identity for path, identity in config.files.items())
