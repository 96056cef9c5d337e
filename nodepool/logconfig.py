"""Logging set-up and message annotation (CFG-15)."""

from __future__ import annotations

import abc
import copy
import json
import logging
import logging.config
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from nodepool.texts import printable

LOG_DIRECTORY = "/var/log/nodepool"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTINUATION = "  "

_SERVER_LOGGING: dict[str, Any] = {
    "version": 1,
    # Modules create their loggers at import, before this configuration is applied.
    "disable_existing_loggers": False,
    "formatters": {
        "simple": {"class": "nodepool.logconfig.MultiLineFormatter", "format": LOG_FORMAT}
    },
    "handlers": {
        "null": {"class": "logging.NullHandler"},
        "console": {
            "class": "logging.StreamHandler",
            "formatter": "simple",
            "level": "INFO",
            "stream": "ext://sys.stdout",
        },
    },
    "loggers": {
        "nodepool": {"handlers": ["console"], "level": "INFO"},
        "requests": {"handlers": ["console"], "level": "WARN"},
        "openstack": {"handlers": ["console"], "level": "WARN"},
        "kazoo": {"handlers": ["console"], "level": "WARN"},
    },
    "root": {"handlers": ["null"]},
}

#: Destinations of messages, with or without the ids of their objects.
Log = logging.Logger | logging.LoggerAdapter[Any]


class MultiLineFormatter(logging.Formatter):
    """Prefixes every line of a record, so that ``grep`` finds tracebacks, too."""

    def format(self, record: logging.LogRecord) -> str:
        # A copy: other handlers must get the message as one piece.
        record = copy.copy(record)
        text = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            text = f"{text}\n{record.exc_text}"
        if record.stack_info:
            text = f"{text}\n{self.formatStack(record.stack_info)}"
        first, *rest = printable(text).rstrip("\n").split("\n")
        record.message = first
        lines = [self.formatMessage(record)]
        for line in rest:
            record.message = CONTINUATION + line
            lines.append(self.formatMessage(record))
        return "\n".join(lines)


class LoggingConfig(abc.ABC):
    """A logging configuration that can be applied to this process."""

    @abc.abstractmethod
    def apply(self) -> None:
        """Apply this configuration to the process."""


class DictLoggingConfig(LoggingConfig):
    """A configuration in the form of Python's ``dictConfig``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def apply(self) -> None:
        """Apply this configuration to the process.

        :raises ValueError: it cannot be applied, for example because a directory is missing.
        """
        try:
            logging.config.dictConfig(self._config)
        except ValueError as error:
            # Only the cause names the file or class.
            reason = f": {error.__cause__}" if error.__cause__ else ""
            raise ValueError(f"Logging: {error}{reason}") from error

    def writeJson(self, path: str) -> None:
        """Write the configuration as JSON, which :func:`load_config` reads."""
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(self._config, stream, indent=2)


class ServerLoggingConfig(DictLoggingConfig):
    """The daemons' default: standard output, or a file once ``server`` is set."""

    def __init__(self, config: dict[str, Any] | None = None, server: str | None = None) -> None:
        super().__init__(copy.deepcopy(_SERVER_LOGGING) if config is None else config)
        self._server: str | None = None
        if server is not None:
            self.server = server

    @property
    def server(self) -> str | None:
        return self._server

    @server.setter
    def server(self, server: str) -> None:
        self._server = server
        self._config["handlers"]["normal"] = {
            "class": "logging.handlers.WatchedFileHandler",
            "formatter": "simple",
            "level": "INFO",
            "filename": log_file(server),
        }
        for section in self._config["loggers"].values():
            if section.get("handlers") == ["console"]:
                section["handlers"] = ["normal"]

    def setDebug(self) -> None:
        """Log debug messages wherever informational messages are logged."""
        for part in ("handlers", "loggers"):
            for section in self._config[part].values():
                if section.get("level") == "INFO":
                    section["level"] = "DEBUG"


class FileLoggingConfig(LoggingConfig):
    """A configuration in the form of Python's ``fileConfig`` (INI)."""

    def __init__(self, path: str) -> None:
        self._path = path

    def apply(self) -> None:
        try:
            logging.config.fileConfig(self._path)
        except KeyError as error:
            raise ValueError(
                f"Logging config file {self._path}: missing section or option {error}"
            ) from error


def log_file(server: str) -> str:
    """Return the path to which a daemon in the background logs."""
    return os.path.join(LOG_DIRECTORY, f"{server}.log")


def load_config(path: str) -> LoggingConfig:
    """Read the file given with ``-l``.

    :raises ValueError: the file is missing or malformed.
    """
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        raise ValueError(f"Unable to read logging config file at {path}")
    if os.path.isdir(path):
        raise ValueError(f"Logging config file {path} is a directory")
    if os.path.splitext(path)[1] in (".yml", ".yaml", ".json"):
        import yaml

        with open(path, encoding="utf-8") as stream:
            try:
                config = yaml.safe_load(stream)
            except yaml.YAMLError as error:
                raise ValueError(
                    f"Logging config file {path} is not valid YAML: {error}"
                ) from error
        if isinstance(config, dict):
            return DictLoggingConfig(config)
    return FileLoggingConfig(path)


class EventIdLogAdapter(logging.LoggerAdapter[Any]):
    """Prefixes messages with event, request and node id."""

    _PARTS = (("event_id", "e"), ("node_request", "node_request"), ("node", "node"))

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        extra: dict[str, Any] = dict(self.extra or {})
        extra.update(kwargs.get("extra") or {})
        kwargs["extra"] = extra
        # A percent sign would be one of the format.
        prefix = [
            f"[{short}: {extra[key]}]".replace("%", "\\x25")
            for key, short in self._PARTS
            if extra.get(key) is not None
        ]
        return " ".join([*prefix, str(msg)]), kwargs


def get_annotated_logger(
    logger: logging.Logger | logging.LoggerAdapter[Any],
    event_id: str | None = None,
    node_request_id: str | None = None,
    node_id: str | None = None,
) -> EventIdLogAdapter:
    """Return an adapter that adds event, request and node ids; a given adapter is updated."""
    known: Mapping[str, Any] = (
        logger.extra or {} if isinstance(logger, logging.LoggerAdapter) else {}
    )
    given = {"event_id": event_id, "node_request": node_request_id, "node": node_id}
    extra = {**known, **{key: value for key, value in given.items() if value is not None}}
    if isinstance(logger, EventIdLogAdapter):
        logger.extra = extra
        return logger
    if isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    return EventIdLogAdapter(logger, extra)
