"""The nodepool command with the drivers of the fault tests."""

from __future__ import annotations

import sys

from tests.support.faults.serve import load_drivers, patch_client


def main() -> int:
    load_drivers()
    patch_client()
    from nodepool.cmd.nodepoolcmd import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
