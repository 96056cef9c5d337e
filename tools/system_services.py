"""Install packages for their programs only: none of their services is started or enabled.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

POLICY = "usr/sbin/policy-rc.d"
MARK = "made by tools/quickstart of Nodepool, for as long as it installs packages; may be removed"
#: Where a link means that something starts automatically.
PLACES = (
    "etc/systemd/system",
    "etc/systemd/user",
    "etc/rc2.d",
    "etc/rc3.d",
    "etc/rc4.d",
    "etc/rc5.d",
)


def links(root: pathlib.Path) -> set[pathlib.Path]:
    """Return all links that make a service start at boot."""
    found: set[pathlib.Path] = set()
    for place in PLACES:
        found |= {
            path
            for path in (root / place).rglob("*")
            if path.is_symlink() and (not place.startswith("etc/rc") or path.name.startswith("S"))
        }
    return found


@contextlib.contextmanager
def left_as_they_are(root: pathlib.Path = pathlib.Path("/")) -> Iterator[None]:
    """Keep packages that the body installs from starting services, and disable what they enable.

    Debian asks policy-rc.d. Packages that are installed already are not changed: their links exist
    before.
    """
    before = links(root)
    policy = root / POLICY
    ours = not policy.exists() or MARK in policy.read_text(errors="replace")
    if ours:
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(f"#!/bin/sh\n# {MARK}\nexit 101\n")
        policy.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            policy.unlink(missing_ok=True)
        for link in sorted(links(root) - before):
            _disable(link)
        if (
            links(root) != before
            and shutil.which("systemctl")
            and os.path.isdir("/run/systemd/system")
        ):
            subprocess.run(
                ["systemctl", "daemon-reload"], check=False, capture_output=True, timeout=60
            )


def _disable(link: pathlib.Path) -> None:
    if link.parent.name.startswith("rc"):
        link.rename(link.with_name("K01" + link.name[3:]))  # as update-rc.d does it
    else:
        link.unlink()
