"""Files of leases in the directory of a user, whose commands run concurrently."""

from __future__ import annotations

import os
import pathlib
import types
from typing import Any

import pytest

from nodepool.lease import ssh


def test_files_that_another_command_removes_meanwhile_are_skipped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(3):
        folder = pathlib.Path(ssh.directory_of(f"ended-{number}"))
        folder.mkdir(parents=True)
        os.utime(folder, (1.0, 1.0))

    def get(_lease: str) -> None:
        """Return that the lease has ended; the other command has removed all old files by now."""
        for number in range(3):
            ssh.remove(f"ended-{number}")

    leases: Any = types.SimpleNamespace(get=get)
    lease: Any = types.SimpleNamespace(id="mine", nodes=[], ends=None)
    path = ssh.write(leases, lease)
    assert os.path.exists(path)
    assert os.listdir(ssh.directory_of()) == ["mine"]
