"""The writer with a server that answers when the test says so: limits, order, lost answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, ConnectionLoss, RolledBackError

from nodepool.zk.writer import TransactionFailed, Txn, Writer


class Server:
    """Takes the place of the connection; remembers what was sent and which locks were left to
    it.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[list[Any], Any]] = []
        self.abandoned: set[str] = set()
        #: Called once, before the next message is sent.
        self.interruption: Callable[[], None] | None = None

    def submit(self, request: Any, reply: Any) -> None:
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            interruption()
        self.sent.append((list(request.operations), reply))

    def full_path(self, path: str) -> str:
        return "/chroot" + path

    def unchroot(self, path: str) -> str:
        return path.removeprefix("/chroot")

    @property
    def paths(self) -> list[list[str]]:
        """Of what was sent, by message."""
        return [
            [self.unchroot(operation.path) for operation in operations]
            for operations, _reply in self.sent
        ]

    def answer(
        self, number: int, results: list[Any] | None = None, error: BaseException | None = None
    ) -> None:
        operations, reply = self.sent[number]
        if error is not None:
            reply.set_exception(error)
        else:
            reply.zxid = 1
            reply.set([object()] * len(operations) if results is None else results)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def writer(server: Server) -> Writer:
    return Writer(server)  # type: ignore[arg-type]


def txn(server: Server, path: str, data: bytes = b"", operations: int = 1) -> Txn:
    result = Txn(server)  # type: ignore[arg-type]
    for _ in range(operations):
        result.set(path, data)
    return result


def fill(writer: Writer, server: Server) -> None:
    """Send as many messages as may be under way."""
    for number in range(Writer.MAX_IN_FLIGHT):
        writer.submit(txn(server, f"/first-{number}"))
    assert len(server.sent) == Writer.MAX_IN_FLIGHT


def test_no_more_than_the_limit_of_messages_is_under_way(server: Server, writer: Writer) -> None:
    fill(writer, server)
    for name in "abc":
        writer.submit(txn(server, f"/{name}"))
    assert len(server.sent) == Writer.MAX_IN_FLIGHT
    server.answer(0)
    assert server.paths[Writer.MAX_IN_FLIGHT :] == [["/a", "/b", "/c"]], (
        "what waited is sent together, in its order"
    )


def test_messages_that_are_answered_make_place_for_as_many(server: Server, writer: Writer) -> None:
    fill(writer, server)
    for number in range(Writer.MAX_IN_FLIGHT):
        server.answer(number)
    server.sent.clear()
    fill(writer, server)
    writer.submit(txn(server, "/late"))
    assert len(server.sent) == Writer.MAX_IN_FLIGHT


def test_merged_message_stays_below_the_limit_of_bytes(server: Server, writer: Writer) -> None:
    half = Writer.MAX_BYTES // 2
    fill(writer, server)
    for name in "abc":
        writer.submit(txn(server, f"/{name}", b"x" * (half - 100)))
    server.answer(0)
    server.answer(1)
    assert server.paths[Writer.MAX_IN_FLIGHT :] == [["/a", "/b"], ["/c"]]


def test_merged_message_may_have_exactly_the_limit_of_bytes(server: Server, writer: Writer) -> None:
    half = Writer.MAX_BYTES // 2 - len("/chroot/a")
    fill(writer, server)
    for name in "ab":
        writer.submit(txn(server, f"/{name}", b"x" * half))
    server.answer(0)
    assert server.paths[Writer.MAX_IN_FLIGHT :] == [["/a", "/b"]]


def test_merged_message_stays_below_the_limit_of_operations(server: Server, writer: Writer) -> None:
    fill(writer, server)
    for name in "abc":
        writer.submit(txn(server, f"/{name}", operations=Writer.MAX_OPERATIONS // 2))
    server.answer(0)
    assert set(server.paths[-1]) == {"/a", "/b"} and len(server.paths[-1]) == Writer.MAX_OPERATIONS


def test_transaction_beyond_the_limits_is_sent_alone(server: Server, writer: Writer) -> None:
    fill(writer, server)
    writer.submit(txn(server, "/large", b"x" * (Writer.MAX_BYTES + 1)))
    writer.submit(txn(server, "/many", operations=Writer.MAX_OPERATIONS + 1))
    server.answer(0)
    server.answer(1)
    assert [set(paths) for paths in server.paths[Writer.MAX_IN_FLIGHT :]] == [{"/large"}, {"/many"}]


def test_later_write_of_a_path_does_not_overtake_one_that_may_be_sent_again(
    server: Server, writer: Writer
) -> None:
    """World seed 185: a node went from aborted back to building, because its older record was
    sent again after the newer one.
    """
    fill(writer, server)
    for name in ("node", "other"):
        writer.submit(txn(server, f"/{name}", b"old"))
    server.answer(0)
    assert server.paths[2:] == [["/node", "/other"]]
    server.answer(1)
    writer.submit(txn(server, "/node", b"new"))
    writer.submit(txn(server, "/third"))
    assert len(server.sent) == 3, "the second waits, and what comes after it"
    server.answer(2, [RolledBackError(), BadVersionError()])
    assert server.paths[3:] == [["/node"], ["/node", "/third"]]
    assert [server.sent[number][0][0].data for number in (3, 4)] == [b"old", b"new"]
    for number in (3, 4):
        server.answer(number)
    server.sent.clear()
    writer.submit(txn(server, "/node"))
    assert server.paths == [["/node"]]


def test_write_does_not_overtake_one_that_another_thread_is_sending(
    server: Server, writer: Writer
) -> None:
    fill(writer, server)
    writer.submit(txn(server, "/node", b"old"))

    def write_again() -> None:
        server.answer(1)
        writer.submit(txn(server, "/node", b"new"))

    server.interruption = write_again
    server.answer(0)
    assert [operations[0].data for operations, _reply in server.sent[2:]] == [b"old", b"new"]


def test_refusal_of_a_merged_message_concerns_its_transaction_only(
    server: Server, writer: Writer
) -> None:
    fill(writer, server)
    answers: dict[str, Any] = {}
    for name in "abc":
        writer.submit(
            txn(server, f"/{name}"),
            lambda results, error, name=name: answers.update({name: error or results}),
        )
    server.answer(0)
    server.answer(2, [RolledBackError(), BadVersionError(), RolledBackError()])
    assert server.paths[3:] == [["/a"], ["/c"]], "in their order"
    assert answers.keys() == {"b"} and isinstance(answers["b"], TransactionFailed)
    assert (answers["b"].path, answers["b"].index) == ("/b", 0)
    assert isinstance(answers["b"].cause, BadVersionError)
    for number in (1, 3, 4):
        server.answer(number)
    assert answers.keys() == {"a", "b", "c"}
    server.sent.clear()
    fill(writer, server)
    writer.submit(txn(server, "/late"))
    assert len(server.sent) == Writer.MAX_IN_FLIGHT, "each message that was sent again was counted"


def test_callback_that_raises_holds_up_nothing(server: Server, writer: Writer) -> None:
    fill(writer, server)

    def broken(_results: object, _error: object) -> None:
        raise RuntimeError("by the test")

    heard: list[object] = []
    writer.submit(txn(server, "/a"), broken)
    writer.submit(txn(server, "/b"), lambda results, _error: heard.append(results))
    server.answer(0)
    writer.submit(txn(server, "/c"))
    server.answer(2)
    assert heard and server.paths[-1] == ["/c"]


def test_locks_of_a_lost_transaction_are_abandoned(server: Server, writer: Writer) -> None:
    lost = Txn(server)  # type: ignore[arg-type]
    lost.create("/nodes/1/lock/a__lock__", ephemeral=True, sequence=True)
    lost.create("/nodes/2/lock/b__lock__", sequence=True)  # a backing node's, which outlives us
    lost.delete("/nodes/3/lock/c__lock__0000000000")
    lost.delete("/nodes/4/lock")
    lost.create("/requests/1", ephemeral=True)
    lost.set("/nodes/1", b"")
    errors: list[object] = []
    writer.submit(lost, lambda _results, error: errors.append(error))
    server.answer(0, error=ConnectionLoss())
    assert server.abandoned == {"/nodes/1/lock/a__lock__", "/nodes/3/lock/c__lock__0000000000"}
    assert isinstance(errors[0], ConnectionLoss)


def test_locks_of_a_refused_transaction_are_not_abandoned(server: Server, writer: Writer) -> None:
    refused = Txn(server)  # type: ignore[arg-type]
    refused.delete("/nodes/3/lock/c__lock__0000000000")
    writer.submit(refused)
    server.answer(0, [BadVersionError()])
    assert server.abandoned == set()


def test_waiting_for_an_answer_ends(server: Server, writer: Writer) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        writer.run(txn(server, "/a"), timeout=0.01)
