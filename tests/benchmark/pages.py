#!/usr/bin/env python3
"""Measures what a viewer of the overview feels, alongside 10,000 nodes and 2,000 waiting requests,
in a real browser.

  python -m tests.benchmark.pages [--nodes 10000] [--waiting 2000] [--views 7]

Printed: the first view (largest contentful paint) on loopback, the time from a change in ZooKeeper
to the change on the page, the time of the answers that the page fetches, and the compressed size of
all scripts and styles. ``tests.benchmark.web`` measures what 200 viewers cost the launcher.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from statistics import median

from nodepool.web.v1 import FILES
from tests import REPOSITORY
from tests.benchmark.harness import Bench, log
from tests.benchmark.web import get, run
from tests.support.browser import Browser, browser

PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  const last = list.getEntries().at(-1); setTimeout(() => resolve(last.startTime), 50);
}).observe({ type: 'largest-contentful-paint', buffered: true }))"""
#: When (ms since 1970) the card of waiting requests showed another number than now.
CHANGED = """() => { globalThis.changed = new Promise((resolve) => {
  const isIt = (each) => each.textContent.startsWith('Requests waiting');
  const card = () => [...document.querySelectorAll('.card')].find(isIt);
  const number = () => card()?.querySelector('.big').textContent;
  const before = number();
  new MutationObserver(() => {
      const now = number();
      if (now !== undefined && now !== before) resolve(Date.now());
    })
    .observe(document.getElementById('main'), { childList: true, subtree: true });
}); }"""


def first_view(seen: Browser) -> float:
    """Milliseconds until the largest text is painted in a browser that runs, with an empty
    cache.
    """
    running = seen.page.context.browser
    assert running is not None
    with running.new_context() as context:
        page = context.new_page()
        page.goto(f"{seen.address}/ui/")
        page.get_by_role("heading", name="Providers").wait_for()
        return float(page.evaluate(PAINT))


def change(bench: Bench, seen: Browser) -> float:
    """Milliseconds from a request in ZooKeeper to its number on the page."""
    seen.page.evaluate(CHANGED)
    begin = time.time()
    bench.zuul.submit(["stuck"])
    return float(seen.page.evaluate("() => globalThis.changed")) - 1000 * begin


def compressed() -> int:
    """Bytes of all scripts and styles."""
    folder = REPOSITORY / "nodepool/web/static"
    return sum(len(gzip.compress((folder / name).read_bytes())) for name in FILES)


def measure(bench: Bench, port: int, args: argparse.Namespace) -> dict[str, float]:
    pools = [
        {"name": "main", "labels": ["small"]},
        {"name": "full", "labels": ["stuck"], "max-servers": 1},
    ]
    bench.environment["NODEPOOL_BENCHMARK_WEB"] = str(port)
    bench.start(
        {
            "labels": [{"name": "small"}, {"name": "stuck"}],
            "providers": [{"name": "p0", "driver": "instant", "pools": pools}],
        }
    )
    zuul, address = bench.zuul, f"http://127.0.0.1:{port}"
    zuul.wait([zuul.submit(["stuck"])])
    zuul.create_nodes(args.nodes)
    zuul.submit_many([["stuck"]] * args.waiting)
    time.sleep(8)
    with browser(address) as seen:
        seen.open("/ui/")
        views = [first_view(seen) for _ in range(args.views)]
    log(f"first views: {' '.join(f'{each:.0f}' for each in views)} ms")
    answers = []
    for _ in range(args.views):
        time.sleep(1.2)  # older than the cached one
        answers.append(1000 * get(port, "/api/v1/overview"))
    quiet = []
    with browser(address) as seen:
        seen.open("/ui/")
        for _ in range(args.views):
            time.sleep(5)
            quiet.append(change(bench, seen))
        log(f"changes: {' '.join(f'{each:.0f}' for each in quiet)} ms")
    return {
        "first view: ms": median(views),
        "overview, fresh: ms": median(answers),
        "trends: ms": 1000 * get(port, "/api/v1/trends"),
        "change to page: ms": median(quiet),
        "scripts and styles: kB": compressed() / 1000,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--views", type=int, default=7)
    args = parser.parse_args()
    return run(measure, args)


if __name__ == "__main__":
    sys.exit(main())
