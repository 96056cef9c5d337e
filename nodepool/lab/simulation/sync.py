"""Locks, threads and thread-local data of the standard library, on top of the kernel.

Conditions, events, semaphores, timers, queues and executors of the standard library are built on
these and run unchanged.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable
from typing import Any

from nodepool.lab.simulation import kernel as kernels
from nodepool.lab.simulation.kernel import Process, SimulationError, Task, current


class Lock:
    """As ``_thread.lock``; a lock whose owner was killed is free."""

    __slots__ = ("__weakref__", "_home", "_locked", "_owner", "_waiting")

    def __init__(self) -> None:
        self._locked = False
        self._owner: Task | None = None
        self._waiting: deque[Task] = deque()
        self._home: Process = current().running_process

    @property
    def abandoned(self) -> bool:
        return self._owner is not None and not self._owner.process.alive

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = kernels.running
        assert kernel is not None
        if kernel.preemption:
            kernel.point()
        if self._locked and not self.abandoned:
            if not blocking or timeout == 0:
                return False
            deadline = None if timeout < 0 else kernel.now + timeout
            task = kernel.task
            if task is None:
                raise SimulationError("something that runs outside of tasks waits for a lock")
            while self._locked and not self.abandoned:
                self._waiting.append(task)
                task.awaited = self
                woken = kernel.park(deadline)
                task.awaited = None
                if task in self._waiting:  # woken by a time-out, or by the end of the owner
                    self._waiting.remove(task)
                if not woken and self._locked and not self.abandoned:
                    return False
        self._locked = True
        self._owner = owner = kernel.task
        if owner is not None and self._home is not owner.process:
            owner.foreign += 1
        return True

    def release(self, *_exception: object) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        owner, self._owner, self._locked = self._owner, None, False
        if owner is not None and self._home is not owner.process:
            owner.foreign -= 1
        kernel = kernels.running
        assert kernel is not None
        while self._waiting:
            task = self._waiting.popleft()
            if task.process.alive:
                kernel.wake(task)
                break
        if kernel.preemption:
            kernel.point()

    def locked(self) -> bool:
        return self._locked

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]

    __enter__ = acquire
    __exit__ = release


class RLock(Lock):
    """As ``threading.RLock``."""

    __slots__ = ("_count",)
    _count: int

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = kernels.running
        if self._locked and kernel is not None and self._owner is kernel.task:
            self._count += 1
            return True
        if not Lock.acquire(self, blocking, timeout):
            return False
        self._count = 1
        return True

    def release(self, *_exception: object) -> None:
        kernel = kernels.running
        if not self._locked or kernel is None or self._owner is not kernel.task:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            Lock.release(self)

    # -- for threading.Condition

    def _is_owned(self) -> bool:
        return self._locked and self._owner is current().task

    def _release_save(self) -> int:
        count = self._count
        Lock.release(self)
        return count

    def _acquire_restore(self, count: int) -> None:
        Lock.acquire(self)
        self._count = count

    __enter__ = acquire
    __exit__ = release


#: Of the thread that runs the simulation.
_REAL_IDENT = _thread.get_ident()


def get_ident() -> int:
    task = current().task
    return _REAL_IDENT if task is None else task.ident


def start_new_thread(
    function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> int:
    return current().spawn(function, *args, **(kwargs or {})).ident


def set_sentinel() -> Lock:
    """Return a lock that is released when the present task ends (Python 3.12 and earlier)."""
    lock, task = Lock(), current().task
    if task is not None:  # not in a child just forked
        task.sentinels.append(lambda: lock.release() if lock.locked() else None)
    return lock


class ThreadHandle:
    """As ``_thread._ThreadHandle`` (from Python 3.13 on)."""

    def __init__(self) -> None:
        self.ident = 0
        self._ended = Lock()
        self._done = False

    def is_done(self) -> bool:
        return self._done

    def begin(self) -> None:
        self._ended.acquire(False)

    def finish(self) -> None:
        if not self._done:
            self._done = True
            if self._ended.locked():
                self._ended.release()

    _set_done = finish

    def join(self, timeout: float | None = None) -> None:
        if self._done:
            return
        task = current().task
        if task is not None and task.ident == self.ident:
            raise RuntimeError("Cannot join current thread")
        if self._ended.acquire(True, -1 if timeout is None or timeout < 0 else timeout):
            self._ended.release()


def start_joinable_thread(
    function: Callable[[], Any], handle: ThreadHandle | None = None, daemon: bool = True
) -> ThreadHandle:
    handle = handle or ThreadHandle()
    handle.begin()
    task = current().spawn(function)
    handle.ident = task.ident
    task.sentinels.append(handle.finish)
    return handle


def make_thread_handle(ident: int) -> ThreadHandle:
    handle = ThreadHandle()
    handle.ident = ident
    return handle
