"""users 11: the log names which change of the configuration has come into force."""

from __future__ import annotations

import pathlib

from nodepool.config.live.changes import applied_message, changes
from nodepool.config.loading import loadConfig
from nodepool.config.model import Config

BEFORE = """
labels: [{name: a}, {name: b}]
providers:
  - {name: one, driver: static, pools: [{name: main, nodes: [{name: h, labels: a}]}]}
  - name: two
    driver: static
    pools: [{name: main, nodes: [{name: h, labels: b, username: root}]}]
"""
AFTER = """
max-hold-age: 60
labels: [{name: a, min-ready: 1}, {name: c}]
providers:
  - {name: one, driver: static, pools: [{name: main, nodes: [{name: h2, labels: a}]}]}
  - {name: three, driver: static, pools: [{name: main, nodes: [{name: h, labels: c}]}]}
"""


def load(tmp_path: pathlib.Path, text: str) -> Config:
    path = tmp_path / "nodepool.yaml"
    path.write_text(text)
    return loadConfig(str(path))


def test_users_11_what_has_changed(tmp_path: pathlib.Path) -> None:
    old, new = load(tmp_path, BEFORE), load(tmp_path, AFTER)
    assert changes(old, new) == (
        "labels: new c, removed b, changed a; providers: new three, removed two, changed one; "
        "max-hold-age"
    )
    assert changes(old, load(tmp_path, BEFORE)) == ""
    assert (
        applied_message(None, new, "f")
        == "The configuration f is in force: 2 labels, 0 diskimages, 2 providers"
    )
    assert "nothing that matters" in applied_message(
        old, load(tmp_path, BEFORE + "\n# a comment\n"), "f"
    )
