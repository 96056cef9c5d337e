"""What a launcher needs to install a node manager on backing nodes (NM-C.8)."""

from __future__ import annotations


def check_config(content: object, where: str) -> None:
    """Check the configuration of a pushed node manager.

    :param where: where it was given, for the text of an error.
    :raises ConfigurationError: an option is wrong.
    """
    from nodepool.nodemanager.config import parse

    parse(content, where)
