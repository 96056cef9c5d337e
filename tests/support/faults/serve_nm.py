"""nodepool-nodemanager that kills itself (SIGKILL) at the n-th step of making or removing slivers.

NODEPOOL_NM_STEPS   file that gets a line for each step passed: its name
NODEPOOL_NM_CRASH   number of the step before which to die; counting begins when the file
                    NODEPOOL_NM_ARMED exists
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from typing import Any

CRASH = int(os.environ.get("NODEPOOL_NM_CRASH", "0"))
ARMED = os.environ.get("NODEPOOL_NM_ARMED", "")
STEPS = os.environ.get("NODEPOOL_NM_STEPS", "")
_lock = threading.Lock()
_passed = 0


def step(name: str) -> None:
    global _passed
    if not ARMED or not os.path.exists(ARMED):
        return
    with _lock:
        _passed += 1
        with open(STEPS, "a") as stream:
            stream.write(f"{_passed} {name}\n")
        if _passed == CRASH:
            os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str) -> None:
    """A step before and one after each call."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        step(f"before {owner.__name__}.{name}")
        result = function(*arguments, **keywords)
        step(f"after {owner.__name__}.{name}")
        return result

    setattr(owner, name, wrapper)


def main() -> int:
    from nodepool.nodemanager.helper.zygote import Zygote
    from nodepool.nodemanager.limits.cgroups import Cgroups
    from nodepool.nodemanager.limits.disks import Disks
    from nodepool.nodemanager.network.veth import Network
    from nodepool.nodemanager.records.database import Database
    from nodepool.nodemanager.ssh.gate import Gate

    for owner, names in (
        (
            Database,
            ("put", "delete", "update_local", "delete_local", "allocate_index", "free_index"),
        ),
        (Cgroups, ("create", "kill", "remove")),
        (Disks, ("create", "mount", "destroy")),
        (Network, ("create", "destroy")),
        (Zygote, ("call",)),
        (Gate, ("open", "close")),
    ):
        for name in names:
            around(owner, name)
    from nodepool.nodemanager import service as nodemanager

    return nodemanager.main()


if __name__ == "__main__":
    sys.exit(main())
