"""Lease machines from a program, with nothing but the standard library.

::

    from nodepool.client import Pool

    with Pool().lease("noble", purpose="bisect") as lease:
        lease.put("src.tar", "/tmp/src.tar")
        done = lease.run("tar -C /tmp -xf /tmp/src.tar && make -C /tmp/src check", timeout="1h")
        lease.get("/tmp/src/log", "log")

A lease without ``for_`` lives as long as this program: a thread renews it, and the end of ``with``,
or of the program, returns it. If the program is killed, the lease ends within two minutes. A lease
with ``for_`` lives until its end. A forked process may use a lease of its parent, and does not
return it when it ends.
"""

from __future__ import annotations

from nodepool.client.calls import (
    SHOWN,
    SOCKET,
    Done,
    Duration,
    LeaseEnded,
    NoCapacity,
    NodepoolError,
    NotAllowed,
    SecretFile,
    is_protected,
    read_secret,
    seconds,
)
from nodepool.client.lease import MOST_INPUT, Lease
from nodepool.client.pool import Pool
from nodepool.ssh import Node

__all__ = [
    "MOST_INPUT",
    "SHOWN",
    "SOCKET",
    "Done",
    "Duration",
    "Lease",
    "LeaseEnded",
    "NoCapacity",
    "Node",
    "NodepoolError",
    "NotAllowed",
    "Pool",
    "SecretFile",
    "is_protected",
    "read_secret",
    "seconds",
]
