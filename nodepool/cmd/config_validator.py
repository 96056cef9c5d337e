"""``nodepool config-validate``: all errors of a configuration file in one run (CFG-12)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from nodepool.config.checks.validation import Problem, Validation
from nodepool.config.loading import replaced_keys
from nodepool.config.source import Source
from nodepool.exceptions import ConfigError

log = logging.getLogger("nodepool.cmd.config_validator")


class ConfigValidator:
    """Checks one file; afterwards ``config`` contains its data and ``findings`` its problems.

    A finding is (file, problem).

    ``strict``: warnings are errors, too.

    :param secure_file: if given, the options that it replaces are checked there. An unreadable one
        is only a warning, as it is often missing on the machine of the author.
    """

    def __init__(self, config_file: str, secure_file: str | None = None) -> None:
        self.config_file = config_file
        self.secure_file = secure_file
        self.config: object = None
        self.strict = False
        self.findings: list[tuple[str, Problem]] = []

    def validate(self, env: Mapping[str, str] = os.environ) -> int:
        """Return 0 if the file is valid, else 1; each finding is logged."""
        log.info("validating %s", self.config_file)
        self.check(env)
        for path, problem in self.findings:
            log.log(logging.ERROR if problem.error else logging.WARNING, "%s", problem.format(path))
        log.info("%s", self.summary())
        return 0 if self.good else 1

    def count(self, error: bool) -> int:
        return sum(1 for _path, problem in self.findings if problem.error is error)

    @property
    def good(self) -> bool:
        return not (self.count(True) or (self.strict and self.count(False)))

    def counts(self) -> dict[str, int]:
        """Return the number of labels and providers in the file."""
        data = self.config if isinstance(self.config, dict) else {}
        return {
            key: len(data[key]) if isinstance(data.get(key), list) else 0
            for key in ("labels", "providers")
        }

    def summary(self) -> str:
        """Return the last line."""
        errors, warnings = self.count(True), self.count(False)
        if self.good:
            counts = ", ".join(f"{number} {key}" for key, number in self.counts().items())
            return f"{self.config_file} is good ({counts})" + (
                f", with {_number(warnings, 'warning')}" if warnings else ""
            )
        found = " and ".join(
            _number(*pair) for pair in ((errors, "error"), (warnings, "warning")) if pair[0]
        )
        return f"{self.config_file} is not good: {found}" + ("" if errors else " (--strict)")

    def report(self) -> dict[str, Any]:
        """Return everything for programs."""
        return {
            "file": self.config_file,
            "good": self.good,
            **self.counts(),
            "errors": self.count(True),
            "warnings": self.count(False),
            "problems": [
                {
                    "file": path,
                    "line": problem.line,
                    "option": problem.path or None,
                    "level": "error" if problem.error else "warning",
                    "text": problem.text,
                }
                for path, problem in self.findings
            ],
        }

    def check(self, env: Mapping[str, str] = os.environ) -> None:
        """Find problems without logging them."""
        self.findings = []
        main, secure = self._read(self.config_file, env), None
        if self.secure_file is not None:
            secure = self._read(self.secure_file, env, missing_is_error=False)
        if main is not None:
            validation = Validation(main, replaced_keys(secure))
            self.config = validation.data
            self.findings += [(self.config_file, problem) for problem in validation.run()]
        if secure is not None:
            self.findings += [(secure.path, problem) for problem in Validation(secure).run_secure()]

    def _read(
        self, path: str, env: Mapping[str, str], missing_is_error: bool = True
    ) -> Source | None:
        try:
            return Source(path, env)
        except OSError as exc:
            self.findings.append(
                (path, Problem(f"cannot be read: {exc.strerror or exc}", error=missing_is_error))
            )
        except ConfigError as exc:
            self.findings.append((path, Problem(f"YAML parsing failed: {exc}")))
        return None


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
