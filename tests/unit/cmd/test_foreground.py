"""Commands that use nodes get their data, however many there are."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from nodepool.cmd.commands.foreground import Foreground

#: Prints whether the variable exists, and the length of the file's content, from a process of its
#: own.
PROGRAM = (
    "import json, os, subprocess, sys\n"
    "child = 'import json, os; print(len(json.load(open(os.environ[\"NODES_JSON_FILE\"]))))'\n"
    "length = subprocess.run([sys.executable, '-c', child], capture_output=True, check=True, "
    "text=True).stdout.strip()\n"
    "open(sys.argv[1], 'w').write(f'{\"NODES_JSON\" in os.environ} {length}')\n"
)


@pytest.mark.parametrize(("nodes", "told"), [(3, "True 3"), (2000, "False 2000")])
def test_command_gets_any_number_of_nodes(tmp_path: pathlib.Path, nodes: int, told: str) -> None:
    text = json.dumps(["x" * 500] * nodes)
    assert (
        Foreground().run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "told")],
            {"NODES_JSON": text, "LEASE": "200-1"},
        )
        == 0
    )
    assert (tmp_path / "told").read_text() == told
