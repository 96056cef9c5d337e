"""System calls on a machine on which other programs are at work."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from nodepool.nodemanager.kernel import syscalls


@pytest.mark.spec("issue 4 security: links in a tar lead nowhere but into its own tree")
def test_path_with_dots_is_resolved_while_others_rename_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "other").touch()
    root = os.open(tmp_path / "root", os.O_PATH)
    renames = (
        "import os\nprint(flush=True)\nwhile True:\n os.rename('other', 'moved')\n "
        "os.rename('moved', 'other')"
    )
    with subprocess.Popen(
        ["python3", "-c", renames], cwd=tmp_path, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            for _ in range(3000):
                os.close(syscalls.openat2(root, "a/../" * 5, os.O_PATH, syscalls.RESOLVE_IN_ROOT))
        finally:
            other.kill()
            os.close(root)
