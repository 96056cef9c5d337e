"""Lease: the nodes of a borrower, their files and commands."""

from __future__ import annotations

import atexit
import base64
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from nodepool import ssh
from nodepool.client.calls import (
    LEAST_PAUSE,
    POLL,
    RETRY,
    TIMEOUT,
    UNAVAILABLE,
    Calls,
    Done,
    Duration,
    LeaseEnded,
    NoCapacity,
    NodepoolError,
    content_of,
    path_of,
    seconds,
)
from nodepool.ssh import Node
from nodepool.texts import killed

#: Seconds that an attached lease outlives its program, and between two renewals.
ATTACHED, RENEW_EVERY = 120, 40.0
#: Seconds before the end of a certificate at which a new one is signed.
SOON = 60.0
#: Bytes of input, and seconds, of a command that the launcher runs.
MOST_INPUT, MOST_TIME = 45_000, 86_400.0
#: Its limits: bytes of the whole call, words of a command, and characters of a word.
MOST_BODY, MOST_WORDS, LONGEST_WORD = 65_000, 1000, 32_768
#: Seconds between two questions for kills, of one such question, and by which clocks may differ.
ASK, ANSWER, CLOCKS = 0.1, 1.0, 5.0
log = logging.getLogger("nodepool.client")


class Lease:
    """Nodes that are yours until the end of the lease.

    :ivar state: ``waiting``, ``ready``, ``held`` or ``failed``, when it was last read.
    :ivar ends: time with time zone; None: it has no end, or has not begun.
    :ivar limited_by: what gave it an earlier end than you asked for, such as ``max-hold-age``;
        None: nothing.
    :ivar drained: why one of its nodes should be returned soon; None: no operator drains one.
    :ivar kills: processes that were killed for memory on its nodes, when they were last read.
    :ivar why: what it waits for: ``text``, and perhaps ``code``, ``suggestion``,
        ``queue_position``.
    :ivar token: renews and returns this lease from other processes.
    """

    id: str
    state: str
    owner: str
    purpose: str
    tenant: str | None
    labels: list[str]
    renewed: int
    lost: int
    notes: Mapping[str, Any]
    why: Mapping[str, Any] | None
    limited_by: str | None
    drained: str | None
    kills: list[Mapping[str, Any]]

    def __init__(
        self,
        pool: Calls,
        answer: Mapping[str, Any],
        attached: bool = False,
        token: str | None = None,
    ) -> None:
        self._pool = pool
        self.token = token
        self.nodes: list[Node] = []
        self.ends: datetime.datetime | None = None
        self.created: datetime.datetime | None = None
        self._apply(answer)
        self._ended: LeaseEnded | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        shared = pool.ssh_directory
        self._directory = (
            shared if shared and os.path.exists(os.path.join(shared, "ssh_config")) else None
        )
        self._lock = threading.Lock()
        self._running = ssh.Programs()
        #: The process that got the lease, and the one that has created the directory.
        self._process, self._files_of = os.getpid(), 0
        #: Whether the launcher may be able to run programs.
        self._relays = True
        #: Unix time at which the certificate ends; 0: there is none yet; None: the server signs
        #: none.
        self._certified: float | None = 0.0
        if attached:
            atexit.register(self._release)
            self._thread = threading.Thread(
                target=self._renew, name=f"lease-{self.id}", daemon=True
            )
            self._thread.start()

    def __repr__(self) -> str:
        return f"<Lease {self.id} {self.state}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_error: object) -> None:
        if os.getpid() == self._process:
            self.give_back()
        elif os.getpid() == self._files_of:
            self._remove_files()  # of this forked process; the lease is its parent's

    def _apply(self, answer: Mapping[str, Any]) -> None:
        for name in (
            "id",
            "state",
            "owner",
            "purpose",
            "tenant",
            "labels",
            "renewed",
            "lost",
            "notes",
            "why",
            "limited_by",
            "drained",
        ):
            setattr(self, name, answer.get(name))
        self.created, self.ends = (_moment(answer.get(name)) for name in ("created", "ends"))
        self.token = answer.get("token") or self.token
        self.kills = answer.get("kills") or []
        known = Node.__dataclass_fields__
        self.nodes = [
            Node(**{name: value for name, value in one.items() if name in known})
            for one in answer.get("nodes", ())
        ]

    # -- life

    def refresh(self, wait: float = 0.0) -> Lease:
        """Read the lease again.

        :param wait: seconds to wait, at most 60, while it is waiting.
        :raises LeaseEnded, NoCapacity: it has ended, or will not get nodes.
        """
        self._check()
        query = f"?wait={wait:.3f}" if wait else ""
        try:
            self._apply(self._pool.call("GET", path_of(self.id) + query, token=self.token))
        except LeaseEnded:
            self._stopping.set()
            self._check()  # another thread has returned it meanwhile: nobody waits for it
            raise
        return self

    def wait(
        self, longest: Duration | None = None, on_change: Callable[[Lease], object] | None = None
    ) -> Lease:
        """Wait until the nodes are yours.

        :param on_change: is called first, and whenever what it waits for has changed.
        :raises NoCapacity: they are not in this time; the text says what they wait for.
        """
        limit = None if longest is None else time.monotonic() + seconds(longest)
        for change in self.changes(limit):
            if on_change is not None:
                on_change(change)
            if change.state == "held":
                return self
        reason = (self.why or {}).get("text") or "no reason is known yet"
        raise NoCapacity("not-in-time", f"Lease {self.id} was not ready in time: {reason}")

    def changes(self, until: float | None = None) -> Iterator[Lease]:
        """Return this lease whenever state, reason or place have changed, until it is held.

        :param until: monotonic time.
        """
        last: object = None
        while True:
            why = self.why or {}
            now = (self.state, why.get("text"), why.get("queue_position"))
            if now != last:
                last = now
                yield self
            began = time.monotonic()
            left = POLL if until is None else min(POLL, until - began)
            if self.state == "held" or left <= 0:
                return
            pause = LEAST_PAUSE
            try:
                self.refresh(left)
                if self.state == "held":
                    continue
            except NodepoolError as error:
                if error.code not in UNAVAILABLE:
                    raise
                pause = error.pause
            self._stopping.wait(
                min(began + pause - time.monotonic(), left)
            )  # a server with too many clients does not wait

    def renew(self, for_: Duration) -> Lease:
        """Let the lease end at least this much later than now.

        :raises LeaseEnded: it has ended. :raises NotAllowed: beyond your limits.
        """
        self._apply(
            self._pool.call(
                "POST", path_of(self.id) + "/renew", {"for": int(seconds(for_))}, token=self.token
            )
        )
        return self

    def note(self, **notes: object) -> Lease:
        """Add notes, such as the id of a job; they are shown with the lease."""
        self._apply(
            self._pool.call(
                "PATCH",
                path_of(self.id),
                {"notes": {**(self.notes or {}), **notes}},
                token=self.token,
            )
        )
        return self

    def give_back(self) -> None:
        """Release the nodes, or stop waiting for them; this may be repeated."""
        self._stopping.set()
        atexit.unregister(self._release)
        self._ended = LeaseEnded("returned", f"Lease {self.id} has been returned")
        self._close()
        self._pool.call(
            "DELETE", path_of(self.id), token=self.token, retry=time.monotonic() + TIMEOUT
        )

    def _release(self) -> None:
        with contextlib.suppress(NodepoolError):
            self.__exit__()

    def _renew(self) -> None:
        pause = RENEW_EVERY
        while not self._stopping.wait(pause):
            pause = RENEW_EVERY
            try:
                if self.state == "held":
                    answer = self._pool.call(
                        "POST", path_of(self.id) + "/renew", {"for": ATTACHED}, token=self.token
                    )
                    self.ends = _moment(answer["ends"])
                    if answer.get("limited_by") and not self.limited_by:
                        self.limited_by = answer["limited_by"]
                        log.warning(
                            "Lease %s ends at %s: %s permits no later end",
                            self.id,
                            self.ends,
                            self.limited_by,
                        )
            except NodepoolError as error:
                if isinstance(error, LeaseEnded) or (
                    self.ends is not None and time.time() > self.ends.timestamp()
                ):
                    self._ended = LeaseEnded(error.code, f"Lease {self.id} has ended: {error}")
                    self._close()  # a command that runs there ends
                    return
                pause = RETRY

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    # -- use

    def run(
        self,
        command: str | Sequence[str],
        *,
        node: int = 0,
        input: bytes | None = None,
        timeout: Duration | None = None,
        check: bool = False,
        stream: bool = False,
    ) -> Done:
        """Run a command on a node, and return its status and output.

        The launcher runs it where it can (slivers), unless the command or its input is long;
        otherwise it runs over SSH. If it fails, lines at the end of its standard error name the
        processes on the node that were killed for memory meanwhile.

        :param command: a text for the login shell, or a list of words.
        :param check: raise ``subprocess.CalledProcessError`` if its status is not 0.
        :param stream: the output goes to standard output and standard error of this program as it
            comes.
        :raises subprocess.TimeoutExpired: it has not ended in time.
        :raises LeaseEnded: the lease has ended meanwhile.
        """
        text = command if isinstance(command, str) else shlex.join(command)
        known, began = {(each["pid"], each["time"]) for each in self.kills}, time.monotonic()
        name = "".join(sorted(each.id for each in self.nodes)[node : node + 1])
        done = self._relayed(command, node, input or b"", timeout, stream)
        if done is None:
            done = self._execute(
                *ssh.remote(self._ssh(), self._numbered(node), text), input, timeout, stream
            )
        if done.status and (lines := self._killed(name, done.status, known, began)):
            end = "".join(f"nodepool: {line}\n" for line in lines).encode()
            if stream:
                sys.stderr.buffer.write(end)
                sys.stderr.buffer.flush()
            else:
                done = dataclasses.replace(done, stderr=done.stderr + end)
        if check and done.status:
            raise subprocess.CalledProcessError(done.status, text, done.stdout, done.stderr)
        return done

    def _killed(
        self, node: str, status: int, known: Set[tuple[int, str]], began: float
    ) -> list[str]:
        """Return a line for each process that was killed for memory while a command has run."""
        return [
            killed(kill)
            for kill in self.find_kills(
                ssh.patience(status, time.monotonic() - began),
                lambda kill: (
                    kill["node"] == node
                    and kill["age"] < time.monotonic() - began + CLOCKS
                    and (kill["pid"], kill["time"]) not in known
                ),
            )
        ]

    def find_kills(
        self, longest: float, wanted: Callable[[Mapping[str, Any]], bool] = bool
    ) -> list[Mapping[str, Any]]:
        """Return processes that were killed for memory on the nodes, of the newest 20.

        :param longest: seconds to wait for the first one.
        :param wanted: which ones count.
        """
        until = time.monotonic() + longest
        while True:
            with contextlib.suppress(NodepoolError):
                answer = self._pool.call("GET", path_of(self.id), token=self.token, longest=ANSWER)
                self.kills = answer.get("kills") or []
            found = [kill for kill in self.kills if wanted(kill)]
            if found or time.monotonic() + ASK > until:
                return found
            time.sleep(ASK)

    def _relayed(
        self,
        command: str | Sequence[str],
        node: int,
        data: bytes,
        timeout: Duration | None,
        stream: bool,
    ) -> Done | None:
        """Run a command through the launcher; None: it cannot do that for this node."""
        self._check()
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        body: dict[str, Any] = {
            "command": words,
            "node": node + 1,
            "input": base64.b64encode(data).decode(),
        }
        if (
            not self._relays
            or len(json.dumps(body)) > MOST_BODY
            or len(words) > MOST_WORDS
            or any(len(word) > LONGEST_WORD for word in words)
        ):
            return None
        limit = MOST_TIME if timeout is None else seconds(timeout)
        until = time.monotonic() + limit
        try:
            while True:
                body["timeout"] = max(1e-3, until - time.monotonic())
                try:
                    return self._pool.relay(path_of(self.id) + "/exec", body, self.token, stream)
                except NodepoolError as error:
                    if error.code != "busy" or time.monotonic() + error.pause >= until:
                        raise
                    pause = error.pause
                time.sleep(pause)
                self._check()
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, limit) from None
        except NodepoolError as error:
            if error.code not in ("no-exec", "not-found", "method-not-allowed"):
                self._check()
                raise
            self._relays = False
            return None

    def _numbered(self, number: int) -> Node:
        if not 0 <= number < len(self.nodes):
            raise NodepoolError(
                "bad-request",
                f"Lease {self.id} has {len(self.nodes)} nodes; there is no node {number + 1}",
            )
        node = sorted(self.nodes, key=lambda node: node.id)[number]
        if (why := ssh.unreachable(node)) is not None:
            raise NodepoolError("unreachable", why)
        return node

    def put(
        self,
        source: str | os.PathLike[str],
        target: str,
        node: int = 0,
        timeout: Duration | None = None,
    ) -> None:
        """Copy a file or directory to a node."""
        # Absolute: scp takes what is before a colon for the name of a host.
        self._copy(
            [os.path.join(os.getcwd(), source), f"np{self._numbered(node).id}:{target}"], timeout
        )

    def get(
        self,
        source: str,
        target: str | os.PathLike[str],
        node: int = 0,
        timeout: Duration | None = None,
    ) -> None:
        """Copy a file or directory from a node."""
        self._copy(
            [f"np{self._numbered(node).id}:{source}", os.path.join(os.getcwd(), target)], timeout
        )

    def _copy(self, paths: list[str], timeout: Duration | None) -> None:
        done = self._execute(
            ["scp", "-r", "-F", self._ssh(), "-oLogLevel=ERROR", "-oBatchMode=yes", "--", *paths],
            None,
            None,
            timeout,
        )
        if done.status:
            raise OSError(
                done.stderr.decode("utf-8", "replace").strip()
                or f"scp ended with status {done.status}"
            )

    def _execute(
        self,
        argv: list[str],
        command: str | None,
        data: bytes | None,
        timeout: Duration | None,
        stream: bool = False,
    ) -> Done:
        limit, outputs = None if timeout is None else seconds(timeout), self._pool.outputs(stream)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            status = ssh.run(argv, command, outputs, data or b"", deadline, self._running)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command or argv, limit or 0.0) from None
        except ssh.Lost as error:
            raise NodepoolError("broken", str(error)) from error
        finally:
            self._check()
        return Done(status, *map(content_of, outputs))

    def write_ssh(self, directory: str | os.PathLike[str]) -> str:
        """Write ``ssh_config`` and ``known_hosts`` to a directory; return the path of the former.

        ``ssh -F PATH n1`` logs in to the first node.

        :raises PermissionError: it is not of this user, or others may change it. :raises
            ValueError: ssh cannot use its name.
        """
        folder = ssh.private(os.path.abspath(directory))
        nodes = sorted(self.nodes, key=lambda node: node.id)
        return ssh.write(nodes, folder, identity=self._identity(pathlib.Path(folder)))

    def _identity(self, folder: pathlib.Path) -> dict[str, str]:
        """Return the options for the configured key, or for a new one with a certificate."""
        if self._pool.key_file:
            return {
                "IdentityFile": ssh.quoted(os.path.abspath(self._pool.key_file)),
                "IdentitiesOnly": "yes",
            }
        if self._certified is None:
            return {}
        key = folder / "id"
        if not key.exists():
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.id, "-f", str(key)]
            subprocess.run(
                argv, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT
            )
        body = {"public_key": key.with_suffix(".pub").read_text().strip()}
        try:
            answer = self._pool.call(
                "POST", path_of(self.id) + "/certificate", body, token=self.token
            )
        except NodepoolError as error:
            if error.code not in ("no-certificates", "not-found"):
                raise
            self._certified = None
            return {}
        (folder / "id-cert.pub").write_text(answer["certificate"] + "\n")
        self._certified = datetime.datetime.fromisoformat(answer["valid_before"]).timestamp()
        return {
            "IdentityFile": ssh.quoted(str(key)),
            "CertificateFile": ssh.quoted(f"{folder}/id-cert.pub"),
            "IdentitiesOnly": "yes",
        }

    def inventory(self) -> dict[str, Any]:
        """Return Ansible's dynamic inventory: a group for each label."""
        found: dict[str, Any] = self._pool.call(
            "GET", path_of(self.id) + "/inventory", token=self.token
        )
        return found

    def _ssh(self) -> str:
        self._check()
        with self._lock:
            if self._directory is None or 0 < (self._certified or 0) < time.time() + SOON:
                self._directory = self._directory or self._pool.ssh_directory
                if self._directory is None:
                    self._directory = tempfile.mkdtemp(prefix="nplease-")
                    self._files_of = os.getpid()
                self.write_ssh(self._directory)
            return os.path.join(self._directory, "ssh_config")

    def _close(self) -> None:
        """End what runs on the nodes, and remove the files."""
        self._running.stop()
        self._remove_files()

    def _remove_files(self) -> None:
        with self._lock:
            directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _moment(text: str | None) -> datetime.datetime | None:
    return None if text is None else datetime.datetime.fromisoformat(text)
