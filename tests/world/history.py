"""Which request had which node and when, as clients and ZooKeeper saw it, for
``tools/linearizable``.
"""

from __future__ import annotations

from nodepool.lab.simulation.kernel import Kernel

#: Node, whether it is taken (or released), request, and the times of invocation and response in
#: virtual µs.
Entry = tuple[str, bool, str, int, int]
#: The response of what has not been answered.
NEVER = 2**53


class History:
    """A client takes a node when it asks for it until it has locked it; it releases it when it
    begins to return it.

    Nodes of requests that their client never locked belong to the request until that is withdrawn.
    A client that was killed, or has lost its session, may have released its nodes at any time since
    it had locked them.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._nodes: dict[str, list[str]] = {}
        #: Virtual µs by request.
        self._requested: dict[str, int] = {}
        self._fulfilled: dict[str, int] = {}
        self._withdrawn: dict[str, int] = {}
        self._locked: dict[str, int] = {}
        self._releasing: dict[str, int] = {}
        self._released: dict[str, int] = {}

    def _now(self) -> int:
        return int(self._kernel.now * 1_000_000)

    def requested(self, request: str) -> None:
        self._requested.setdefault(request, self._now())

    def fulfilled(self, request: str, nodes: list[str]) -> None:
        self._nodes[request] = list(nodes)
        self._fulfilled[request] = self._now()

    def withdrawn(self, request: str) -> None:
        self._withdrawn[request] = self._now()

    def locked(self, request: str) -> None:
        self._locked[request] = self._now()

    def releasing(self, request: str) -> None:
        self._releasing[request] = self._now()

    def released(self, request: str) -> None:
        self._released[request] = self._now()

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for request, nodes in self._nodes.items():
            locked = self._locked.get(request)
            taken = self._fulfilled[request] if locked is None else locked
            if locked is None:
                released = self._withdrawn.get(request)
            else:
                released = self._releasing.get(request, locked)
            for node in nodes:
                found.append((node, True, request, self._requested[request], taken))
                if released is not None:
                    end = self._released.get(request, NEVER) if locked is not None else NEVER
                    found.append((node, False, request, released, end))
        return found
