"""Ports and user ids of this test process that no other test run on this machine has."""

from __future__ import annotations

import importlib
import sys

from tests import REPOSITORY

# The same module, and so the same range, as in tools that run within the test process.
sys.path.append(str(REPOSITORY / "tools"))
_ports = importlib.import_module("ports")

#: User ids per node manager of a test process: 120 slivers of 65,536 ids.
ID_SPAN = 8_000_000
#: Node managers of one test process that have separate ids.
ID_RANGES = 10


def reserve(count: int = 1) -> int:
    """Return the first of *count* adjacent ports on loopback that stay free until a server of
    the test binds them.
    """
    return int(_ports.reserve(count))


def id_base(number: int) -> int:
    """Return the first user id of the node manager *number* (below `ID_RANGES`) of this test
    process.
    """
    assert 0 <= number < ID_RANGES, number
    return 1_000_000_000 + (int(_ports.number()) * ID_RANGES + number) * ID_SPAN
