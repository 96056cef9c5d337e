"""What attempts share. Sent into the sliver before them; standard library only.

An attempt says what may come of it: the names of errors, or words that it returns. It raises Escape
when it has got what it must not get.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection

libc = ctypes.CDLL(None, use_errno=True)
#: Name -> what it tries, how, what may come of it; and what may besides in a sliver with all
#: privileges.
ATTEMPTS: dict[str, tuple[str, Callable[[], str], Collection[str], Collection[str]]] = {}


class Escape(Exception):
    """The attempt has succeeded; the text says what it got."""


def attempt(
    what: str, may: Collection[str], privileged: Collection[str] = ()
) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register an attempt.

    :param may: the outcomes that are all right.
    :param privileged: further ones in a sliver with all privileges.
    """

    def register(function: Callable[[], str]) -> Callable[[], str]:
        ATTEMPTS[function.__name__] = (what, function, may, privileged)
        return function

    return register


def attempt_calls(calls: Collection[tuple[str, Collection[str], tuple[object, ...]]]) -> None:
    """Register system calls: (name, what may come of it, number and arguments)."""
    for name, may, words in calls:

        def function(words: tuple[object, ...] = words) -> str:
            number, *arguments = words
            assert isinstance(number, int)
            return name_of(call(number, *arguments))

        # With the privilege "docker" mounts by descriptor are let through; these arguments lead
        # nowhere.
        ATTEMPTS[name] = (
            name,
            function,
            may,
            ("EPERM", "EINVAL", "EFAULT", "ENOENT", "done") if name.startswith("18 ") else (),
        )


def tried(function: Callable[[], object], what: str) -> str:
    """It must raise OSError, whose name is the outcome."""
    try:
        result = function()
    except OSError as error:
        return refused(error)
    raise Escape(f"{what}: {result!r}")


def all_tried(tries: Collection[tuple[str, Callable[[], object]]], may: Collection[str]) -> str:
    """Each must raise one of these errors; then "refused"."""
    for what, function in tries:
        outcome = tried(function, what)
        if outcome not in may:
            raise Escape(f"{what}: {outcome}")
    return "refused"


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    ctypes.set_errno(0)
    if (
        libc.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
        )
        < 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def call(number: int, *arguments: object) -> int:
    """A system call; minus the number of the error."""
    ctypes.set_errno(0)
    result = int(
        libc.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments),
        )
    )
    return -ctypes.get_errno() if result < 0 else result


def name_of(result: int) -> str:
    """Of what `call` returned: the error's name, or "done"."""
    return errno.errorcode.get(-result, str(-result)) if result < 0 else "done"


def refused(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def others() -> list[int]:
    """All processes that can be seen, but this one."""
    return sorted(
        int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()
    )


def run_all() -> None:
    """Try all that are registered; a line of JSON for each."""
    for name, (_what, function, _may, _privileged) in ATTEMPTS.items():
        try:
            result = {"outcome": function()}
        except Escape as escape:
            result = {"escape": str(escape)}
        except OSError as error:
            result = {"outcome": refused(error)}
        except BaseException:
            result = {"error": traceback.format_exc()[-2000:]}
        print(json.dumps({"attempt": name, **result}), flush=True)
    sys.stdout.flush()
