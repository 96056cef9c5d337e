"""Answers of forges, and why calls of forges fail.

Imported only with the extra of a forge: it needs requests and urllib3.
"""

from __future__ import annotations

import time

import requests
from urllib3.exceptions import HTTPError, MaxRetryError

#: What a call asks for: a small compressed answer may be a large one.
UNCOMPRESSED = {"Accept-Encoding": "identity"}
#: Bytes and seconds of the body of an answer.
MOST, LONGEST = 16 << 20, 60.0


def content_of(answer: requests.Response) -> bytes:
    """Return the body of an answer that is read from the connection.

    :raises OSError: it is compressed, too long, arrives too slowly, or the connection is lost.
    """
    if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise OSError(f"its answer is compressed ({encoding}) although that was not requested")
    found, deadline = bytearray(), time.monotonic() + LONGEST
    try:
        while data := answer.raw.read1(1 << 16):
            found += data
            if len(found) > MOST or time.monotonic() > deadline:
                raise OSError(f"its answer has more than {MOST} bytes, or took longer than {LONGEST:g} s")
    except HTTPError as error:
        raise OSError(str(error)) from error
    # An error may repeat what was sent.
    token = answer.request.headers.get("Authorization", "").rpartition(" ")[2].encode()
    return bytes(found.replace(token, b"[token]") if token else found)


def is_untrusted(error: Exception) -> bool:
    """Return whether the certificate of a forge was refused: a later call fails, too."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def reason_of(error: Exception) -> str:
    """Return why a forge does not answer, without the URL that the library repeats."""
    reason = error.args[0] if error.args else type(error).__name__
    if isinstance(reason, MaxRetryError):
        reason = reason.reason
    return f"{reason}; if the certificate is right, set ca-file to that of its authority" if is_untrusted(error) else str(reason)
