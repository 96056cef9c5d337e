"""Time of ``tools/quickstart`` with an image, in times of one ``disk-image-create`` alone that
builds the same image.

Run it as root, with what ``tools/quickstart`` installs already there:
``python -m tests.benchmark.quickstart``.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from tests import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

#: At most so many times of the build alone.
GOAL = 1.6


def seconds(command: list[str], **environment: str) -> float:
    began = time.monotonic()
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
        raise SystemExit(f"{command[0]} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return time.monotonic() - began


def build() -> float:
    from demo import image

    with tempfile.TemporaryDirectory() as folder:
        [wanted] = image.settings(pathlib.Path(folder))["diskimages"]
        create = pathlib.Path(sys.executable).with_name("disk-image-create")
        options = ["-x", "-t", "tar", "--checksum", "--no-tmpfs", "-o", f"{folder}/image"]
        return seconds(
            [str(create), *options, *wanted["elements"]],
            **wanted["env-vars"],
            DIB_RELEASE=wanted["release"],
        )


def main() -> int:
    alone, whole = build(), seconds([str(REPOSITORY / "tools" / "quickstart")])
    print(
        f"disk-image-create alone {alone:.0f} s, tools/quickstart {whole:.0f} s: "
        f"{whole / alone:.2f} times, at most {GOAL}"
    )
    return whole > GOAL * alone


if __name__ == "__main__":
    sys.exit(main())
