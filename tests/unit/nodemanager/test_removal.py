"""Trees that jobs and images have filled can always be removed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.nodemanager.kernel.removal import remove_tree
from nodepool.nodemanager.regular_tasks import RegularTasks
from tests import REPOSITORY
from tests.support.deadline import limit


def dig(top: pathlib.Path, depth: int) -> None:
    """Directories below each other, deeper than any path can be long, with a file in each."""
    directory = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 20, dir_fd=directory)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
    os.close(directory)


def test_tree_of_any_depth_is_removed(tmp_path: pathlib.Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    dig(top, 3000)
    remove_tree(top)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        remove_tree(top)


def test_user_removes_directories_of_any_depth_that_nobody_may_enter(
    tmp_path: pathlib.Path,
) -> None:
    """As slivers of an ordinary user can leave them."""
    top = tmp_path / "top"
    top.mkdir()
    dig(top, 1500)
    for name in ("locked", "locked/below"):
        (top / name).mkdir()
    (top / "locked/below/file").touch()
    (top / "link").symlink_to(tmp_path)
    tmp_path.chmod(0o711)
    os.chmod(top / "locked/below", 0)
    os.chmod(top / "locked", 0)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-Rh", "65534:65534", str(tmp_path)], check=True, timeout=60)
    program = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from nodepool.nodemanager.kernel import removal
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
removal.remove_tree("top")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=limit(60), cwd=tmp_path)
    assert os.listdir(tmp_path) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o711


def test_links_are_removed_not_followed(tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "top/a/b/link").symlink_to(outside)
    (tmp_path / "top/link").symlink_to(outside)
    remove_tree(tmp_path / "top")
    assert os.listdir(outside) == ["kept"]
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError):
        remove_tree(tmp_path / "link")
    assert os.listdir(outside) == ["kept"]


def test_what_cannot_be_removed_does_not_keep_the_rest(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b/bad", "a/b/good", "c/good"):
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).touch()
    unlink = os.unlink

    def refusing(name: Any, **options: Any) -> None:
        if name == "bad":
            raise PermissionError(1, "not permitted", name)
        unlink(name, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refusing)
        with pytest.raises(PermissionError):
            remove_tree(tmp_path / "top")
    assert [path.name for path in (tmp_path / "top").rglob("*") if path.is_file()] == ["bad"]
    remove_tree(tmp_path / "top")


def test_periodic_task_that_fails_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []

    def fail() -> None:
        raise RecursionError("too deep")

    tasks = {"root trees": fail, "sockets": lambda: done.append("sockets")}
    RegularTasks(Mock(), tasks).each_minute()
    assert done == ["sockets"] and "retrying in a minute: root trees" in caplog.text
