"""``nodepool config-validate``: every error of a configuration file in one run (config.md section 12)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from nodepool.config.errors import ConfigError
from nodepool.config.source import Source
from nodepool.config.validation import Validation

log = logging.getLogger("nodepool.cmd.config_validator")


class ConfigValidator:
    """Checks one file; ``config`` holds its data afterwards."""

    def __init__(self, config_file: str) -> None:
        self.config_file = config_file
        self.config: Any = None

    def validate(self, env: Mapping[str, str] = os.environ) -> int:
        """0 when the file is good, 1 when not; each finding is one log record."""
        log.info("validating %s", self.config_file)
        try:
            validation = Validation(Source(self.config_file, env))
        except OSError as exc:
            log.error("%s: cannot be read: %s", self.config_file, exc.strerror or exc)
            return 1
        except ConfigError as exc:
            log.error("YAML parsing failed: %s", exc)
            return 1
        self.config = validation.data
        problems = validation.run()
        for problem in problems:
            log.log(logging.ERROR if problem.error else logging.WARNING, "%s", problem.format(self.config_file))
        if any(problem.error for problem in problems):
            return 1
        labels, providers = (len(self.config.get(key) or ()) for key in ("labels", "providers"))
        log.info("%s is good (%d labels, %d providers)", self.config_file, labels, providers)
        return 0
