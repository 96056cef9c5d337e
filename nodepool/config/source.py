"""A configuration file as read: its data, and the positions of options."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import yaml

from nodepool.config.location import duplicate_keys
from nodepool.config.reading import SafeLoader, read_text, syntax_error


class Source:
    """One file, environment substituted.

    :raises ConfigError: it is missing or not YAML.
    """

    def __init__(self, path: str, env: Mapping[str, str] = os.environ) -> None:
        self.path = path
        #: The identity is from before reading, so that a concurrent change is noticed.
        self.text, self.identity = read_text(path, env)
        loader = SafeLoader(self.text)
        try:
            root = loader.get_single_node()
            # Before the data is built, which mixes merged keys into the nodes.
            self.duplicates = list(duplicate_keys(root, set()))
            self.data: object = None if root is None else loader.construct_document(root)
        except yaml.YAMLError as exc:
            raise syntax_error(exc, self.text, path) from exc
        finally:
            loader.dispose()

    @functools.cached_property
    def root(self) -> yaml.Node | None:
        """Return the nodes with line numbers; parsed again when a problem has to be reported."""
        return yaml.compose(self.text, Loader=SafeLoader)


def openConfig(path: str, env: Mapping[str, str] = os.environ) -> Any:
    """Return the data of the YAML file *path* with the environment substituted.

    :raises ConfigSyntaxError: (a YAMLError) names file and line.
    """
    return Source(path, env).data
