"""More open files than the usual limit of 1024, and a start with a low one."""

from __future__ import annotations

import os
import pathlib
import re
import resource

import pytest

from tests.support.nodemanager.scene import NmDaemon, run_daemon

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]

#: What a host with hundreds of slivers and sessions has, taken at the start of the daemon.
MANY = """
import os, resource, sys
if any(word.endswith("nodepool-nodemanager") for word in sys.orig_argv):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(1100):
        os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
"""


@pytest.mark.spec(
    "issue 10, F9: the soft limit of open files is raised at the start, and nothing breaks above "
    "1024"
)
def test_daemon_works_with_descriptors_above_1024(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(MANY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = NmDaemon(tmp_path)
    running = run_daemon(daemon)
    nm = next(running)
    monkeypatch.delenv("PYTHONPATH")
    try:
        assert nm.process is not None
        limits = pathlib.Path(f"/proc/{nm.process.pid}/limits").read_text()
        found = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits)
        assert found is not None
        assert int(found[1]) == int(found[2]) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert len(os.listdir(f"/proc/{nm.process.pid}/fd")) > 1100
        for name in ("one", "two"):
            nm.put(name)
        assert nm.ssh("one", "echo in") == "in\n"
        nm.client.call("Stop", "one")
        nm.wait("one", "stopped")
        nm.client.call("Start", "one")
        nm.wait("one")
        assert nm.ssh("one", "echo again") == "again\n"
        nm.delete("two")
    finally:
        with pytest.raises(StopIteration):
            next(running)
