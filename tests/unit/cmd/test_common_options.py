"""Options that all subcommands accept alike, and misspelled subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from nodepool.cmd.nodepoolcmd import create_parser


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    actions: list[argparse.Action] = vars(parser)["_actions"]
    groups = [dict(action.choices) for action in actions if isinstance(action.choices, dict)]
    yield from [parser] if not groups else ()
    for choices in groups:
        for child in dict.fromkeys(choices.values()):
            yield from leaves(child)


def test_subcommands_accept_json_and_format_or_neither() -> None:
    found = [each.format_help() for each in leaves(create_parser())]
    assert len(found) > 50
    assert [
        text.split("\n")[0] for text in found if ("--json" in text) != ("--format" in text)
    ] == []


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["lease", "list"],
        ["explain", "node", "1"],
        ["image-build", "debian"],
        ["config-validate"],
    ],
)
def test_both_dialects_and_the_configuration_after_the_subcommand_mean_the_same(
    words: list[str],
) -> None:
    parser = create_parser()
    one, other = (
        parser.parse_args([*words, *form, "-c", "/x.yaml"])
        for form in (["--json"], ["--format", "json"])
    )
    assert vars(one) == vars(other)
    assert one.config == "/x.yaml" == parser.parse_args(["-c", "/x.yaml", *words]).config


def test_misspelled_subcommand_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        create_parser().parse_args(["lsit"])
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "nodepool: error: argument SUBCOMMAND: lsit is unknown; did you mean list?"
    )
    with pytest.raises(SystemExit):
        create_parser().parse_args(["list", "--format", "jsn"])
    assert "--format: jsn is unknown; did you mean json?" in capsys.readouterr().err
