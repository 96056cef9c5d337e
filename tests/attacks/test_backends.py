"""The same attempts in slivers of the other backends that can run here: none of them succeeds."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.backends.podman import PodmanBackend
from tests.attacks.conftest import attempts_of, program, results
from tests.attacks.trees import make_python_tree
from tests.integration.nodemanager.backends.test_rootless_daemon import UserDaemon, home, nm
from tests.support.nodemanager.machine import machine_at

__all__ = ["home", "nm"]

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0,
        reason="only root can become a user that nobody else is, and make podman's slivers",
    ),
]
MODULES = ("kernel", "mounts", "network", "processes", "sessions")


def bad(module: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Attempts that have succeeded, or broken; which error the others got differs between
    backends.
    """
    assert set(found) == set(attempts_of(module))
    return [line for line in found.values() if "outcome" not in line]


@pytest.mark.spec("issue 10, 2: attempts in slivers of backend rootless")
@pytest.mark.skipif(
    not os.path.exists("/usr/sbin/sshd"), reason="this host has no sshd to run inside slivers"
)
def test_root_in_a_rootless_sliver_achieves_only_what_is_allowed(nm: UserDaemon) -> None:
    found = nm.put("mallory")
    with nm.session("mallory", user="zuul") as session:
        for module in MODULES:
            done = subprocess.run(
                [
                    "ssh",
                    "-i",
                    str(nm.key),
                    "-p",
                    str(found["ssh_port"]),
                    "-o",
                    "BatchMode=yes",
                    "-o",
                    "StrictHostKeyChecking=no",
                    "-o",
                    f"UserKnownHostsFile={os.devnull}",
                    "-o",
                    "LogLevel=ERROR",
                    "zuul@127.0.0.1",
                    "exec python3 -I -",
                ],
                input=program(module).replace("/root/", "/home/zuul/"),
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            assert bad(module, results(done.stdout)) == []
        session.communicate("bye\n", timeout=20)


@pytest.fixture(scope="module")
def python_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    tree = make_python_tree(tmp_path_factory.mktemp("tree") / "root")
    if tree is None:
        pytest.skip("this host has no Python of its distribution at /usr/bin/python3")
    yield tree
    shutil.rmtree(tree)


@pytest.mark.spec("issue 10, 2: attempts in slivers of backend podman")
@pytest.mark.skipif(
    shutil.which("podman") is None or shutil.which("crun") is None,
    reason="podman and crun are not installed",
)
def test_root_in_a_podman_sliver_achieves_only_what_is_allowed(
    python_tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with machine_at(tmp_path / "state", factory=PodmanBackend) as machine:
        sliver = machine.sliver(
            "mallory", 1, f"dir:{python_tree}", rspec={"nm_mem_limit": 256, "nm_pids_max": 300}
        )
        with sliver.start_program("sleep", "1000"):
            for module in MODULES:
                answer = sliver.run("python3", "-I", "-c", program(module), timeout=90)
                assert answer.status == 0, answer.text[-2000:]
                assert bad(module, results(answer.text)) == []
