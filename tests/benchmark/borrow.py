"""Borrows slivers with the client of either release, and prints the milliseconds from each call to
the end of its first command as JSON: ``PYTHON borrow.py SOCKET COUNT SECONDS``, with the seconds
between two calls; a negative number: the next call after the end of the one before.
"""

import json
import sys
import threading
import time

from nodepool.client import Pool


def main() -> None:
    path, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    pool = Pool(f"unix://{path}")
    times, errors = [], []

    def borrow() -> None:
        try:
            began = time.monotonic()
            with pool.lease("host", for_="10m", wait="2m") as lease:
                done = lease.run("true", timeout="1m")
                times.append((time.monotonic() - began) * 1000)
                assert done.status == 0, done
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=borrow, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
        if pause < 0:
            thread.join()
        else:
            time.sleep(pause)
    for thread in threads:
        thread.join()
    print(json.dumps({"times": times, "errors": errors}))


main()
