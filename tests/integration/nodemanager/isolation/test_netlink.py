"""The limit of netlink sockets, with real networks."""

from __future__ import annotations

import os
import subprocess

import pytest

from nodepool.nodemanager.limits import netlink
from tests.conftest import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")


def test_sliver_with_too_many_sockets_is_stopped_and_the_host_is_never_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netlink, "PERIOD", 0.01)
    monkeypatch.setattr(netlink, "MOST", -netlink.KERNEL - 1)  # anybody has more
    killed: list[str] = []
    limit = netlink.NetlinkLimit(killed.append)
    with subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    ) as sliver:
        assert sliver.stdout is not None and sliver.stdout.readline()
        limit.add("host", os.getpid())
        limit.add("alice", sliver.pid)
        limit.start()
        try:
            wait_for(lambda: len(killed) >= 3, what="the end of its processes")
        finally:
            limit.stop()
            sliver.kill()
    assert set(killed) == {"alice"}
