"""Runs a pushed node manager as a systemd unit if possible, or as a process (NM-C.8)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nodepool.nodemanager.kernel import removal, syscalls

#: Seconds.
START_TIMEOUT, COMMAND_TIMEOUT = 75.0, 60.0
LONELY_CHECK = 60.0
REMOVE_TIMEOUT = 20.0
UNITS = Path("/run/systemd/system")
#: Number of the descriptor that keeps the base directory from being removed.
LOCK_VARIABLE = "NODEPOOL_PUSHED_LOCK"


class ServiceError(Exception):
    """The daemon cannot be started; the text contains the reason."""


def logging_config(path: str) -> dict[str, Any]:
    """Return the configuration of a log that does not grow without limit."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"simple": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {
            "file": {
                "class": "logging.handlers.RotatingFileHandler",
                "filename": path,
                "maxBytes": 4 << 20,
                "backupCount": 1,
                "formatter": "simple",
            }
        },
        "root": {"level": "INFO", "handlers": ["file"]},
    }


def listen_address(address: str) -> str:
    """Return the address if this machine has it, else (a name, or behind NAT) all addresses.

    A machine's own name is often a loopback address to itself.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        socket.inet_pton(family, address)
        probe.bind((address, 0))
        return address
    return "::" if ":" in address else "0.0.0.0"


# -- life of the daemon


def with_systemd() -> bool:
    return os.geteuid() == 0 and UNITS.is_dir() and shutil.which("systemctl") is not None


def unit_name(place: str) -> str:
    return f"nodepool-backing-{place}.service"


def command(directory: Path) -> list[str]:
    return [sys.executable, "-s", "-m", "nodepool.nodemanager.pushed.program", str(directory)]


def unit(directory: Path, code: str) -> str:
    """Return the unit, as etc/systemd/nodepool-nodemanager.service, for the current boot only."""
    argv = " ".join(f'"{part}"' for part in command(directory)).replace("%", "%%")
    environment = f"PYTHONPATH={code}".replace("%", "%%")
    return f"""\
[Unit]
Description=Nodepool node manager of a launcher ({directory.name})

[Service]
Type=notify
Environment="{environment}"
ExecStart={argv}
UMask=0022
Restart=on-failure
RestartSec=2
KillMode=process
TasksMax=infinity
TimeoutStopSec=30
LimitNOFILE=65536
"""


def start(place: str, directory: Path, code: str) -> None:
    """Start, and wait until it runs.

    :raises ServiceError: it does not start.
    """
    if with_systemd():
        path = UNITS / unit_name(place)
        path.write_text(unit(directory, code))
        argv, environment = (
            ["sh", "-c", 'systemctl daemon-reload && systemctl start "$0"', path.name],
            dict(os.environ),
        )
    else:
        argv, environment = command(directory), {**os.environ, "PYTHONPATH": code}
    environment = {
        k: v
        for k, v in environment.items()
        if k != LOCK_VARIABLE and not k.startswith(("SSH_", "SUDO_"))
    }
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_TIMEOUT,
            env=environment,
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"the node manager has not started within {START_TIMEOUT:g} s") from None
    if done.returncode != 0:
        raise ServiceError(done.stderr.strip()[-1000:] or f"{argv[0]}: status {done.returncode}")


def stop(place: str) -> None:
    """End the unit, if there is one."""
    if with_systemd() and (UNITS / unit_name(place)).exists():
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(
                ["systemctl", "stop", unit_name(place)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )


def forget(place: str) -> None:
    """Remove the unit."""
    path = UNITS / unit_name(place)
    if with_systemd() and path.exists():
        path.unlink(missing_ok=True)
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(
                ["systemctl", "daemon-reload"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )


def run(directory: Path, empty: Callable[[], bool]) -> tuple[bool, int]:
    """Run the daemon; return whether it ended because it is not needed, and exit status."""
    from nodepool.nodemanager import service as nodemanager
    from nodepool.process.parts import Part
    from nodepool.process.service import run_daemon

    args = nodemanager.create_parser().parse_args(
        [
            "-c",
            str(directory / "nodemanager.yaml"),
            "-p",
            str(directory / "pid"),
            "-l",
            str(directory / "logging.yaml"),
        ]
    )
    lonely = Loneliness(directory, empty)

    status = run_daemon(
        "nodepool-nodemanager",
        "nodepool-nodemanager",
        args,
        lambda: nodemanager.create(args, Part("lonely", lonely.start, lonely.stop)),
    )
    return lonely.ended, status


class Loneliness:
    """Ends the daemon after the seconds in file ``idle`` without slivers and launchers.

    Connected launchers change the time of the file ``contact``. Its value does not count, since the
    clock of a machine may be set after the boot.
    """

    def __init__(self, directory: Path, empty: Callable[[], bool]) -> None:
        self._directory = directory
        self._empty = empty
        self._stop = threading.Event()
        self.ended = False

    def start(self) -> None:
        # Python 3.13.0 to 3.13.3 cannot start a thread that was created before the fork.
        threading.Thread(target=self._run, name="Thread-nm-lonely", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        try:
            limit = float((self._directory / "idle").read_text())
        except (OSError, ValueError):
            return
        contact, since = 0, time.monotonic()
        while limit > 0 and not self._stop.wait(min(LONELY_CHECK, limit)):
            with contextlib.suppress(Exception):
                latest = (self._directory / "contact").stat().st_mtime_ns
                if latest != contact:
                    contact, since = latest, time.monotonic()
                elif time.monotonic() - since > limit and self._empty():
                    self.ended = True
                    os.kill(os.getpid(), 15)
                    return


# -- removing


def mounts_below(directory: Path) -> list[str]:
    """Mount points, the innermost first."""
    prefix = f"{directory.resolve()}/"
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4].decode("unicode_escape") for line in file]
    return sorted((point for point in points if point.startswith(prefix)), reverse=True)


def remove_tree(directory: Path) -> None:
    """Remove a directory, but never the content of mounts in it.

    A template that is being created when the daemon ends may continue for a moment.

    :raises OSError: something cannot be unmounted or removed.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT
    pause = threading.Event()
    while True:
        try:
            _remove_tree(directory)
            return
        except FileNotFoundError:
            if not directory.exists():
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        pause.wait(0.2)


def _remove_tree(directory: Path) -> None:
    for point in mounts_below(directory):
        syscalls.umount(point)
    if left := mounts_below(directory):
        raise OSError(f"{left[0]} is still mounted")
    removal.remove_tree(directory)
