"""Values in the text of a configuration, and the difference that ``patch`` applies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from nodepool.lab.whatif.edit import changed, difference
from nodepool.process.program import load_config

TEXT = """\
# All labels.
zookeeper-servers: [{host: zk.example.org, port: 2281}]
labels:
  - name: small  # most jobs
    min-ready: 2 # keep
  - {name: large, max-ready-age: 600}
  - name: bare   # no value
    max-ready-age: 60
providers: []
"""


def at(text: str, number: int, value: int = 5, **env: str) -> str | None:
    return changed(text, ("labels", number, "min-ready"), value, env)


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (0, "min-ready: 2 # keep", "min-ready: 5 # keep"),
        (1, "{name: large, max", "{name: large, min-ready: 5, max"),
        (2, "name: bare   # no value\n", "name: bare   # no value\n    min-ready: 5\n"),
    ],
)
def test_only_the_value_changes_and_comments_stay(number: int, before: str, after: str) -> None:
    assert at(TEXT, number) == TEXT.replace(before, after)


@pytest.mark.parametrize(
    "text",
    [
        "labels:\n- &one {name: a, min-ready: 1}\n- *one\n",
        "labels:\n- {name: a, min-ready: &number 1}\n- {name: b, min-ready: *number}\n",
        "labels:\n- name: a\n  min-ready: %(NODEPOOL_READY)\n",
        "labels:\n- name: a\n  min-ready:\n",
        "labels: &all\n- name: a\n  min-ready: 1\nother: *all\n",
    ],
)
def test_value_that_no_single_line_sets_is_not_changed(text: str) -> None:
    assert at(text, 0, NODEPOOL_READY="3\n") is None


def test_environment_elsewhere_stays_in_the_text() -> None:
    text = "labels:\n- name: '%(NODEPOOL_NAME)'\n  min-ready: 1\n"
    assert at(text, 0, NODEPOOL_NAME="a") == text.replace("1", "5")


@pytest.mark.parametrize("end", ["\n", ""])
def test_patch_applies_the_difference_and_the_result_is_a_configuration(
    tmp_path: Path, end: str
) -> None:
    path = tmp_path / "nodepool.yaml"
    before = TEXT.rstrip("\n") + end
    path.write_text(before)
    after = before
    for number, value in ((0, 7), (1, 1), (2, 3)):
        after = at(after, number, value) or ""
    diff = difference(before, after, str(path))
    # As `patch`, which is not on every machine.
    done = subprocess.run(
        ["git", "apply", f"-p{len(path.parts) - 1}"],
        input=f"A table.\n\n{diff}",
        text=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert path.read_text() == after
    labels = load_config(str(path), None).labels
    assert {name: label.min_ready for name, label in labels.items()} == {
        "small": 7,
        "large": 1,
        "bare": 3,
    }
    assert [each["name"] for each in yaml.safe_load(after)["labels"]] == ["small", "large", "bare"]


def test_value_below_a_repeated_key_changes_where_it_counts() -> None:
    assert at("labels: []\n" + TEXT, 0) == "labels: []\n" + TEXT.replace(": 2 #", ": 5 #")
