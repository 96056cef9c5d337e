#!/usr/bin/env python3
"""Run the README's first command (without image) and the quick tests on another Debian release.

  tools/release.py trixie [TEST...]    bootstrap a root with debootstrap (a minute), run, also these
                                       tests with a ZooKeeper, remove it

What runs in it is the last commit, in a clean clone, as root, with nothing installed but git and
python3.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import bootstrap
from demo import image

TIMEOUT = 1800.0
MIRROR = "http://deb.debian.org/debian"
SCRIPTS = pathlib.Path("/usr/share/debootstrap/scripts")
#: Trusted certificates of this machine, which may reach its mirrors through its own proxy.
CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
VERSIONS = """. /etc/os-release
printf 'versions: %s, %s, ' "$PRETTY_NAME" "$(python3 --version)"
ssh -V 2>&1 | cut -d' ' -f1"""
COMMANDS = (
    ["tools/quickstart", "--no-image"],
    ["sh", "-c", VERSIONS],
    ["tools/run-tests", "--quick"],
)
#: In separate namespaces, so that everything ends, and is unmounted, with the first process: a
#: shell, which collects orphans.
ISOLATED = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
ENTER = """set -e
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/run"
mount -t tmpfs tmpfs "$1/tmp"
root="$1"; shift
chroot "$root" sh -c 'cd /root/nodepool && exec "$@"' sh "$@" &
wait $!
"""


def run(what: str, command: list[str], **options: object) -> None:
    """:raises SystemExit: it has failed."""
    began = time.monotonic()
    print(f"== {what}", flush=True)
    done = subprocess.run(
        command, check=False, timeout=TIMEOUT, stdin=subprocess.DEVNULL, **options
    )  # type: ignore[call-overload]
    print(
        f"== {what}: exit status {done.returncode} after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    if done.returncode != 0:
        sys.exit(1)


def make_root(root: pathlib.Path, release: str) -> None:
    root.chmod(0o755)  # as any root: other users could not even enter /proc
    mirror = image.apt_mirrors(image.read_apt_sources()).get("DIB_DISTRIBUTION_MIRROR", MIRROR)
    include = "--include=ca-certificates,git,iproute2,procps,python3"
    # A release that is newer than this machine's debootstrap is made like sid.
    script = release if (SCRIPTS / release).exists() else "sid"
    run(
        f"debootstrap {release}",
        ["debootstrap", "--variant=minbase", include, release, str(root), mirror, script],
        stdout=subprocess.DEVNULL,
    )
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / "etc" / "ssl" / "certs")
    for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/pip.conf"):
        if os.path.exists(name):
            shutil.copy(name, f"{root}{name}")
    # A mirror may keep a release that still changes for longer than its index is valid.
    (root / "etc/apt/apt.conf.d/mirror").write_text('Acquire::Check-Valid-Until "false";\n')
    run("clone", ["git", "clone", "-q", str(bootstrap.REPOSITORY), str(root / "root" / "nodepool")])


def main() -> int:
    name, *tests = sys.argv[1:] or [""]
    if not name.isalpha():
        print(__doc__)
        return 2
    if os.geteuid() != 0:
        sys.exit("A root of another release needs root")
    bootstrap.install({"debootstrap": "debootstrap", "unshare": "util-linux", "git": "git"})
    environment = {
        **os.environ,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
    }
    root = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-release-"))
    try:
        make_root(root, name)
        more = ["tools/zookeeper", "run", "--", ".venv/bin/pytest", *tests]
        for command in (*COMMANDS, *([more] if tests else [])):
            run(
                " ".join(command),
                [*ISOLATED, "sh", "-c", ENTER, "sh", str(root), *command],
                env=environment,
            )
    finally:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
