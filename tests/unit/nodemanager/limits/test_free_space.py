"""Free space that may be promised, and the ballast of a full file system."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest

from nodepool.nodemanager.limits import free_space
from nodepool.nodemanager.limits.free_space import MIB, FreeSpace

GIB = 1024 * MIB


def use(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 1000) -> None:
    """Let the file system have 100 GiB, and this many free bytes and inodes."""
    state = SimpleNamespace(
        f_frsize=MIB, f_blocks=100 * 1024, f_bavail=free // MIB, f_files=100_000, f_favail=inodes
    )
    monkeypatch.setattr(free_space.os, "statvfs", lambda _path: state)


def test_reserve_of_the_host_is_not_promised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    space = FreeSpace(tmp_path)
    for free, promised in ((5 * GIB, 3 * GIB), (2 * GIB, 0), (0, 0)):
        use(monkeypatch, free)
        assert space.total(0) == promised
    assert space.total(7 * GIB) == 5 * GIB, "slivers occupy the reserve"


@pytest.mark.parametrize("free, inodes", [(7 * MIB, 1000), (GIB, 3)])
def test_ballast_is_released_when_bytes_or_inodes_are_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, free: int, inodes: int
) -> None:
    (tmp_path / "ballast").mkdir()
    ballast = tmp_path / "ballast" / "room"
    ballast.write_bytes(b"x")
    space = FreeSpace(tmp_path)
    use(monkeypatch, GIB)
    space.ensure()
    assert ballast.exists()
    use(monkeypatch, free, inodes)
    space.ensure()
    assert not ballast.exists()


def test_ballast_leaves_space_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    use(monkeypatch, 40 * MIB)
    FreeSpace(tmp_path).keep()
    assert (tmp_path / "ballast" / "room").stat().st_size == 24 * MIB
