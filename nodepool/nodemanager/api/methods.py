"""Methods of the API: permitted callers, arguments and faults (NM-A.8, NM-B.3, NM-C.5)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.helper.zygote import Pending
from nodepool.nodemanager.records import loans, records, rspec

log = logging.getLogger("nodepool.nodemanager.api")

UNKNOWN_METHOD, WRONG_COUNT, BAD_ARGUMENT, INTERNAL, DENIED = 100, 101, 102, 104, 108
#: Changes per second of one sliver by a caller other than root and controllers, and how many may be
#: saved up.
CHANGES, CHANGES_SAVED = 0.5, 20
#: Maximum characters of an argument of a program, as in Linux.
MAX_WORD = 128 * 1024 - 1
#: Maximum timeout of WaitSliver and WaitEvents in seconds, and characters of a reader's name.
MAX_WAIT, MAX_READER = 300.0, 255

ROOT, SLIVER, DELEGATE, CONTROLLER, CERTIFICATE, OTHER = (
    "root",
    "sliver",
    "delegate",
    "controller",
    "certificate",
    "other",
)


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

    ``kind``: root; a sliver; a delegate; a controller (a launcher with a certificate); another
    owner of a certificate; or another account of the host.
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


@dataclass(frozen=True)
class Method:
    name: str
    arguments: tuple[str, ...]
    purpose: str
    #: anyone, root, controller (or root), or target: the sliver that is the first argument, root, a
    #: controller, or whom the sliver's record names.
    who: str
    #: The call is logged, and causes work on this host.
    changes: bool = False
    #: Returns the checked arguments for the function that answers the call. Raises Fault.
    check: Callable[[Caller, Sequence[Any]], Sequence[Any]] = lambda caller, arguments: arguments

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}): {self.purpose}"


def _loans(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    try:
        return arguments[0], loans.validate(arguments[1])
    except loans.LoanError as error:
        raise Fault(BAD_ARGUMENT, f"invalid loans: {error}") from None


def _put(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    try:
        given = arguments[0]
        # Created immediately for a launcher; others may still ask for one that only CreateSliver
        # creates.
        record = records.parse_record(
            {"plc_instantiated": True, **given} if isinstance(given, dict) else given
        )
    except records.RecordError as error:
        raise Fault(BAD_ARGUMENT, str(error)) from None
    if record.get("account_type") != records.SLIVER:
        raise Fault(BAD_ARGUMENT, "only records of slivers can be put")
    return str(caller), record


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise Fault(BAD_ARGUMENT, f"{what} must be a number of seconds")
    return float(value)


def _wait(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    name, state, timeout = arguments
    if state not in ("ready", "stopped", "gone"):
        raise Fault(BAD_ARGUMENT, f"state must be ready, stopped or gone, not {str(state)[:40]!r}")
    return name, state, min(MAX_WAIT, _seconds(timeout, "timeout"))


def wait(
    reached: Callable[[str, str], dict[str, Any] | None], name: str, state: str, timeout: float
) -> dict[str, Any] | Parked:
    """Return the answer to WaitSliver.

    :param reached: returns the sliver when it is in the state, or can no longer reach it.
    """
    late = {"name": name, "state": "waiting"}
    found = reached(name, state)
    if found is None and timeout:
        return Parked(name, timeout, lambda: reached(name, state), late)
    return found or late


def _events(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    reader, confirmed, after, timeout = arguments
    for number in (confirmed, after):
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise Fault(BAD_ARGUMENT, "confirmed and after must be numbers of events, or 0")
    if len(_text(reader, "reader")) > MAX_READER:
        raise Fault(BAD_ARGUMENT, f"reader must have at most {MAX_READER} characters")
    return reader, confirmed, after, min(MAX_WAIT, _seconds(timeout, "timeout"))


def _renew(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    expiry = _seconds(arguments[1], "expiry")
    if expiry <= time.time():
        raise Fault(BAD_ARGUMENT, "expiry must be a UNIX time in the future")
    return arguments[0], expiry


def _ticket(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    return (_text(arguments[0], "ticket"),)


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


def _exec(caller: Caller, arguments: Sequence[Any]) -> Sequence[Any]:
    name, argv, options = arguments
    if not isinstance(argv, list) or not argv:
        raise Fault(BAD_ARGUMENT, "argv must be a list with the program and its arguments")
    if (
        not isinstance(options, dict)
        or options.keys() - {"user", "env"}
        or not isinstance(options.get("env", {}), dict)
    ):
        raise Fault(
            BAD_ARGUMENT,
            "options must be a dictionary with user (a text) and env (a dictionary), both optional",
        )
    env = {
        _word(key, "env"): _word(value, f"env: {str(key)[:40]}")
        for key, value in options.get("env", {}).items()
    }
    if any(not key or "=" in key for key in env):
        raise Fault(BAD_ARGUMENT, "env: a name must not be empty or contain '='")
    return name, [_word(word, "argv") for word in argv], env, _word(options.get("user", ""), "user")


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("Help", (), "this text", "anyone"),
        Method("DumpDatabase", (), "everything that is known, as JSON text", "root"),
        Method(
            "CreateSliver",
            ("sliver",),
            "create a sliver that is not kept by its authority",
            "target",
            changes=True,
        ),
        Method(
            "DeleteSliver",
            ("sliver",),
            "remove a sliver that is not kept by its authority",
            "target",
            changes=True,
        ),
        Method("Start", ("sliver",), "run the start scripts of a sliver", "target", changes=True),
        Method("Stop", ("sliver",), "end all processes of a sliver", "target", changes=True),
        Method(
            "ReCreate",
            ("sliver",),
            "stop a sliver, make sure that it exists, start it",
            "target",
            changes=True,
        ),
        Method("GetRSpec", ("sliver",), "resources granted to a sliver, without loans", "target"),
        Method("GetEffectiveRSpec", ("sliver",), "resources of a sliver with loans", "target"),
        Method(
            "GetLoans", ("sliver",), "loans of a sliver: [recipient, resource, amount]", "target"
        ),
        Method(
            "SetLoans",
            ("sliver", "loans"),
            "replace all loans of a sliver (the caller's, when the first argument is omitted); "
            "one [recipient, resource, amount], or a list of them",
            "target",
            changes=True,
            check=_loans,
        ),
        Method("GetRecord", ("sliver",), "all data of a sliver", "target"),
        Method("GetUsage", ("sliver",), "current usage of a sliver", "target"),
        Method("GetConsole", ("sliver",), "the last output of its first process", "target"),
        Method(
            "WaitSliver",
            ("sliver", "state", "timeout"),
            "wait until a sliver is ready, stopped or gone, for at most `timeout` seconds",
            "target",
            check=_wait,
        ),
        Method(
            "Exec",
            ("sliver", "argv", "options"),
            "run a program in a sliver; the connection then carries its streams. Options: user "
            "(default: the login user), env",
            "controller",
            check=_exec,
        ),
        Method(
            "RenewSliver",
            ("sliver", "expiry"),
            "let a sliver live until this UNIX time",
            "controller",
            check=_renew,
        ),
        Method(
            "PutRecord",
            ("record",),
            "add or change a sliver by its record",
            "controller",
            check=_put,
        ),
        Method("ListSlivers", (), "all slivers of this node", "controller"),
        Method(
            "WaitEvents",
            ("reader", "confirmed", "after", "timeout"),
            "wait until slivers have ended, with what they used, or a process was killed for "
            "memory, for at most `timeout` seconds; confirm events that the reader has stored",
            "controller",
            check=_events,
        ),
        Method("GetCapacity", (), "what this node has, and what is assigned", "anyone"),
        Method("GetXIDs", (), "first user id of each sliver", "anyone"),
        Method("GetSSHKeys", (), "keys of each sliver", "anyone"),
        Method(
            "Ticket", ("signed",), "add the slivers of a signed ticket", "anyone", check=_ticket
        ),
    )
}
SYNONYMS = {
    "Create": "CreateSliver",
    "Destroy": "DeleteSliver",
    "Recreate": "ReCreate",
    "AdminTicket": "Ticket",
}


def canonical(name: str) -> str:
    """Return the current name of a method."""
    return SYNONYMS.get(name, name)


def help_text() -> str:
    """Return one line per method."""
    return "\n".join(METHODS[name].signature for name in sorted(METHODS)) + "\n"


class Api:
    """Checks and executes calls; raises faults only.

    :param calls: name of each method -> the function that answers it; raises NodeError for the
        caller.
    :param sliver_record: returns the record of a sliver, or None.
    :param is_delegate: returns whether a delegate has this name.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[..., object]],
        sliver_record: Callable[[str], dict[str, Any] | None],
        is_delegate: Callable[[str], bool],
    ) -> None:
        self._calls = {"Help": help_text, **calls}
        assert self._calls.keys() == METHODS.keys(), "each method needs its function"
        self._sliver_record = sliver_record
        self._is_delegate = is_delegate
        self._lock = threading.Lock()
        self._changes: dict[tuple[str, str], Bucket] = {}

    def call(self, caller: Caller, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method and return its result; None is returned as 1 (A.8).

        :raises Fault: in the order: method, number of arguments, target, permission, content.
        """
        method = METHODS.get(canonical(name))
        if method is None:
            valid = ", ".join(sorted(METHODS))
            raise Fault(
                UNKNOWN_METHOD, f"Invalid API method {name[:60]!r}.  Valid choices are {valid}"
            )
        arguments = list(arguments)
        if method.name == "SetLoans" and len(arguments) == 1 and caller.kind == SLIVER:
            arguments.insert(0, caller.name)
        if len(arguments) != len(method.arguments):
            raise Fault(
                WRONG_COUNT,
                f"Invalid argument count: got {len(arguments)}, expecting {len(method.arguments)} "
                f"({', '.join(method.arguments) or 'none'})",
            )
        self._permit(caller, method, arguments, self._target(method, arguments))
        if method.changes:
            self._not_too_often(caller, method, str(arguments[0]))
        try:
            result = self._calls[method.name](*method.check(caller, arguments))
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
                self._changes = {
                    key: bucket for key, bucket in self._changes.items() if not bucket.full
                }
            bucket = self._changes.setdefault((str(caller), sliver), Bucket(CHANGES, CHANGES_SAVED))
            wait = bucket.wait()
            if not wait:
                bucket.use(1)
        if wait:
            raise Fault(
                INTERNAL,
                f"too many changes of {sliver} by {caller}: {method.name} is possible in "
                f"{wait + 0.05:.1f} s",
            )

    def _target(self, method: Method, arguments: Sequence[Any]) -> dict[str, Any] | None:
        if not method.arguments or method.arguments[0] != "sliver":
            return None
        try:
            name = rspec.check_name(arguments[0])
        except ValueError as error:
            raise Fault(
                BAD_ARGUMENT, f"Invalid argument: the first argument must be a sliver name: {error}"
            ) from None
        record = self._sliver_record(name)
        # A wait for a deleted sliver has succeeded already.
        if record is None and method.name != "WaitSliver":
            raise Fault(
                BAD_ARGUMENT,
                "Invalid argument: the first argument must be a sliver name: there is no sliver "
                f"{name} here",
            )
        return record

    def _permit(
        self,
        caller: Caller,
        method: Method,
        arguments: Sequence[Any],
        record: dict[str, Any] | None,
    ) -> None:
        if method.who == "anyone" or caller.kind == ROOT:
            return
        if caller.kind == CONTROLLER and method.who != "root":
            return
        if method.who == "target":
            if caller.kind == SLIVER and caller.name == arguments[0]:
                return
            if caller.kind == DELEGATE and method.name in {
                canonical(name) for name in caller.methods
            }:
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

        A name is first looked up as a delegate, then as a sliver, else as a name in a certificate.
        Accounts of the host do not count: others chose their names for other reasons.
        """
        if not any(
            name == caller.name and canonical(allowed) == method.name
            for name, allowed in record.get("delegations", [])
        ):
            return False
        if caller.kind == DELEGATE:
            return True
        if caller.kind not in (SLIVER, CERTIFICATE) or self._is_delegate(caller.name):
            return False
        return caller.kind == SLIVER or self._sliver_record(caller.name) is None
