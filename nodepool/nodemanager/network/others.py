"""Firewalls of others on this host that drop what slivers send through it.

A packet passes only if no table drops it: our rules cannot accept it for another table.
"""

from __future__ import annotations

import logging
import re

from nodepool.nodemanager.network.tools import run

log = logging.getLogger("nodepool.nodemanager.net")

_TABLES = re.compile(r"^(?=table )", re.MULTILINE)
_TABLE = re.compile(r"table ((?:ip|inet) (?!nodemanager)\S+) \{")
_CHAIN = re.compile(r"^\tchain (\S+) \{\n((?:\t\t.*\n|\n)+)", re.MULTILINE)
#: The last rule of a chain that drops the rest.
_REST = re.compile(r"(counter )?(drop|reject)\b")
#: Docker jumps to this chain first and does not change it.
_OF_USERS = "DOCKER-USER"


class OtherFirewalls:
    """Which of them drops packets of slivers. Not thread-safe.

    :param subnet: addresses of slivers.
    """

    def __init__(self, subnet: str) -> None:
        self._trusted = ('"nm*"', f"ip saddr {subnet} ")
        self._found: str | None = None

    def find(self) -> str | None:
        """Return the chain that drops them and the remedy; None: none does. NetworkError."""
        self._found = _dropping(self._trusted)
        return self._found

    def warn(self) -> None:
        """Log what :meth:`find` returns if it is new."""
        known = self._found
        if self.find() not in (None, known):
            log.warning("Slivers with network nat reach nothing: %s", self._found)


def _dropping(trusted: tuple[str, ...]) -> str | None:
    """Return which table drops forwarded packets of slivers, and the remedy; None: none does.

    :param trusted: text of rules about slivers: a table with one is not checked.
    :raises NetworkError: the rules cannot be read.
    """
    for text in _TABLES.split(run("nft", ["--stateless", "--terse", "list", "ruleset"])):
        table = _TABLE.match(text)
        if table is None or any(each in text for each in trusted):
            continue
        for chain, body in _CHAIN.findall(text):
            if _drops(body):
                place = _OF_USERS if f"\tchain {_OF_USERS} {{" in text else chain
                rules = "; ".join(
                    f"nft insert rule {table[1]} {place} {side} 'nm*' accept"
                    for side in ("iifname", "oifname")
                )
                return (
                    f"chain {chain} of the nftables table {table[1]} drops packets of slivers; "
                    f"let it accept them, whenever its owner has loaded it: {rules}"
                )
    return None


def _drops(body: str) -> bool:
    head, *rules = [line.strip() for line in body.splitlines() if line.strip()]
    return " hook forward " in head and (
        "policy drop" in head or bool(rules and _REST.match(rules[-1]))
    )
