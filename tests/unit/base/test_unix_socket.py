"""Unix sockets for everybody on a host."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest

from nodepool.base import unix_socket


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "api.sock")


def test_everybody_may_connect_and_is_identified(path: str) -> None:
    with unix_socket.listen(path, "launcher") as listener, socket.socket(socket.AF_UNIX) as client:
        assert os.stat(path).st_mode & 0o777 == 0o666
        client.connect(path)
        connection, _address = listener.accept()
        with connection:
            assert unix_socket.peer_uid(connection) == os.geteuid()


def test_socket_of_a_process_that_has_ended_is_replaced(path: str) -> None:
    unix_socket.listen(path, "launcher").close()
    unix_socket.listen(path, "launcher").close()


def test_socket_that_another_process_serves_is_kept(path: str) -> None:
    with (
        unix_socket.listen(path, "launcher"),
        pytest.raises(OSError, match=f"another launcher answers at {path}; stop it"),
    ):
        unix_socket.listen(path, "launcher")


def test_file_that_is_no_socket_is_kept(path: str) -> None:
    pathlib.Path(path).write_text("precious")
    with pytest.raises(OSError, match="is not a socket; remove it"):
        unix_socket.listen(path, "launcher")
    assert pathlib.Path(path).read_text() == "precious"


def test_missing_directory_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError, match=r"cannot listen at .*/none/api\.sock: No such file"):
        unix_socket.listen(str(tmp_path / "none" / "api.sock"), "launcher")
