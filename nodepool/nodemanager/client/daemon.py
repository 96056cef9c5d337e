"""Functions that need the code of the node manager, which may not be installed here."""

from __future__ import annotations

import importlib.util

from nodepool.exceptions import ConfigurationError


def require(user: str) -> None:
    """Check that the node manager is installed here.

    :param user: the option or command that needs it, for the text of the error.
    :raises ConfigurationError: it is not installed.
    """
    if importlib.util.find_spec("nodepool.nodemanager.config") is None:
        raise ConfigurationError(
            f"{user} needs the node manager, which is not installed here; install the wheel "
            "nodepool-nodemanager of this release"
        )


def check_config(content: object, where: str) -> None:
    """Check the configuration of a node manager to install on backing nodes (NM-C.8).

    :param where: where it was given, for the text of an error.
    :raises ConfigurationError: an option is wrong, or the node manager is not installed here.
    """
    require("backing-label")
    from nodepool.nodemanager.config import parse

    parse(content, where)
