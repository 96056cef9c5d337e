"""Delegates: accounts that may only make API calls, over SSH (nodemanager.md A.4, A.9, C.5).

By default nobody is added to passwd: all of them log in as one account, whose keys this module prints for sshd, each with
the forwarding program as forced command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.records import RecordError, clean_keys
from nodepool.nodemanager.rspec import check_name

log = logging.getLogger("nodepool.nodemanager.delegates")



def forward_program() -> str:
    """Path of ``nodepool-nm-forward``: beside this Python, else in PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "nodepool-nm-forward")
    return beside if os.path.exists(beside) else shutil.which("nodepool-nm-forward") or "/usr/bin/nodepool-nm-forward"


def authorized_keys(found: Mapping[str, Mapping[str, Any]], program: str) -> Iterable[str]:
    """Lines for sshd: each key may do nothing but call the API as its delegate."""
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
    """Write the keys where sshd's AuthorizedKeysFile of the shared account points: ``<run-dir>/delegates.keys``."""
    text = "".join(f"{line}\n" for line in authorized_keys(found, forward_program()))
    path = os.path.join(config.run_dir, "delegates.keys")
    handle, temporary = tempfile.mkstemp(dir=config.run_dir, prefix=".delegates-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


