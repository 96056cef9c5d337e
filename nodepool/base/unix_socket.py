"""Unix sockets that anybody on the host may connect to: the kernel identifies the callers."""

from __future__ import annotations

import os
import socket
import stat
import struct

_UCRED = struct.Struct("iII")
#: Bytes of a path.
LONGEST = 107
#: The kernel lowers it to its own limit.
BACKLOG = 4096


def listen(path: str, owner: str) -> socket.socket:
    """Return a listening socket at a path; the file of a process that has ended is replaced.

    :param owner: what listens, for the error if another one does.
    :raises OSError: with a text for users as its only argument.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket; remove it")
        _remove_dead(path, owner)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bind(listener, path)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def bind(listener: socket.socket, path: str) -> None:
    """Listen on the path for everybody."""
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen(BACKLOG)


def _remove_dead(path: str, owner: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise OSError(
                f"cannot connect to the existing {path}: {error.strerror or error}"
            ) from error
        else:
            raise OSError(f"another {owner} answers at {path}; stop it, or configure another path")


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the other end when it connected; its process may have ended."""
    return int(
        _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    )
