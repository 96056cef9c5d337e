"""Runs ip, tc and nft: one process per batch of requests, each with a deadline."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nodepool.nodemanager.kernel import commands
from nodepool.nodemanager.outcomes import BackendError

TIMEOUT = 20.0
_ENVIRONMENT = {"PATH": commands.PATH, "LC_ALL": "C"}


class NetworkError(BackendError):
    """A network cannot be created or changed; the text has the request and the reason."""


def run(name: str, arguments: Sequence[str], text: str = "", inside: int | None = None) -> str:
    """Run a tool with `text` as its input and return its output.

    :param inside: a process in whose network namespace the tool runs.
    :raises NetworkError: it is missing, fails, or times out.
    """
    path = commands.find(name)
    if path is None:
        raise NetworkError(
            f"{name} is missing: install {'nftables' if name == 'nft' else 'iproute2'}"
        )
    command = [path, *arguments]
    if inside is not None:
        command = [
            commands.find("nsenter") or "nsenter",
            f"--net=/proc/{inside}/ns/net",
            "--",
            *command,
        ]
    return commands.run(
        command,
        TIMEOUT,
        f"{name} {' '.join(arguments)}",
        text=text,
        env=_ENVIRONMENT,
        error=NetworkError,
    )


def batch(name: str, lines: Sequence[str], inside: int | None = None, force: bool = False) -> str:
    """Run several requests of ip or tc. With `force`, failures are skipped and not reported."""
    if not lines:
        return ""
    arguments = ["-force", "-batch", "-"] if force else ["-batch", "-"]
    try:
        return run(name, arguments, "\n".join(lines) + "\n", inside)
    except NetworkError as error:
        # A retryable failure means that nothing was done: the host is short of something, or a
        # timeout.
        if force and not error.retry and commands.find(name) is not None:
            return ""
        raise


def supports(lines: Sequence[tuple[str, ...]]) -> str | None:
    """Try requests in a temporary network namespace; return the error, None if all work."""
    unshare = commands.find("unshare")
    if unshare is None or os.geteuid() != 0:
        return None
    script = " && ".join(" ".join(line) for line in lines)
    try:
        commands.run(
            [unshare, "--net", "--", "/bin/sh", "-c", script],
            TIMEOUT,
            "unshare --net",
            env=_ENVIRONMENT,
        )
    except BackendError as error:
        return str(error)
    return None


def sysctl(name: str, value: int) -> None:
    """Set a sysctl only if it exists, as hosts may lack IPv6. Raises NetworkError."""
    path = f"/proc/sys/{name}"
    if os.path.exists(path):
        try:
            with open(path, "w") as file:
                file.write(str(value))
        except OSError as error:
            raise NetworkError(f"sysctl {name.replace('/', '.')}: {error.strerror}") from error
