"""The nodepool-launcher program with faults built in from outside.

NODEPOOL_FAULT_DRIVERS   directory of drivers to search
NODEPOOL_FAULT_CLEANUP   seconds between two clean-ups (default 1)
NODEPOOL_JOURNAL         file that gets a JSON line per transaction answered: what was written, by
                         which session
NODEPOOL_END_THREAD      a file; once it names a thread, an exception that nobody foresaw is raised
                         in that one; then the file is removed
NODEPOOL_CRASH_AT        <point>[:n] - SIGKILL ourselves at the n-th passing of a point:
    txn-before   a transaction is about to be sent
    txn-sent     it has been given to the connection
    txn-after    the server has answered; nobody has been notified yet
    txn-done     whoever waited for the answer has been notified
    write-before   a write to ZooKeeper is about to be sent (of commands)
    create-before create-after delete-before delete-after   around what happens in the cloud
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

POINT, _, NUMBER = os.environ.get("NODEPOOL_CRASH_AT", "").partition(":")
_left = {"n": int(NUMBER or 1)}
_lock = threading.Lock()


def passed(name: str) -> None:
    if name != POINT:
        return
    with _lock:
        _left["n"] -= 1
        if _left["n"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Unforeseen(BaseException):
    """Passes by all who expect errors."""


def end_thread(thread: threading.Thread) -> None:
    """Raised as soon as the thread runs Python code.

    Not while it starts another one: until that runs, Python may take the new thread for it.
    """
    while _starts_thread(thread):
        time.sleep(0.01)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Unforeseen)
    )


def _starts_thread(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is not None


def end_threads() -> None:
    """Do as the environment says."""
    path = pathlib.Path(os.environ.get("NODEPOOL_END_THREAD", "/nowhere"))

    def wait() -> None:
        while not path.exists():
            time.sleep(0.05)
        for thread in threading.enumerate():
            if thread.name == path.read_text():
                end_thread(thread)
        path.unlink()

    if "NODEPOOL_END_THREAD" in os.environ:
        threading.Thread(target=wait, name="Thread-ender", daemon=True).start()


def _describe(client: Any, operation: Any, result: Any) -> dict[str, Any]:
    kind = type(operation).__name__
    entry: dict[str, Any] = {"op": kind, "path": client.unchroot(operation.path)}
    if kind == "Create" and isinstance(result, str):
        entry["path"] = result
    if kind == "SetData":
        entry["version"] = getattr(result, "version", None)
    data = getattr(operation, "data", None)
    if data:
        try:
            entry["state"] = json.loads(data).get("state")
        except ValueError:
            pass
    return entry


def _concerns_a_node_or_request(txns: list[Any]) -> bool:
    """What is counted: other writes (elections, components) come at other times."""
    return any(
        "/nodepool/nodes" in op.path or "/nodepool/requests" in op.path
        for t in txns
        for op in t.operations
    )


def patch_writer() -> None:
    from nodepool.zk.writer import Writer

    journal = os.environ.get("NODEPOOL_JOURNAL")
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if journal else None
    send, answer = Writer._send, Writer._answer

    def _send(self: Any, txns: list[Any]) -> None:
        counted = _concerns_a_node_or_request(txns)
        if counted:
            passed("txn-before")
        send(self, txns)
        if counted:
            passed("txn-sent")

    def _answer(self: Any, txns: list[Any], results: Any, error: Any, zxid: int) -> None:
        if out is not None:
            operations = [op for txn in txns for op in txn.operations]
            refused = error is not None or any(isinstance(r, BaseException) for r in results)
            client_id = self._client.client_id
            line = {
                "t": time.time(),
                "pid": os.getpid(),
                "session": client_id[0] if client_id else None,
                "zxid": zxid,
                "refused": refused,
                "error": repr(error) if error is not None else None,
                "ops": [
                    _describe(self._client, op, None if refused else results[i])
                    for i, op in enumerate(operations)
                ],
            }
            os.write(out, json.dumps(line).encode() + b"\n")
        counted = _concerns_a_node_or_request(txns)
        if counted:
            passed("txn-after")
        answer(self, txns, results, error, zxid)
        if counted:
            passed("txn-done")

    Writer._send, Writer._answer = _send, _answer  # type: ignore[method-assign]


def patch_client() -> None:
    """Before each write to ZooKeeper, the point ``write-before`` is passed."""
    from kazoo.protocol.serialization import Create, SetData, Transaction

    from nodepool.zk.connection.protocol import SessionClient

    call = SessionClient._call

    def _call(self: Any, request: Any, async_object: Any) -> Any:
        if isinstance(request, (Create, SetData, Transaction)):
            passed("write-before")
        return call(self, request, async_object)

    SessionClient._call = _call  # type: ignore[method-assign]


def patch_intervals() -> None:
    from nodepool.launcher import NodePool
    from nodepool.launcher.nodes import reconciler

    reconciler.BACKING_AGE = 3.0
    reconciler.INIT_AGE = 10.0
    start = NodePool.start

    def _start(self: Any) -> None:
        self.cleanup_interval = float(os.environ.get("NODEPOOL_FAULT_CLEANUP", "1"))
        self.delete_interval = 0.5
        start(self)

    NodePool.start = _start  # type: ignore[method-assign]


def load_drivers() -> None:
    from nodepool.driver import Drivers

    Drivers.load([os.environ["NODEPOOL_FAULT_DRIVERS"]])
    if POINT:
        type(Drivers.get("diskcloud")).getAdapter.__globals__["checkpoint"] = passed


def main() -> int:
    load_drivers()
    patch_writer()
    patch_intervals()
    end_threads()
    from nodepool.cmd.launcher import main as launcher_main

    return launcher_main()


if __name__ == "__main__":
    sys.exit(main())
