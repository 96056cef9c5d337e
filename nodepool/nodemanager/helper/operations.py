"""Operations of the helper on running slivers: processes, files, listeners, probes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from nodepool.nodemanager.helper import inside, relay
from nodepool.nodemanager.helper.operation import Operation, StepError, is_shortage
from nodepool.nodemanager.kernel import syscalls

ALL_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)
#: First byte of a child's failure text when a retry may succeed.
_RETRY = b"+"


def open_cgroups(files: Iterable[str]) -> dict[str, int]:
    """Open the cgroup files that accept processes. Raises StepError."""
    opened: dict[str, int] = {}
    for path in files:
        try:
            opened[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StepError(f"cannot join the cgroup {path}: {error.strerror}") from error
    return opened


def join_cgroups(opened: Mapping[str, int], pid: int = 0) -> None:
    """Move a process (0: this one) into cgroups and close their files. Raises StepError."""
    for path, descriptor in opened.items():
        try:
            os.write(descriptor, str(pid).encode())
        except OSError as error:
            raise StepError(f"cannot join the cgroup {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)


def join_all_but_cpu(files: Sequence[str]) -> dict[str, int]:
    """Join all cgroups but the last, which has the controller cpu; return that one open.

    Work before the program runs inside must not run at the sliver's pace: a busy sliver would delay
    the release of what the worker holds meanwhile, including kernel locks. Raises StepError.
    """
    opened = open_cgroups(files)
    last = dict([opened.popitem()]) if opened else {}
    join_cgroups(opened)
    return last


def open_sliver(request: dict[str, Any]) -> int:
    """Return a pidfd that is certainly of the intended process 1. Raises StepError."""
    pid = int(request["pid"])
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise StepError(f"the sliver does not run (process {pid}: {error.strerror})") from error
    if syscalls.start_time(pid) != request["start_time"]:
        raise StepError(f"the sliver does not run (process {pid} is a different one)")
    return descriptor


def child(flags: int, work: Callable[[int], None], failure: str) -> tuple[int, int]:
    """Clone a child that runs `work(failure pipe)`; wait for its exec or a failure text.

    Returns (pid, pidfd). Raises StepError with the child's text.
    """
    outcome, outcome_write = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = syscalls.clone(flags)
    if pid == 0:
        run_child(work, outcome_write)
    os.close(outcome_write)
    try:
        finish(outcome, pid, failure)
    except BaseException:
        os.close(pidfd)
        raise
    return pid, pidfd


def run_child(work: Callable[[int], None], outcome: int) -> NoReturn:
    """Run the child's part; what goes wrong is written to the pipe."""
    try:
        work(outcome)
        os._exit(0)
    except BaseException as error:
        text = str(error) or "no memory left" * isinstance(error, MemoryError)
        if isinstance(error, OSError):
            text = f"{error.strerror or error}" + (
                f" ({os.fsdecode(error.filename)})" if error.filename else ""
            )
        if not isinstance(error, StepError):
            # Not with the module traceback, which reads source files: here these are the sliver's.
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            text += f" [{type(error).__name__}" + (
                f" in {last.tb_frame.f_code.co_name}]" if last is not None else "]"
            )
        try:
            os.write(outcome, (_RETRY if is_shortage(error) else b"-") + text.encode()[:4000])
        finally:
            os._exit(1)


def finish(outcome: int, pid: int, failure: str) -> None:
    """Wait until the child has exec'ed (or ended well). Raises StepError with its text."""
    text = b""
    while True:
        data = os.read(outcome, 4096)
        if not data:
            break
        text += data
    os.close(outcome)
    if text:
        os.waitpid(pid, 0)
        raise StepError(
            f"{failure}: {text[1:].decode(errors='replace')}", retry=text.startswith(_RETRY)
        )


def enter(request: dict[str, Any], sliver: int) -> None:
    """Enter the sliver's namespaces; the pid namespace affects children. Raises StepError."""
    try:
        syscalls.setns(sliver, request.get("namespaces", ALL_NAMESPACES))
    except OSError as error:
        raise StepError(f"cannot enter the sliver: {error.strerror}") from error


def run_inside(
    request: dict[str, Any], cpu: Mapping[str, int], streams: Callable[[], Sequence[int | None]]
) -> tuple[int, int]:
    """Run the program of a request in the current namespaces; return (pid, pidfd).

    :param cpu: the cgroup that has the controller cpu.
    :param streams: called as root of the sliver: stdin, stdout and stderr; None is the sliver's own
        /dev/null.
    """

    def work(outcome: int) -> None:
        os.setsid()
        if not request.get("rootless"):
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        given = streams()
        null = inside.open_null()
        # First move them to high numbers: descriptors may themselves be 0, 1 or 2.
        high = [os.dup(null if stream is None else stream) for stream in given]
        while min(high) < 3:
            high = [os.dup(stream) for stream in high]
        for target, descriptor in enumerate(high):
            os.dup2(descriptor, target)
        syscalls.close_from(3, (outcome, *cpu.values()))
        inside.reset_signals()
        if request.get("rootless"):
            account = next(
                (a for a in inside.accounts().values() if a.uid == os.getuid()),
                inside.Account("nobody", os.getuid(), os.getgid(), "/", "/bin/sh"),
            )
            os.chdir(account.home if os.path.isdir(account.home) else "/")
            inside.limit(request.get("limits", {}))
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            inside.confine(request["privileges"])
        else:
            with contextlib.suppress(OSError):  # this kernel has no keys
                syscalls.own_keyring()
            inside.confine(request["privileges"])
            account = inside.become(request["user"])
        os.umask(0o022)
        join_cgroups(cpu)
        inside.execute(request["argv"], inside.environment(account, request.get("env")))

    return child(0, work, "cannot run the program")


def _fork_relay(
    request: dict[str, Any], cpu: Mapping[str, int], keep: Sequence[int], work: Callable[[], None]
) -> None:
    """Relay bytes as the host's id of the sliver's last user; as ourselves if we are not root."""
    ids = syscalls.uid_range(int(request["pid"]))
    relay.start(
        work,
        keep,
        -1 if os.geteuid() != 0 or ids is None else ids[0] + ids[1] - 1,
        lambda: join_cgroups(cpu),
    )


def spawn(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Start a process inside: namespaces, cgroup, filter, user.

    Descriptors: pipes; `streams` of the request says which of them is stdin, stdout and stderr
    (None: /dev/null).  With `console` instead, what the program prints is added to that file.
    """
    relay.only_pipes(descriptors)
    sliver = open_sliver(request)
    cpu = join_all_but_cpu(request.get("procs", []))
    streams: list[int | None] = [
        None if place is None else descriptors[place] for place in request.get("streams", ())
    ]
    if "console" in request:
        file = os.open(
            request["console"],
            os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        reading, writing = os.pipe2(os.O_CLOEXEC)
        _fork_relay(request, cpu, (reading, file), lambda: relay.keep_output(reading, file))
        os.close(reading)
        os.close(file)
        streams = [None, writing, writing]
    enter(request, sliver)
    pid, pidfd = run_inside(request, cpu, lambda: streams)
    return {"pid": pid, "watch": pid}, [pidfd]


def serve(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Start a process inside with a relayed host connection as stdin and stdout.

    :param descriptors: the connection.
    """
    sliver = open_sliver(request)
    cpu = join_all_but_cpu(request.get("procs", []))
    connection = socket.socket(fileno=descriptors[0])
    relay.prepare(connection)
    control, control_inside = socket.socketpair()
    _fork_relay(
        request,
        cpu,
        (connection.fileno(), control.fileno()),
        lambda: relay.carry(connection, control),
    )
    connection.close()
    control.close()
    enter(request, sliver)

    def streams() -> list[int | None]:
        # Created here: the pair belongs to the namespaces of its creator and carries its identity.
        ours, theirs = socket.socketpair()
        socket.send_fds(control_inside, [b"e"], [theirs.fileno()])
        control_inside.close()
        end = ours.detach()
        return [end, end, None]

    pid, pidfd = run_inside(request, cpu, streams)
    return {"pid": pid, "watch": pid}, [pidfd]


def furnish(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Write files, keys and accounts of a sliver that runs, as its own root."""
    sliver = open_sliver(request)
    join_all_but_cpu(request.get("procs", []))
    syscalls.setns(sliver, syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    if not request.get("rootless"):
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    os.umask(0o022)
    inside.furnish(request)
    return {}, []


def listen(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Return a listening socket in the network namespace of a sliver."""
    sliver = open_sliver(request)
    flags = syscalls.CLONE_NEWNET
    syscalls.setns(sliver, flags | (syscalls.CLONE_NEWUSER if request.get("rootless") else 0))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((request["address"], request["port"]))
        except OSError as error:
            raise StepError(
                f"cannot listen on {request['address']}:{request['port']} inside: {error.strerror}"
            ) from error
        listener.listen(request.get("backlog", 16))
        return {}, [os.dup(listener.fileno())]


def ping(request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Answer, to show that the helper is alive."""
    return {"pid": os.getppid()}, []


OPERATIONS: dict[str, Operation] = {
    "spawn": spawn,
    "serve": serve,
    "furnish": furnish,
    "listen": listen,
    "ping": ping,
}
