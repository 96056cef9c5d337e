"""Old pickles: plain values, or nothing."""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import Any

import pytest

from nodepool.nodemanager.records.database import ABANDONED, Database
from nodepool.nodemanager.records.pickle_import import ImportFailed, import_pickle, load

#: As the first version wrote it: Python 2, text protocol.
PYTHON2 = b"""(dp0
S'sliver_princeton_sirius'
p1
(dp2
S'record_key'
p3
S'sliver_princeton_sirius'
p4
sS'account_type'
p5
S'sliver'
p6
sS'name'
p7
S'princeton_sirius'
p8
sS'timestamp'
p9
I1158000000
sS'rspec'
p10
(dp11
S'nm_cpu_guaranteed_share'
p12
I400
ssS'loans'
p13
(lp14
(S'princeton_eisentest'
p15
S'nm_cpu_guaranteed_share'
p16
I200
tp17
assS'timestamp'
p18
(dp19
S'type'
p20
S'timestamp'
p21
sS'timestamp'
p22
I1158000001
ss."""


def imported(database: Database, tmp_path: pathlib.Path, data: bytes) -> Any:
    (tmp_path / "pickle").write_bytes(data)
    return import_pickle(database, str(tmp_path / "pickle"))


@pytest.mark.spec("NM-A.11, NM-C.5: an importer reads old pickles")
def test_pickle_of_the_first_version_is_imported(
    database: Database, tmp_path: pathlib.Path
) -> None:
    result = imported(database, tmp_path, PYTHON2)
    assert (result.taken, result.refused) == (["sliver_princeton_sirius"], {})
    record = database.get("sliver_princeton_sirius")
    assert record is not None
    assert (record.source, record.content["rspec"]) == (ABANDONED, {"nm_cpu_guaranteed_share": 400})
    assert "loans" not in record.content
    assert database.local(record.key) == {
        "loans": [["princeton_eisentest", "nm_cpu_guaranteed_share", 200]]
    }
    assert "already" in imported(database, tmp_path, PYTHON2).refused["sliver_princeton_sirius"]


@pytest.mark.spec(
    "NM-B.2: keyed by name, _rspec, _loans, instantiation, expires, type sliver.VServer"
)
def test_pickle_of_the_last_version_is_imported(database: Database, tmp_path: pathlib.Path) -> None:
    result = imported(
        database,
        tmp_path,
        pickle.dumps(
            {
                "pl_sirius": {
                    "name": "pl_sirius",
                    "type": "sliver.VServer",
                    "instantiation": "delegated",
                    "expires": 99,
                    "keys": "",
                    "rspec": {"cpu_share": 3, "capabilities": "", "ip_addresses": "0.0.0.0"},
                    "_rspec": {"cpu_share": 3},
                    "_loans": [("b", "nm_cpu_share", 1)],
                    "timestamp": 5,
                },
                "pl_ctl": {
                    "name": "pl_ctl",
                    "type": "controller.Controller",
                    "instantiation": "nm-controller",
                    "timestamp": 5,
                },
                "bad": {"name": "a/b", "type": "sliver.VServer"},
                "worse": 7,
            },
            protocol=0,
        ),
    )
    assert sorted(result.taken) == ["delegate_pl_ctl", "sliver_pl_sirius"]
    assert set(result.refused) == {"bad", "worse"}
    record = database.get("sliver_pl_sirius")
    assert record is not None
    assert record.expiry == 99
    assert record.content["plc_instantiated"] is False
    assert record.content["rspec"] == {"nm_cpu_share": 3}


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


@pytest.mark.spec("NM-C.5: a restricted unpickler that admits only builtin containers and scalars")
@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"a": Evil()}, protocol=0),
        pickle.dumps(os.system),
        pickle.dumps(eval),
        b"cbuiltins\ngetattr\n(S'a'\nS'b'\ntR.",
        b"",
        b"junk",
        PYTHON2[:100],
        b"P1\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
    ],
)
def test_pickle_with_code_is_refused(
    data: bytes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportFailed, match="not a pickle of plain values"):
        load(data)
    assert list(tmp_path.iterdir()) == []


def test_plain_values_of_all_protocols_are_read() -> None:
    value = {"a": [1, 2.5, None, True, ("x",), {"s"}, frozenset({1})]}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert load(pickle.dumps(value, protocol=protocol)) == value


def test_missing_file_is_reported(database: Database) -> None:
    with pytest.raises(ImportFailed, match="cannot read"):
        import_pickle(database, "/nowhere/pickle")
