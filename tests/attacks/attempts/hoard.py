"""One sliver takes all that it can get of something that the kernel counts, reports how much, and
holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

from tests.attacks.library import call, libc, mount

_kept: list[object] = []
MOST = 200_000


def counted(take: Callable[[], object]) -> int:
    """Until it is refused."""
    count = 0
    with contextlib.suppress(OSError, MemoryError, ValueError):
        while count < MOST:
            _kept.append(take())
            count += 1
    return count


def _raise(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def inotify() -> int:
    return counted(lambda: _raise(call(294, 0)))


def fanotify() -> int:
    return counted(lambda: _raise(call(300, 0x200, 0)))


def queues() -> int:
    names = iter(range(MOST))
    attributes = struct.pack("8q", 0, 10, 8192, 0, 0, 0, 0, 0)
    return counted(lambda: _raise(call(240, f"q{next(names)}".encode(), 0o102, 0o600, attributes)))


def signals() -> int:
    signum = 34
    libc.signal(signum, 1)
    own = os.getpid()
    mask = struct.pack("Q", 1 << (signum - 1))
    call(14, 0, mask, 0, 8)
    info = struct.pack("iii4xiiQ", signum, 0, -1, own, 0, 0) + bytes(96)
    return counted(lambda: _raise(call(129, own, signum, info)))


def terminals() -> int:
    return counted(os.openpty)


def mounted_terminals() -> int:
    """More than the 4096 that a host usually has, on a separate devpts, by children:
    descriptors are limited by process.
    """
    os.makedirs("/mnt/pts", exist_ok=True)
    mount("devpts", "/mnt/pts", "devpts", 0, "newinstance,ptmxmode=0666")
    total = 0
    for _ in range(10):
        told, tell = os.pipe()
        if os.fork() == 0:
            count = 0
            with contextlib.suppress(OSError):
                while count < 450:
                    os.open("/mnt/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
                    count += 1
            os.write(tell, b"%d" % count)
            os.close(1)
            time.sleep(600)
        total += int(os.read(told, 100))
    return total


def asynchronous() -> int:
    def take() -> int:
        context = ctypes.c_ulong(0)
        return _raise(call(206, 1000, ctypes.byref(context)))

    return counted(take)


def networks() -> int:
    return counted(lambda: _raise(call(272, 0x40000000)))


def watches() -> int:
    watcher = _raise(call(294, 0))
    os.makedirs("/dev/shm/w", exist_ok=True)

    def take() -> int:
        path = f"/dev/shm/w/{len(_kept)}"
        os.mkdir(path)
        return _raise(call(254, watcher, path.encode(), 0xFFF))

    return counted(take)


def pipes() -> int:
    import fcntl

    def take() -> tuple[int, int]:
        ends = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(ends[1], 1031, 1 << 20)
        return ends

    return counted(take)


def files() -> int:
    return counted(lambda: os.open("/etc/passwd", os.O_RDONLY))


def locks() -> int:
    def take() -> int:
        descriptor = os.open("/dev/shm/lock", os.O_RDWR | os.O_CREAT)
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, len(_kept) * 2)
        return descriptor

    return counted(take)


def sockets() -> int:
    def pairs() -> Iterator[tuple[socket.socket, socket.socket]]:
        while True:
            yield socket.socketpair()

    source = pairs()
    return counted(lambda: next(source))


def messages() -> int:
    return counted(lambda: _raise(call(68, 0, 0o1600)))


def shared_memory() -> int:
    return counted(lambda: _raise(call(29, 0, 4096, 0o1600)))


def semaphores() -> int:
    return counted(lambda: _raise(call(64, 0, 250, 0o1600)))


def children() -> int:
    def take() -> int:
        pid = os.fork()
        if pid == 0:
            os.close(1)
            time.sleep(600)
        return pid

    return counted(take)


def tcp_buffers() -> int:
    """MiB in buffers of connections whose data nobody reads; 400 are enough to show it."""
    sent = 0
    piece = bytes(1 << 16)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        for _ in range(200):
            ends = socket.create_connection(server.getsockname()), server.accept()[0]
            _kept.append(ends)
            ends[0].setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sent < 400 << 20:
                    sent += ends[0].send(piece)
    return sent >> 20


def inodes() -> int:
    os.makedirs("/root/i", exist_ok=True)
    return counted(lambda: os.close(os.open(f"/root/i/{len(_kept)}", os.O_CREAT | os.O_WRONLY)))


def disk() -> int:
    descriptor = os.open("/root/big", os.O_CREAT | os.O_WRONLY)
    piece = bytes(1 << 20)
    return counted(lambda: os.write(descriptor, piece))


def hold(kind: str) -> None:
    """Take it, report it, and keep it until this process is killed."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(globals()[kind](), flush=True)
    time.sleep(600)
