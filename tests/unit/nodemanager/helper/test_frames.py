"""Messages between the daemon and its helper."""

from __future__ import annotations

import socket
from typing import Any

from nodepool.nodemanager.helper.frames import receive_frame, send_frame


class Hasty(socket.socket):
    """Its other end reads, answers and ends before `send` returns."""

    other: socket.socket

    def send(self, *arguments: Any) -> int:
        sent = super().send(*arguments)
        frame = receive_frame(self.other)
        assert frame is not None
        send_frame(self.other, {"got": frame[0]})
        self.other.close()
        return sent


def test_an_answer_may_be_quicker_than_the_end_of_sending() -> None:
    ours, theirs = socket.socketpair()
    with Hasty(fileno=ours.detach()) as hasty:
        hasty.other = theirs
        send_frame(hasty, {"a": 1})
        assert receive_frame(hasty) == ({"got": {"a": 1}}, [])
