"""Replace functions of the standard library in this process, permanently.

Run simulations in separate processes.
"""

from __future__ import annotations

import _thread
import _threading_local
import concurrent.futures  # noqa: F401
import errno
import gc
import logging
import math
import os
import queue
import random
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from nodepool.base import threads
from nodepool.lab.simulation import kernel as kernels
from nodepool.lab.simulation import sync
from nodepool.lab.simulation.kernel import Kernel, current
from nodepool.lab.simulation.network import FIRST_DESCRIPTOR, Network, Poll, Socket

_network: Network | None = None


def network() -> Network:
    assert _network is not None
    return _network


def replace_standard_library() -> None:
    """Call it once, as early as possible: before the daemons are imported."""
    python_queue: Any = vars(queue)["_PySimpleQueue"]
    replaced: dict[int, Any] = {
        id(_thread.allocate_lock): sync.Lock,
        id(threading.Lock): sync.Lock,  # another object from Python 3.13 on
        id(_thread.RLock): sync.RLock,
        id(_thread.get_ident): sync.get_ident,
        id(_thread.start_new_thread): sync.start_new_thread,
        id(threading.local): _threading_local.local,
        id(time.time): lambda: current().time(),
        id(time.monotonic): lambda: current().monotonic(),
        id(time.perf_counter): lambda: current().monotonic(),
        id(time.time_ns): lambda: int(current().time() * 1_000_000_000),
        id(time.monotonic_ns): lambda: int(current().monotonic() * 1_000_000_000),
        id(time.sleep): lambda seconds: current().sleep(seconds),
        id(select.poll): lambda: Poll(network()),
        id(socket.create_connection): lambda *args, **kwargs: network().create_connection(
            *args, **kwargs
        ),
        id(socket.socketpair): lambda *args: network().socketpair(*args),
        id(socket.getaddrinfo): Network.getaddrinfo,
        id(socket.gethostname): lambda: current().running_process.name,
        id(socket.getfqdn): lambda _name="": f"{current().running_process.name}.example.org",
        id(os.urandom): lambda size: current().random.randbytes(size),
        id(os.getpid): lambda: current().running_process.pid,
        id(os.pipe): lambda: network().pipe(),
        id(queue.SimpleQueue): python_queue,
    }
    for real, method in ((os.read, "recv"), (os.write, "send"), (os.close, "close")):
        replaced[id(real)] = _of_descriptor(real, method)
    # The first is of Python 3.12 and earlier, the others are of 3.13 and later.
    for name, function in (
        ("_set_sentinel", sync.set_sentinel),
        ("start_joinable_thread", sync.start_joinable_thread),
        ("_ThreadHandle", sync.ThreadHandle),
        ("_make_thread_handle", sync.make_thread_handle),
    ):
        if hasattr(_thread, name):
            replaced[id(getattr(_thread, name))] = function
    # Called as a function by code that must not shut down TLS on top of the socket.
    socket.socket.shutdown = _of_socket(socket.socket.shutdown)  # type: ignore[method-assign]
    poll_selector = type(
        "PollSelector",
        (selectors.PollSelector,),
        {"_selector_cls": staticmethod(lambda: Poll(network()))},
    )
    vars(selectors)["DefaultSelector"] = poll_selector
    for name, module in list(sys.modules.items()):
        if module is None or name.startswith(
            ("nodepool.lab.simulation", "greenlet", "importlib", "_frozen_importlib")
        ):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                setattr(module, attribute, replaced[id(value)])


def _of_descriptor(real: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return the function for simulated descriptors; others are passed on."""

    def function(number: int, *arguments: object) -> Any:
        if number < FIRST_DESCRIPTOR:
            return real(number, *arguments)
        return getattr(network().files.socket(number), method)(*arguments)

    return function


def _of_socket(real: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(sock: object, how: int) -> Any:
        return sock.shutdown(how) if isinstance(sock, Socket) else real(sock, how)

    return shutdown


class _Ordered(dict[Any, None]):
    """As far as kazoo uses a set of its listeners.

    It contains functions, which are hashed by address.
    """

    def add(self, item: object) -> None:
        self[item] = None

    def discard(self, item: object) -> None:
        self.pop(item, None)


def _none_left(**_options: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _select(
    rlist: Iterable[Any], wlist: Iterable[Any], _xlist: Iterable[Any], timeout: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    """Stand for ``selector_select`` of kazoo, which creates a selector for each message."""
    from kazoo.handlers.utils import fileobj_to_fd

    readers, writers = ({fileobj_to_fd(file): file for file in files} for files in (rlist, wlist))
    poll = Poll(network())
    for number in (*readers, *writers):
        poll.register(
            number,
            (select.POLLIN if number in readers else 0)
            | (select.POLLOUT if number in writers else 0),
        )
    ready = poll.poll(None if timeout is None else math.ceil(timeout * 1000))
    readable = [
        readers[number]
        for number, events in ready
        if number in readers and events & ~select.POLLOUT
    ]
    return (
        readable,
        [
            writers[number]
            for number, _events in ready
            if number in writers and writers[number] not in readable
        ],
        [],
    )


def _threads_of_process() -> threads.Threads:
    kept = current().running_process.globals
    if "threads" not in kept:
        kept["threads"] = threads.Threads("Thread-shared")
    shared: threads.Threads = kept["threads"]
    return shared


def adapt_libraries() -> None:
    """Import what the launcher uses, and replace what depends on this machine.

    This includes addresses of objects.
    """
    import kazoo.client
    import kazoo.handlers.threading
    import kazoo.handlers.utils

    from nodepool.base import file_events, hostnames

    # They are kept for the process, of which there are several here.
    threads.shared = _threads_of_process
    hostnames.short = socket.gethostname  # type: ignore[assignment]
    hostnames.fqdn = socket.getfqdn  # type: ignore[assignment]
    # A busy machine may run out of inotify instances.
    vars(file_events)["INotify"] = _none_left
    file_events.WITHOUT_EVENTS = file_events.WITH_EVENTS
    kazoo.handlers.utils.HAS_FNCTL = False
    kazoo.handlers.threading.selector_select = _select
    kazoo.client.set = _Ordered
    # Messages about requests contain the addresses of watchers, and a filter of the product
    # compares messages.
    logging.getLogger("kazoo").setLevel(logging.INFO)


def begin(kernel: Kernel, net: Network) -> None:
    """Use this kernel and this network from now on."""
    global _network
    kernels.use(kernel)
    _network = net
    random.seed(kernel.random.random())
    gc.disable()
