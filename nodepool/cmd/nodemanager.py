"""The ``nodepool-nodemanager`` daemon (NM-A.2, NM-C.1)."""

from __future__ import annotations

import sys

from nodepool.nodemanager.service import main

if __name__ == "__main__":
    sys.exit(main())
