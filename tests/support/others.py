"""Programs of other projects, as black boxes in a virtual environment of their own: Zuul and Nodepool 11.0.0."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nodepool.base.files import lock_file
from tests import REPOSITORY

OTHERS = pathlib.Path(os.environ.get("NODEPOOL_OTHERS_VENV") or REPOSITORY / ".others-venv")
#: What the two import and our own environment lacks.
REQUIREMENTS = (
    "nodepool==11.0.0", "zuul==14.3.0", "extras", "google-re2", "grpcio", "ibm-platform-services", "jsonpath-rw", "lockfile",
    "openshift", "opentelemetry-exporter-otlp-proto-grpc", "Paste", "ply", "python-daemon", "WebOb",
)  # fmt: skip
#: Runs a launcher of the release that its Python has, with a driver whose machines appear immediately.
SERVE = str(REPOSITORY / "tests" / "benchmark" / "serve.py")


def environment() -> str:
    """Return the Python of an environment with both; all other modules are those of our environment."""
    python = OTHERS / "bin" / "python"
    with open(f"{OTHERS}.lock", "w") as lock:
        lock_file(lock.fileno(), 900)
        if not (OTHERS / "complete").exists():
            shutil.rmtree(OTHERS, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(OTHERS)], check=True, timeout=120)
            ours = sysconfig.get_path("purelib")
            theirs = sysconfig.get_path("purelib", "venv", {"base": str(OTHERS)})
            pathlib.Path(theirs, "ours.pth").write_text(f"{ours}\n")
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *REQUIREMENTS], check=True, timeout=600)
            (OTHERS / "complete").touch()
    return str(python)


@contextmanager
def running(command: list[str], log: pathlib.Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block; one of another environment must not find our package first."""
    keep = command[0] == sys.executable
    variables = {name: value for name, value in os.environ.items() if keep or name != "PYTHONPATH"}
    with open(log, "a") as output:
        process = subprocess.Popen(command, stderr=output, text=True, cwd=log.parent, env=variables, **options)
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
        "providers": [{"name": "p", "driver": "instant", "pools": [{"name": "main", "labels": ["small"]}]}],
    }
