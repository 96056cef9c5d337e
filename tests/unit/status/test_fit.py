"""Tables: the quick way draws what the library draws, and what does not fit is omitted or cut."""

from __future__ import annotations

from typing import Any

import prettytable
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.base.problems import printable
from nodepool.status.results import Results, format_use, output

CELLS = (
    st.text(max_size=8)
    | st.integers()
    | st.none()
    | st.booleans()
    | st.lists(st.text(max_size=3), max_size=2)
)


@given(st.lists(st.fixed_dictionaries({"id": CELLS, "pool": CELLS}), max_size=5))
def test_as_the_library_draws(rows: list[dict[str, Any]]) -> None:
    found = output(Results(rows, {"id": "ID", "pool": "Pool"}), "table")
    table = prettytable.PrettyTable(["ID", "Pool"])
    table.align = "l"
    for row in rows:
        cells = [row["id"], row["pool"]]
        texts = [
            "" if each is None else ",".join(each) if isinstance(each, list) else str(each)
            for each in cells
        ]
        table.add_row([printable(text) for text in texts])
    # What a terminal would obey is shown escaped.
    assert not [c for c in found if c != "\n" and not c.isprintable()]
    assert found == str(table).encode("utf-8", "backslashreplace").decode()


def test_narrow_table_wraps_reasons_instead_of_cutting_them() -> None:
    reason = "east-main: pool main, instances: 1 needed, 0 of 20 left (20 nodes: 20 in-use)"
    rows = [{"labels": ["fake-label"], "state": "requested", "reason": reason}]
    columns = {"labels": "Labels", "state": "State", "reason": "Reason"}
    lines = output(Results(rows, columns), "table", width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert (
        " ".join(
            line.split("|")[3].strip()
            for line in lines
            if line.startswith("|") and "Reason" not in line
        )
        == reason
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_table_fits_the_terminal(width: int) -> None:
    columns = {
        "id": "ID",
        "provider": "Provider",
        "label": "Label",
        "server_id": "Server ID",
        "state": "State",
    }
    rows = [
        {
            "id": "0000000001",
            "provider": "p" * 30,
            "label": ["l" * 20, "m" * 30],
            "server_id": "s" * 40,
            "state": "ready",
        }
    ]
    lines = output(Results(rows, columns), "table", width=width).splitlines()
    # Two columns stay in any case.
    assert max(map(len, lines)) <= max(width, 1 + 2 * 15)
    assert "0000000001" in lines[3]
    if width == 200:
        assert lines == output(Results(rows, columns), "table").splitlines()


def test_narrow_table_wraps_instead_of_cutting() -> None:
    rows = [
        {
            "limits": "cores 12/40, instances 2/20, ram 1024/20000",
            "file": "/etc/nodepool/nodepool.yaml",
        }
    ]
    text = output(Results(rows, {"limits": "Used of Limits", "file": "File"}), "table", width=40)
    assert max(map(len, text.splitlines())) <= 40 and "..." not in text
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[3:-1]
    ]
    assert next(
        " ".join(filter(None, column)) for column in zip(*cells, strict=True)
    ) == format_use(rows[0]["limits"])
    assert "".join(cell for _, cell in cells) == rows[0]["file"]


@pytest.mark.parametrize("width", [30, 60, 80])
def test_narrow_table_keeps_columns_with_sentences(width: int) -> None:
    columns = {
        "launcher": "Launcher",
        "provider": "Provider",
        "label": "Label",
        "problem": "Problem",
        "suggestion": "Suggestion",
    }
    rows = [dict.fromkeys(columns, "one or another word " * 4)]
    text = output(Results(rows, columns), "table", width=width)
    assert "Problem" in text and "Suggestion" in text


def test_wrapped_names_and_commands_stay_whole() -> None:
    text = output(
        Results(
            [{"reason": "see `nodepool image-unpause debian-12` and retry it"}],
            {"reason": "Reason"},
        ),
        "table",
        width=25,
    )
    assert "image-unpause" in text and "debian-12" in text and len(text.splitlines()) > 5
