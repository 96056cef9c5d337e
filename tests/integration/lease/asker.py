"""Ask for a lease of two nodes, print its id at one moment, and stay there until killed or asked to
continue.

``python asker.py HOSTS CA CERT KEY MOMENT``, where the moment is ``waiting``, ``fulfilled``,
``locked`` or ``written``.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from nodepool.cmd.commands.requests.follow import Follower
from nodepool.lease import Leases, Terms
from nodepool.zk import ZooKeeperClient
from nodepool.zk.records import FULFILLED
from nodepool.zk.zookeeper import ZooKeeper

LABELS = ["small", "small"]
TERMS = Terms("alice", "unix:1000", "killed", key="job-1")


def main(hosts: str, ca: str, cert: str, key: str, moment: str) -> None:
    client = ZooKeeperClient(hosts, timeout=4.0, tls_ca=ca, tls_cert=cert, tls_key=key)
    client.connect(timeout=20)
    zk = ZooKeeper(client, enable_cache=False)
    lease = Leases(zk).ask(LABELS, TERMS)
    run = zk.writer.run

    def reached(name: str) -> None:
        if name == moment:
            print(lease.id, flush=True)
            sys.stdin.readline()

    def run_slowly(txn: Any) -> Any:
        reached("locked")
        result = run(txn)
        reached("written")
        return result

    reached("waiting")
    states = Follower(zk.kazoo_client).follow([lease.id], 60, lambda *_: None, lambda _ids: None)
    assert states == {lease.id: FULFILLED}
    reached("fulfilled")
    with mock.patch.object(zk.writer, "run", run_slowly):
        Leases(zk).hand_over(lease.id, 600)


if __name__ == "__main__":
    main(*sys.argv[1:])
