"""What stand-ins have in common: machines that come and go in their time, credentials, JSON, and
faults in front.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.authority import Authority
from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request

JSON = [("Content-Type", "application/json")]


class Refusal(Exception):
    """An error of the API, with its body."""

    def __init__(
        self, status: int, body: Any, headers: list[tuple[str, str]] | None = None
    ) -> None:
        super().__init__(status, body)
        self.reply = Reply(status, json.dumps(body).encode(), JSON + (headers or []))


@dataclass
class Machine:
    """A virtual machine, whatever the cloud calls it."""

    name: str
    id: str
    body: dict[str, Any]
    place: str
    made: float
    up: float = math.inf
    """When it runs, on the monotonic clock."""
    gone: float = math.inf
    halted: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ending(self) -> bool:
        return self.gone < math.inf


class StandIn:
    """:param folder: for its certificates. Seconds that things take are attributes, and may be
    changed.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        authority = Authority(folder)
        self.ca = authority.cert
        cert, key = authority.issue("server", "IP:127.0.0.1")
        self.lock = threading.RLock()
        self.machines: list[Machine] = []
        #: Also those that no longer exist.
        self.history: list[Machine] = []
        self.numbers = itertools.count(1)
        self.boot = 0.2
        self.ending = 0.1
        self.paused = False
        self.allowed: float = math.inf
        self.sold_out = False
        #: Sizes that are sold out.
        self.sold_out_sizes: set[str] = set()
        self.address = "10.0.0.{}"
        #: What was wrong with requests; a test fails of it.
        self.mistakes: list[str] = []
        self.proxy = FaultProxy(("127.0.0.1", 1), self._answer, (cert, key, authority.cert))

    def close(self) -> None:
        self.proxy.close()

    @property
    def url(self) -> str:
        return self.proxy.url

    # -- machines

    def new_machine(self, name: str, body: dict[str, Any], place: str = "") -> Machine:
        now = time.monotonic()
        number = next(self.numbers)
        machine = Machine(name, f"{number:019d}", body, place, now)
        machine.facts["ip"] = self.address.format(number % 250 + 1)
        self.machines.append(machine)
        self.history.append(machine)
        return machine

    def now(self) -> list[Machine]:
        """Those that are there; the gone ones are forgotten."""
        now = time.monotonic()
        self.machines = [machine for machine in self.machines if machine.gone > now]
        for machine in self.machines:
            if machine.up == math.inf and not self.paused and now >= machine.made + self.boot:
                machine.up = now
        return self.machines

    def find(self, name: str, place: str | None = None) -> Machine | None:
        return next(
            (each for each in self.now() if each.name == name and place in (None, each.place)), None
        )

    def by_id(self, machine_id: str) -> Machine | None:
        return next((each for each in self.now() if each.id == machine_id), None)

    def end(self, machine: Machine) -> None:
        machine.gone = min(machine.gone, time.monotonic() + self.ending)

    def runs(self, machine: Machine) -> bool:
        return machine.up <= time.monotonic() and not machine.ending and not machine.halted

    def living(self) -> set[str]:
        """Ids of all that are not on their way out."""
        with self.lock:
            return {each.id for each in self.now() if not each.ending}

    # -- requests

    def handle(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        """Answer; with the lock held. Raises Refusal."""
        raise NotImplementedError

    def _answer(self, request: Request, _forward: Forward) -> Reply:
        parts = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        try:
            with self.lock:
                return self.handle(request.method, urllib.parse.unquote(parts.path), query, request)
        except Refusal as refusal:
            return refusal.reply
        except Exception as error:
            self.mistakes.append(f"{request.method} {request.path}: {error!r}")
            return Reply(
                500, json.dumps({"error": {"code": 500, "message": repr(error)}}).encode(), JSON
            )

    @staticmethod
    def json(value: Any, status: int = 200, headers: list[tuple[str, str]] | None = None) -> Reply:
        return Reply(status, json.dumps(value).encode(), JSON + (headers or []))


Handler = Callable[..., Any]
