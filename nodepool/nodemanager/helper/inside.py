"""Operations with a sliver's identity in its own tree: files, accounts, identity, exec.

It runs in workers of the helper that have entered the sliver (or in its process 1 before exec), so
a link planted by the sliver leads nowhere but into the sliver; links are refused all the same,
because accounts inside must not be able to fool the sliver's root either.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import posixpath
import resource
import signal
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodepool.nodemanager.client import privileges
from nodepool.nodemanager.confinement import seccomp
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.descriptors import held

_SAFE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
MAX_TABLE = 4 * 1024 * 1024
"""Bytes of /etc/passwd and the like that are read."""

#: Open files of a process: what systemd gives its services. Programs that use select() break above
#: the first.
SOFT_FILES, MAX_FILES = 1024, 524288
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Account:
    """A line of the sliver's /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def read_file(path: str, limit: int = MAX_TABLE) -> str:
    """Return a regular file of the tree, at most `limit` bytes; "" if missing. Never blocks."""
    try:
        with held(_root()) as root:
            descriptor = syscalls.openat2(root, path, os.O_RDONLY | os.O_NONBLOCK, _SAFE)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ""
        raise
    with held(descriptor):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return ""
        # Python allocates as much memory as requested.
        return os.read(descriptor, min(limit, found.st_size)).decode(errors="replace")


def accounts() -> dict[str, Account]:
    """Return all accounts of the sliver; damaged lines are ignored."""
    found: dict[str, Account] = {}
    for line in read_file("/etc/passwd").splitlines():
        fields = line.split(":")
        if len(fields) >= 7 and fields[2].isdigit() and fields[3].isdigit():
            found.setdefault(
                fields[0],
                Account(
                    fields[0],
                    int(fields[2]),
                    int(fields[3]),
                    fields[5] or "/",
                    fields[6] or "/bin/sh",
                ),
            )
    return found


def groups_of(name: str) -> list[int]:
    """Return the supplementary groups of an account."""
    found = []
    for line in read_file("/etc/group").splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit() and name in fields[3].split(","):
            found.append(int(fields[2]))
    return found[:64]


def open_directory(
    path: str, uid: int = 0, gid: int = 0, mode: int = 0o755, make: bool = True
) -> int:
    """Open a directory, following no links and creating missing ones for the owner. OSError."""
    current = _root()
    for part in [p for p in posixpath.normpath(path).split("/") if p]:
        try:
            following = syscalls.openat2(current, part, os.O_RDONLY | os.O_DIRECTORY, _SAFE)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, mode, dir_fd=current)
            following = syscalls.openat2(current, part, os.O_RDONLY | os.O_DIRECTORY, _SAFE)
            os.fchown(following, uid, gid)
            os.fchmod(following, mode)
        except OSError as error:
            if error.errno in syscalls.SHORTAGE:
                raise
            raise OSError(
                error.errno, f"{path}: {part!r} is not a plain directory (a link or a file)"
            ) from error
        finally:
            os.close(current)
        current = following
    return current


def write_file(
    path: str, content: bytes, mode: int, uid: int = 0, gid: int = 0, directory_mode: int = 0o755
) -> None:
    """Write a new file and rename it into place, following no links. Raises OSError."""
    parent, name = posixpath.split(posixpath.normpath(path))
    directory = open_directory(parent, uid, gid, directory_mode)
    temporary = f".{name}.nodepool"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        with held(
            os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
                0o600,
                dir_fd=directory,
            )
        ) as descriptor:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise OSError(error.errno, f"{path}: {os.strerror(error.errno or 0)}") from error
    finally:
        os.close(directory)


def ensure_account(name: str, owner: int = 0) -> Account:
    """Return the account; create it with sudo rights and without password if it is missing.

    `owner` is the owner of system files; without root inside it is the only id, also of the
    account. Raises OSError.
    """
    known = accounts()
    if name in known:
        return known[name]
    used = {account.uid for account in known.values()} | {account.gid for account in known.values()}
    uid = owner or next(number for number in range(1000, 60000) if number not in used)
    account = Account(
        name, uid, uid, f"/home/{name}", "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    )
    # "*" matches no password; "!" means locked, and sshd then refuses keys, too.
    for path, line, mode in (
        ("/etc/passwd", f"{name}:x:{uid}:{uid}::{account.home}:{account.shell}", 0o644),
        ("/etc/group", f"{name}:x:{uid}:", 0o644),
        ("/etc/shadow", f"{name}:*:19000:0:99999:7:::", 0o640),
    ):
        text = read_file(path)
        if not any(existing.startswith(f"{name}:") for existing in text.splitlines()):
            write_file(
                path,
                (text.rstrip("\n") + "\n" + line + "\n").lstrip("\n").encode(),
                mode,
                owner,
                owner,
            )
    os.close(open_directory("/home", owner, owner))
    os.close(open_directory(account.home, uid, uid))
    if os.path.isdir("/etc/sudoers.d") and not owner:
        write_file(
            f"/etc/sudoers.d/90-nodepool-{name}",
            f"{name} ALL=(ALL:ALL) NOPASSWD: ALL\n".encode(),
            0o440,
        )
    return account


def unlock(names: Collection[str], owner: int = 0) -> None:
    """Replace the password of locked accounts by one that matches nothing. Raises OSError.

    `useradd` and many images lock accounts. sshd without PAM then refuses keys, too.
    """
    text = read_file("/etc/shadow")
    lines = [line.split(":") for line in text.splitlines()]
    locked = [line for line in lines if line[0] in names and line[1:2] and line[1].startswith("!")]
    for line in locked:
        line[1] = "*"
    if locked:
        content = "".join(":".join(line) + "\n" for line in lines)
        group = os.lstat("/etc/shadow").st_gid
        write_file("/etc/shadow", content.encode(), 0o640, owner, group)


def write_keys(username: str, keys: str, owner: int = 0) -> None:
    """Write authorized_keys of root and user: directory 0700, file 0600 (NM-A.4). OSError."""
    text = "".join(f"{line.strip()}\n" for line in keys.splitlines() if line.strip())
    known = accounts()
    names = list(dict.fromkeys((username,) if owner else ("root", username)))
    unlock(names, owner)
    for name in names:
        account = known.get(name)
        if account is None:
            continue
        directory = posixpath.join(account.home, ".ssh")
        with held(open_directory(directory, account.uid, account.gid, 0o700)) as descriptor:
            os.fchown(descriptor, account.uid, account.gid)
            os.fchmod(descriptor, 0o700)
        write_file(
            posixpath.join(directory, "authorized_keys"),
            text.encode(),
            0o600,
            account.uid,
            account.gid,
        )


def furnish(request: Mapping[str, Any]) -> None:
    """Write account, keys and files of a request, as root of the sliver. Raises OSError."""
    owner = request.get("owner", 0)
    if request.get("username"):
        ensure_account(request["username"], owner)
    if request.get("ssh_keys") is not None:
        write_keys(request.get("username") or "root", request["ssh_keys"], owner)
    for path in request.get("remove", []):
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            held(open_directory(posixpath.dirname(path), make=False)) as directory,
        ):
            os.unlink(posixpath.basename(path), dir_fd=directory)
    for entry in request.get("files", []):
        if entry.get("instead_of") not in (None, read_file(entry["path"])):
            continue  # the sliver has changed it
        write_file(entry["path"], base64.b64decode(entry["content"]), entry["mode"], owner, owner)
    for path in request.get("directories", []):
        os.close(open_directory(path, owner, owner))
    for path in request.get("present", []):
        # Programs complain when these are missing; their content belongs to the sliver.
        if not os.path.lexists(path) and os.path.isdir(posixpath.dirname(path)):
            write_file(path, b"", 0o644, owner, owner)
    if request.get("hostname"):
        add_host(request["hostname"], owner)


def add_host(hostname: str, owner: int = 0) -> None:
    """Add the sliver's name to its /etc/hosts, for sudo. Raises OSError."""
    text = (
        read_file("/etc/hosts") or "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
    )
    if hostname not in text.split():
        write_file(
            "/etc/hosts", f"{text.rstrip()}\n127.0.1.1 {hostname}\n".encode(), 0o644, owner, owner
        )


def limit(limits: Mapping[str, int]) -> None:
    """Set limits of this process and its children ("NPROC": 100), never above existing ones."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _soft, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def ordinary_limits(core: bool = False) -> None:
    """Set the limits that programs expect, independent of the daemon's own.

    :param core: whether core dumps may be written. The host's pattern for them may name a program,
        which then runs outside as root and reads data of the sliver; with a limit of 1 the kernel
        does not start it.
    """
    limit({} if core else {"CORE": 1})
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT_FILES, hard), hard))


def confine(given: Collection[str]) -> None:
    """Apply limits, capabilities and the system call filter to this process and its children.

    :param given: privileges of the sliver.
    """
    given = privileges.expand(given)
    ordinary_limits(core="debug" in given)
    syscalls.keep_capabilities(
        privileges.capabilities(given),
        lambda: seccomp.install(seccomp.build(syscalls.machine(), given)),
    )


def open_null() -> int:
    """Open the sliver's /dev/null, or a file in memory if it is not the device. OSError."""
    with held(_root()) as root, contextlib.suppress(OSError):
        descriptor = syscalls.openat2(
            root, "dev/null", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY, _SAFE
        )
        if os.fstat(descriptor).st_rdev == os.makedev(1, 3):
            os.set_blocking(descriptor, True)
            return descriptor
        os.close(descriptor)
    return os.memfd_create("null")


def reset_signals(ignore_children: bool = False) -> None:
    """Reset signal dispositions; with `ignore_children` the kernel reaps children."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignore_children else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def become(user: str) -> Account:
    """Switch to an account of the sliver and to its home directory. Raises OSError."""
    account = accounts().get(user)
    if account is None:
        if user != "root":
            raise OSError(errno.ENOENT, f"the sliver has no account {user!r}")
        account = Account("root", 0, 0, "/root", "/bin/sh")
    os.setgroups(sorted({account.gid, *groups_of(account.name)}))
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    for directory in (account.home, "/"):
        try:
            os.chdir(directory)
            break
        except OSError:
            continue
    return account


def environment(account: Account, extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of a program, without anything of the daemon's."""
    return {
        "PATH": PATH,
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        "LANG": "C.UTF-8",
        **(extra or {}),
    }


def execute(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Replace this process; names without a slash are searched in PATH. Raises OSError."""
    candidates = (
        [argv[0]] if "/" in argv[0] else [posixpath.join(d, argv[0]) for d in PATH.split(":")]
    )
    last: OSError = FileNotFoundError(errno.ENOENT, f"{argv[0]}: no such program in the sliver")
    for candidate in candidates:
        try:
            os.execve(candidate, list(argv), dict(env))
        except FileNotFoundError as error:
            last = OSError(error.errno, f"{argv[0]}: no such program in the sliver")
        except OSError as error:
            last = OSError(error.errno, f"{candidate}: {error.strerror}")
    raise last
