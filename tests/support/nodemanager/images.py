"""Images of slivers with an SSH server, made of programs of this host, and ways to break them."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Callable

from nodepool.nodemanager.rootfs.templates import RootStore

PROGRAMS = (
    "/bin/sh",
    "/bin/cat",
    "/bin/sleep",
    "/bin/true",
    "/bin/rm",
    "/usr/bin/ssh-keygen",
    "/usr/sbin/sshd",
    # Of OpenSSH 9.8 and newer.
    "/usr/lib/openssh/sshd-auth",
    "/usr/lib/openssh/sshd-session",
)
SSHD = "usr/sbin/sshd"


def make_tree(target: pathlib.Path) -> pathlib.Path:
    """Create a root tree in which root can log in and run a shell."""
    for name in ("etc", "root", "bin", "usr/bin", "usr/sbin", "home", "var/log", "var/empty"):
        (target / name).mkdir(parents=True)
    programs = [program for program in PROGRAMS if pathlib.Path(program).exists()]
    listed = subprocess.run(
        ["ldd", *programs], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and word[-1] != ":"}
    for path in (*programs, *libraries):
        copy = target / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pathlib.Path(path).resolve(), copy)
    (target / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nsshd:x:100:100::/var/empty:/bin/false\n"
    )
    (target / "etc/group").write_text("root:x:0:\nsshd:x:100:\n")
    return target


def break_boot(tree: pathlib.Path) -> None:
    """No account can be created in it."""
    (tree / "etc/passwd").unlink()
    (tree / "etc/passwd").mkdir()


def break_ssh(tree: pathlib.Path) -> None:
    (tree / SSHD).unlink()


def break_host_key(tree: pathlib.Path) -> None:
    """Let each connection find another host key."""
    real = tree / "usr/sbin/sshd-real"
    (tree / SSHD).rename(real)
    (tree / SSHD).write_text(
        "#!/bin/sh\n"
        "k=/root/key-$$\n"
        "ssh-keygen -q -t ed25519 -N '' -f $k >&2 </dev/null\n"
        "exec /usr/sbin/sshd-real -h $k -i -e -f /dev/null\n"
    )
    (tree / SSHD).chmod(0o755)


def break_command(tree: pathlib.Path) -> None:
    """Let the program fail with which images are verified."""
    (tree / "bin/cat").unlink()


#: Name -> what breaks a tree so.
BROKEN: dict[str, Callable[[pathlib.Path], None]] = {
    "does not boot": break_boot,
    "no SSH": break_ssh,
    "other host keys": break_host_key,
    "command fails": break_command,
}


def templates(store: RootStore) -> dict[str, list[str]]:
    """Return the slivers that use each complete template of the store."""
    return {
        references.parent.name: sorted(path.name for path in references.iterdir())
        for references in sorted(store.directory.glob("*/refs"))
        if references.parent.suffix not in (".new", ".old")
    }
