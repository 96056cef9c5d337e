"""The one place for upper bounds on wall time in tests; what is measured for its own sake is in
tests/benchmark.
"""

from __future__ import annotations

import os

#: How many times longer everything may take here than usual, as in a virtual machine without
#: its own hardware.
PATIENCE = float(os.environ.get("NODEPOOL_TEST_PATIENCE", "1"))


def limit(seconds: float) -> float:
    """What *seconds* of a quiet machine may become here and now: more when its cores have to be
    shared.
    """
    return seconds * PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
