"""The manual has all commands."""

from __future__ import annotations

import argparse
import re

from nodepool.cmd.nodepoolcmd import create_parser
from tests.support import manual


def test_table_of_commands_has_each_command_once() -> None:
    actions: list[argparse.Action] = vars(create_parser())["_actions"]
    commands = next(action.choices for action in actions if isinstance(action.choices, dict))
    rows = re.findall(r"^   \* - (``.*``)$", manual.page("index"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"``([\w-]+)``", row)]
    assert sorted(named) == sorted(commands)
