"""``nodepool recover`` with a cloud on disk; tests/faults has whole restores."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import recover
from nodepool.driver import Drivers
from tests import REPOSITORY
from tests.conftest import Chroot

DRIVERS = REPOSITORY / "tests" / "support" / "faults" / "drivers"


def disk_cloud(zk_chroot: Chroot, tmp_path: pathlib.Path) -> str:
    """Return the path of a configuration with provider p0 of an empty cloud."""
    pool = {"name": "main", "max-servers": 2, "labels": ["small"]}
    provider = {
        "name": "p0",
        "driver": "diskcloud",
        "cloud-dir": str(tmp_path / "cloud"),
        "pools": [pool],
    }
    (tmp_path / "cloud").mkdir()
    return zk_chroot.config(
        {"labels": [{"name": "small"}], "providers": [provider], "drivers-path": [str(DRIVERS)]}
    )


def create(cloud: pathlib.Path, owner: str) -> None:
    metadata = {
        "nodepool_provider_name": owner,
        "nodepool_pool_name": "main",
        "nodepool_node_id": "0000000007",
    }
    (cloud / f"i-of-{owner}.json").write_text(json.dumps({"hostname": "a", "metadata": metadata}))


def test_machines_of_another_provider_in_the_same_cloud_are_neither_listed_nor_deleted(
    zk_chroot: Chroot, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = disk_cloud(zk_chroot, tmp_path)
    for owner in ("p0", "p1"):
        create(tmp_path / "cloud", owner)

    def resources(*options: str) -> list[str]:
        assert nodepoolcmd.main(["-c", config, "recover", *options, "--format", "json"]) == 0
        return [row["resource"] for row in json.loads(capsys.readouterr().out)]

    try:
        assert resources() == resources("--all", "--delete") == ["i-of-p0"]
    finally:
        Drivers.load([])
    assert [path.name for path in (tmp_path / "cloud").glob("i-*")] == ["i-of-p1.json"]


def test_deletion_of_a_machine_that_no_longer_exists_succeeds(
    zk_chroot: Chroot,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = disk_cloud(zk_chroot, tmp_path)
    create(tmp_path / "cloud", "p0")
    delete = recover._apply

    def delete_late(context: Any, action: str, lost: Any) -> None:
        (tmp_path / "cloud" / "i-of-p0.json").unlink()
        delete(context, action, lost)

    monkeypatch.setattr(recover, "_apply", delete_late)
    options = ["-c", config, "recover", "--all", "--delete", "--format", "json"]
    try:
        assert nodepoolcmd.main(options) == 0
    finally:
        Drivers.load([])
    assert [row["result"] for row in json.loads(capsys.readouterr().out)] == ["no longer exists"]
