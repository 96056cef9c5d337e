"""Stages of GitLab's custom executor without a pool."""

from __future__ import annotations

import pathlib
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.adapters import gitlab


def test_node_that_does_not_answer_is_named_as_a_system_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, **_options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    lease = SimpleNamespace(run=run, nodes=[SimpleNamespace(id="0000000007")])
    monkeypatch.setattr(gitlab, "_pool", lambda _args: None)
    monkeypatch.setattr(gitlab.Kept, "lease", lambda _self, _pool: lease)
    monkeypatch.setenv("SYSTEM_FAILURE_EXIT_CODE", "77")
    script = tmp_path / "script"
    script.write_text("true")
    assert gitlab.main(["run", str(script), "build_script"]) == 77
    said = capsys.readouterr().out
    assert "node 0000000007 does not answer: a small command there did not end within 60s" in said
    assert "internal error" not in said
