"""Programs of the host, run with a deadline and one error text for failures."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from nodepool.nodemanager.kernel.syscalls import SHORTAGE
from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager.commands")

PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
#: Maximum characters of a program's output in error texts.
SAID = 1000


def find(name: str) -> str | None:
    """Return the path of a program, independent of the daemon's own PATH."""
    return shutil.which(name, path=PATH)


def run(
    argv: Sequence[str],
    timeout: float,
    what: str,
    *,
    text: str = "",
    env: Mapping[str, str] | None = None,
    error: type[BackendError] = BackendError,
    retry: bool = False,
) -> str:
    """Run a program with `text` as its input and return its output.

    The arguments are logged: pass secrets in the text.

    :param timeout: seconds, after which the program is killed.
    :param what: name of the program for messages.
    :param error: the exception to raise when it cannot be run, fails or times out.
    :param retry: a failure may be temporary; timeouts and shortages on the host always are.
    """
    log.debug("Run: %s", shlex.join(argv))
    try:
        done = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=env,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise error(f"{what} did not end within {timeout:g} s", retry=True) from None
    except OSError as problem:
        raise error(
            f"{what} cannot be run: {problem.strerror}", retry=problem.errno in SHORTAGE
        ) from problem
    if done.returncode != 0:
        raise error(
            f"{what}: {_shorten(done.stderr or done.stdout) or f'exit status {done.returncode}'}",
            retry=retry,
        )
    return done.stdout


def _shorten(said: str) -> str:
    """Return the text in one line without its middle: the reason may be at either end."""
    line = " ".join(said.split())
    return line if len(line) <= SAID else f"{line[: SAID // 2]} ... {line[-SAID // 2 :]}"
