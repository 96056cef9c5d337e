"""Helm, built from its Go module, for the tests of the chart."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import tempfile

from cluster import control_plane

#: The newest of each line; most installations have the first.
VERSIONS = {"3": "v3.22.0", "4": "v4.3.2"}


def path(line: str = "3") -> pathlib.Path:
    """Return where Helm is kept."""
    return control_plane.CACHE / f"helm-{VERSIONS[line]}" / "helm"


def install(line: str = "3") -> pathlib.Path:
    """Build Helm unless it exists, and return its path. Raises ClusterError."""
    program, module = path(line), f"helm.sh/helm/v{line}"
    if program.exists():
        return program
    # Helm 3 takes Kubernetes for 1.20 otherwise, wherever it does not ask a server.
    match = re.match(r"v(\d+)\.(\d+)", control_plane.version(control_plane.CURRENT))
    assert match is not None
    flags = ["-s -w"] + [
        f"-X {module}/pkg/{package}.k8sVersion{name}={number}"
        for package in ("chartutil", "lint/rules")
        for name, number in (("Major", match[1]), ("Minor", match[2]))
    ]
    words = ["nice", "-n", "19", control_plane.go(), "install", "-trimpath"]
    words += ["-ldflags", " ".join(flags), f"{module}/cmd/helm@{VERSIONS[line]}"]
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        done = subprocess.run(
            words,
            cwd="/",
            env={**control_plane.environment(), "GOBIN": folder},
            capture_output=True,
            text=True,
            timeout=control_plane.BUILD_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise control_plane.ClusterError(
                f"helm does not build ({' '.join(words)}):\n{done.stderr[-3000:]}"
            )
        os.rename(pathlib.Path(folder, "helm"), program)
    return program
