"""Files that are complete or as they were, and locks on files."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from nodepool.base.files import lock_file, new_file, replace_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("sync", [True, False])
def test_replaced_as_a_whole(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    replace_file(str(path), "a", sync=sync)
    assert (path.read_text(), mode(path)) == ("a", 0o600)
    with new_file(str(path), 0o644, sync=sync) as file:
        file.write(b"longer")
        file.flush()
        assert mode(Path(file.name)) == 0o600
        assert Path(file.name).read_text() == "longer"
        assert path.read_text() == "a"
    assert (path.read_text(), mode(path)) == ("longer", 0o644)
    assert os.listdir(tmp_path) == ["file"]


def test_after_an_error_it_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(str(path), b"a")
    with pytest.raises(KeyboardInterrupt), new_file(str(path)) as file:
        file.write(b"b")
        raise KeyboardInterrupt
    assert path.read_text() == "a"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        replace_file(str(tmp_path / "missing" / "file"), b"")


def test_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file("file", b"a")
    assert os.listdir(tmp_path) == ["file"]


def test_shared_locks_exclude_an_exclusive_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as one, path.open("w") as other, path.open("w") as third:
        lock_file(one.fileno(), shared=True)
        lock_file(other.fileno(), shared=True)
        with pytest.raises(BlockingIOError):
            lock_file(third.fileno(), 0.1)
        one.close()
        taken = threading.Event()
        waits = threading.Thread(target=lambda: (lock_file(third.fileno(), 20), taken.set()))
        waits.start()
        other.close()
        assert taken.wait(20)
        waits.join()
