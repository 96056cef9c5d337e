"""What one sliver takes of kernel objects is its own: root of the host and other slivers get
theirs all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from nodepool.nodemanager.limits.netlink import MOST
from tests.attacks.conftest import ATTACKER, VICTIM, program
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager.scene import NmDaemon

TRUSTED = "trusted"
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hoard(host: NmDaemon, name: str, kind: str) -> Iterator[int]:
    """How many it has got; it keeps them during the block."""
    found = host.client.call("GetRecord", name)
    text = program("hoard", tail=f"hold({kind!r})")
    with subprocess.Popen(
        [
            "ssh",
            "-i",
            str(host.key),
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
            "root@127.0.0.1",
            "cat > /root/h; exec python3 -I /root/h",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as session:
        try:
            assert session.stdin is not None and session.stdout is not None
            session.stdin.write(text)
            session.stdin.close()
            line = session.stdout.readline()
            yield int(line) if line.strip() else -1
        finally:
            session.kill()
            if kind in ("disk", "inodes"):  # a sliver whose disk is full is not started again
                host.ssh(name, "pkill -9 -f '/root/[h]'; rm -rf /root/big /root/i", timeout=60)
            else:
                host.client.call("ReCreate", name)
                host.wait(name)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _inotify() -> None:
    os.close(_checked(_libc.inotify_init1(0)))


def _fanotify() -> None:
    os.close(_checked(_libc.fanotify_init(0, 0)))


def _queue() -> None:
    number = _checked(_libc.syscall(240, b"nm-attack", 0o102, 0o600, None))
    _libc.syscall(241, b"nm-attack")
    os.close(number)


def _timer() -> None:
    timer = ctypes.c_int()
    _checked(_libc.syscall(222, 1, None, ctypes.byref(timer)))
    _libc.syscall(226, timer)


def _terminal() -> None:
    for end in os.openpty():
        os.close(end)


def _asynchronous() -> None:
    context = ctypes.c_ulong(0)
    _checked(_libc.syscall(206, 10000, ctypes.byref(context)))
    _libc.syscall(207, context)


def _socket() -> None:
    for end in socket.socketpair():
        end.close()


def _pipe() -> None:
    for end in os.pipe():
        os.close(end)


IN_VICTIM = (
    'python3 -c "import os, ctypes, socket; os.openpty(); l = ctypes.CDLL(None); assert '
    "l.inotify_init1(0) >= 0; os.pipe(); "
    "assert l.syscall(240, b'q', 0o102, 0o600, None) >= 0; l.syscall(241, b'q'); "
    "socket.socketpair(); open('/root/x', 'w')"
    ".write('x'); print('well')\""
)


@pytest.mark.spec(
    "issue 10, F4: root's own kernel limits, and other slivers', are not used up by one sliver"
)
@pytest.mark.parametrize(
    ("kind", "most", "check"),
    [
        ("inotify", 512, _inotify),
        ("fanotify", 0, _fanotify),
        ("queues", 100, _queue),
        ("signals", 200_000, _timer),
        ("terminals", 256, _terminal),
        ("asynchronous", 0, _asynchronous),
        ("networks", 0, _inotify),
        ("watches", 65536, _inotify),
        ("pipes", 200_000, _pipe),
        ("files", 200_000, _pipe),
        ("locks", 200_000, _pipe),
        ("sockets", 200_000, _socket),
        ("messages", 32000, _queue),
        ("shared_memory", 4096, _queue),
        ("semaphores", 32000, _queue),
        ("children", 300, _pipe),
        ("tcp_buffers", 160, _socket),
        ("inodes", 200_000, _pipe),
        ("disk", 110, _pipe),
    ],
)
def test_one_sliver_hoards(host: NmDaemon, kind: str, most: int, check: Callable[[], None]) -> None:
    with hoard(host, ATTACKER, kind) as count:
        assert count <= most, f"{kind}: {count}"
        check()
        assert host.ssh(VICTIM, IN_VICTIM, timeout=60) == "well\n"
        assert host.client.call("GetRecord", VICTIM)["state"] == "ready"
    assert host.ssh(ATTACKER, "echo well", timeout=60) == "well\n"


def test_terminals_of_a_separate_devpts_are_not_taken_from_others(host: NmDaemon) -> None:
    host.put("mounter", rspec={"nm_mem_limit": 256, "nm_pids_max": 300}, privileges=["mount"])
    try:
        with hoard(host, "mounter", "mounted_terminals") as count:
            assert count > 1000  # it is its memory that ends it
            _terminal()
            assert host.ssh(VICTIM, IN_VICTIM, timeout=60) == "well\n"
    finally:
        host.delete("mounter")


@pytest.mark.spec(
    "issue 10, F4b: network namespaces of one sliver do not take more than its memory"
)
def test_network_namespaces_of_a_sliver_take_only_its_memory(host: NmDaemon) -> None:
    host.put(TRUSTED, rspec={"nm_mem_limit": 256, "nm_pids_max": 300}, privileges=["docker"])

    def unreclaimable() -> int:
        with open("/proc/meminfo") as file:
            return int(next(line for line in file if line.startswith("SUnreclaim")).split()[1])

    before = unreclaimable()
    # Each is left behind immediately, but a socket in it keeps it.
    script = (
        "import ctypes, socket\nl = ctypes.CDLL(None, use_errno=True)\nkept = []\n"
        "while len(kept) < 5000 and l.unshare(0x40000000) == 0:\n    kept.append(socket.socket())\n"
        "print(len(kept), flush=True)\ninput()\n"
    )
    found = host.client.call("GetRecord", TRUSTED)
    with subprocess.Popen(
        [
            "ssh",
            "-i",
            str(host.key),
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
            "root@127.0.0.1",
            f"python3 -c '{script}'",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as session:
        assert session.stdout is not None
        count = int(session.stdout.readline())
        grown = unreclaimable() - before
        session.communicate("\n", timeout=30)
    assert 0 < count <= 32
    assert grown < 128 * 1024, f"{grown} KiB"


IDLE_NETLINK = """import socket, sys, time
held = [socket.socket(16, 3, 0) for _ in range(int(sys.argv[1]))]
for each in held: each.bind((0, 0))
open("/root/bound", "w").close()
time.sleep(600)
"""


def test_sliver_with_many_idle_netlink_sockets_loses_its_processes_and_others_do_not(
    host: NmDaemon,
) -> None:
    """What is in their buffers is charged to nobody; here they are empty."""
    for name, count in ((VICTIM, 300), (ATTACKER, 800)):
        start = (
            f"cat >/root/idle <<'END'\n{IDLE_NETLINK}END\nsetsid python3 /root/idle {count} "
            "</dev/null >/dev/null 2>&1 &"
        )
        host.ssh(name, start, timeout=60)
    wait_for(
        lambda: (
            f"Sliver {ATTACKER} has more than {MOST} netlink sockets: killing its processes"
            in host.log
        ),
        limit(60),
    )
    wait_for(
        lambda: (
            host.ssh(ATTACKER, "pgrep -f /root/[i]dle || echo none", timeout=60, check=False)
            == "none\n"
        ),
        limit(60),
    )
    wait_for(
        lambda: host.ssh(VICTIM, "ls /root/bound", timeout=60, check=False) == "/root/bound\n",
        limit(60),
    )
    assert host.ssh(VICTIM, "pkill -f /root/[i]dle && echo alive", timeout=60) == "alive\n"
    assert f"Sliver {VICTIM} has more" not in host.log
