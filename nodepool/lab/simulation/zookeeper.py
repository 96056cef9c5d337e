"""The embedded ZooKeeper server on the simulated network."""

from __future__ import annotations

from nodepool.lab.simulation.kernel import EPOCH, Kernel
from nodepool.lab.simulation.network import Address, Network, SimulatedConnection
from nodepool.lab.zkserver.core import Keep
from nodepool.lab.zkserver.requests import StandaloneServer

ADDRESS: Address = ("zookeeper", 2181)


class ZooKeeper:
    """The server, with its sessions and timers in virtual time.

    :param observe: called with the changes of each transaction as the journal gets them.
    """

    def __init__(
        self, kernel: Kernel, network: Network, observe: Keep = lambda _zxid, _time, _changes: None
    ) -> None:
        self._kernel = kernel
        self._timer = 0.0
        #: Session and process of the request that is being served.
        self.session = 0
        self.writer = ""
        self.server = StandaloneServer(
            observe, lambda: kernel.now, lambda: EPOCH + kernel.now, kernel.random.randbytes
        )
        network.serve(ADDRESS, self._accept)

    def _accept(self, connection: SimulatedConnection) -> None:
        client = self.server.connect(
            connection.write, connection.hang_up, {("ip", "127.0.0.1")}, connection.client.name
        )

        def receive(data: bytes) -> None:
            self.session, self.writer = (
                client.session.id if client.session else 0,
                connection.client.name,
            )
            self.server.receive(client, data)
            self._schedule()

        connection.receive = receive
        connection.lost = lambda: self.server.lost(client)

    def _schedule(self) -> None:
        """End sessions in time.

        A timer that is too early, since the client was heard of, schedules the next one.
        """
        sessions = self.server.sessions.values()
        if sessions and self._timer <= self._kernel.now:
            self._timer = min(session.ends for session in sessions) + 0.0005
            self._kernel.call_at(self._timer, self._tick)

    def _tick(self) -> None:
        self.server.tick()
        self._timer = 0.0
        self._schedule()
