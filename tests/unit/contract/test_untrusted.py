"""What others send comes in through few modules, which bound it, and goes out through few, which
clean it.
"""

from __future__ import annotations

import ast
import functools
import logging

import msgspec
import pytest

from nodepool.adapters.runners.program import set_up_log
from nodepool.logconfig import MultiLineFormatter, get_annotated_logger
from nodepool.texts import one_line, printable
from nodepool.web.actions.bodies import NewLease
from tests import REPOSITORY

#: Libraries for HTTP -> modules that use them. A new one needs a bound for size and time of each
#: answer.
READERS = {
    "requests": {
        "adapters/github/service.py",
        "answers.py",
        "cloud/http.py",
        "driver/azure/login.py",
        "driver/gce/client.py",
        "driver/openstack/api/transport.py",
    },
    "urllib3": {"answers.py", "driver/kubernetes/api/client.py"},
    "http.client": {
        "adapters/runners/program.py",
        "client/calls.py",
        "nodemanager/client/programs.py",
        "nodemanager/client/rpc.py",
        "nodemanager/sources/sources.py",
    },
}
#: Modules that read the output of programs, which are of this host, but for those that read in
#: pieces and keep a bounded part.
PROGRAMS = {
    "builder/building/process.py",
    "driver/nodemanager/pushed/ssh_link.py",
    "ssh.py",  # in pieces
    "client/lease.py",
    "cmd/commands/simulate.py",
    "lease/certificates.py",
    "nodemanager/api/delegates.py",
    "nodemanager/kernel/commands.py",
    "nodemanager/pushed/service.py",
    "nodemanager/rootfs/ssh_files.py",
}
#: Modules that print, besides the commands, whose texts go through `say`, `note` and tables. A new
#: one has to clean texts.
PRINTERS = {
    "adapters/github/program.py",
    "adapters/gitlab.py",
    "adapters/runners/program.py",
    "nodemanager/pushed/program.py",
    "process/background.py",
    "process/program.py",
    "process/stack_dump.py",
    "lab/whatif/__main__.py",
    "lab/zkserver/__main__.py",
    "texts.py",
}
#: In commands that print texts of others, only these arguments are printed without `print_text`.
SAYING = (
    "cmd/commands/lease.py",
    "cmd/commands/requests/__init__.py",
    "cmd/commands/requests/use.py",
)


@functools.cache
def modules() -> list[tuple[str, ast.AST]]:
    files = sorted((REPOSITORY / "nodepool").rglob("*.py"))
    return [
        (str(path.relative_to(REPOSITORY / "nodepool")), ast.parse(path.read_text()))
        for path in files
    ]


def imports(tree: ast.AST) -> set[str]:
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return found | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def prints(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def test_answers_of_others_are_read_only_where_they_are_bounded() -> None:
    found = {
        library: {
            name
            for name, tree in modules()
            if any(f"{each}.".startswith(f"{library}.") for each in imports(tree))
        }
        for library in READERS
    }
    assert found == READERS


def reads_output(call: ast.Call) -> bool:
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return given.get("capture_output") == "True" or given.get("stdout", "").lower().endswith("pipe")


def test_output_of_programs_is_read_only_where_it_is_bounded_or_of_this_host() -> None:
    found = {
        name
        for name, tree in modules()
        if any(
            isinstance(node, ast.Call)
            and (reads_output(node) or ast.unparse(node.func).endswith("check_output"))
            for node in ast.walk(tree)
        )
    }
    assert found == PROGRAMS


def test_texts_are_printed_only_where_they_are_cleaned() -> None:
    found = {name for name, tree in modules() if prints(tree) and not name.startswith("cmd/")}
    assert found == PRINTERS
    for name, tree in modules():
        if name in SAYING:
            shown = [ast.unparse(call.args[0]) for call in prints(tree)]
            plain = ("json.dumps(", "to_json(", "Path(ssh.write(")
            plain += ("f'nodepool: {error}'", "request_id")
            assert all(text.startswith(plain) for text in shown), shown


ODD = "a\x1b[31m\x9b1m\u202eb\r\u2028c\x00"


def test_cleaned_text_has_no_character_that_a_terminal_interprets() -> None:
    assert printable(ODD + "\nd") == r"a\x1b[31m\x9b1m\u202eb\r\u2028c\x00" + "\nd"
    assert one_line("a\n b\x9b", 9) == r"a b\x9b" and one_line("a" * 20, 10) == "aaaaaaa..."


def formatted(formatter: logging.Formatter, message: str, *args: object) -> str:
    return formatter.format(logging.LogRecord("name", logging.INFO, "path", 1, message, args, None))


def test_log_lines_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.INFO)
    monkeypatch.setattr(logging, "root", root)
    set_up_log(False)
    [handler] = root.handlers
    assert isinstance(handler, logging.StreamHandler) and handler.formatter is not None
    for formatter in (MultiLineFormatter("LINE %(message)s"), handler.formatter):
        lines = formatted(formatter, "job %s", f"x{ODD}\n2026-01-01 ERROR nodepool: forged").split(
            "\n"
        )
        assert all(line.isprintable() for line in lines) and "  2026-01-01 ERROR" in lines[1]
        assert not lines[1].startswith("2026")


def test_id_with_a_percent_sign_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = get_annotated_logger(logging.getLogger("nodepool.test"), event_id="100%s %d")
    with caplog.at_level(logging.INFO):
        log.info("launch of %s", "n1")
        log.info("without arguments")
    assert [record.getMessage() for record in caplog.records] == [
        r"[e: 100\x25s \x25d] launch of n1",
        r"[e: 100\x25s \x25d] without arguments",
    ]


@pytest.mark.parametrize(
    "odd", ["\n", "\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\u200f"]
)
def test_text_of_a_borrower_has_no_control_or_direction_characters(odd: str) -> None:
    for text in (f"debug{odd}", f"{odd}debug", f"de{odd}bug"):
        with pytest.raises(msgspec.ValidationError, match="purpose"):
            msgspec.convert({"labels": ["small"], "purpose": text}, NewLease)
    assert (
        msgspec.convert(
            {"labels": ["small"], "purpose": "Fehlersuche, für Ä: 100 % 日本"}, NewLease
        ).purpose[-2:]
        == "日本"
    )
