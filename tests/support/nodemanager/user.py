"""Running programs as an ordinary user who has an account and a home but no other right, with
nothing added to the host.

The account exists only in a separate mount namespace, where the Python of the tests can be read
too: developers often have theirs in a home directory that is closed to others.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

from tests import REPOSITORY

# One for each of the processes that run tests side by side: limits on processes count per user.
USER_ID = 54322 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
USER_NAME = "nmtest"

_SCRIPT = """
set -e
home=$1; shift
mkdir -p "$home/.stage"
while [ "$1" != -- ]; do
    closed=$1; shift
    mount -t tmpfs -o mode=755 nodepool-test "$home/.stage"
    while [ "$1" != + ]; do
        mkdir -p "$home/.stage/${1#"$closed"/}"
        mount --rbind "$1" "$home/.stage/${1#"$closed"/}"
        shift
    done
    shift
    mount --move "$home/.stage" "$closed"
done
shift
mount --bind "$home/.passwd" /etc/passwd
cd "$home"
exec setpriv --reuid="$ID" --regid="$ID" --clear-groups --inh-caps=-all --bounding-set=-all \\
    env -i HOME="$home" USER="$NAME" LOGNAME="$NAME" PATH="$PATH" LANG=C.UTF-8 \\
      PYTHONDONTWRITEBYTECODE=1 TMPDIR="$home" "$@"
"""


def closed_directories() -> dict[pathlib.Path, set[pathlib.Path]]:
    """Directories that others may not enter -> what our programs need in them."""
    found: dict[pathlib.Path, set[pathlib.Path]] = {}
    for path in (pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix), REPOSITORY):
        for parent in reversed(path.resolve().parents):
            if parent.stat().st_mode & 0o001 == 0:
                found.setdefault(parent, set()).add(path.resolve())
                break
    return found


def open_repository(directory: pathlib.Path) -> pathlib.Path:
    """Where every user can import nodepool from: the clone, or a copy in `directory` when the
    clone is in a closed one.
    """
    if all(parent.stat().st_mode & 0o001 for parent in REPOSITORY.parents):
        return REPOSITORY
    shutil.copytree(
        REPOSITORY / "nodepool",
        directory / "nodepool",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for path in (directory / "nodepool").rglob("*"):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    (directory / "nodepool").chmod(0o755)
    return directory


def make_home(directory: pathlib.Path) -> pathlib.Path:
    """A home for the user; `directory` must be one that others can reach."""
    (directory / ".passwd").write_text(
        pathlib.Path("/etc/passwd").read_text()
        + f"{USER_NAME}:x:{USER_ID}:{USER_ID}::{directory}:/bin/sh\n"
    )
    (directory / ".passwd").chmod(0o644)
    os.chown(directory, USER_ID, USER_ID)
    return directory


def command(home: pathlib.Path, *argv: str) -> list[str]:
    """The command that becomes the user and then `argv`, in the same process."""
    closed: list[str] = []
    for directory, paths in closed_directories().items():
        closed += [str(directory), *map(str, sorted(paths)), "+"]
    return [
        "env",
        f"ID={USER_ID}",
        f"NAME={USER_NAME}",
        "unshare",
        "-m",
        "--propagation",
        "private",
        "sh",
        "-c",
        _SCRIPT,
        "sh",
        str(home),
        *closed,
        "--",
        *argv,
    ]


def processes(user: int = USER_ID) -> list[int]:
    """Of a user, as the host sees them; those that have ended and wait for their parent do not
    count.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = pathlib.Path(f"/proc/{entry}/status").read_text()
            except OSError:
                continue
            if f"Uid:\t{user}\t" in status and "State:\tZ" not in status:
                found.append(int(entry))
    return found
