"""Root of a sliver with the rights of its network destroys sockets that the daemon has made in
it.
"""

from __future__ import annotations

from tests.attacks.conftest import VICTIM
from tests.support.nodemanager.scene import NmDaemon

#: SOCK_DESTROY of the listener at port 812, like ``ss -K``; then the API must answer there again.
DESTROY = r"""
import socket, struct, time
address = socket.inet_aton("127.0.0.1").ljust(16, b"\0")
ident = struct.pack("!HH16s16sI", 812, 0, address, bytes(16), 0) + b"\xff" * 8
request = struct.pack("BBBxI", socket.AF_INET, 6, 0, 0xFFFFFFFF) + ident
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:
    netlink.bind((0, 0))
    netlink.send(struct.pack("IHHII", 16 + len(request), 21, 5, 1, 0) + request)
    print("destroyed", struct.unpack_from("i", netlink.recv(4096), 16)[0], flush=True)
deadline = time.monotonic() + 60
while True:
    try:
        socket.create_connection(("127.0.0.1", 812), 5).close()
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline, "the API is gone"
        time.sleep(0.05)
print("answers")
"""


def test_destroyed_listener_is_opened_again(host: NmDaemon) -> None:
    host.put("networker", rspec={"nm_mem_limit": 256}, privileges=["network-admin"])
    try:
        for _ in range(2):
            outcome = host.ssh("networker", f"python3 - <<'END'\n{DESTROY}END", timeout=90)
            assert outcome.split("\n")[:2] == ["destroyed 0", "answers"]
        assert host.ssh(VICTIM, "echo well") == "well\n"
    finally:
        host.delete("networker")
