"""Run a module that is killed when its parent ends, in whatever way.

``python -m nodepool.lab.dev.child PARENT MODULE [ARGUMENT...]``
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    parent, module, *arguments = sys.argv[1:]
    if ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
    ) != 0 or os.getppid() != int(parent):
        return 1
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
