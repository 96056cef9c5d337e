"""A machine without sshd is named by the backends whose slivers use it."""

from __future__ import annotations

import inspect

import pytest

from nodepool.nodemanager.backends import base, native, rootless


def test_missing_ssh_server_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SSHD_ARGV", ("/nonexistent/sshd",))
    (problem,) = base.missing_ssh_server()
    assert not problem.fatal and "install openssh-server" in problem.remedy


@pytest.mark.parametrize("backend", [native.NativeBackend, rootless.RootlessBackend])
def test_backends_with_slivers_of_the_host_search_the_ssh_server(
    backend: type[base.Backend],
) -> None:
    assert "missing_ssh_server()" in inspect.getsource(backend.check)
