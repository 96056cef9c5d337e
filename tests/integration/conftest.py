"""Fixtures that several modules use."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.conftest import Chroot
from tests.support.aws.cloud import aws  # noqa: F401
from tests.support.builder import BuilderBench
from tests.support.builder import make_bench as make_builder_bench
from tests.support.launcher import LauncherBench, StatsdReceiver, make_bench, make_statsd
from tests.support.openstack.cloud import OpenStackCloud, make_cloud
from tests.support.others import environment


@pytest.fixture
def bench(
    zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[LauncherBench]:
    yield from make_bench(zk_chroot, monkeypatch, tmp_path)


@pytest.fixture
def statsd(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatsdReceiver]:
    yield from make_statsd(monkeypatch)


@pytest.fixture
def builders(
    zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[BuilderBench]:
    yield from make_builder_bench(zk_chroot, monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def others() -> str:
    """Return the Python of an environment with Zuul and Nodepool 11.0.0."""
    return environment()


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """Where another user may connect; pytest's own folder is closed to others."""
    found = pathlib.Path(tempfile.mkdtemp(prefix="nm-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.fixture
def openstack_cloud() -> Iterator[OpenStackCloud]:
    yield from make_cloud()
