"""Programs of other projects, as black boxes in a separate virtual environment: Zuul and
Nodepool 11.0.0.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nodepool.base.files import lock_file
from tests import REPOSITORY

OTHERS = pathlib.Path(os.environ.get("NODEPOOL_OTHERS_VENV") or REPOSITORY / ".others-venv")
#: What the two import and our own environment lacks.
REQUIREMENTS = (
    "nodepool==11.0.0",
    "zuul==14.3.0",
    "extras",
    "google-re2",
    "grpcio",
    "ibm-platform-services",
    "jsonpath-rw",
    "lockfile",
    "openshift",
    "opentelemetry-exporter-otlp-proto-grpc",
    "Paste",
    "ply",
    "python-daemon",
    "WebOb",
)
#: Runs a launcher of the release that its Python has, with a driver whose machines appear
#: immediately.
SERVE = str(REPOSITORY / "tests" / "benchmark" / "serve.py")


def environment() -> str:
    """Return the Python of an environment with both; all other modules are those of our
    environment.
    """
    return create(OTHERS, REQUIREMENTS, ours=True)


def create(folder: pathlib.Path, requirements: Sequence[str], ours: bool = False) -> str:
    """Create a virtual environment unless it is complete; return its Python.

    :param ours: the modules of our environment can be imported in it, so nothing that the
        requirements need is installed.
    """
    python = folder / "bin" / "python"
    # Another set of requirements is another environment.
    complete, wanted = folder / "complete", "\n".join(requirements)
    with open(f"{folder}.lock", "w") as lock:
        lock_file(lock.fileno(), 900)
        if not complete.exists() or complete.read_text() not in ("", wanted):
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
            if ours:
                theirs = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
                pathlib.Path(theirs, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
            options = ["--no-deps"] if ours else []
            subprocess.run(
                [python, "-m", "pip", "install", "-q", *options, *requirements],
                check=True,
                timeout=600,
            )
            complete.write_text(wanted)
    return str(python)


@contextmanager
def running(
    command: list[str], log: pathlib.Path, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block; one of another environment must not find our
    package first.
    """
    keep = command[0] == sys.executable
    variables = {name: value for name, value in os.environ.items() if keep or name != "PYTHONPATH"}
    with open(log, "a") as output:
        process = subprocess.Popen(
            command, stderr=output, text=True, cwd=log.parent, env=variables, **options
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def configuration() -> dict[str, Any]:
    """Return the configuration of a launcher for :data:`SERVE`, with the label ``small``."""
    return {
        "webapp": {"port": 0},
        "labels": [{"name": "small", "min-ready": 0}],
        "providers": [
            {"name": "p", "driver": "instant", "pools": [{"name": "main", "labels": ["small"]}]}
        ],
    }
