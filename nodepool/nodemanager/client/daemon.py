"""Functions that need the code of the node manager, which may not be installed here."""

from __future__ import annotations

from nodepool.base import optional


def check_config(content: object, where: str) -> None:
    """Check the configuration of a node manager to install on backing nodes (NM-C.8).

    :param where: where it was given, for the text of an error.
    :raises ConfigurationError: an option is wrong, or the node manager is not installed here.
    """
    optional.require("backing-label", "nodepool-nodemanager")
    from nodepool.nodemanager.config import parse

    parse(content, where)
