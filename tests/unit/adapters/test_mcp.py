"""The arguments and results of the tools of ``nodepool mcp``."""

from __future__ import annotations

import threading
import typing
from typing import Any

from nodepool.adapters.mcp import Machines
from nodepool.client import Lease, Pool


def test_every_text_argument_is_exactly_str() -> None:
    """For ``str | None``, the SDK parses the text as JSON: it would refuse files that are JSON, and
    turn the text ``null`` into None (findings/mcp-parses-text-of-optional-argument.sh).
    """
    for tool in Machines(Pool()).tools():
        for name, kind in typing.get_type_hints(tool).items():
            assert name == "return" or kind in (str, int, list[str]), (tool.__name__, name, kind)


def test_no_tool_returns_a_list() -> None:
    """The SDK sends nothing for an empty list, and one object for a list of one
    (findings/mcp-list-arrives-without-brackets.sh).
    """
    for tool in Machines(Pool()).tools():
        kind = typing.get_type_hints(tool)["return"]
        assert kind in (str, dict[str, Any]), (tool.__name__, kind)


def test_end_of_the_session_waits_for_all_returns_together() -> None:
    """Agents kill a server that does not end within seconds."""
    together, returned = threading.Barrier(3), []

    class Slow(Lease):
        def __init__(self, number: str) -> None:
            self.id = number

        def give_back(self) -> None:
            together.wait(30)
            returned.append(self.id)

    machines = Machines(Pool())
    machines._leases = {number: Slow(number) for number in "123"}
    machines.close()
    assert sorted(returned) == ["1", "2", "3"]
