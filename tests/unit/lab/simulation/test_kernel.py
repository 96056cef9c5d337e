"""Tasks, locks and connections in virtual time, without the rest of the world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.lab.simulation import kernel as kernels
from nodepool.lab.simulation.kernel import Kernel, SimulationError
from nodepool.lab.simulation.sync import Lock, RLock
from tests.world.faulty import FaultyConnection, FaultyKernel, FaultyNetwork


@pytest.fixture
def start() -> Iterator[Callable[[int], Kernel]]:
    def make(seed: int = 1) -> Kernel:
        kernel = FaultyKernel(seed, preemption=0.5)
        kernels.use(kernel)
        return kernel

    yield make
    kernels.running = None


def test_time_moves_only_while_all_tasks_wait(start: Callable[..., Kernel]) -> None:
    kernel, seen = start(), []

    def sleeper(seconds: float) -> None:
        kernel.sleep(seconds)
        seen.append((seconds, kernel.now))

    def main() -> None:
        for seconds in (3600.0, 1.0, 60.0):
            kernel.spawn(sleeper, seconds)
        kernel.sleep(7200.0)

    kernel.run(main)
    assert seen == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]


def test_same_seed_takes_the_same_decisions_and_another_seed_takes_others(
    start: Callable[..., Kernel],
) -> None:
    def trace(seed: int) -> tuple[int, list[int]]:
        kernel, order = start(seed), []

        def main() -> None:
            lock = Lock()

            def work(number: int) -> None:
                for _ in range(5):
                    with lock:
                        order.append(number)

            for number in range(4):
                kernel.spawn(work, number)
            kernel.sleep(1.0)

        kernel.run(main)
        return kernel.trace, order

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def test_lock_has_one_owner_at_a_time(start: Callable[..., Kernel]) -> None:
    kernel, inside, most = start(3), [], []

    def main() -> None:
        lock = RLock()

        def work(number: int) -> None:
            for _ in range(20):
                with lock, lock:
                    inside.append(number)
                    kernel.point()
                    most.append(len(inside))
                    inside.remove(number)

        for number in range(5):
            kernel.spawn(work, number)
        kernel.sleep(60.0)

    kernel.run(main)
    assert len(most) == 100 and max(most) == 1


def test_waiting_for_a_lock_ends_in_time(start: Callable[..., Kernel]) -> None:
    kernel = start()

    def main() -> tuple[bool, float]:
        lock = Lock()
        lock.acquire()
        return lock.acquire(timeout=2.5), kernel.now

    assert kernel.run(main) == (False, 2.5)


def test_lock_of_a_killed_process_is_free(start: Callable[..., Kernel]) -> None:
    kernel = start()
    lock, victim, reached = Lock(), kernel.process("victim"), []

    def hold() -> None:
        with lock:
            kernel.sleep(1.0)
            reached.append("after the kill")

    def main() -> float:
        kernel.spawn(hold, process=victim)
        kernel.sleep(0.5)
        kernel.call_at(0.7, lambda: kernel.kill(victim))
        assert lock.acquire(timeout=10.0)
        kernel.sleep(5.0)
        return kernel.now

    assert 5.7 <= kernel.run(main) < 6.0
    assert not reached


def test_process_that_kills_itself_does_nothing_more(start: Callable[..., Kernel]) -> None:
    kernel, reached = start(), []

    def main() -> None:
        victim = kernel.process("victim")

        def work() -> None:
            reached.append("before")
            kernel.kill(victim)
            reached.append("after")

        kernel.spawn(work, process=victim)
        kernel.sleep(1.0)

    kernel.run(main)
    assert reached == ["before"]


def test_paused_process_stands_still_until_it_is_resumed(start: Callable[..., Kernel]) -> None:
    kernel, seen = start(), []
    process = kernel.process("paused")

    def work() -> None:
        kernel.sleep(1.0)
        seen.append(kernel.now)

    def main() -> None:
        kernel.spawn(work, process=process)
        kernel.sleep(0.5)
        kernel.pause(process)
        kernel.sleep(9.5)
        assert not seen
        kernel.resume(process)
        kernel.sleep(1.0)

    kernel.run(main)
    assert seen == [10.0]


def test_deadlock_is_reported(start: Callable[..., Kernel]) -> None:
    kernel = start()

    def main() -> None:
        lock = Lock()
        lock.acquire()
        lock.acquire()

    with pytest.raises(SimulationError, match="all tasks wait"):
        kernel.run(main)


def test_run_is_given_up_after_its_time(start: Callable[..., Kernel]) -> None:
    with pytest.raises(SimulationError, match="not finished after 100 s"):
        kernel = start()
        kernel.run(lambda: kernel.sleep(101.0), until=100.0)


class Echo:
    """A service that remembers what it gets, and sends it back."""

    def __init__(self, network: FaultyNetwork) -> None:
        self.received: list[bytes] = []
        self.connections: list[FaultyConnection] = []
        self.lost = 0
        network.serve(("echo", 7), self._accept)

    def _accept(self, connection: FaultyConnection) -> None:
        self.connections.append(connection)

        def receive(data: bytes) -> None:
            self.received.append(data)
            connection.write(data)

        def lost() -> None:
            self.lost += 1

        connection.receive, connection.lost = receive, lost


@pytest.fixture
def talk(
    start: Callable[..., Kernel],
) -> Callable[[Callable[[Any, Echo, Kernel, FaultyNetwork], Any]], Any]:
    def run(conversation: Callable[[Any, Echo, Kernel, FaultyNetwork], Any]) -> Any:
        kernel = start()
        network = FaultyNetwork(kernel)
        echo = Echo(network)
        return kernel.run(
            lambda: conversation(network.create_connection(("echo", 7), 5.0), echo, kernel, network)
        )

    return run


def test_bytes_arrive_in_order_after_the_latency(talk: Any) -> None:
    def conversation(
        socket: Any, _echo: Echo, kernel: Kernel, _network: FaultyNetwork
    ) -> tuple[bytes, bool]:
        before, found = kernel.now, b""
        for number in range(10):
            socket.send(b"%d" % number)
        while len(found) < 10:
            found += socket.recv(100)
        return found, kernel.now > before

    assert talk(conversation) == (b"0123456789", True)


def test_cut_connection_breaks_both_ends(talk: Any) -> None:
    def conversation(socket: Any, echo: Echo, kernel: Kernel, _network: FaultyNetwork) -> int:
        echo.connections[0].cut()
        with pytest.raises(ConnectionResetError):
            socket.recv(1)
        kernel.sleep(1.0)
        return echo.lost

    assert talk(conversation) == 1


def test_muted_connection_loses_answers_only(talk: Any) -> None:
    def conversation(
        socket: Any, echo: Echo, _kernel: Kernel, _network: FaultyNetwork
    ) -> list[bytes]:
        echo.connections[0].mute()
        socket.settimeout(3.0)
        socket.send(b"x")
        with pytest.raises(TimeoutError):
            socket.recv(1)
        return echo.received

    assert talk(conversation) == [b"x"]


def test_isolated_process_is_reachable_when_it_is_back(talk: Any) -> None:
    def conversation(socket: Any, echo: Echo, kernel: Kernel, network: FaultyNetwork) -> bytes:
        network.isolate(kernel.outside)
        socket.send(b"x")
        kernel.sleep(10.0)
        assert not echo.received
        with pytest.raises(TimeoutError):
            network.create_connection(("echo", 7), 2.0)
        network.rejoin(kernel.outside)
        received: bytes = socket.recv(1)
        return received

    assert talk(conversation) == b"x"


def test_connection_without_listener_is_refused(talk: Any) -> None:
    def conversation(_socket: Any, _echo: Echo, _kernel: Kernel, network: FaultyNetwork) -> None:
        with pytest.raises(ConnectionRefusedError):
            network.create_connection(("echo", 8))

    talk(conversation)
