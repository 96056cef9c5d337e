"""tools/commit_message.py refuses subjects that are hard to read in a list of commits."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import yaml

from tests import REPOSITORY
from tests.conftest import load_tool

TOOL = REPOSITORY / "tools" / "commit_message.py"
problems = load_tool("commit_message.py").problems


@pytest.mark.parametrize(
    "message",
    [
        "zk: keep the order of writes",
        "zk: keep the order of writes\n\nThey were sorted by path; readers saw them in another "
        "order.\n",
        f"zk: {'x' * 68}",
        "\n# a comment of git\nzk: keep the order\n# another\n\nWhy.\n",
        "zk: keep the order\n# ------------------------ >8 ------------------------\ndiff --git "
        "a/x b/x",
        f"Merge branch 'a' into {'b' * 80}",
        'Revert "zk: keep the order; sort."\nThis reverts commit 1.',
        "",
    ],
)
def test_good_message_is_accepted(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"zk: {'x' * 69}", "73 characters; the limit is 72"),
        ("zk: keep the order of writes.", "ends with a period"),
        ("zk: keep the order; sort the paths", "may describe two changes"),
        ("zk: keep the order\nThey were sorted.", "second line is not blank"),
    ],
)
def test_bad_message_is_refused_with_the_reason(message: str, expected: str) -> None:
    (problem,) = problems(message)
    assert expected in problem


def test_exit_status_makes_git_refuse(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "COMMIT_EDITMSG"
    for message, status in (("zk: keep the order\n", 0), ("zk: keep the order.\n", 1)):
        path.write_text(message)
        done = subprocess.run(
            [sys.executable, TOOL, path], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == status, done.stderr
        assert bool(done.stderr) == bool(status)


def test_hook_runs_at_commit_messages_only() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for hook in config["repos"][0]["hooks"]}
    assert hooks["commit-message"]["stages"] == ["commit-msg"]
    assert hooks["commit-message"]["entry"].endswith(str(TOOL.relative_to(REPOSITORY)))
    assert config["default_stages"] == ["pre-commit"]
    assert "commit-msg" in config["default_install_hook_types"]
