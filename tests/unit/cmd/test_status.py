"""What ``nodepool status`` shows of waiting requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nodepool.cmd.commands.observe import waiting_lines

ROW: dict[str, Any] = {
    "cause": "quota of provider east: 20 of 20 instances in use",
    "count": 5,
    "since": "6 min 3 s",
    "suggestion": "raise `max-servers` of pool main",
    "label_counts": Counter(small=3, large=2),
    "tenants": Counter(acme=4),
    "ids": [f"100-{number:010}" for number in range(5)],
}


def test_waiting_requests_show_cause_suggestion_labels_tenants_and_first_ids() -> None:
    assert list(waiting_lines(ROW, None)) == [
        "  5 requests waiting up to 6 min 3 s: quota of provider east: 20 of 20 instances in use",
        "    suggestion: raise `max-servers` of pool main",
        "    labels: small 3, large 2",
        "    tenants: acme 4",
        "    ids: 100-0000000000, 100-0000000001, 100-0000000002 (+2 more)",
    ]


def test_what_is_unknown_is_omitted() -> None:
    row = {**ROW, "count": 1, "suggestion": "", "tenants": Counter(), "ids": ["100-0000000000"]}
    assert next(iter(waiting_lines(row, None))).startswith("  1 request waiting up to ")
    assert list(waiting_lines(row, None))[1:] == [
        "    labels: small 3, large 2",
        "    ids: 100-0000000000",
    ]


@pytest.mark.parametrize("width", [30, 60])
def test_narrow_terminal_wraps_without_losing_words(width: int) -> None:
    lines = list(waiting_lines(ROW, width))
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(waiting_lines(ROW, None)).split())


def test_values_cannot_break_the_terminal() -> None:
    assert not [
        line
        for line in waiting_lines({**ROW, "cause": "a\x1b[2J\nb"}, None)
        if not line.isprintable()
    ]
