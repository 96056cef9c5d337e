"""Frames of the streams of programs."""

from __future__ import annotations

import pytest

from nodepool.nodemanager.client import frames


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_frames_are_read_whatever_the_pieces_in_which_they_arrive(step: int) -> None:
    sent = [
        (frames.STDIN, b""),
        (frames.STDOUT, b"hello"),
        (frames.STDERR, bytes(300)),
        (frames.EXIT, b"-15"),
    ]
    data = b"".join(frames.pack(kind, content) for kind, content in sent)
    buffer, found = bytearray(), []
    for start in range(0, len(data), step):
        buffer += data[start : start + step]
        while (frame := frames.take(buffer)) is not None:
            found.append(frame)
    assert found == sent
    assert not buffer


def test_frame_that_is_too_long_is_refused_before_it_has_arrived() -> None:
    frames.take(bytearray(frames.pack(0, bytes(frames.PIECE))))
    with pytest.raises(ValueError, match="a frame of 65537 bytes is too long"):
        frames.take(bytearray(frames.pack(0, bytes(frames.PIECE + 1))[:5]))
