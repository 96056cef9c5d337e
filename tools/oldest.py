#!/usr/bin/env python3
"""Run the unit tests with the oldest packages that setup.cfg allows (three minutes).

A lower bound that another package excludes is an error. What the packages need, and what only tests
use, is of today.
"""

from __future__ import annotations

import configparser
import os
import pathlib
import re
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
#: They need newer packages than the product does; only the tests of pages' scripts miss one.
LEFT_OUT = ("schemathesis", "ibm-vpc", "playwright", "axe-playwright-python")
IGNORED = "--ignore=tests/unit/web/test_scripts.py"


def environment(folder: pathlib.Path) -> pathlib.Path:
    """Return the Python of a new environment with them, and with what the tests need.

    :raises SystemExit: a lower bound that another package excludes.
    """
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    product, *tests = setup["options.extras_require"]["test"].strip().splitlines()
    python = folder / "venv/bin/python"
    uv = [f"{folder}/uv/bin/uv", "pip"]

    def install(*arguments: str) -> None:
        command = [*uv, "install", "--quiet", "--python", str(python), *arguments]
        subprocess.run(command, check=True, cwd=REPOSITORY)

    for name in ("uv", "venv"):
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/{name}"], check=True)
    subprocess.run([f"{folder}/uv/bin/pip", "install", "--quiet", "uv"], check=True)
    install("--resolution", "lowest-direct", "--editable", product.replace("nodepool", ".", 1))
    oldest = subprocess.run(
        [*uv, "freeze", "--python", str(python), "--exclude-editable"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    print(oldest, flush=True)
    declared = (REPOSITORY / "setup.cfg").read_text().partition("\ntest =")[0]
    wrong = {
        f"{name}>={bound}: the oldest that can be installed is {found[1]}"
        for name, bound in re.findall(r"(?m)^    ([\w-]+)(?:\[\w+\])?>=([\d.]+)", declared)
        if (found := re.search(rf"(?mi)^{name.replace('_', '-')}==(.*)", oldest))
        and not f"{found[1]}.0".startswith(bound + ".")
    }
    if wrong:
        sys.exit("\n".join(sorted(wrong)))
    constraints = folder / "constraints"
    constraints.write_text(oldest)
    others = [line for line in tests if line[:1] != "#" and not line.startswith(LEFT_OUT)]
    install("--constraint", str(constraints), *others)
    return python


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="nodepool-oldest-") as folder:
        python = environment(pathlib.Path(folder))
        command = [python, "-m", "pytest", "-q", "-n", "2", "tests/unit", IGNORED, *sys.argv[1:]]
        return subprocess.run(command, check=False, cwd=REPOSITORY, env=os.environ).returncode


if __name__ == "__main__":
    sys.exit(main())
