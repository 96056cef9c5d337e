"""Methods, faults and permissions."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.api import methods as api_methods
from nodepool.nodemanager.api.methods import (
    BAD_ARGUMENT,
    CERTIFICATE,
    CONTROLLER,
    DELEGATE,
    DENIED,
    OTHER,
    ROOT,
    SLIVER,
    Caller,
    Fault,
    Program,
)
from nodepool.nodemanager.client.texts import clean
from nodepool.nodemanager.config import parse
from tests.support.nodemanager.node import MemoryNode, delegate, sliver

A, B = Caller(SLIVER, "a"), Caller(SLIVER, "b")
THE_ROOT, LAUNCHER, SNOOP = (
    Caller(ROOT, "root"),
    Caller(CONTROLLER, "nl01"),
    Caller(DELEGATE, "del_snoop"),
)
SEED = [
    "Help",
    "DumpDatabase",
    "CreateSliver",
    "DeleteSliver",
    "Start",
    "Stop",
    "GetRSpec",
    "GetEffectiveRSpec",
    "GetLoans",
    "SetLoans",
]


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[MemoryNode]:
    found = MemoryNode(parse({"state-dir": str(tmp_path), "run-dir": str(tmp_path)}, "test"))
    found.deliver(
        "test",
        None,
        [
            sliver(
                "a",
                rspec={"nm_cpu_guaranteed_share": 400},
                delegations=[("del_snoop", "GetRSpec"), ("b", "Destroy")],
            ),
            sliver("b"),
            sliver("lazy", plc_instantiated=False),
            sliver("broken"),
            delegate("del_snoop"),
        ],
        True,
    )
    yield found
    found.close()


def fault(node: MemoryNode, caller: Caller, method: str, *arguments: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        node.api.call(caller, method, arguments)
    return caught.value


@pytest.mark.spec("NM-A.8: Help, one line of signature and purpose per method")
def test_help_lists_signature_and_purpose_of_every_method(node: MemoryNode) -> None:
    lines = node.api.call(Caller(OTHER, "nobody"), "Help", ()).splitlines()
    assert lines == sorted(lines)
    assert {line.partition("(")[0] for line in lines} == set(api_methods.METHODS) >= set(SEED)
    assert "SetLoans(sliver, loans): " in "\n".join(lines)


@pytest.mark.spec("NM-A.8: 100 unknown method, text lists the valid ones sorted")
def test_unknown_method_is_refused_with_the_valid_ones(node: MemoryNode) -> None:
    found = fault(node, THE_ROOT, "Explode")
    assert found.code == 100
    assert ", ".join(sorted(api_methods.METHODS)) in found.text


@pytest.mark.spec("NM-A.8: 101 wrong argument count (got/expected)")
def test_wrong_argument_count_is_reported_with_the_expected_one(node: MemoryNode) -> None:
    found = fault(node, THE_ROOT, "GetRSpec")
    assert (found.code, "got 0, expecting 1" in found.text) == (101, True)
    assert fault(node, THE_ROOT, "Help", 1).code == 101
    assert fault(node, THE_ROOT, "SetLoans", []).code == 101, "only a sliver may leave itself out"


@pytest.mark.spec("NM-A.8: 102 first argument is no sliver name")
@pytest.mark.parametrize(
    "name", ["nobody", "a/b", "a\n", "../a", "", 7, None, ["a"], {"a": 1}, "A", "x" * 100_000]
)
def test_unknown_sliver_is_refused_as_first_argument(node: MemoryNode, name: Any) -> None:
    assert fault(node, THE_ROOT, "GetRSpec", name).code == 102


@pytest.mark.spec("NM-A.8: method, count, target exists, permission, then argument content")
def test_order_of_checks(node: MemoryNode) -> None:
    stranger = Caller(OTHER, "nobody")
    assert fault(node, stranger, "Explode", 1, 2, 3).code == 100
    assert fault(node, stranger, "SetLoans", "missing", [], 1).code == 101
    assert fault(node, stranger, "SetLoans", "missing", "junk").code == 102
    assert fault(node, stranger, "SetLoans", "a", "junk").code == 108
    assert fault(node, A, "SetLoans", "a", "junk").code == 102


@pytest.mark.spec("NM-A.8: target itself, root, or delegation; C.5: controller")
def test_calls_need_the_target_itself_root_or_a_delegation(node: MemoryNode) -> None:
    for caller in (A, THE_ROOT, LAUNCHER, SNOOP):
        assert node.api.call(caller, "GetRSpec", ("a",))["nm_cpu_guaranteed_share"] == 400
    for caller in (
        B,
        Caller(DELEGATE, "other"),
        Caller(OTHER, "root"),
        Caller(CERTIFICATE, "root"),
        Caller(OTHER, ""),
    ):
        assert fault(node, caller, "GetRSpec", "a").code == 108
    for method in set(SEED) - {"Help", "GetRSpec", "DumpDatabase", "SetLoans"}:
        assert fault(node, SNOOP, method, "a").code == 108
    assert fault(node, SNOOP, "GetRSpec", "b").code == 108, "the pair is in the record of a only"
    assert node.api.call(B, "DeleteSliver", ("a",)) == 1, "by today's name or an old one"
    assert node.commands == [("delete", "a")]


def test_methods_of_a_delegate(node: MemoryNode) -> None:
    """What nodemanager.yaml lets a delegate call, for every sliver."""
    operator = Caller(DELEGATE, "operator", frozenset({"GetUsage", "Recreate"}))
    assert node.api.call(operator, "GetUsage", ("b",))
    assert node.api.call(operator, "ReCreate", ("b",)) == 1
    assert fault(node, operator, "Stop", "b").code == 108
    assert fault(node, Caller(SLIVER, "b", frozenset({"Stop"})), "Stop", "a").code == 108


@pytest.mark.spec("NM-A.8: DumpDatabase root only, C.5: JSON text")
def test_only_root_can_dump_the_database_as_json(node: MemoryNode) -> None:
    for caller in (A, LAUNCHER, SNOOP):
        assert fault(node, caller, "DumpDatabase").code == 108
    assert (
        json.loads(node.api.call(THE_ROOT, "DumpDatabase", ()))["records"]["sliver_a"]["source"]
        == "test"
    )


@pytest.mark.spec(
    "NM-A.7: SetLoans with one argument, a bare triple; and with (own name, [triple, ...])"
)
def test_loans_are_set_with_one_argument_or_with_the_own_name(node: MemoryNode) -> None:
    triple = ["b", "nm_cpu_guaranteed_share", 200]
    for arguments in ((triple,), ([triple],), ("a", triple), ("a", [triple])):
        assert node.api.call(A, "SetLoans", arguments) == 1
        assert node.api.call(A, "GetLoans", ("a",)) == [triple]
        assert node.api.call(B, "GetEffectiveRSpec", ("b",))["nm_cpu_guaranteed_share"] == 200
        assert node.api.call(A, "GetRSpec", ("a",))["nm_cpu_guaranteed_share"] == 400
        node.api.call(A, "SetLoans", ([],))
    assert fault(node, A, "SetLoans", [triple, "junk"]).code == 102
    assert node.api.call(A, "GetLoans", ("a",)) == [], "nothing changed"


@pytest.mark.spec("NM-A.8: None is sent as int 1; Create of a plc_instantiated sliver says so")
def test_create_refuses_slivers_of_an_authority(node: MemoryNode) -> None:
    assert node.api.call(THE_ROOT, "CreateSliver", ("lazy",)) == 1
    assert node.api.call(THE_ROOT, "Create", ("lazy",)) == 1
    assert node.commands == [("create", "lazy")] * 2
    found = fault(node, THE_ROOT, "CreateSliver", "a")
    assert (found.code, "kept by its authority" in found.text) == (104, True)


@pytest.mark.spec("NM-B.3: 104 error inside the call; nothing of the inside goes out")
def test_internal_error_reveals_nothing(node: MemoryNode) -> None:
    found = fault(node, THE_ROOT, "GetConsole", "broken")
    assert (found.code, "secret" in found.text) == (104, False)


@pytest.mark.spec("NM-C.5: records of launchers")
def test_launchers_can_store_records(node: MemoryNode) -> None:
    record = {"account_type": "sliver", "name": "np1", "rspec": {"nm_cpu_share": 3}}
    assert fault(node, A, "PutRecord", record).code == 108
    node.api.call(LAUNCHER, "PutRecord", (record,))
    assert node.sliver_record("np1")["plc_instantiated"] is True  # type: ignore[index]
    node.api.call(LAUNCHER, "PutRecord", ({**record, "plc_instantiated": False},))
    assert node.sliver_record("np1")["plc_instantiated"] is False  # type: ignore[index]
    for wrong in (
        None,
        "x",
        {},
        delegate("d"),
        {"type": "bwcap"},
        {**record, "name": "a/b"},
        {**record, "rspec": {"x": 1}},
    ):
        assert fault(node, LAUNCHER, "PutRecord", wrong).code == 102
    assert "belongs to" in fault(node, LAUNCHER, "PutRecord", {**record, "name": "a"}).text
    assert "expired" in fault(node, LAUNCHER, "PutRecord", {**record, "expiry": 5}).text


def test_renew_and_wait(node: MemoryNode) -> None:
    assert node.api.call(LAUNCHER, "RenewSliver", ("a", int(time.time()) + 60)) == 1
    for wrong in (0, -1, "soon", True, float("nan"), 10**15):
        assert fault(node, LAUNCHER, "RenewSliver", "a", wrong).code == 102
    assert fault(node, A, "RenewSliver", "a", 2e9).code == 108, "a lease is the launcher's"
    assert node.api.call(LAUNCHER, "WaitSliver", ("gone", "gone", 5))["name"] == "gone"
    assert fault(node, LAUNCHER, "WaitSliver", "a", "happy", 5).code == 102
    assert fault(node, B, "WaitSliver", "a", "ready", 5).code == 108


@pytest.mark.spec("issue 10, F16: delegations compare kind as well as name")
def test_delegations_by_kind(node: MemoryNode) -> None:
    node.deliver(
        "test",
        None,
        [
            sliver("del_snoop"),
            sliver(
                "watched",
                delegations=[
                    ("del_snoop", "GetRSpec"),
                    ("b", "GetRSpec"),
                    ("monitor", "GetRSpec"),
                    ("lazy", "GetRSpec"),
                ],
            ),
        ],
        False,
    )
    for caller in (SNOOP, B, Caller(CERTIFICATE, "monitor")):
        assert node.api.call(caller, "GetRSpec", ("watched",))
    for kind in (SLIVER, OTHER, CERTIFICATE):
        assert fault(node, Caller(kind, "del_snoop"), "GetRSpec", "watched").code == 108, (
            "it is the delegate's name"
        )
    assert fault(node, Caller(OTHER, "monitor"), "GetRSpec", "watched").code == 108, (
        "an account of the host"
    )
    for kind in (OTHER, CERTIFICATE):
        assert fault(node, Caller(kind, "lazy"), "GetRSpec", "watched").code == 108, (
            "it is the sliver's name"
        )


@pytest.mark.spec(
    "issue 10, F16: changes of callers that are neither root nor controller are limited"
)
def test_too_many_changes(node: MemoryNode) -> None:
    for _ in range(api_methods.CHANGES_SAVED + 1):
        node.api.call(A, "SetLoans", ([],))
    found = fault(node, A, "SetLoans", [])
    assert found.code == 104
    assert found.text.startswith("too many changes of a by sliver a: SetLoans is possible in ")
    assert fault(node, A, "Stop", "a").code == 104
    assert node.api.call(A, "GetLoans", ("a",)) == []
    assert node.api.call(B, "DeleteSliver", ("a",)) == 1, "another caller's"
    for caller in (THE_ROOT, LAUNCHER):
        for _ in range(2 * api_methods.CHANGES_SAVED):
            node.api.call(caller, "SetLoans", ("a", []))


@pytest.mark.spec("issue 10, F16: texts chosen by others are cleaned before they get into faults")
def test_foreign_texts_are_cleaned_in_faults() -> None:
    assert (
        str(Fault(104, "a\x1b[2J\x9bb\r\nforged line\u202e\x00"))
        == "a\ufffd[2J\ufffdb forged line\ufffd\ufffd"
    )
    assert clean("two  spaces, umlauts: ü") == "two  spaces, umlauts: ü"


def test_wait_is_parked(node: MemoryNode) -> None:
    found = node.api.call(LAUNCHER, "WaitSliver", ("late", "ready", 1000))
    assert isinstance(found, api_methods.Parked)
    assert (found.sliver, found.timeout, found.check()) == ("late", api_methods.MAX_WAIT, None)
    assert (
        node.api.call(LAUNCHER, "WaitSliver", ("late", "ready", 0))
        == found.late
        == {"name": "late", "state": "waiting"}
    )
    node.deliver("test", None, [sliver("late")], False)
    assert found.check()["name"] == "late"


@pytest.mark.parametrize("caller", [Caller(SLIVER, "a"), SNOOP, Caller(OTHER, "someone")])
def test_only_launchers_and_root_run_programs(node: MemoryNode, caller: Caller) -> None:
    assert fault(node, caller, "Exec", "a", ["id"], {}).code == DENIED
    for permitted in (LAUNCHER, THE_ROOT):
        assert isinstance(node.api.call(permitted, "Exec", ["a", ["id"], {}]), Program)


@pytest.mark.parametrize(
    ("argv", "options", "text"),
    [
        ("id", {}, "argv must be a list with the program and its arguments"),
        ([], {}, "argv must be a list with the program and its arguments"),
        (["id", 1], {}, "argv must be a text"),
        ([b"i\0d"], {}, "argv must have at most"),
        (["x" * 131072], {}, "argv must have at most 131071 characters and no NUL"),
        (["id"], [], "options must be a dictionary"),
        (["id"], {"cwd": "/"}, "options must be a dictionary with user"),
        (["id"], {"env": ["A=B"]}, "options must be a dictionary with user"),
        (["id"], {"env": {"A": 1}}, "env: A must be a text"),
        (["id"], {"env": {"A=B": "1"}}, "env: a name must not be empty or contain '='"),
        (["id"], {"env": {"": "1"}}, "env: a name must not be empty or contain '='"),
        (["id"], {"user": None}, "user must be a text"),
    ],
)
def test_invalid_program_is_refused_with_the_reason(
    node: MemoryNode, argv: Any, options: Any, text: str
) -> None:
    refused = fault(node, LAUNCHER, "Exec", "a", argv, options)
    assert refused.code == BAD_ARGUMENT
    assert text in refused.text
