"""What callers of the API may do at the same time as others: leases of what goes, tickets, loans
again and again, delegations.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.client.rpc import RpcFault
from nodepool.nodemanager.records import merge
from nodepool.nodemanager.sources import tickets
from tests.support.nodemanager.scene import NmDaemon, run_daemon

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    for command in (
        ["genpkey", "-algorithm", "ed25519", "-out", "key"],
        ["pkey", "-in", "key", "-pubout", "-out", "key.pub"],
    ):
        subprocess.run(
            ["openssl", *command], cwd=tmp_path, check=True, capture_output=True, timeout=30
        )
    yield from run_daemon(NmDaemon(tmp_path, tickets={"keys": [str(tmp_path / "key.pub")]}))


def together(*calls: Any) -> list[Any]:
    """Results, or faults, of calls made at the same time."""
    barrier = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        barrier.wait(10)
        try:
            found[place] = calls[place]()
        except RpcFault as fault:
            found[place] = fault

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.spec(
    "issue 10, F14: RenewSliver, SetLoans and Stop beside DeleteSliver bring nothing of it back"
)
def test_changes_concurrent_with_deletion(nm: NmDaemon) -> None:
    for number in range(25):
        name = f"s{number}"
        nm.put(name, wait=False)
        renew = [
            lambda name=name: nm.client.call("RenewSliver", name, int(time.time()) + 9000)
            for _ in range(4)
        ]  # type: ignore[misc]
        together(
            *renew,
            lambda name=name: nm.client.call("DeleteSliver", name),  # type: ignore[misc]
            lambda name=name: nm.client.call("SetLoans", name, [["x", "nm_cpu_share", 1]]),  # type: ignore[misc]
            lambda name=name: nm.client.call("Stop", name),
        )  # type: ignore[misc]
    assert nm.client.call("ListSlivers") == []
    for number in range(25):
        nm.wait(f"s{number}", "gone")
    nm.put("s0")
    assert nm.client.call("GetLoans", "s0") == []


@pytest.mark.spec(
    "issue 10, F16: a ticket that is refused for another reason may be handed in again; none works "
    "twice"
)
def test_tickets_are_used_once(nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    key = (tmp_path / "key").read_bytes()
    records = [
        {"account_type": "sliver", "name": name, "rspec": {"nm_disk_quota": 102400}}
        for name in ("guest", "other")
    ]
    nm.put("other")
    ticket = tickets.sign(records, key, "authority", "host0")
    for _ in range(2):
        with pytest.raises(RpcFault, match="belongs to source driver"):
            nm.client.call("Ticket", ticket)
        assert [sliver["name"] for sliver in nm.client.call("ListSlivers")] == ["other"], (
            "all of it or nothing"
        )
    nm.delete("other")
    found = together(*[lambda: nm.client.call("Ticket", ticket)] * 8)
    assert [item for item in found if not isinstance(item, RpcFault)] == [["guest", "other"]]
    assert {item.text for item in found if isinstance(item, RpcFault)} == {
        "ticket refused: it was used before"
    }
    nm.wait("guest")


INSIDE = """
import time, xmlrpc.client
api = xmlrpc.client.ServerProxy("http://127.0.0.1:812/")
done = 0
while True:
    try:
        api.SetLoans([["mate", "nm_cpu_share", 1 + done % 5]])
    except xmlrpc.client.Fault as fault:
        text = fault.faultString
        print(done, fault.faultCode, text)
        break
    done += 1
time.sleep(float(text.split(" in ")[1].split()[0]))
print(api.SetLoans([]))
"""


@pytest.mark.spec(
    "issue 10, F16: SetLoans of a sliver is limited, and says when the next is possible"
)
def test_loans_again_and_again(nm: NmDaemon) -> None:
    nm.put("mate")
    nm.put("lender")
    first, last = nm.ssh("lender", f"python3 -c '{INSIDE}'").splitlines()
    done, code, text = first.split(" ", 2)
    assert 20 <= int(done) < 40
    assert code == "104"
    assert text.startswith("too many changes of lender by sliver lender: SetLoans is possible in ")
    assert last == "1"
    for _ in range(40):  # root is not held back
        nm.client.call("SetLoans", "lender", [])


def test_stop_of_a_node_manager_that_has_not_started_needs_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    from nodepool.nodemanager.config import parse
    from nodepool.nodemanager.manager import NodeManager

    given = {name: str(tmp_path / name) for name in ("state-dir", "run-dir")}
    for _ in range(2):  # the second one gets the lock
        NodeManager(parse({**given, "backend": "rootless"}, "test")).parts.stop()
    assert "stopping" not in caplog.text


@pytest.mark.spec("issue 10, F14: the family: what is noted of a sliver needs a record of it")
def test_notes_need_a_record(tmp_path: pathlib.Path) -> None:
    from nodepool.nodemanager.api.methods import NodeError
    from nodepool.nodemanager.config import parse
    from nodepool.nodemanager.manager import NodeManager

    given = {
        "state-dir": str(tmp_path / "s"),
        "run-dir": str(tmp_path / "r"),
        "backend": "rootless",
    }
    manager = NodeManager(parse(given, "test"))
    try:
        manager.calls.database.open()
        for call in (
            manager.calls.stop,
            manager.calls.create,
            lambda name: manager.calls.set_loans(name, []),
            lambda name: manager.calls.renew(name, 2e9),
            manager.calls.recreate,
            manager.calls.slivers.start,
        ):
            with pytest.raises(NodeError, match="there is no sliver gone"):
                call("gone")
        assert manager.calls.database.locals() == {}
        record = {"account_type": "sliver", "name": "gone", "plc_instantiated": True}
        merge.deliver(manager.calls.database, "driver", None, [record], False)
        writes = manager.calls.database._connection.total_changes  # type: ignore[union-attr]
        for _ in range(3):
            manager.calls.set_loans("gone", [("other", "nm_cpu_share", 1)])
        assert manager.calls.database._connection.total_changes == writes + 1, (
            "the same again costs no write"
        )  # type: ignore[union-attr]
    finally:
        manager.parts.stop()
        manager.calls.database.close()
