"""Delegates: accounts that may only make API calls, over SSH (NM-A.4, NM-A.9, NM-C.5).

By default no account is added to passwd: all of them log in as one account, whose keys this module
prints for sshd, each with the forwarding program as forced command.  With
``delegate-accounts: unix`` each has its own account with that program as login shell, by which
passwd identifies our accounts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nodepool.base.files import replace_file
from nodepool.nodemanager.api.forward import SOCKET
from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.records.records import RecordError, clean_keys
from nodepool.nodemanager.records.rspec import check_name

log = logging.getLogger("nodepool.nodemanager.delegates")

SHELLS = "/etc/shells"
#: Seconds for useradd and its like.
COMMAND_TIMEOUT = 30.0
#: Maximum length of an account name for useradd.
MAX_ACCOUNT_NAME = 32


class AccountError(Exception):
    """An account cannot be created, changed or removed; the text has its name and the reason."""


def forward_program() -> str:
    """Return the path of ``nodepool-nm-forward``: next to this Python, or in PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "nodepool-nm-forward")
    return (
        beside
        if os.path.exists(beside)
        else shutil.which("nodepool-nm-forward") or "/usr/bin/nodepool-nm-forward"
    )


def authorized_keys(found: Mapping[str, Mapping[str, Any]], program: str) -> Iterable[str]:
    """Return lines for sshd: each key may only call the API as its delegate."""
    for name, record in sorted(found.items()):
        try:
            keys = clean_keys(record.get("ssh_keys") or "").splitlines()
            check_name(name)
        except (RecordError, ValueError) as error:
            log.error("Delegate %s: %s", name, error)
            continue
        for key in keys:
            yield f'restrict,command="{program} --as {name}" {key}'


def update(config: NodeManagerConfig, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Update the accounts, or the keys of the shared account, to match the records.

    The keys are in ``<run-dir>/delegates.keys``, for sshd's AuthorizedKeysFile.

    :raises OSError: the file cannot be written.
    """
    if config.delegate_accounts == "unix":
        UnixAccounts(forward_program()).update(found)
        found = {}
    program = forward_program()
    if config.api.unix and config.api.unix != SOCKET:
        program += f" --socket {config.api.unix}"
    text = "".join(f"{line}\n" for line in authorized_keys(found, program))
    replace_file(os.path.join(config.run_dir, "delegates.keys"), text, 0o644, sync=False)


class UnixAccounts:
    """Accounts of the host whose login shell is the forwarding program.

    :param shell: that program; it is added to /etc/shells, as sshd and others refuse shells that
        are not listed.
    """

    def __init__(self, shell: str, shells: str = SHELLS) -> None:
        self.shell = shell
        self._shells = shells

    def found(self) -> dict[str, pwd.struct_passwd]:
        return {entry.pw_name: entry for entry in pwd.getpwall() if entry.pw_shell == self.shell}

    def update(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Create, change and remove accounts; failures are logged and do not stop the others."""
        for name in sorted(self.found().keys() - wanted.keys()):
            self._try(self.destroy, name)
        for name, record in sorted(wanted.items()):
            self._try(self.ensure, name, str(record.get("ssh_keys") or ""))

    @staticmethod
    def _try(step: Callable[..., Any], *arguments: str) -> None:
        try:
            step(*arguments)
        except (AccountError, RecordError, ValueError, OSError) as error:
            log.error("Delegate %s: %s", arguments[0], error)

    def ensure(self, name: str, ssh_keys: str) -> None:
        """Create or update an account with exactly these keys.

        :raises AccountError: it cannot be created, or the name belongs to another account.
        """
        check_name(name)
        if len(name) > MAX_ACCOUNT_NAME:
            raise AccountError(f"an account's name has at most {MAX_ACCOUNT_NAME} characters")
        keys = clean_keys(ssh_keys)
        account = self.found().get(name)
        if account is None:
            try:
                other = pwd.getpwnam(name)
            except KeyError:
                pass
            else:
                raise AccountError(
                    f"the host has another account of this name, with the shell {other.pw_shell}"
                )
            self._list_shell()
            # No password fits "*"; a locked account ("!") could not log in with a key either.
            self._run(
                "useradd",
                "--create-home",
                "--user-group",
                "--shell",
                self.shell,
                "--password",
                "*",
                "--comment",
                "Nodepool delegate",
                name,
            )
            log.info("Account %s created for a delegate", name)
            account = pwd.getpwnam(name)
        write_keys(account, keys)

    def destroy(self, name: str) -> None:
        """Delete the account. Idempotent.

        :raises AccountError: it cannot be removed, or is not ours.
        """
        if name not in self.found():
            return
        self._run("userdel", "--remove", name)
        log.info("Account %s of a delegate removed", name)

    def _list_shell(self) -> None:
        try:
            text = Path(self._shells).read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        if self.shell in text.splitlines():
            return
        text += "" if not text or text.endswith("\n") else "\n"
        replace_file(self._shells, f"{text}{self.shell}\n", 0o644, sync=False)

    @staticmethod
    def _run(program: str, *arguments: str) -> None:
        path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if path is None:
            raise AccountError(f"{program} is not installed (Debian package passwd)")
        log.debug("Running %s %s", path, arguments)
        try:
            result = subprocess.run(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AccountError(f"{program}: {error}") from error
        # userdel: 12 when only the mail spool could not be removed.
        if result.returncode not in ((0, 12) if program == "userdel" else (0,)):
            raise AccountError(f"{program}: {result.stderr.decode(errors='replace').strip()[:300]}")


def write_keys(account: pwd.struct_passwd, keys: str) -> None:
    """Write ``~/.ssh/authorized_keys``, 0600 in a directory 0700, following no links.

    The account's owner may have planted them.

    :raises AccountError: an existing file or directory does not belong to the account.
    :raises OSError: it cannot be written.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with held(os.open(account.pw_dir, flags)) as home:
        _own(home, account, account.pw_dir)
        with contextlib.suppress(FileExistsError):
            os.mkdir(".ssh", 0o700, dir_fd=home)
            os.chown(".ssh", account.pw_uid, account.pw_gid, dir_fd=home, follow_symlinks=False)
        try:
            directory = os.open(".ssh", flags, dir_fd=home)
        except OSError as error:
            raise AccountError(
                f"{account.pw_dir}/.ssh is not a directory owned by the account: {error.strerror}"
            ) from error
    with held(directory):
        _own(directory, account, f"{account.pw_dir}/.ssh")
        os.fchmod(directory, 0o700)
        temporary = ".authorized_keys.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        handle = os.open(
            temporary,
            os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=directory,
        )
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(keys + "\n" if keys else "")
            os.fchown(stream.fileno(), account.pw_uid, account.pw_gid)
        os.replace(temporary, "authorized_keys", src_dir_fd=directory, dst_dir_fd=directory)


def _own(descriptor: int, account: pwd.struct_passwd, path: str) -> None:
    if os.fstat(descriptor).st_uid != account.pw_uid:
        raise AccountError(f"{path} does not belong to {account.pw_name}")
