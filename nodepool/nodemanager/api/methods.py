"""Methods of the API: permitted callers, arguments and faults (NM-A.8, NM-B.3, NM-C.5)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.helper.zygote import Pending
from nodepool.nodemanager.records import loans, records, rspec

log = logging.getLogger("nodepool.nodemanager.api")

UNKNOWN_METHOD, WRONG_COUNT, BAD_ARGUMENT, INTERNAL, DENIED = 100, 101, 102, 104, 108
#: Changes per second of one sliver by a caller other than root and controllers, and how many may be saved up.
CHANGES, CHANGES_SAVED = 0.5, 20
#: Maximum characters of an argument of a program, as in Linux.
MAX_WORD = 128 * 1024 - 1
#: Maximum timeout of WaitSliver in seconds.
MAX_WAIT = 300.0

ROOT, SLIVER, DELEGATE, CONTROLLER, CERTIFICATE, OTHER = "root", "sliver", "delegate", "controller", "certificate", "other"


class Fault(Exception):
    """An error answer: number and text of the XML-RPC fault."""

    def __init__(self, code: int, text: str) -> None:
        text = clean(text)
        super().__init__(text)
        self.code = code
        self.text = text


class NodeError(Exception):
    """The node cannot do it; the text is for the caller."""


@dataclass(frozen=True)
class Caller:
    """A caller, as identified by the transport.

    ``kind``: root; a sliver; a delegate; a controller (a launcher with a certificate); another owner of a certificate; or
    another account of the host.
    """

    kind: str
    name: str = ""
    #: Methods that a delegate may call for every sliver.
    methods: frozenset[str] = frozenset()
    #: Hint for refused calls.
    advice: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True)
class Parked:
    """A waiting call without a thread: its connection is kept until the answer or timeout."""

    sliver: str
    #: Seconds.
    timeout: float
    #: Returns the answer, or None: not yet. Called at each change of the sliver.
    check: Callable[[], Any]
    #: The answer after the timeout.
    late: object


@dataclass(frozen=True)
class Program:
    """A program to start; the connection of the call then carries its streams."""

    sliver: str
    #: Starts it with its ends of the pipes for stdin, stdout and stderr. Raises BackendError.
    start: Callable[[int, int, int], Pending]


class Node(Protocol):
    """Interface of the node manager for the API; methods raise NodeError for the caller."""

    def sliver_record(self, name: str) -> dict[str, Any] | None: ...
    def sliver_names(self) -> list[str]: ...
    def granted(self, name: str) -> dict[str, int]: ...
    def effective(self, name: str) -> dict[str, int]: ...
    def loans_of(self, name: str) -> list[loans.Loan]: ...
    def set_loans(self, name: str, given: list[loans.Loan]) -> None: ...
    def create_sliver(self, name: str) -> None: ...
    def delete_sliver(self, name: str) -> None: ...
    def start_sliver(self, name: str) -> None: ...
    def stop_sliver(self, name: str) -> None: ...
    def recreate_sliver(self, name: str) -> None: ...
    def put_record(self, caller: str, record: dict[str, Any]) -> dict[str, Any]: ...
    def renew(self, name: str, expiry: float) -> None: ...
    def ticket(self, signed: str) -> list[str]: ...
    def is_delegate(self, name: str) -> bool: ...
    def reached(self, name: str, state: str) -> dict[str, Any] | None: ...
    def describe(self, name: str) -> dict[str, Any]: ...
    def describe_all(self) -> list[dict[str, Any]]: ...
    def capacity(self) -> dict[str, Any]: ...
    def usage(self, name: str) -> dict[str, int]: ...
    def console(self, name: str) -> str: ...
    def program(self, name: str, argv: list[str], env: dict[str, str], user: str) -> Program: ...
    def xids(self) -> dict[str, int]: ...
    def ssh_keys(self) -> dict[str, str]: ...
    def dump(self) -> str: ...


@dataclass(frozen=True)
class Method:
    name: str
    arguments: tuple[str, ...]
    purpose: str
    #: anyone, root, controller (or root), or target: the sliver that is the first argument, root, a controller, or
    #: whom the sliver's record names.
    who: str
    call: Callable[[Node, Caller, Sequence[Any]], Any]
    #: The call is logged, and causes work on this host.
    changes: bool = False

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}): {self.purpose}"


def _loans(node: Node, caller: Caller, arguments: Sequence[Any]) -> None:
    try:
        given = loans.validate(arguments[1])
    except loans.LoanError as error:
        raise Fault(BAD_ARGUMENT, f"invalid loans: {error}") from None
    node.set_loans(arguments[0], given)


def _put(node: Node, caller: Caller, arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        given = arguments[0]
        # Created immediately for a launcher; others may still ask for one that only CreateSliver creates.
        record = records.parse_record({"plc_instantiated": True, **given} if isinstance(given, dict) else given)
    except records.RecordError as error:
        raise Fault(BAD_ARGUMENT, str(error)) from None
    if record.get("account_type") != records.SLIVER:
        raise Fault(BAD_ARGUMENT, "only records of slivers can be put")
    return node.put_record(str(caller), record)


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise Fault(BAD_ARGUMENT, f"{what} must be a number of seconds")
    return float(value)


def _wait(node: Node, caller: Caller, arguments: Sequence[Any]) -> dict[str, Any] | Parked:
    name, state, timeout = arguments
    if state not in ("ready", "stopped", "gone"):
        raise Fault(BAD_ARGUMENT, f"state must be ready, stopped or gone, not {str(state)[:40]!r}")
    seconds = min(MAX_WAIT, _seconds(timeout, "timeout"))
    late = {"name": name, "state": "waiting"}
    found = node.reached(name, state)
    if found is None and seconds:
        return Parked(name, seconds, lambda: node.reached(name, state), late)
    return found or late


def _renew(node: Node, caller: Caller, arguments: Sequence[Any]) -> None:
    expiry = _seconds(arguments[1], "expiry")
    if expiry <= time.time():
        raise Fault(BAD_ARGUMENT, "expiry must be a UNIX time in the future")
    node.renew(arguments[0], expiry)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Fault(BAD_ARGUMENT, f"{what} must be a text")
    return value


def _word(value: object, what: str) -> str:
    """Return a text for a program. Texts in XML have no control characters; bytes may."""
    text = os.fsdecode(value) if isinstance(value, bytes) else _text(value, what)
    if "\0" in text or len(text) > MAX_WORD:
        raise Fault(BAD_ARGUMENT, f"{what} must have at most {MAX_WORD} characters and no NUL")
    return text


def _exec(node: Node, caller: Caller, arguments: Sequence[Any]) -> Program:
    name, argv, options = arguments
    if not isinstance(argv, list) or not argv:
        raise Fault(BAD_ARGUMENT, "argv must be a list with the program and its arguments")
    if not isinstance(options, dict) or options.keys() - {"user", "env"} or not isinstance(options.get("env", {}), dict):
        raise Fault(BAD_ARGUMENT, "options must be a dictionary with user (a text) and env (a dictionary), both optional")
    env = {_word(key, "env"): _word(value, f"env: {str(key)[:40]}") for key, value in options.get("env", {}).items()}
    if any(not key or "=" in key for key in env):
        raise Fault(BAD_ARGUMENT, "env: a name must not be empty or contain '='")
    return node.program(name, [_word(word, "argv") for word in argv], env, _word(options.get("user", ""), "user"))


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("Help", (), "this text", "anyone", lambda node, caller, a: help_text()),
        Method("DumpDatabase", (), "everything that is known, as JSON text", "root", lambda node, caller, a: node.dump()),
        Method(
            "CreateSliver",
            ("sliver",),
            "create a sliver that is not kept by its authority",
            "target",
            lambda node, caller, a: node.create_sliver(a[0]),
            True,
        ),
        Method(
            "DeleteSliver",
            ("sliver",),
            "remove a sliver that is not kept by its authority",
            "target",
            lambda node, caller, a: node.delete_sliver(a[0]),
            True,
        ),
        Method(
            "Start",
            ("sliver",),
            "run the start scripts of a sliver",
            "target",
            lambda node, caller, a: node.start_sliver(a[0]),
            True,
        ),
        Method(
            "Stop", ("sliver",), "end all processes of a sliver", "target", lambda node, caller, a: node.stop_sliver(a[0]), True
        ),
        Method(
            "ReCreate",
            ("sliver",),
            "stop a sliver, make sure that it exists, start it",
            "target",
            lambda node, caller, a: node.recreate_sliver(a[0]),
            True,
        ),
        Method(
            "GetRSpec",
            ("sliver",),
            "resources granted to a sliver, without loans",
            "target",
            lambda node, caller, a: node.granted(a[0]),
        ),
        Method(
            "GetEffectiveRSpec",
            ("sliver",),
            "resources of a sliver with loans",
            "target",
            lambda node, caller, a: node.effective(a[0]),
        ),
        Method(
            "GetLoans",
            ("sliver",),
            "loans of a sliver: [recipient, resource, amount]",
            "target",
            lambda node, caller, a: [list(loan) for loan in node.loans_of(a[0])],
        ),
        Method(
            "SetLoans",
            ("sliver", "loans"),
            "replace all loans of a sliver (the caller's, when the first argument is "
            "omitted); one [recipient, resource, amount], or a list of them",
            "target",
            _loans,
            True,
        ),
        Method("GetRecord", ("sliver",), "all data of a sliver", "target", lambda node, caller, a: node.describe(a[0])),
        Method("GetUsage", ("sliver",), "current usage of a sliver", "target", lambda node, caller, a: node.usage(a[0])),
        Method(
            "GetConsole",
            ("sliver",),
            "the last output of its first process",
            "target",
            lambda node, caller, a: node.console(a[0]),
        ),
        Method(
            "WaitSliver",
            ("sliver", "state", "timeout"),
            "wait until a sliver is ready, stopped or gone, for at most `timeout` seconds",
            "target",
            _wait,
        ),
        Method(
            "Exec",
            ("sliver", "argv", "options"),
            "run a program in a sliver; the connection then carries its streams. Options: user (default: the login user), env",
            "controller",
            _exec,
        ),
        Method("RenewSliver", ("sliver", "expiry"), "let a sliver live until this UNIX time", "controller", _renew),
        Method("PutRecord", ("record",), "add or change a sliver by its record", "controller", _put),
        Method("ListSlivers", (), "all slivers of this node", "controller", lambda node, caller, a: node.describe_all()),
        Method("GetCapacity", (), "what this node has, and what is assigned", "anyone", lambda node, caller, a: node.capacity()),
        Method("GetXIDs", (), "first user id of each sliver", "anyone", lambda node, caller, a: node.xids()),
        Method("GetSSHKeys", (), "keys of each sliver", "anyone", lambda node, caller, a: node.ssh_keys()),
        Method(
            "Ticket",
            ("signed",),
            "add the slivers of a signed ticket",
            "anyone",
            lambda node, caller, a: node.ticket(_text(a[0], "ticket")),
        ),
    )
}
SYNONYMS = {"Create": "CreateSliver", "Destroy": "DeleteSliver", "Recreate": "ReCreate", "AdminTicket": "Ticket"}


def canonical(name: str) -> str:
    """Return the current name of a method."""
    return SYNONYMS.get(name, name)


def help_text() -> str:
    """Return one line per method."""
    return "\n".join(METHODS[name].signature for name in sorted(METHODS)) + "\n"


class Api:
    """Checks and executes calls; raises faults only."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._changes: dict[tuple[str, str], Bucket] = {}

    def call(self, caller: Caller, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method and return its result; None is returned as 1 (A.8).

        :raises Fault: in the order: method, number of arguments, target, permission, content.
        """
        method = METHODS.get(canonical(name))
        if method is None:
            valid = ", ".join(sorted(METHODS))
            raise Fault(UNKNOWN_METHOD, f"Invalid API method {name[:60]!r}.  Valid choices are {valid}")
        arguments = list(arguments)
        if method.name == "SetLoans" and len(arguments) == 1 and caller.kind == SLIVER:
            arguments.insert(0, caller.name)
        if len(arguments) != len(method.arguments):
            raise Fault(
                WRONG_COUNT,
                f"Invalid argument count: got {len(arguments)}, expecting {len(method.arguments)} "
                f"({', '.join(method.arguments) or 'none'})",
            )
        record = self._target(method, arguments)
        self._permit(caller, method, arguments, record)
        if method.changes:
            self._not_too_often(caller, method, str(arguments[0]))
        try:
            result = method.call(self._node, caller, arguments)
        except Fault:
            raise
        except (NodeError, rspec.RSpecError, records.RecordError) as error:
            raise Fault(INTERNAL, str(error)) from None
        except Exception:
            # Internal details of the daemon must not be sent.
            log.exception("Error in %s of %s:", method.name, caller)
            raise Fault(INTERNAL, "internal error; see the log of the node manager") from None
        return 1 if result is None else result

    def _not_too_often(self, caller: Caller, method: Method, sliver: str) -> None:
        """Rate-limit callers inside slivers; root and launchers are trusted."""
        if caller.kind in (ROOT, CONTROLLER):
            return
        with self._lock:
            if len(self._changes) > 1000:
                self._changes = {key: bucket for key, bucket in self._changes.items() if not bucket.full}
            bucket = self._changes.setdefault((str(caller), sliver), Bucket(CHANGES, CHANGES_SAVED))
            wait = bucket.wait()
            if not wait:
                bucket.use(1)
        if wait:
            raise Fault(INTERNAL, f"too many changes of {sliver} by {caller}: {method.name} is possible in {wait + 0.05:.1f} s")

    def _target(self, method: Method, arguments: Sequence[Any]) -> dict[str, Any] | None:
        if not method.arguments or method.arguments[0] != "sliver":
            return None
        try:
            name = rspec.check_name(arguments[0])
        except ValueError as error:
            raise Fault(BAD_ARGUMENT, f"Invalid argument: the first argument must be a sliver name: {error}") from None
        record = self._node.sliver_record(name)
        # A wait for a deleted sliver has succeeded already.
        if record is None and method.name != "WaitSliver":
            raise Fault(
                BAD_ARGUMENT, f"Invalid argument: the first argument must be a sliver name: there is no sliver {name} here"
            )
        return record

    def _permit(self, caller: Caller, method: Method, arguments: Sequence[Any], record: dict[str, Any] | None) -> None:
        if method.who == "anyone" or caller.kind == ROOT:
            return
        if caller.kind == CONTROLLER and method.who != "root":
            return
        if method.who == "target":
            if caller.kind == SLIVER and caller.name == arguments[0]:
                return
            if caller.kind == DELEGATE and method.name in {canonical(name) for name in caller.methods}:
                return
            if self._delegated(caller, method, record or {}):
                return
        raise Fault(
            DENIED,
            f"Permission denied: {caller} may not call {method.name}"
            + (f" for {arguments[0]}" if method.who == "target" else "")
            + (f" ({caller.advice})" if caller.advice else ""),
        )

    def _delegated(self, caller: Caller, method: Method, record: Mapping[str, Any]) -> bool:
        """Return whether the record names this caller for this method.

        A name is first looked up as a delegate, then as a sliver, else as a name in a certificate.  Accounts of
        the host do not count: others chose their names for other reasons.
        """
        if not any(name == caller.name and canonical(allowed) == method.name for name, allowed in record.get("delegations", [])):
            return False
        if caller.kind == DELEGATE:
            return True
        if caller.kind not in (SLIVER, CERTIFICATE) or self._node.is_delegate(caller.name):
            return False
        return caller.kind == SLIVER or self._node.sliver_record(caller.name) is None
