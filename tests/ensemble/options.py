"""The options of ``tools/ensemble``."""

from __future__ import annotations

import argparse
import pathlib

from tests.ensemble.faults import KINDS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/ensemble",
        description="Run launchers, a builder and Zuul's client against three ZooKeepers with "
        "faults, and print a page about it. Needs root.",
    )
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="how many (10)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first one (1)")
    parser.add_argument("--fault", choices=KINDS, help="each seed has only this one")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all results")
    parser.add_argument("--keep", action="store_true", help="keep the folder with data and logs")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--throttle", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
