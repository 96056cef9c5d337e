"""Runs a launcher of either release for the benchmark: the same object, started the same way."""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
logging.getLogger("kazoo").setLevel(logging.WARNING)

from nodepool.driver import Drivers  # noqa: E402

with contextlib.suppress(ImportError):  # 11.0.0 has none
    from nodepool.process.log_writer import LogWriter

    LogWriter().start()

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    Drivers.load([os.path.join(HERE, "drivers")])
    # 11.0.0 reloads with an empty list as soon as anybody asks with another path; keep ours.
    Drivers.load = staticmethod(lambda paths=None: None)
    from nodepool import launcher

    try:  # what our nodepool-launcher does
        pool = launcher.NodePool(None, sys.argv[1], all_read=gc.freeze)
    except TypeError:  # 11.0.0
        pool = launcher.NodePool(None, sys.argv[1])
    pool.session_file = sys.argv[1] + ".session"  # the same; without meaning for others
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pool.start()
    if port := os.environ.get("NODEPOOL_BENCHMARK_WEB"):
        from nodepool.webapp import WebApp

        WebApp(pool, int(port), "127.0.0.1").start()
    if path := os.environ.get("NODEPOOL_BENCHMARK_SOCKET"):
        from nodepool.web.actions.actions import Actions
        from nodepool.web.server import WebApp as OurWebApp

        OurWebApp(pool, 0, "127.0.0.1", actions=Actions(pool, "loopback"), unix=path).start()
    while not stop.wait(3600):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
