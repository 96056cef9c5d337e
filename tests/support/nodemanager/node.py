"""A node manager without slivers, for tests of the API and its transports: the real rules and
database, no machines.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.nodemanager.api.methods import Api, NodeError, Program, wait
from nodepool.nodemanager.api.programs import Programs
from nodepool.nodemanager.api.server import Servers
from nodepool.nodemanager.config import NodeManagerConfig, parse
from nodepool.nodemanager.records import loans, merge, records, rspec
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.rootfs.uploaded import Images
from nodepool.nodemanager.slivers.events import Events
from nodepool.nodemanager.sources import tickets

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJb4lPZ1C3ZpZ2ZkZ2ZkZ2ZkZ2ZkZ2ZkZ2ZkZ2Zk someone"


def sliver(name: str, **values: Any) -> dict[str, Any]:
    return {"account_type": "sliver", "name": name, "plc_instantiated": True, **values}


def delegate(name: str, **values: Any) -> dict[str, Any]:
    return {"account_type": "delegate", "name": name, **values}


def with_network(
    config: NodeManagerConfig, state_dir: str | None = None, **network: Any
) -> NodeManagerConfig:
    """Return a copy with other options of the network."""
    changed = copy.deepcopy(config)
    changed.state_dir = state_dir or config.state_dir
    vars(changed.network).update(network)
    return changed


class MemoryNode:
    """What answers the calls of an Api; commands are noted in ``commands``."""

    def __init__(self, config: NodeManagerConfig) -> None:
        self.config = config
        self.database = Database(str(pathlib.Path(config.state_dir, "nodemanager.sqlite")))
        self.database.open()
        self.images = Images(str(pathlib.Path(config.state_dir, "images")))
        calls = {
            "DumpDatabase": self.database.dump,
            "CreateSliver": self.create_sliver,
            "DeleteSliver": lambda name: self.commands.append(("delete", name)),
            "Start": lambda name: self.commands.append(("start", name)),
            "Stop": lambda name: self.commands.append(("stop", name)),
            "ReCreate": lambda name: self.commands.append(("recreate", name)),
            "GetRSpec": self.granted,
            "GetEffectiveRSpec": self.effective,
            "GetLoans": self.loans_of,
            "SetLoans": self.set_loans,
            "GetRecord": self.describe,
            "GetUsage": lambda name: {"memory_bytes": 2**40},
            "GetConsole": self.console,
            "WaitSliver": functools.partial(wait, self.reached),
            "Exec": self.program,
            "RenewSliver": lambda name, expiry: self.commands.append(("renew", name)),
            "PutRecord": self.put_record,
            "ListSlivers": lambda: [self.describe(name) for name in self.sliver_names()],
            "GetCapacity": self.capacity,
            "WaitEvents": Events(self.database, lambda *_: {}, lambda: None).wait,
            "GetXIDs": dict,
            "GetSSHKeys": lambda: {
                n: (self.sliver_record(n) or {}).get("ssh_keys", "") for n in self.sliver_names()
            },
            "Ticket": self.ticket,
        }
        self.api = Api(calls, self.sliver_record, self.is_delegate)
        self.backend: Any = None
        self.commands: list[tuple[str, str]] = []
        self.uids: dict[int, str] = {}
        self.changed: Callable[[str], None] = lambda name: None

    def close(self) -> None:
        self.database.close()

    def sliver_of_uid(self, uid: int) -> str | None:
        return self.uids.get(uid)

    def deliver(
        self, source: str, serial: float | None, given: Any, complete: bool
    ) -> merge.Changes:
        changes = merge.deliver(self.database, source, serial, given, complete)
        for key in changes.changed | changes.deleted:
            self.changed(key.removeprefix("sliver_"))
        return changes

    def sliver_record(self, name: str) -> dict[str, Any] | None:
        found = self.database.get(records.record_key("sliver", name))
        return None if found is None else found.content

    def sliver_names(self) -> list[str]:
        return sorted(
            r.content["name"]
            for r in self.database.records()
            if r.content.get("account_type") == "sliver"
        )

    def granted(self, name: str) -> dict[str, int]:
        return rspec.with_defaults((self.sliver_record(name) or {}).get("rspec") or {})

    def effective(self, name: str) -> dict[str, int]:
        return loans.effective(
            {n: (self.granted(n), self.loans_of(n)) for n in self.sliver_names()}
        )[name]

    def loans_of(self, name: str) -> list[Any]:
        return list(self.database.local(f"sliver_{name}").get("loans", []))

    def set_loans(self, name: str, given: list[loans.Loan]) -> None:
        self.database.update_local(f"sliver_{name}", loans=[list(loan) for loan in given])

    def create_sliver(self, name: str) -> None:
        if (self.sliver_record(name) or {}).get("plc_instantiated"):
            raise NodeError(f"sliver {name} is kept by its authority")
        self.commands.append(("create", name))

    def put_record(self, caller: str, record: dict[str, Any]) -> dict[str, Any]:
        changes = self.deliver("driver", None, [record], False)
        if changes.refused:
            raise NodeError("; ".join(changes.refused.values()))
        return self.describe(record["name"])

    def ticket(self, signed: str) -> list[str]:
        try:
            given, jti, expiry = tickets.verify(signed, self.config.tickets, self.config.host_name)
        except tickets.TicketError as error:
            raise NodeError(f"ticket refused: {error}") from None
        if not self.database.use_ticket(jti, expiry):
            raise NodeError("ticket refused: it was used before")
        self.deliver("ticket", None, given, False)
        return [str(item["name"]) for item in given]

    def is_delegate(self, name: str) -> bool:
        return self.database.get(records.record_key("delegate", name)) is not None

    def reached(self, name: str, state: str) -> dict[str, Any] | None:
        return (
            self.describe(name) if (self.sliver_record(name) is None) == (state == "gone") else None
        )

    def describe(self, name: str) -> dict[str, Any]:
        return {"name": name, "metadata": (self.sliver_record(name) or {}).get("metadata") or {}}

    def capacity(self) -> dict[str, Any]:
        return {
            "cores": 2,
            "allocated": {"slivers": len(self.sliver_names())},
            "images": [],
            "backend": "none",
        }

    def console(self, name: str) -> str:
        if name == "broken":
            raise RuntimeError("secret of the inside")
        return "\x1b[1mbold\x00\x1b[0m\r\n"

    def program(self, name: str, argv: list[str], env: dict[str, str], user: str) -> Program:
        return Program(name, lambda *_streams: self.backend.spawn(name, argv, env, user))


class Running:
    """Servers of a MemoryNode in a directory; ``with`` starts and stops them."""

    def __init__(self, folder: pathlib.Path, **options: Any) -> None:
        self.socket = str(folder / "api.sock")
        api: dict[str, Any] = {"unix": self.socket, "tcp": 0, **options.pop("api", {})}
        self.config = parse(
            {
                "state-dir": str(folder),
                "run-dir": str(folder),
                "host-name": "here",
                "api": api,
                **options,
            },
            "test",
        )
        self.node = MemoryNode(self.config)
        self.servers = Servers(
            self.node.api,
            self.config,
            self.node.backend,
            self.node.database,
            self.node.images,
            self.node.sliver_of_uid,
            Programs(self.config.ssh.connections),
        )
        self.node.changed = self.servers.connections.recheck_now

    def __enter__(self) -> Running:
        self.servers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.stop()
        self.node.close()

    def add(self, *given: Mapping[str, Any], source: str = "test") -> None:
        changes = self.node.deliver(source, None, [dict(record) for record in given], False)
        assert not changes.refused, changes.refused
