"""Time of ``tools/quickstart`` with an image, in times of one ``disk-image-create`` alone that
builds the same image; with ``--busy N``, N runs of it alongside eight programs that need all the
CPU time they get, each with exactly one build.

Run it as root, with what ``tools/quickstart`` installs already there:
``python -m tests.benchmark.quickstart``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

#: At most this many times of the build alone.
GOAL = 1.6
#: Programs alongside each run with ``--busy``.
LOOPS = 8


def printed(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.stdout + done.stderr


def build() -> None:
    from demo import image

    with tempfile.TemporaryDirectory() as folder:
        [wanted] = image.settings(pathlib.Path(folder))["diskimages"]
        create = pathlib.Path(sys.executable).with_name("disk-image-create")
        options = ["-x", "-t", "tar", "--checksum", "--no-tmpfs", "-o", f"{folder}/image"]
        printed(
            [str(create), *options, *wanted["elements"]],
            **wanted["env-vars"],
            DIB_RELEASE=wanted["release"],
        )


def quickstart() -> None:
    """:raises SystemExit: it failed, showed a traceback, or built not one image."""
    from demo import image

    text = printed([str(REPOSITORY / "tools" / "quickstart")])
    table = text.partition("nodepool dib-image-list")[2].partition("nodepool image-list")[0]
    builds = sum(line.startswith(f"| {image.IMAGE}-") for line in table.splitlines())
    if builds != 1 or "Traceback" in text:
        raise SystemExit(f"{builds} builds instead of 1, or a traceback: {text}")


def compare() -> bool:
    began = time.monotonic()
    build()
    alone, began = time.monotonic() - began, time.monotonic()
    quickstart()
    whole = time.monotonic() - began
    print(
        f"disk-image-create alone {alone:.0f} s, tools/quickstart {whole:.0f} s: "
        f"{whole / alone:.2f} times, at most {GOAL}"
    )
    return whole <= GOAL * alone


@contextmanager
def loops() -> Iterator[None]:
    running = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, metavar="N", help="N runs beside eight busy programs")
    wanted = parser.parse_args().busy
    if wanted is None:
        return not compare()
    with loops():
        for number in range(1, wanted + 1):
            began = time.monotonic()
            quickstart()
            print(
                f"run {number} of {wanted}: good, one build, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
