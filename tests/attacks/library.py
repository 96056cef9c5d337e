"""What attempts share. Sent into the sliver before them; standard library only.

An attempt says what may come of it: the names of errors, or words that it returns. It raises Escape when it has got
what it must not get.
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
ATTEMPTS: dict[str, tuple[str, Callable[[], str], Collection[str]]] = {}


class Escape(Exception):
    """The attempt has succeeded; the text says what it got."""


def attempt(what: str, may: Collection[str]) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register an attempt. `may`: the outcomes that are all right."""
    def register(function: Callable[[], str]) -> Callable[[], str]:
        ATTEMPTS[function.__name__] = (what, function, may)
        return function
    return register


def call(number: int, *arguments: object) -> int:
    """A system call; minus the number of the error."""
    ctypes.set_errno(0)
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))
    return -ctypes.get_errno() if result < 0 else result


def name_of(result: int) -> str:
    """Of what `call` returned: the error's name, or "done"."""
    return errno.errorcode.get(-result, str(-result)) if result < 0 else "done"


def refused(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def others() -> list[int]:
    """All processes that can be seen, but this one."""
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())


def run_all() -> None:
    """Try all that are registered; a line of JSON for each."""
    for name, (_what, function, _may) in ATTEMPTS.items():
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
