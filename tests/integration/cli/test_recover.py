"""``nodepool recover`` with a cloud on disk; tests/faults has whole restores."""

from __future__ import annotations

import json
import pathlib

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.driver import Drivers
from tests import REPOSITORY
from tests.conftest import Chroot

DRIVERS = REPOSITORY / "tests" / "support" / "faults" / "drivers"


def test_machines_of_another_provider_in_the_same_cloud_are_neither_listed_nor_deleted(
    zk_chroot: Chroot, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {"name": "main", "max-servers": 2, "labels": ["small"]}
    provider = {
        "name": "p0",
        "driver": "diskcloud",
        "cloud-dir": str(tmp_path / "cloud"),
        "pools": [pool],
    }
    config = zk_chroot.config(
        {"labels": [{"name": "small"}], "providers": [provider], "drivers-path": [str(DRIVERS)]}
    )
    (tmp_path / "cloud").mkdir()
    for owner in ("p0", "p1"):
        metadata = {
            "nodepool_provider_name": owner,
            "nodepool_pool_name": "main",
            "nodepool_node_id": "0000000007",
        }
        (tmp_path / "cloud" / f"i-of-{owner}.json").write_text(
            json.dumps({"hostname": "a", "metadata": metadata})
        )

    def recover(*options: str) -> list[str]:
        assert nodepoolcmd.main(["-c", config, "recover", *options, "--format", "json"]) == 0
        return [row["resource"] for row in json.loads(capsys.readouterr().out)]

    try:
        assert recover() == recover("--all", "--delete") == ["i-of-p0"]
    finally:
        Drivers.load([])
    assert [path.name for path in (tmp_path / "cloud").glob("i-*")] == ["i-of-p1.json"]
