"""The configuration of a daemon: load, validate and watch its files (CFG-11).

The last valid configuration is kept while the files are invalid.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nodepool.base.files import file_identity
from nodepool.config.checks.validation import Validation
from nodepool.config.errors import ProviderLoadError
from nodepool.config.live.watch import ConfigWatcher
from nodepool.config.loading import checkRecentConfig, load_both, replaced_keys
from nodepool.config.model import Config
from nodepool.config.source import Source
from nodepool.exceptions import ConfigError, ConfigurationError

#: Maximum number of reasons in one message.
SHOWN = 5


class ConfigFileStatus:
    """Loads the files and reports since when and why they are invalid; logs each problem once.

    :param paths: the main file, the secure file or None.
    :param stale_changed: called with 1 if the file cannot be used, with 0 if it is in force.
    :param required: options that the daemon requires, see :meth:`Config.require`.
    """

    def __init__(
        self,
        paths: Iterable[str | None],
        log: logging.Logger,
        stale_changed: Callable[[int], Any],
        required: Sequence[str] = (),
    ) -> None:
        self._paths = [path for path in paths if path]
        self._log = log
        self._stale_changed = stale_changed
        self._required = required
        self._watcher: ConfigWatcher | None = None
        self._again = threading.Event()
        #: Why the file on disk is not in force, and since when (Unix seconds); None if it is.
        self.error: str | None = None
        self.stale_since: float | None = None
        self._reported: object = None
        #: The texts validated last, and the reason to refuse them.
        self._validated: tuple[list[str], str | None] = ([], None)
        #: Errors in these texts with which 11.0.0 loads them all the same.
        self._tolerated: list[str] = []
        #: Warnings about the files in force.
        self.warnings: list[str] = []
        #: Warnings about the files validated last; logged and applied with them.
        self._found_warnings: list[str] | None = None

    def load(self) -> Config:
        """Return the configuration on disk.

        :raises ConfigurationError: it cannot be used.
        """
        main, *rest = [Source(path) for path in self._paths]
        secure = rest[0] if rest else None
        texts = [source.text for source in (main, *rest)]
        if texts != self._validated[0]:
            self._validated = (texts, self._validate(main, secure))
        if self._validated[1] is not None:
            raise ConfigError(self._validated[1])
        try:
            config = load_both(main, secure)
        except Exception as error:
            if isinstance(error, OSError) or (
                isinstance(error, ConfigurationError)
                and not (isinstance(error, ProviderLoadError) and self._tolerated)
            ):
                raise
            # An unforeseen value: the validation may know better what is wrong with it.
            self._log.debug("The configuration cannot be used:", exc_info=True)
            said = (
                str(error)
                if isinstance(error, ConfigurationError)
                else f"{main.path}: {type(error).__name__}: {error}; see nodepool config-validate"
            )
            raise ConfigError("; ".join([*self._tolerated[:SHOWN], said])) from error
        config.require(main.path, *self._required)
        return config

    def apply_again(self) -> None:
        """Let the next :meth:`update` apply the files even if they are already in force."""
        self._again.set()

    def update(self, current: Config | None, apply: Callable[[Config], Any]) -> bool:
        """Apply the files if they are not ``current``; return True if they were applied.

        Errors are logged, and ``current`` is kept.
        """
        if (
            current is not None
            and not self._again.is_set()
            and checkRecentConfig(current, *self._paths)
        ):
            self.good()
            return False
        self._again.clear()
        try:
            config = self.load()
        except Exception as error:
            self.bad(error)
            return False
        try:
            apply(config)
        except ConfigurationError as error:  # only found now, such as an unreadable certificate
            self.bad(error)
            return False
        self.good()
        if self._watcher is not None:
            self._watcher.watch_also(config.files)
        return True

    def watch(self, changed: Callable[[], Any], driver_files: Iterable[str] = ()) -> None:
        """Call ``changed`` on a separate thread after each change of the files."""
        self._watcher = ConfigWatcher(self._paths, changed, name="CleanupWorker-config")
        self._watcher.start()
        self._watcher.watch_also(driver_files)

    def stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    def _validate(self, main: Source, secure: Source | None) -> str | None:
        """Return the reason why the files cannot be used, or None."""
        found = [
            (main.path, problem)
            for problem in Validation(main, replaced_keys(secure), by_daemon=True).run()
        ]
        if secure is not None:
            found += [
                (secure.path, problem)
                for problem in Validation(secure, by_daemon=True).run_secure()
            ]
        self._found_warnings = [
            problem.format(path) for path, problem in found if not problem.fatal
        ]
        self._tolerated = [
            problem.format(path) for path, problem in found if problem.error and not problem.fatal
        ]
        fatal = [problem.format(path) for path, problem in found if problem.fatal]
        more = (
            [f"{len(fatal) - SHOWN} more, see nodepool config-validate"]
            if len(fatal) > SHOWN
            else []
        )
        return "; ".join([*fatal[:SHOWN], *more]) or None

    def good(self) -> None:
        """Record that the file on disk is in force."""
        if self._found_warnings is not None:
            self.warnings, self._found_warnings = self._found_warnings, None
            for text in self.warnings:
                self._log.warning("%s", text)
        if self.error is not None:
            self._log.info("The configuration is valid again")
        self.error = self.stale_since = None
        self._reported = None
        self._stale_changed(0)

    def bad(self, error: Exception) -> None:
        """Record that the file on disk cannot be used."""
        signature = (str(error), [file_identity(path) for path in self._paths])
        if self.stale_since is None:
            self.stale_since = time.time()
        self.error = str(error)
        self._stale_changed(1)
        if signature == self._reported:
            return
        self._reported = signature
        if isinstance(error, (ConfigurationError, OSError)):
            self._log.error(
                "The configuration cannot be used, keeping the last valid one: %s", error
            )
        else:
            self._log.error(
                "The configuration cannot be used, keeping the last valid one:", exc_info=error
            )

    def describe(self) -> list[str]:
        """Return one line about the file on disk if it is not in force."""
        if self.error is None:
            return []
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.stale_since))
        return [f"configuration: stale since {since}: {self.error}"]
