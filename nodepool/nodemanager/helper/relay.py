"""Relay of bytes into and out of a sliver, by a small process outside (NM-C.2, NM-C.4).

Nothing that belongs to the host is ever open inside, since root inside may use any descriptor of
its sessions for other purposes: a socket of the host's network, above all, can be reconnected, in
the host's network and in the name of its owner. A program inside therefore gets one end of a socket
pair that it has created itself, in its own namespaces, and this process relays the bytes between
the other end and the host's descriptor. It is outside the sliver's namespaces, where nothing inside
can name it, has no rights of root, and is in the sliver's cgroup, which is charged for it. It is
forked by a worker of the helper: it outlives the daemon, and ends when either end is closed.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable, Sequence

from nodepool.nodemanager.helper.operation import StepError
from nodepool.nodemanager.kernel import syscalls

PIECE = 128 * 1024
#: Seconds for a client to read the last output of the ended program.
LAST_WORDS = 30.0
#: Bytes of output that are kept on disk; then the file is overwritten.
MAX_OUTPUT = 1 << 20
#: TCP keepalive: idle seconds before the first probe, seconds between probes, and unanswered probes
#: until the end.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 30), (socket.TCP_KEEPCNT, 5))


def start(work: Callable[[], None], keep: Sequence[int], uid: int, join: Callable[[], None]) -> int:
    """Fork a process outside the sliver that runs `work` and ends; returns its pid.

    :param keep: its only descriptors.
    :param uid: host user without any rights; -1: the current one.
    :param join: moves it into the sliver's cgroups.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        join()
        _give_up_all(keep, uid)
        work()
        code = 0
    finally:
        os._exit(code)


def _give_up_all(keep: Sequence[int], uid: int) -> None:
    syscalls.close_from(0, tuple(keep))
    syscalls.set_name("nm-relay")
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)


def prepare(connection: socket.socket) -> None:
    """Set the socket options that a server would set on its connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def carry(connection: socket.socket, control: socket.socket) -> None:
    """Relay between a connection and the socket that arrives on `control`, until one ends."""
    _message, descriptors, _flags, _address = socket.recv_fds(control, 1, 1)
    control.close()
    if not descriptors:
        return  # the program could not be run
    with connection, socket.socket(fileno=descriptors[0]) as inside:
        for end in (connection, inside):
            end.setblocking(False)
        _exchange(connection, inside)


class _Direction:
    """Bytes in one direction."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.left: memoryview = memoryview(b"")
        self.open = True

    def move(self) -> None:
        """Read available data and write what can be written. Raises OSError: an end has broken."""
        if self.open and not self.left:
            try:
                data = self.source.recv(PIECE)
            except BlockingIOError:
                return
            if self.source.family != socket.AF_UNIX:
                # Linux soon resets it. A client without TCP_NODELAY that sends two small packets
                # would wait 40 ms.
                self.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            if not data:
                self.open = False
                self.sink.shutdown(socket.SHUT_WR)
            self.left = memoryview(data)
        if self.left:
            try:
                self.left = self.left[self.sink.send(self.left) :]
            except BlockingIOError:
                return


def _exchange(client: socket.socket, program: socket.socket) -> None:
    inward, outward = _Direction(client, program), _Direction(program, client)
    poller = select.poll()
    while outward.open or outward.left:
        wanted = {client.fileno(): 0, program.fileno(): 0}
        for direction in (inward, outward):
            if direction.left:
                wanted[direction.sink.fileno()] |= select.POLLOUT
            elif direction.open:
                wanted[direction.source.fileno()] |= select.POLLIN
        for descriptor, events in wanted.items():
            if events:
                poller.register(descriptor, events)
        ready = poller.poll(None if outward.open else LAST_WORDS * 1000)
        for descriptor, events in wanted.items():
            if events:
                poller.unregister(descriptor)
        if not ready:
            return
        try:
            for direction in (inward, outward):
                direction.move()
        except OSError:
            return


def keep_output(pipe: int, file: int) -> None:
    """Write the output of programs from a pipe to a file; a full disk loses it."""
    while data := os.read(pipe, PIECE):
        try:
            if os.fstat(file).st_size + len(data) > MAX_OUTPUT:
                os.ftruncate(file, 0)
                os.write(file, b"[what came before was more than is kept]\n")
            os.write(file, data)
        except OSError:
            continue


def only_pipes(descriptors: Sequence[int]) -> None:
    """Raise StepError unless all are pipes: files, devices and sockets lead back to the host."""
    for descriptor in descriptors:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(kind):
            raise StepError(
                f"only pipes can be passed into a sliver, not type {stat.S_IFMT(kind):o}"
            )
