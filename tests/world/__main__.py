"""``python -m tests.world``: run seeds; see README.rst."""

from __future__ import annotations

import os
import sys
import traceback

#: The order of sets of strings is a part of what a seed stands for.
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}


def main() -> int:
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):
        os.environ.update(_ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]])
    # Before anything that makes a lock.
    from nodepool.lab.simulation import install, kernel

    kernel.use(kernel.Kernel(0))
    install.replace_standard_library()

    from tests.world.command import command

    return command()


try:
    status = main()
except SystemExit as end:  # of argparse, which has printed why
    status = int(end.code or 0)
except BaseException:
    traceback.print_exc()
    status = 2
sys.stdout.flush()
sys.stderr.flush()
# The interpreter's own shutdown would wait for threads that are none.
os._exit(status)
