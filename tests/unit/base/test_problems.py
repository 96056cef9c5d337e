"""What may be a bug is logged with its traceback, what a cloud refuses in one line."""

from __future__ import annotations

import logging

import pytest

from nodepool.base.problems import log_failure
from nodepool.exceptions import CapacityException


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (KeyError("flavor"), True),
        (RuntimeError("odd"), True),
        (CapacityException("HTTP 409:\nno host"), False),
        (TimeoutError("10 s"), False),
    ],
)
def test_traceback_is_logged_only_of_what_may_be_a_bug(
    error: Exception, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log_failure(logging.getLogger("test"), error, "Cannot delete node %s", "0000000012")
    (record,) = caplog.records
    assert bool(record.exc_info) is traceback
    assert (
        record.getMessage().startswith("Cannot delete node 0000000012: ")
        and "\n" not in record.getMessage()
    )


def test_traceback_of_a_refusal_is_logged_when_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log_failure(
        logging.getLogger("test"),
        CapacityException("no host"),
        "Cannot launch node %s",
        "0000000012",
    )
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [
        ("ERROR", True)
    ]
