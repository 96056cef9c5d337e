"""Ports of tests and demonstrations: nobody else takes them between choosing and binding."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests import REPOSITORY
from tests.support import ports

OTHER = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tools")!r})
import ports
print(ports.number(), ports.reserve(), flush=True)
sys.stdin.read()
"""


def test_each_process_has_a_separate_range_until_it_ends() -> None:
    ours = ports.id_base(0)
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        number, first = map(int, other.stdout.readline().split())
        assert 1_000_000_000 + number * ports.ID_RANGES * ports.ID_SPAN != ours
        assert first != ports.reserve()
        again = subprocess.run(
            command, input="", capture_output=True, text=True, check=True, timeout=60
        )
        assert int(again.stdout.split()[0]) != number
        other.kill()
    again = subprocess.run(
        command, input="", capture_output=True, text=True, check=True, timeout=60
    )
    assert int(again.stdout.split()[0]) <= number


def test_a_port_in_use_is_skipped_and_none_is_reused_soon() -> None:
    first = ports.reserve()
    with socket.create_server(("127.0.0.1", first + 2)):
        assert ports.reserve(2) >= first + 3
    assert len({ports.reserve(100) for _ in range(8)}) == 8
