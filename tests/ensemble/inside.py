"""The part of ``tools/ensemble`` that runs in separate namespaces."""

from __future__ import annotations

import os
import sys
import threading

from tests.ensemble import report
from tests.ensemble.options import arguments
from tests.ensemble.seeds import Run, as_json, run_all


def end_with(lifeline: int) -> None:
    """End this process, the first of its namespace, and so all others, when the pipe closes."""
    os.read(lifeline, 1)
    os._exit(1)


def main() -> int:
    args = arguments()
    assert args.folder is not None
    threading.Thread(target=end_with, args=(args.lifeline,), name="lifeline", daemon=True).start()
    run = Run(args.folder, args.throttle)
    try:
        if args.fault in run.omitted:
            sys.exit(f"tools/ensemble: {args.fault}: {run.omitted[args.fault]}")
        results = run_all(run, range(args.first, args.first + args.seeds), args.fault)
    finally:
        run.close()
    if args.json:
        args.json.write_text(as_json(results))
    print(report.page(results, run.omitted))
    return int(any(result.violations or result.slow for result in results))


if __name__ == "__main__":
    sys.exit(main())
