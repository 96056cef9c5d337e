"""The file of ended nodes: tables from it are those from events."""

from __future__ import annotations

import os
import pathlib
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nodepool.status import usage_file
from nodepool.status.usage import GROUPS, MEASURED, Use, table
from nodepool.status.usage_file import UsageFile, create

NAMES = ("", "a", "b, c", "ü\n'\"", "x" * 30)


def uses(number: int, seed: int) -> list[Use]:
    """Ended nodes of which more or less is known, in a random order."""
    rng = random.Random(seed)

    def made(index: int) -> Use:
        begin = rng.uniform(1e9, 1e9 + 1e6)
        times = [begin, *sorted(begin + rng.uniform(0, 1e5) for _ in range(3))]
        known = [time if rng.random() < 0.8 else None for time in times]
        removed = times[-1] + rng.choice((0, 5, 9.5))
        waited = rng.choice((None, round(rng.uniform(0, 100), 3)))
        user = {
            key: " ".join(rng.choice(NAMES).split())
            for key in ("tenant", "project", "pipeline", "job", "owner")
        }
        measured = {key: float(rng.randrange(1 << 40)) for key in MEASURED if rng.random() < 0.6}
        places = (rng.choice(("small", "large")), rng.choice(("p", "q")), "main")
        return Use(f"{index:010}", *places, *known, removed, waited, user, measured)

    return [made(index) for index in range(number)]


def price(use: Use) -> float | None:
    return {"small": 0.5, "large": None}[use.label]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "usage?#%.sqlite")


@pytest.fixture
def file(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[UsageFile]:
    monkeypatch.setattr(usage_file, "TOGETHER", 20)
    with create(path) as opened:
        yield opened


@pytest.mark.spec("issue 49, 3: tables from events and from the file are equal")
@pytest.mark.parametrize("seed", range(5))
def test_tables_from_events_and_from_the_file_are_equal(file: UsageFile, seed: int) -> None:
    found = uses(150, seed)
    for start in range(0, len(found), 40):
        file.write(found[start : start + 40], price)
        while file.sum_up():
            pass
    assert file.connection.execute("SELECT count(*) FROM sums").fetchone()[0] > 0
    times = sorted(use.removed or 0.0 for use in found)
    for since in (0.0, times[3], times[30] - 0.001, times[90], times[-1], 2e9):
        chosen = [use for use in found if (use.removed or 0.0) >= since]
        for by in GROUPS:
            expected = table(chosen, by, 0.0, price)
            assert file.table(by, since).rows == expected.rows
            assert file.table(by, since).columns == expected.columns


def test_rows_that_come_again_or_late_change_the_sums_that_contain_them(file: UsageFile) -> None:
    found = uses(100, 1)
    provider = next(use.provider for use in found if use.node == "0000000003")
    late = Use("0000000003", measured={"memory_peak": 2.0**41, "oom_kills": 7.0}, source=provider)
    file.write(found, price)
    while file.sum_up():
        pass
    before = file.table("label").rows
    file.write(found, lambda use: 99.0 if price(use) else None)
    assert file.table("label").rows == before, "the first price counts"
    assert not file.complete(replace(late, source="another provider"))
    assert file.complete(late) and not file.complete(Use("9", measured={"cpu_usec": 1.0}))
    found[3].measured |= late.measured
    assert file.table("label").rows == table(found, "label", 0.0, price).rows != before
    # Part of what is known comes again: the rest stays.
    file.write([Use("0000000003", removed=found[3].removed)], lambda use: None)
    assert file.table("label").rows == table(found, "label", 0.0, price).rows


def test_node_with_an_id_from_before_zookeeper_was_emptied_keeps_its_row(file: UsageFile) -> None:
    for begin in (1e9, 2e9):
        file.write([Use("0000000001", label="small", created=begin, removed=begin + 60)], price)
    assert file.table("label").rows[0]["nodes"] == 2
    assert [use.node for use in file.uses(0.0)] == ["0000000001@1000000060", "0000000001"]


def test_odd_texts_of_records_are_stored_printable(file: UsageFile) -> None:
    file.write([Use("1\ud800", label="small", user={"job": "a\ud800\x1b"}, removed=1.0)], price)
    assert [row["job"] for row in file.table("job").rows] == ["a\\ud800\\x1b"]


@pytest.mark.parametrize("mode", [None, 0o600, 0o666])
def test_file_is_not_readable_for_others(path: str, mode: int | None) -> None:
    before = os.umask(0)
    try:
        if mode is not None:
            os.close(os.open(path, os.O_CREAT, mode))
        create(path).connection.close()
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == {None: 0o640, 0o600: 0o600, 0o666: 0o640}[mode]


def test_what_is_not_a_usage_log_is_refused_and_not_changed(tmp_path: pathlib.Path) -> None:
    text, other, pipe = tmp_path / "text", tmp_path / "other", tmp_path / "pipe"
    text.write_text("something else" * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    os.mkfifo(pipe)
    for path in (text, other, pipe, tmp_path, tmp_path / "none" / "file"):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises((OSError, sqlite3.Error)):
            create(str(path))
        assert not path.is_file() or path.read_bytes() == before
    with pytest.raises(sqlite3.OperationalError):
        UsageFile(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
