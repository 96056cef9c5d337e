"""The helper: a small single-threaded process that forks for the threaded daemon.

The daemon itself must not fork, because it has many threads. The helper
is a server of workers: each request gets a forked worker that reads the request from its own
socket, does the work
(namespaces, mounts, process 1, a process inside a sliver) and answers there. Requests therefore run
concurrently, a crash in one does not affect others, and a worker that hangs is ended by SIGALRM at
the deadline. The helper ends when the daemon's end of its socket closes; slivers keep running
(NM-C.7).

Processes of slivers are adopted by the helper, which reaps them and sends their exit status to
their spawners.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gc
import importlib
import math
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter

from nodepool.nodemanager.confinement import seccomp
from nodepool.nodemanager.helper.frames import receive_frame, send_frame
from nodepool.nodemanager.helper.operation import Operation, StepError, is_shortage
from nodepool.nodemanager.kernel import syscalls

#: Idle milliseconds after which a worker for the next request is forked.
SPARE_DELAY = 20
OPERATION_MODULES = (
    "nodepool.nodemanager.helper.operations",
    "nodepool.nodemanager.setup.native",
    "nodepool.nodemanager.setup.rootless",
    "nodepool.nodemanager.setup.podman",
)
"""Each has a table OPERATIONS: name -> function(request, descriptors) -> (answer, descriptors to
send).
"""


class _Server:
    """The loop of the helper: fork a worker per request, reap, pass on exit statuses."""

    def __init__(self, requests: socket.socket, operations: dict[str, Operation]) -> None:
        self.requests = requests
        self.operations = operations
        self.workers: set[int] = set()
        self.reports: dict[int, socket.socket] = {}
        """Pipe on which a worker names the process to watch -> connection for its exit status."""
        self.watched: dict[int, socket.socket] = {}
        self.ended: dict[int, int] = {}
        self.poller = select.poll()
        #: A worker that waits for the next request: a fork takes some ms. It is forked while the
        #: helper is idle.
        self.spare: _Spare | None = None
        self.spare_due = True

    def run(self) -> None:
        wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self.poller.register(self.requests, select.POLLIN)
        self.poller.register(wakeup, select.POLLIN)
        while True:
            events = self.poller.poll(SPARE_DELAY if self.spare_due else None)
            if not events:
                self._make_spare()
            for descriptor, _event in events:
                if descriptor == self.requests.fileno():
                    if not self._request():
                        return
                elif descriptor == wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 4096)
                    self._reap()
                elif descriptor in self.reports:
                    self._report(descriptor)

    def _request(self) -> bool:
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self.requests, 16, 1)
        except OSError:
            return False
        if not data:
            return False
        if not descriptors:
            return True
        self.spare_due = True
        connection = socket.socket(fileno=descriptors[0])
        os.set_inheritable(descriptors[0], False)
        report = self._give_to_spare(connection)
        if report is None:
            try:
                report = self._fork(lambda: connection, connection)
            except OSError as error:
                with contextlib.suppress(OSError), connection:
                    send_frame(
                        connection, {"error": f"the host cannot fork: {error}", "retry": True}
                    )
                return True
        self.reports[report] = connection
        self.poller.register(report, select.POLLIN)
        return True

    def _fork(self, wait: Callable[[], socket.socket | None], kept: socket.socket) -> int:
        """Fork a worker; return the read end of its report. Raises OSError.

        :param wait: in the worker: its connection, when there is one; it ends without.
        :param kept: the socket that it needs.
        """
        report, report_write = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(report)
            os.close(report_write)
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            _worker(wait, self.operations, report_write, kept)
        os.close(report_write)
        self.workers.add(pid)
        return report

    def _make_spare(self) -> None:
        """Fork a spare worker; after a failure the next request forks for itself and reports it."""
        self.spare_due = False
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return

        def wait() -> socket.socket | None:
            data, descriptors, _flags, _address = socket.recv_fds(theirs, 1, 1)
            theirs.close()
            if not data or not descriptors:
                return None
            os.set_inheritable(descriptors[0], False)
            return socket.socket(fileno=descriptors[0])

        with theirs:
            try:
                self.spare = _Spare(ours, self._fork(wait, theirs))
            except OSError:
                ours.close()

    def _give_to_spare(self, connection: socket.socket) -> int | None:
        spare, self.spare = self.spare, None
        if spare is None:
            return None
        with spare.ours:
            try:
                socket.send_fds(spare.ours, [b"r"], [connection.fileno()])
            except OSError:  # it was killed
                os.close(spare.report)
                return None
        return spare.report

    def _report(self, report: int) -> None:
        data = os.read(report, 4)
        connection = self.reports.pop(report)
        self.poller.unregister(report)
        os.close(report)
        if len(data) < 4:
            connection.close()
            return
        pid = struct.unpack("=I", data)[0]
        if pid in self.ended:
            self._send_code(connection, self.ended.pop(pid))
        else:
            self.watched[pid] = connection

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            if pid in self.workers:
                self.workers.discard(pid)
            elif pid in self.watched:
                self._send_code(self.watched.pop(pid), code)
            elif self.reports:
                self.ended[pid] = code
        if not self.reports:
            self.ended.clear()

    @staticmethod
    def _send_code(connection: socket.socket, code: int) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError), connection:
            send_frame(connection, {"exit": code})


@dataclass
class _Spare:
    """A worker without a request yet, which ends with the helper (the owner of `ours`)."""

    ours: socket.socket
    report: int


def _worker(
    wait: Callable[[], socket.socket | None],
    operations: dict[str, Operation],
    report: int,
    kept: socket.socket,
) -> None:
    """Run a worker; never returns."""
    code = 1
    try:
        # Sockets of other requests must not leak into a sliver.
        syscalls.close_from(3, (kept.fileno(), report))
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _plain_victim()
        connection = wait()
        code = 0 if connection is None else _serve(connection, operations, report)
    finally:
        os._exit(code)


def _serve(connection: socket.socket, operations: dict[str, Operation], report: int) -> int:
    """Execute the request that arrives; return the exit status."""
    try:
        signal.alarm(30)
        frame = receive_frame(connection)
        if frame is None:
            return 0
        request, descriptors = frame
        signal.alarm(max(1, math.ceil(float(request.get("timeout", 30)))))
        request["keep"] = [connection.fileno(), report]
        request["more"] = functools.partial(receive_frame, connection)
        try:
            operation = operations.get(request["operation"])
            if operation is None:
                raise StepError(f"unknown operation {request['operation']!r}")
            answer, sent = operation(request, descriptors)
            if "watch" in answer:
                os.write(report, struct.pack("=I", answer.pop("watch")))
            send_frame(connection, answer, sent)
            return 0
        except (StepError, OSError, MemoryError) as error:
            text = str(error) or "no memory left"
            if isinstance(error, OSError):
                text = f"{error.strerror or error}" + (
                    f" ({error.filename})" if error.filename else ""
                )
            send_frame(
                connection,
                {"error": f"{request['operation']}: {text}", "retry": is_shortage(error)},
            )
    except BrokenPipeError:
        pass  # the daemon has ended; its next start finds what was created
    except BaseException as error:
        with contextlib.suppress(OSError):
            send_frame(
                connection, {"error": f"defect in the helper: {type(error).__name__}: {error}"}
            )
    return 1


def _plain_victim() -> None:
    """Make this process an ordinary candidate when the kernel is short of memory.

    The daemon may be protected. Written with CAP_SYS_RESOURCE, the value is also the minimum for
    the sliver's root.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file,
    ):
        file.write(str(max(0, int(file.read()))))


def seal() -> None:
    """Stop importing from files: after entering a sliver they would be the sliver's files."""
    for codec in ("ascii", "utf-8", "latin-1", "idna"):
        codecs.lookup(codec)
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if finder in (BuiltinImporter, FrozenImporter)
    ]
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()
    sys.path.clear()


def main(descriptor: int) -> None:
    """Run the helper."""
    if os.geteuid() == 0:
        # For an ordinary user the files /proc/<pid>/uid_map of children would then belong to root;
        # entering a sliver has the same effect later.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # Terminal signals and the service manager's stop are for the daemon; we stop when the socket
    # ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    operations: dict[str, Operation] = {}
    for name in OPERATION_MODULES:
        operations.update(importlib.import_module(name).OPERATIONS)
    with contextlib.suppress(OSError, KeyError):
        seccomp.build(syscalls.machine(), frozenset())  # once, for all workers
    seal()
    gc.freeze()  # a garbage collection in a worker would copy memory pages
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    _Server(connection, operations).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
