"""A sliver whose own disk a job has filled: it can be started again and logged into, as often as
it takes.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.limits import free_space
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

QUOTA = 40960
FILL = """
import os
os.makedirs("/var/tmp/fill", exist_ok=True)
def inodes():
    try:
        for number in range(1000000):
            os.close(os.open(f"/var/tmp/fill/f{number}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
def blocks():
    large = os.open("/var/tmp/fill/large", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for piece in (1 << 20, 65536, 4096, 1):
        try:
            while True:
                os.write(large, b"x" * piece)
        except OSError:
            pass
os.open("/var/tmp/fill/large", os.O_CREAT | os.O_WRONLY)
"""


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def fill(nm: NmDaemon, what: str) -> None:
    """By its own root; nothing more fits afterwards."""
    nm.ssh("alpha", f"python3 -c '{FILL}{what}'")
    with pytest.raises(AssertionError, match="No space left on device"):
        nm.ssh(
            "alpha",
            "for n in 1 2 3; do made=$(mktemp -d -p /var/tmp) && head -c 8192 /dev/zero > "
            "$made/file || exit 1; done",
        )


def start_again(nm: NmDaemon) -> None:
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.client.call("Start", "alpha")
    assert nm.wait("alpha")["error"] == ""


@pytest.mark.spec(
    "issue 10, F2: a sliver whose disk a job has filled can be started again and logged into"
)
@pytest.mark.parametrize("what", ["blocks()", "inodes()", "blocks(); inodes(); blocks()"])
def test_a_full_disk_of_a_sliver(nm: NmDaemon, what: str) -> None:
    script = "IyEvYmluL3NoCmVjaG8gaGVsbG8K"  # echo hello
    nm.put("alpha", rspec={"nm_disk_quota": QUOTA}, initscript=script)
    for _ in range(3):
        fill(nm, what)
        start_again(nm)
        assert nm.ssh("alpha", "echo in") == "in\n"
    nm.stop(signal.SIGKILL)
    nm.start()
    nm.wait("alpha")
    # Keys that were not changed while it was full are, when it starts.
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    other = nm.tmp / "other"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True, timeout=30
    )
    nm.put(
        "alpha",
        wait=False,
        rspec={"nm_disk_quota": QUOTA},
        initscript=script,
        ssh_keys=other.with_suffix(".pub").read_text(),
    )
    nm.client.call("Start", "alpha")
    assert nm.wait("alpha")["error"] == ""
    assert nm.ssh("alpha", "echo in", check=False) == ""
    nm.key = other
    assert nm.ssh("alpha", "rm -r /var/tmp/fill; echo in") == "in\n"
    start_again(nm)
    kept = sorted((nm.tmp / "state/slivers/alpha/mnt/ballast").iterdir())
    assert [path.stat().st_size for path in kept] == [free_space.DISK_PIECE] * free_space.DISK_FILES


def test_a_new_script_on_a_full_disk(nm: NmDaemon) -> None:
    """What it says has a place, though no inode was left."""
    nm.put("alpha", rspec={"nm_disk_quota": QUOTA})
    fill(nm, "inodes()")
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.put(
        "alpha",
        wait=False,
        rspec={"nm_disk_quota": QUOTA},
        initscript="IyEvYmluL3NoCmVjaG8gaGVsbG8K",
    )
    nm.client.call("Start", "alpha")
    assert nm.wait("alpha")["error"] == ""
    assert nm.ssh("alpha", "echo in") == "in\n"


@pytest.mark.spec(
    "NM-C.3: a quota that was changed while the sliver was stopped holds when it starts"
)
def test_a_quota_changed_while_it_was_stopped(nm: NmDaemon) -> None:
    nm.put("alpha", rspec={"nm_disk_quota": QUOTA})

    def available() -> int:
        return int(nm.ssh("alpha", "df -k --output=avail / | tail -1"))

    before = available()
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.put("alpha", wait=False, rspec={"nm_disk_quota": QUOTA // 2})
    nm.client.call("Start", "alpha")
    assert nm.wait("alpha")["error"] == ""
    assert available() == pytest.approx(before - QUOTA // 2, abs=1024)
    # It starts all the same when more is in use already, and the reason is logged.
    nm.ssh("alpha", "head -c 10M /dev/urandom > /root/large")
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.put("alpha", wait=False, rspec={"nm_disk_quota": QUOTA // 8})
    nm.client.call("Start", "alpha")
    assert re.search(
        "nm_disk_quota: sliver alpha uses .* free some first", nm.wait("alpha")["error"]
    )
    assert nm.ssh("alpha", "rm /root/large; echo in") == "in\n"
