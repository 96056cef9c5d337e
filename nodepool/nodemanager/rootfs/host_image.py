"""Root tree of the image `host`: the host's /usr with new /etc, /var, /root and /home.

Only files listed here are copied, only if everybody may read them, and never a line with
credentials in a URL
(NM-C.2: never the host's shadow, keys, home directories or application data).
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from nodepool.base.boot import boot_id

VERSION = 4
"""Increase when the tree is built differently: templates of older versions are then unused and
deleted.
"""

ETC_FILES = (
    "adduser.conf",
    "bash.bashrc",
    "bindresvport.blacklist",
    "ca-certificates.conf",
    "centos-release",
    "crypto-policies",
    "csh.cshrc",
    "csh.login",
    "debconf.conf",
    "debian_version",
    "deluser.conf",
    "ethertypes",
    "gai.conf",
    "host.conf",
    "inputrc",
    "issue",
    "issue.net",
    "ld.so.cache",
    "ld.so.conf",
    "libaudit.conf",
    "locale.alias",
    "locale.conf",
    "locale.gen",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mailcap",
    "manpath.config",
    "mime.types",
    "mke2fs.conf",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "profile",
    "protocols",
    "redhat-release",
    "resolv.conf",
    "rpc",
    "services",
    "shells",
    "sudo.conf",
    "timezone",
    "ucf.conf",
    "vconsole.conf",
    "xattr.conf",
    "ssh/moduli",
    "default/locale",
    "default/useradd",
)
ETC_TREES = (
    "alternatives",
    "apt/keyrings",
    "apt/preferences.d",
    "apt/trusted.gpg",
    "apt/trusted.gpg.d",
    "bash_completion.d",
    "ca-certificates",
    "crypto-policies",
    "dnf",
    "dpkg",
    "fonts",
    "iproute2",
    "java*",
    "ld.so.conf.d",
    "pam.d",
    "perl",
    "pki/ca-trust",
    "pki/rpm-gpg",
    "pki/tls/certs",
    "python3*",
    "rpm",
    "security",
    "sgml",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "vim",
    "xml",
)
ETC_ADDRESSES = (
    "apt/sources.list",
    "apt/sources.list.d",
    "apt/apt.conf",
    "apt/apt.conf.d",
    "yum.repos.d",
    "yum.conf",
)
"""Copied unless one of their URLs contains a user name and password."""
ETC_EMPTY = (
    "apt/auth.conf.d",
    "cron.d",
    "cron.daily",
    "default",
    "init.d",
    "logrotate.d",
    "opt",
    "profile.d",
    "skel",
    "ssh",
    "ssl/private",
    "sudoers.d",
    "sysctl.d",
    "systemd/system",
    "tmpfiles.d",
    "rc0.d",
    "rc1.d",
    "rc2.d",
    "rc3.d",
    "rc4.d",
    "rc5.d",
    "rc6.d",
    "rcS.d",
)
VAR_TREES = (
    "lib/dpkg",
    "lib/rpm",
    "lib/pam",
    "lib/python",
    "lib/shells.state",
    "lib/xml-core",
    "lib/sgml-base",
    "lib/ucf",
    "lib/apt/extended_states",
    "cache/debconf/config.dat",
    "cache/debconf/templates.dat",
)
VAR_EMPTY = (
    "backups",
    "cache/apt/archives/partial",
    "cache/ldconfig",
    "cache/man",
    "lib/apt/lists/partial",
    "lib/misc",
    "lib/private",
    "lib/systemd",
    "lib/sudo",
    "local",
    "log/apt",
    "mail",
    "opt",
    "spool/cron",
)
TOP_EMPTY = ("boot", "dev", "home", "media", "mnt", "opt", "proc", "run", "srv", "sys", "usr")
SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CREDENTIALS = re.compile(rb"://[^/\s\"']*@|password|secret|token", re.IGNORECASE)
_LIMIT = 64 * 1024 * 1024
"""Bytes of one copied file."""


def digest() -> str:
    """Return a digest of the tree's sources and the boot: the tree need not be synced."""
    seen = hashlib.sha256(f"host {VERSION} {os.geteuid() == 0} {boot_id()}\n".encode())
    for path in (
        "/etc/passwd",
        "/etc/group",
        "/etc/os-release",
        "/etc/ld.so.cache",
        "/etc/resolv.conf",
        "/etc/nsswitch.conf",
        "/etc/alternatives",
        "/etc/pam.d",
        "/etc/ssl/certs",
        "/etc/apt/sources.list",
        "/etc/apt/sources.list.d",
        "/var/lib/dpkg/status",
        "/var/lib/rpm",
    ):
        try:
            found = os.stat(path)
        except OSError:
            continue
        seen.update(f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}\n".encode())
    return seen.hexdigest()[:16]


def overlaid() -> list[str]:
    """Return the host's directories that are layers: usr, and bin, lib, ... if not merged."""
    return [
        "usr",
        *(
            name
            for name in SYSTEM_DIRECTORIES
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
        ),
    ]


def build(target: Path) -> None:
    """Build `target`/root (the tree without /usr) and, as root, `target`/mask. OSError."""
    privileged = os.geteuid() == 0
    root = target / "root"
    root.mkdir(mode=0o755)
    for name in TOP_EMPTY:
        (root / name).mkdir(mode=0o755)
    for name in SYSTEM_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif os.path.isdir(f"/{name}"):
            (root / name).mkdir(mode=0o755)
    _directory(root / "root", 0o700)
    _directory(root / "tmp", 0o1777)
    _build_etc(root / "etc")
    _build_var(root / "var", packages=privileged)
    for name, text in (
        (".bashrc", 'PS1="\\u@\\h:\\w\\$ "\n'),
        (".profile", '[ -n "$BASH" ] && . ~/.bashrc\n'),
    ):
        (root / "root" / name).write_text(text)
    if privileged:
        build_mask(Path("/usr"), target / "mask")
    else:
        # An ordinary user's sshd cannot give terminals to this group, and fails if it exists.
        groups = (root / "etc/group").read_text().splitlines()
        (root / "etc/group").write_text(
            "".join(f"{line}\n" for line in groups if not line.startswith("tty:"))
        )


def _directory(path: Path, mode: int = 0o755) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)


def _build_etc(etc: Path) -> None:
    _directory(etc)
    for name in ETC_EMPTY:
        _directory(etc / name)
    (etc / "ssl/private").chmod(0o700)
    for pattern in (*ETC_FILES, *ETC_TREES):
        for source in sorted(glob.glob(f"/etc/{pattern}")):
            copy_public(Path(source), etc / os.path.relpath(source, "/etc"))
    for name in ETC_ADDRESSES:
        copy_public(Path("/etc") / name, etc / name, without_credentials=True)
    _write_accounts(etc)
    # The host's nsswitch.conf may name services that do not run inside; files always work.
    (etc / "hostname").write_text("sliver\n")
    for name in ("fstab", "environment", "motd", "machine-id"):
        (etc / name).write_text("")
    if not (etc / "resolv.conf").exists():
        (etc / "resolv.conf").write_text("")
    mtab = etc / "mtab"
    if not mtab.is_symlink():
        mtab.symlink_to("../proc/self/mounts")
    (etc / "sudoers").write_text(
        "Defaults env_reset\n"
        'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
        "root ALL=(ALL:ALL) ALL\n%sudo ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n"
    )
    (etc / "sudoers").chmod(0o440)
    (etc / "sudoers.d").chmod(0o750)


def _write_accounts(etc: Path) -> None:
    """Write system accounts only, without passwords and members of groups."""
    users = [
        line.split(":")
        for line in Path("/etc/passwd").read_text(errors="replace").splitlines()
        if line.count(":") == 6
    ]
    system = [u for u in users if u[2].isdigit() and (int(u[2]) < 1000 or int(u[2]) == 65534)]
    if not any(u[0] == "sshd" for u in system):
        used = {int(u[2]) for u in system}
        uid = next(number for number in range(100, 1000) if number not in used)
        system.append(["sshd", "x", str(uid), "65534", "", "/run/sshd", "/usr/sbin/nologin"])
    lines = []
    for user in system:
        user[1], user[4] = "x", ""
        if user[0] == "root":
            user[5] = "/root"
        lines.append(":".join(user))
    (etc / "passwd").write_text("\n".join(lines) + "\n")
    # "*" matches no password and, unlike "!", does not stop sshd from accepting keys.
    (etc / "shadow").write_text("".join(f"{user[0]}:*:19000:0:99999:7:::\n" for user in system))
    (etc / "shadow").chmod(0o640)
    groups = [
        line.split(":")
        for line in Path("/etc/group").read_text(errors="replace").splitlines()
        if line.count(":") == 3
    ]
    kept = [g for g in groups if g[2].isdigit() and (int(g[2]) < 1000 or int(g[2]) == 65534)]
    (etc / "group").write_text("".join(f"{g[0]}:x:{g[2]}:\n" for g in kept))
    (etc / "gshadow").write_text("".join(f"{g[0]}:*::\n" for g in kept))
    (etc / "gshadow").chmod(0o640)


def _build_var(var: Path, packages: bool) -> None:
    _directory(var)
    for name in VAR_EMPTY:
        _directory(var / name)
    for name in VAR_TREES if packages else ():
        copy_public(Path("/var") / name, var / name)
    _directory(var / "tmp", 0o1777)
    (var / "run").symlink_to("/run")
    (var / "lock").symlink_to("/run/lock")
    if packages and (var / "lib/dpkg").is_dir():
        for name in ("lock", "lock-frontend"):
            (var / "lib/dpkg" / name).unlink(missing_ok=True)
        _directory(var / "lib/dpkg/updates")
        _directory(var / "lib/dpkg/triggers")


def copy_public(source: Path, target: Path, without_credentials: bool = False) -> None:
    """Copy links, directories and regular files that everybody may read; skip the rest."""
    try:
        found = os.lstat(source)
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode):
        if source.name in ("resolv.conf", "mtab") and source.is_file():
            target.write_bytes(source.read_bytes()[:65536])  # leads into the host's /run
        elif not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(source))
        return
    if stat.S_ISDIR(found.st_mode):
        if found.st_mode & 0o005 != 0o005:
            return
        _directory(target, stat.S_IMODE(found.st_mode))
        for name in os.listdir(source):
            copy_public(source / name, target / name, without_credentials)
        _own(target, found)
        return
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o004 or found.st_size > _LIMIT:
        return
    if without_credentials and _CREDENTIALS.search(source.read_bytes()):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(stat.S_IMODE(found.st_mode) & 0o755)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    _own(target, found)


def _own(target: Path, found: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.lchown(
            target,
            found.st_uid if found.st_uid < 1000 else 0,
            found.st_gid if found.st_gid < 1000 else 0,
        )


def build_mask(source: Path, mask: Path) -> None:
    """Create a layer that hides local settings and files that are not public from /usr.

    Slivers could not read the latter in any case (native_setup.only_public); hidden, they do not
    block packages that are installed inside.
    """
    mask.mkdir()
    _like(source, mask)
    hidden = []
    pending = [source]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        continue
                    found = entry.stat(follow_symlinks=False)
                    needed = 0o005 if stat.S_ISDIR(found.st_mode) else 0o004
                    if found.st_mode & needed != needed:
                        hidden.append(Path(entry.path))
                    elif stat.S_ISDIR(found.st_mode):
                        pending.append(Path(entry.path))
        except OSError:
            continue
    for path in (*hidden, source / "local/etc", source / "etc"):
        if not os.path.lexists(path):
            continue
        relative = path.relative_to(source)
        for parent in reversed(relative.parents):
            if not (mask / parent).exists():
                (mask / parent).mkdir()
                _like(source / parent, mask / parent)
        os.mknod(mask / relative, stat.S_IFCHR, os.makedev(0, 0))  # a whiteout


def _like(source: Path, target: Path) -> None:
    found = source.stat()
    os.chown(target, found.st_uid, found.st_gid)
    target.chmod(stat.S_IMODE(found.st_mode))
