"""The command imports only the module of its subcommand."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodepool.cmd.nodepoolcmd import COMMANDS, VALUED, create_parser, modules_for


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_table_names_the_subcommands_of_each_module(name: str) -> None:
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"nodepool.cmd.commands.{name}").register(subparsers)
    assert tuple(subparsers.choices or ()) == COMMANDS[name]


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("list", ("nodes",)),
        ("-c lease list", ("nodes",)),
        ("--connect-timeout 5 -s list --debug lease list", ("lease",)),
        ("request list", ("requests",)),
        ("", tuple(COMMANDS)),
        ("--help", tuple(COMMANDS)),
        ("lists list", tuple(COMMANDS)),
        ("--connect-timeout=5 image-list", ("images",)),
    ],
)
def test_modules_of_the_subcommand_are_chosen(line: str, modules: tuple[str, ...]) -> None:
    assert modules_for(line.split()) == modules


def test_options_with_a_value_before_the_subcommand_are_known() -> None:
    valued = {
        option
        for action in create_parser()._actions
        if action.nargs is None
        for option in action.option_strings
    }
    assert valued == VALUED


def test_unknown_subcommand_is_refused_with_the_nearest_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, nearest in (("lists", "list"), ("images-list", "image-list")):
        with pytest.raises(SystemExit):
            create_parser(modules_for([given])).parse_args([given])
        assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_other_modules_are_not_imported() -> None:
    program = (
        "import sys; from nodepool.cmd import nodepoolcmd as n\n"
        "n.create_parser(n.modules_for(['-c', 'x', 'image-list']))\n"
        "print(sorted(m for m in sys.modules if m.startswith('nodepool.cmd.commands.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.split(".")[3] for name in done.stdout.strip("[]\n").replace("'", "").split(", ")}
    assert loaded - {"context"} == {"images"}


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def refuses(parser: argparse.ArgumentParser, action: argparse.Action, name: str) -> bool:
    try:
        parser._get_values(action, [name])
    except argparse.ArgumentError:
        return True
    return False


def test_no_command_takes_an_empty_name_for_something() -> None:
    """As ``"$id"`` is, if the command that should have set it has failed."""
    checked = 0
    for parser in {*parsers(create_parser(tuple(COMMANDS)))}:
        for action in parser._actions:
            if action.option_strings or isinstance(action, argparse._SubParsersAction):
                continue
            if action.metavar not in ("COMMAND", "PATH") and action.choices is None:
                for name in ("", ".", ".."):
                    assert refuses(parser, action, name), (parser.prog, action.dest)
                checked += 1
    assert checked > 30
