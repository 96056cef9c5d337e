"""``python -m nodepool.lab.whatif``: run one job from standard input (see `replay`).

The result is JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    # Before anything else that creates a lock.
    from nodepool.lab.simulation import install, kernel

    kernel.use(kernel.Kernel(0))
    install.replace_standard_library()

    from nodepool.lab.whatif.replay import replay

    print(
        json.dumps(
            replay(json.load(sys.stdin), lambda text: print(text, file=sys.stderr, flush=True))
        ),
        flush=True,
    )
    # The interpreter's own shutdown would wait for threads that are none.
    os._exit(0)
