"""The pool of leases, with a real sshd, for the programs of other CI systems."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.integration.lease import conftest as leases
from tests.support.sshd import SSHServer, ssh_server

pool = leases.pool


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the home directory of those who log in to nodes."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def sshd(home: pathlib.Path) -> Iterator[SSHServer]:
    options = ["Subsystem sftp internal-sftp", f"SetEnv HOME={home}"]
    with ssh_server(kinds=["ed25519"], options=options) as server:
        yield server
