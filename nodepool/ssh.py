"""SSH for nodes: one configuration, and one way to run programs and copy files.

It needs nothing but the standard library and OpenSSH's client.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import selectors
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

#: Of every connection: only the given host keys count, and a machine that has vanished ends it
#: after a minute.
OPTIONS = {
    "IgnoreUnknown": "KnownHostsCommand",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "KnownHostsCommand": "none",
    "VerifyHostKeyDNS": "no",
    "UpdateHostKeys": "no",
    "CheckHostIP": "no",
    "ControlPath": "none",
    "ConnectTimeout": "20",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
}
#: Seconds in which a server that refuses further logins is tried again, of the pauses, and to end a
#: program.
BUSY, PAUSES, END = 60.0, (0.2, 2.0), 10.0
#: What ssh reports when a server has too many concurrent logins (MaxStartups).
_TOO_MANY = re.compile(
    "kex_exchange_identification|Connection (?:closed|reset) by|Exceeded MaxStartups|Not allowed "
    "at this time"
)
#: What scp reports, with status 1, if ssh has ended before scp sends anything (OpenSSH 9.2).
_LOST_BY_SCP = b"lost connection"
#: What may stand in files of ssh without quotes: addresses and names of users come from clouds and
#: records.
PLAIN = re.compile(r"[A-Za-z0-9_.:%@\-]+\Z")
_KEY = re.compile(r"[a-z0-9@.\-]+ [A-Za-z0-9+/=]+\Z")
#: ssh knows no way to write these in a path, and Ansible would take braces for a template.
_UNWRITABLE = re.compile(r'["\\]|[${]\{|\{[%#]')
#: Runs a command in the login shell, and reports process id and status on both streams: processes
#: in the background may keep the streams open, and the status of ssh itself may have other causes.
#: $1: the command for %b of printf; $2: a random mark. With SHLVL, bash does not read ~/.bashrc a
#: second time, whose output would be taken for that of the command.
_FRAME = (
    'm="\\036$2%d;"; printf "$m" $$; printf "$m" $$ >&2; SHLVL=1 "${SHELL:-/bin/sh}" -c "$(printf '
    '%b "$1")"; s=$?; '
    'printf "$m" $s; printf "$m" $s >&2; exit $s'
)
#: Bytes of errors that are kept, of the longest mark, and the status of ssh and scp without a
#: connection.
LAST, MARK, LOST = 4096, 64, 255
#: Statuses from here on are of programs that a signal has ended, and of broken connections.
BY_SIGNAL = 128


class Lost(ConnectionError):
    """The machine cannot be reached, or the connection was lost before the program ended."""


class Interrupted(Lost):
    """The connection was lost after the login."""


@dataclass(frozen=True)
class Node:
    """One machine of a lease; see ``doc/operation/leases.rst`` for the fields."""

    id: str
    labels: list[str] = field(default_factory=list)
    state: str = ""
    provider: str | None = None
    az: str | None = None
    address: str | None = None
    port: object = None
    username: str | None = None
    host_keys: list[str] = field(default_factory=list)
    connection_type: str | None = None
    python_path: str | None = None
    shell_type: str | None = None
    attributes: Mapping[str, Any] | None = None


def unreachable(node: Node) -> str | None:
    """Return why ssh cannot reach a node; None: it can."""
    if node.connection_type not in (None, "ssh", "network_cli"):
        return f"node {node.id} is used by {node.connection_type}, not by SSH"
    # Records of others may contain anything.
    names: tuple[object, ...] = (node.address, node.username or "-")
    if not all(isinstance(name, str) and PLAIN.match(name) for name in names):
        return f"node {node.id} has no usable address or user name"
    return None if isinstance(node.port, int) else f"node {node.id} has no SSH port"


def quoted(path: str) -> str:
    """Return a path as ssh's configuration has it.

    :raises ValueError: ssh has no way to write it.
    """
    if _UNWRITABLE.search(path) or not path.isprintable():
        raise ValueError(
            f"ssh cannot use the path {path!r}: choose one without quotation marks, backslashes, "
            f"'${{' and '{{{{'"
        )
    return f'"{path.replace("%", "%%")}"'


def _searched(address: str) -> str:
    """Return an address in the spelling that ssh looks for in ``known_hosts``.

    It shortens ``2001:DB8:0:0:0:0:0:5``, for example. Names of hosts remain as they are.
    """
    numeric, scope, name = address.partition("%")
    try:
        found = socket.getaddrinfo(
            numeric, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except (OSError, UnicodeError):
        return address
    return f"{found[0][4][0]}{scope}{name}"


def known_hosts(nodes: Sequence[Node]) -> str:
    """Return the host keys of the nodes."""
    named = ((node, _searched(str(node.address))) for node in nodes)
    return "".join(
        f"{name if node.port == 22 else f'[{name}]:{node.port}'} {key}\n"
        for node, name in named
        if unreachable(node) is None
        for key in node.host_keys
        if isinstance(key, str) and _KEY.match(key)
    )


def config(
    nodes: Sequence[Node],
    directory: str,
    insecure: bool = False,
    identity: Mapping[str, str] | None = None,
) -> str:
    """Return the configuration for nodes in the order of their numbers.

    :param directory: of ``known_hosts``.
    :param insecure: also connect to nodes without host keys.
    :param identity: more options of all connections.
    :raises ValueError: the directory cannot be written in it.
    """
    hosts: dict[str, Mapping[str, object]] = {}
    for number, node in enumerate(nodes, 1):
        if unreachable(node) is None:
            user = {"User": node.username} if node.username else {}
            unchecked = {"StrictHostKeyChecking": "no"} if insecure and not node.host_keys else {}
            hosts[f"n{number} np{node.id}"] = {
                "HostName": str(node.address).replace("%", "%%"),
                "Port": node.port,
                **user,
                **unchecked,
            }
    hosts["*"] = {
        **OPTIONS,
        "UserKnownHostsFile": quoted(f"{directory}/known_hosts"),
        **(identity or {}),
    }
    return "\n".join(
        f"Host {host}\n" + "".join(f"    {name} {value}\n" for name, value in options.items())
        for host, options in hosts.items()
    )


def private(directory: str) -> str:
    """Create a directory that only this user may change; return it.

    :raises PermissionError: it is a link, or others may change it.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} must be a directory of this user that nobody else may change: chmod "
            "go-w, or another"
        )
    return directory


def write(
    nodes: Sequence[Node],
    directory: str,
    insecure: bool = False,
    identity: Mapping[str, str] | None = None,
) -> str:
    """Write ``known_hosts`` and ``ssh_config``; return the path of the latter."""
    path = os.path.join(private(directory), "ssh_config")
    for name, text in (
        (os.path.join(directory, "known_hosts"), known_hosts(nodes)),
        (path, config(nodes, directory, insecure, identity)),
    ):
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            file.write(text)
        os.replace(file.name, name)
    return path


class Kept:
    """Keeps the first and the last bytes that are written, at most `most` together."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first, self._last, self._omitted = bytearray(), bytearray(), 0

    def write(self, data: bytes) -> None:
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * self._half:
            self.flush()

    def flush(self) -> None:
        """Forget what is neither first nor last."""
        more = max(0, len(self._last) - self._half)
        self._omitted += more
        del self._last[:more]

    def content(self) -> bytes:
        """Return it, with a line that says how much was omitted."""
        note = f"\n[{self._omitted} bytes omitted]\n".encode() if self._omitted else b""
        return bytes(self._first + note + self._last)


Output = IO[bytes] | Kept


class Programs(set[Any]):
    """Running programs; `stop` ends them, and those that begin later."""

    stopped = False

    def add(self, program: Any) -> None:
        super().add(program)
        if self.stopped:
            program.kill()

    def stop(self) -> None:
        self.stopped = True
        for program in list(self):
            program.kill()


@dataclass
class _Stream:
    """Passes on what a program writes between two marks.

    :ivar numbers: of the marks that have been read.
    """

    sink: Output
    mark: re.Pattern[bytes]
    numbers: list[int]
    #: What has not been passed on, and the end of all that was read.
    rest: bytes = b""
    last: bytes = b""

    def feed(self, data: bytes) -> bool:
        """Return whether the program has ended; empty data: the stream has."""
        self.last = (self.last + data)[-LAST:]
        *parts, self.rest = self.mark.split(self.rest + data)
        for text, number in zip(parts[::2], parts[1::2], strict=True):
            self.sink.write(text if self.numbers else b"")
            self.numbers.append(int(number))
        # The end may be the beginning of a mark.
        cut = (
            max(0, len(self.rest) - MARK) + (self.rest[-MARK:] + b"\x1e").find(b"\x1e")
            if data
            else len(self.rest)
        )
        self.sink.write(self.rest[:cut] if len(self.numbers) == 1 else b"")
        self.rest = self.rest[cut:]
        self.sink.flush()
        return len(self.numbers) > 1 or not data


def _call(
    argv: Sequence[str],
    streams: Sequence[_Stream],
    data: bytes | None,
    deadline: float | None,
    running: set[Any],
) -> int:
    """Return the status of a program, which has ended when its streams say so."""
    with tempfile.TemporaryFile() as given, selectors.DefaultSelector() as ready:
        given.write(data or b"")
        given.seek(0)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            argv, stdin=None if data is None else given, stdout=pipe, stderr=pipe
        ) as process:
            running.add(process)
            try:
                for file, stream in zip((process.stdout, process.stderr), streams, strict=True):
                    ready.register(file or -1, selectors.EVENT_READ, stream)
                while ready.get_map():
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError
                    for key, _events in ready.select(left):
                        if key.data.feed(os.read(key.fd, 1 << 16)):
                            ready.unregister(key.fileobj)
                ended = [stream.numbers[1] for stream in streams if stream.numbers[1:]]
                return ended[0] if ended else process.wait(END)
            finally:
                running.discard(process)
                process.kill()


def remote(path: str, node: Node, command: str, batch: bool = True) -> tuple[list[str], str | None]:
    """Return the first arguments of `run` for a command in the login shell of a node.

    :param path: of the configuration.
    :param batch: never ask for a passphrase.
    """
    argv = [
        "ssh",
        "-F",
        path,
        "-oLogLevel=ERROR",
        f"-oBatchMode={'yes' if batch else 'no'}",
        f"np{node.id}",
        "--",
    ]
    if node.connection_type == "network_cli" or node.shell_type in ("cmd", "powershell"):
        return [*argv, command], None
    return argv, command


def patience(status: int, took: float) -> float:
    """Return how long to wait for the news that a process was killed for memory, in seconds.

    :param status: of the failed command. :param took: its seconds.
    """
    return 1.0 if not 0 < status < BY_SIGNAL else min(1.0, took / 10)


def run(
    argv: Sequence[str],
    command: str | None,
    outputs: Sequence[Output],
    data: bytes | None,
    deadline: float | None,
    running: set[Any],
) -> int:
    """Run ``ssh``, or ``scp``; return the status.

    It ends with the command, even if processes in the background remain on the node.

    :param command: of the login shell on the node; None: it is in the arguments, and the status is
        that of the program.
    :param outputs: get what it writes to standard output and to standard error.
    :param data: its standard input; None: that of this program.
    :param deadline: monotonic time at which the command is killed.
    :param running: gets the local process, whose end ends the command.
    :raises TimeoutError: it has not ended in time; the text says why nobody could log in.
    :raises Lost: its status is not known; Interrupted if it has begun.
    """
    mark, limit = secrets.token_hex(16), time.monotonic() + BUSY
    pattern = re.compile(f"\x1e{mark}([0-9]{{1,10}});".encode())
    # Every shell reads this alike between quotes.
    encoded = re.sub(r"['\\!\n]", lambda found: f"\\0{ord(found[0]):03o}", command or "")
    framed = [] if command is None else [f"exec sh -c '{_FRAME}' sh '{encoded}' {mark}"]
    # Without it, ssh itself marks that the login is done.
    marked = (
        [
            "-oPermitLocalCommand=yes",
            f'-oLocalCommand=sh -c \'m="\\036{mark}0;"; printf "$m"; printf "$m" >&2\'',
        ]
        if argv[0] == "ssh" and not framed
        else []
    )
    text = ""
    while True:
        streams = [_Stream(output, pattern, [0] if argv[0] == "scp" else []) for output in outputs]
        try:
            status = _call([argv[0], *marked, *argv[1:], *framed], streams, data, deadline, running)
        except BaseException as error:
            if isinstance(error, TimeoutError) and not streams[1].numbers:
                raise TimeoutError(text or "the login has not ended in time") from error
            if framed and streams[1].numbers:
                kill = "kill -TERM -- -{0}; sleep 1; kill -KILL -- -{0}".format(
                    streams[1].numbers[0]
                )
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    subprocess.run(
                        [*argv, kill],
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        check=False,
                        timeout=END,
                    )
            raise
        lost = (
            status == LOST
            or status < 0
            or (argv[0] == "scp" and streams[1].last.rstrip().endswith(_LOST_BY_SCP))
        )
        if any(stream.numbers[1:] for stream in streams) or (not framed and not lost):
            return status
        if streams[1].numbers and argv[0] == "ssh":
            raise Interrupted(
                "the connection was lost before the program ended"
                + ("" if framed else ", or that has ended with status 255")
            )
        text = streams[1].last.decode("utf-8", "replace").strip()
        if status < 0:  # by the end of what it belongs to: no server has refused it
            raise Lost(f"{argv[0]} was ended by signal {-status}")
        # OpenSSH 10 prints nothing if the server closes the connection.
        refused = not text or _TOO_MANY.search(text)
        if not refused or time.monotonic() > min(limit, deadline or limit):
            raise Lost(text or f"the connection was closed, and {argv[0]} gave no reason")
        time.sleep(random.uniform(*PAUSES))


def key_problem(path: str) -> str | None:
    """Return why a private key cannot be used; None: it can.

    ssh itself does not check the permissions of another user's file.
    """
    if not os.access(path, os.R_OK):
        return f"cannot read the key {path} (option ssh-key)"
    if os.stat(path).st_mode & 0o007:
        return f"the key {path} (option ssh-key) is open to all users: chmod o-rwx"
    return None


def run_with_key(
    node: Node,
    key: str,
    command: str,
    output: Output,
    deadline: float,
    running: set[Any],
    insecure: bool = False,
) -> int:
    """Log in to a node with this private key only, and run a command; see `run`.

    :param insecure: also if the host keys of the node are not known.
    :raises OSError, ValueError: this machine cannot do that, as for example without ssh.
    """
    if (problem := key_problem(key)) is not None:
        raise PermissionError(problem)
    identity = {"IdentityFile": quoted(key), "IdentitiesOnly": "yes"}
    with tempfile.TemporaryDirectory() as directory:
        path = write([node], directory, insecure, identity)
        argv, framed = remote(path, node, command)
        return run(argv, framed, [output, output], b"", deadline, running)
