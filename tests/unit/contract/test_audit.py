"""Every command that changes something is in the audit log."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from nodepool.access.audit import OBJECTS
from nodepool.cmd.audit import AUDITED
from nodepool.cmd.nodepoolcmd import create_parser
from nodepool.zk.mirror.feed import TYPES

#: Commands that change neither records nor machines, or that only use the API, which records its
#: callers.
READ_ONLY = {
    "advise",
    "alien-image-list",
    "config-schema",
    "config-validate",
    "dev",
    "dib-image-list",
    "drain list",
    "events",
    "explain",
    "export-image-data",
    "usage",
    "hosts",
    "image-list",
    "image-log",
    "image-status",
    "info",
    "lease exec",
    "lease inventory",
    "lease list",
    "lease show",
    "lease ssh",
    "lease ssh-config",
    "list",
    "mcp",
    "plan",
    "pools",
    "problem-list",
    "request list",
    "request show",
    "request wait",
    "rotate list",
    "request-list",
    "simulate",
    "ssh",
    "status",
    "tenants",
    "token list",
    "top",
}


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, set[str]]]:
    """Yield the path and the arguments of each command."""
    actions: list[argparse.Action] = vars(parser)["_actions"]
    for action in actions:
        if isinstance(action.choices, dict):
            for child in dict.fromkeys(action.choices.values()):
                yield from commands(child)
    path = parser.get_default("path")
    if path is not None:
        yield path, {action.dest for action in actions}


def test_every_command_is_recorded_or_changes_nothing() -> None:
    found = {path for path, _arguments in commands(create_parser())}
    assert found == READ_ONLY | set(AUDITED) and not READ_ONLY & set(AUDITED)


def test_recorded_objects_are_arguments_of_the_command() -> None:
    arguments = dict(commands(create_parser()))
    assert [
        path for path, (_kind, argument) in AUDITED.items() if argument not in arguments[path]
    ] == []


def test_actions_are_events_that_explain_finds() -> None:
    assert "action" in TYPES and {"node", "request", "lease", "image"} == set(OBJECTS)
