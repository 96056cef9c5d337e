"""The id of the boot, which decides whether processes of earlier programs can still exist."""

from __future__ import annotations

import errno
import pathlib
from typing import Any, NoReturn

import pytest

from nodepool.base import boot
from nodepool.nodemanager.backends.processes import alive
from nodepool.nodemanager.kernel import syscalls


@pytest.fixture(autouse=True)
def not_read_yet() -> None:
    boot._read.cache_clear()


def refuse(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, **_options: Any) -> NoReturn:
        raise OSError(number, "refused", path)

    monkeypatch.setattr(boot, "open", refused, raising=False)


def test_id_is_that_of_the_kernel() -> None:
    assert boot.boot_id() == pathlib.Path(boot.BOOT_ID).read_text().strip()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_system_without_an_id_has_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(number, monkeypatch)
    assert boot.boot_id() == ""


def test_lack_of_descriptors_is_not_another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lack:
        refuse(errno.EMFILE, lack)
        with pytest.raises(OSError, match="refused"):
            boot.boot_id()
    pid = pathlib.Path("/proc/self").resolve().name
    handle = {"pid": int(pid), "boot_id": boot.boot_id()}
    handle["start_time"] = syscalls.start_time(int(pid))
    refuse(errno.EMFILE, monkeypatch)
    assert alive(handle), "a sliver that is taken for ended is killed and started again"
