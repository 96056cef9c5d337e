"""ip, tc and nft: one process for a batch of requests, each with a deadline."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from nodepool.nodemanager.backends.base import BackendError

TIMEOUT = 20.0
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "LC_ALL": "C"}


class NetworkError(BackendError):
    """The network of a sliver cannot be made or changed; the text names the request and what the kernel said."""


def tool(name: str) -> str | None:
    return shutil.which(name, path=_PATH)


def run(name: str, arguments: Sequence[str], text: str = "", inside: int | None = None) -> str:
    """Run a tool with `text` as its input; `inside`: a process in whose network namespace. Returns its output.

    :raises NetworkError: it is missing, fails, or takes too long.
    """
    path = tool(name)
    if path is None:
        raise NetworkError(f"{name} is missing: install {'nftables' if name == 'nft' else 'iproute2'}")
    command = [path, *arguments]
    if inside is not None:
        command = [tool("nsenter") or "nsenter", f"--net=/proc/{inside}/ns/net", "--", *command]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False,
                              env=_ENVIRONMENT, cwd="/")
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{name} did not end within {TIMEOUT:g} s", retry=True) from None
    except OSError as error:
        raise NetworkError(f"{name} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:400]
        raise NetworkError(f"{name} {' '.join(arguments)}: {said or f'exit status {done.returncode}'}")
    return done.stdout


def batch(name: str, lines: Sequence[str], inside: int | None = None, force: bool = False) -> str:
    """Several requests to ip or tc. With `force` the rest is done after one that fails, and no failure is reported."""
    if not lines:
        return ""
    arguments = ["-force", "-batch", "-"] if force else ["-batch", "-"]
    try:
        return run(name, arguments, "\n".join(lines) + "\n", inside)
    except NetworkError:
        if force and tool(name) is not None:
            return ""
        raise


def supports(lines: Sequence[tuple[str, ...]]) -> str | None:
    """Try requests in a network namespace that vanishes with them; None: all work, else what was said."""
    unshare = tool("unshare")
    if unshare is None or os.geteuid() != 0:
        return None
    script = " && ".join(" ".join(line) for line in lines)
    try:
        done = subprocess.run([unshare, "--net", "--", "/bin/sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=TIMEOUT, check=False, env=_ENVIRONMENT, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else " ".join(done.stderr.split())[-200:]
