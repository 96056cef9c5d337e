"""The parts of the connection that need no server."""

from __future__ import annotations

import logging

import pytest
from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Create

from nodepool.zk.connection.client import RepeatFilter
from nodepool.zk.connection.protocol import BROKEN, SessionClient


def test_no_answer_in_time() -> None:
    """Who expects the exceptions of kazoo's operations gets one; who knows kazoo's own for this
    gets that.
    """
    with pytest.raises(KazooException, match="no answer in time") as raised:
        SessionClient(hosts="127.0.0.1:1").handler.async_result().get(timeout=0.01)
    assert isinstance(raised.value, KazooTimeoutError) and isinstance(raised.value, BROKEN)


def test_details_of_kazoo_are_not_logged_as_they_may_contain_credentials() -> None:
    levels = (logging.DEBUG, logging.INFO)
    records = [
        logging.LogRecord("kazoo.client", level, "", 0, "Received response: %r", ("data",), None)
        for level in levels
    ]
    assert [RepeatFilter(60.0).filter(record) for record in records] == [False, True]


def test_request_whose_answer_cannot_be_read_is_not_logged_with_its_data() -> None:
    request, error = Create("/a", b"token", [], 0), ValueError("damaged")
    record = logging.LogRecord(
        "kazoo.client",
        logging.ERROR,
        "",
        0,
        "Cannot read the answer to %s",
        (request,),
        (ValueError, error, None),
    )
    assert RepeatFilter(60.0).filter(record)
    assert record.getMessage() == "Cannot read the answer to Create"
