"""One request and its answer: XML-RPC by POST, images by PUT, GET and DELETE (nodemanager.md A.8, C.5).

Small on purpose: HTTP/1.0 semantics, one request per connection, everything bounded in size and time.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import time
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from nodepool.nodemanager import xml_rpc
from nodepool.nodemanager.api import BAD_ARGUMENT, CONTROLLER, DENIED, INTERNAL, ROOT, Api, Caller, Fault
from nodepool.nodemanager.forward import FORWARD_HEADER
from nodepool.nodemanager.identity import Identity
from nodepool.nodemanager.images import ImageError, Images

log = logging.getLogger("nodepool.nodemanager.api")

MAX_HEAD = 16 * 1024
MAX_BODY = 1 << 20
#: Seconds for the whole head and body of a call, and for one piece of an image.
REQUEST_TIMEOUT = 30.0
PIECE_TIMEOUT = 60.0
PIECE = 1 << 20
#: Of what a refused client still sends, so much is read, and for so many seconds: closing at once would take the answer
#: away from it.
LINGER_BYTES = 8 << 20
LINGER_TIME = 2.0
_REASONS = {200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
            405: "Method Not Allowed", 408: "Request Timeout", 411: "Length Required", 413: "Content Too Large",
            431: "Request Header Fields Too Large", 500: "Internal Server Error"}


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Body(io.RawIOBase):
    """What was read too far, then the rest from the socket."""

    def __init__(self, first: bytes, connection: socket.socket, length: int) -> None:
        self._first = first[:length]
        self._connection = connection
        self._left = length

    def read(self, size: int = -1) -> bytes:
        if self._left <= 0:
            return b""
        wanted = self._left if size < 0 else min(size, self._left)
        if self._first:
            data, self._first = self._first[:wanted], self._first[wanted:]
        else:
            data = self._connection.recv(min(wanted, 1 << 20))
        self._left -= len(data)
        return data


class Exchange:
    """A connection from its request to its answer."""

    def __init__(self, connection: socket.socket, caller: Caller, api: Api, images: Images, identity: Identity) -> None:
        self._connection = connection
        self._caller = caller
        self._api = api
        self._images = images
        self._identity = identity
        self._deadline = time.monotonic() + REQUEST_TIMEOUT

    def run(self) -> None:
        """Answer one request.

        :raises OSError: the connection broke.
        """
        refused = True
        try:
            verb, target, headers, rest = self._head()
            answer: bytes | BinaryIO
            status, content_type, answer = self._dispatch(verb, target, headers, rest)
            refused = False
        except _Refused as refusal:
            status, content_type, answer = refusal.status, "text/plain; charset=utf-8", f"{refusal}\n".encode()
        except TimeoutError:
            status, content_type, answer = 408, "text/plain", b"the request took too long\n"
        self._connection.settimeout(REQUEST_TIMEOUT)
        length = len(answer) if isinstance(answer, bytes) else os.fstat(answer.fileno()).st_size
        head = (f"HTTP/1.0 {status} {_REASONS.get(status, 'Answer')}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {length}\r\nConnection: close\r\n\r\n")
        if isinstance(answer, bytes):
            self._connection.sendall(head.encode("ascii") + answer)
        else:
            with answer:
                self._connection.sendall(head.encode("ascii"))
                # For each piece: a large image may take its time.
                self._connection.settimeout(PIECE_TIMEOUT)
                while piece := answer.read(PIECE):
                    self._connection.sendall(piece)
        if refused:
            self._linger()

    def _linger(self) -> None:
        self._deadline = time.monotonic() + LINGER_TIME
        left = LINGER_BYTES
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while left > 0:
                piece = self._receive()
                if not piece:
                    return
                left -= len(piece)

    # -- reading

    def _receive(self, size: int = 65536) -> bytes:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv(size)

    def _head(self) -> tuple[str, str, dict[str, str], bytes]:
        data = b""
        while b"\r\n\r\n" not in data and b"\n\n" not in data:
            if len(data) > MAX_HEAD:
                raise _Refused(431, f"the head of the request has more than {MAX_HEAD} bytes")
            piece = self._receive()
            if not piece:
                raise _Refused(400, "the request ended early") if data else ConnectionResetError("nothing was asked")
            data += piece
        end = min(place for mark in (b"\r\n\r\n", b"\n\n") if (place := data.find(mark)) >= 0)
        rest = data[end + (4 if data[end:end + 4] == b"\r\n\r\n" else 2):]
        lines = [line.rstrip("\r") for line in data[:end].decode("latin-1").split("\n")]
        words = lines[0].split(" ") if lines else []
        if len(words) not in (2, 3):
            raise _Refused(400, "the request line is not HTTP")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or name != name.strip() or name.lower() in headers:
                raise _Refused(400, "a header is malformed or given twice")
            headers[name.lower()] = value.strip()
        if "transfer-encoding" in headers:
            raise _Refused(411, "Content-Length is needed")
        return words[0], words[1], headers, rest

    @staticmethod
    def _length(headers: dict[str, str]) -> int:
        text = headers.get("content-length", "")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise _Refused(411, "Content-Length is needed")
        return int(text)

    def _body(self, headers: dict[str, str], rest: bytes) -> bytes:
        length = self._length(headers)
        if length > MAX_BODY:
            raise _Refused(413, f"a request may have at most {MAX_BODY} bytes")
        data = rest[:length]
        while len(data) < length:
            piece = self._receive(length - len(data))
            if not piece:
                raise _Refused(400, "the request ended early")
            data += piece
        return data

    # -- answering

    def _dispatch(self, verb: str, target: str, headers: dict[str, str], rest: bytes) -> tuple[int, str, bytes | BinaryIO]:
        parts = urlsplit(target)
        if verb == "POST" and parts.path in ("/", "/RPC2"):
            return 200, "text/xml", self._call(headers, self._body(headers, rest))
        if parts.path == "/images" or parts.path.startswith("/images/"):
            if self._caller.kind not in (ROOT, CONTROLLER):
                raise _Refused(403, f"{self._caller} may not touch images")
            return self._image(verb, unquote(parts.path[len("/images/"):]), parse_qs(parts.query), headers, rest)
        raise _Refused(404 if verb in ("GET", "POST") else 405, "POST XML-RPC to /")

    def _call(self, headers: dict[str, str], body: bytes) -> bytes:
        try:
            try:
                method, arguments = xml_rpc.parse_call(body)
            except ValueError as error:
                raise Fault(BAD_ARGUMENT, str(error)) from None
            result = self._api.call(self._speaker(headers), method, arguments)
            return xml_rpc.response(result)
        except Fault as fault:
            return xml_rpc.fault(fault.code, fault.text)
        except (TypeError, OverflowError) as error:
            log.error("The answer to %s cannot be told: %s", self._caller, error)
            return xml_rpc.fault(INTERNAL, "internal error; see the log of the node manager")

    def _speaker(self, headers: dict[str, str]) -> Caller:
        name = headers.get(FORWARD_HEADER)
        if name is None:
            return self._caller
        if not self._identity.may_forward(self._caller):
            raise Fault(DENIED, f"Permission denied: {self._caller} may not speak for others")
        delegate = self._identity.forwarded(name)
        if delegate is None:
            raise Fault(DENIED, "Permission denied: no such delegate")
        return delegate

    def _image(self, verb: str, name: str, query: dict[str, list[str]], headers: dict[str, str],
               rest: bytes) -> tuple[int, str, bytes | BinaryIO]:
        try:
            if verb == "GET" and not name:
                return 200, "application/json", json.dumps(self._images.names()).encode()
            if verb == "GET":
                if not os.path.exists(self._images.path(name)):
                    raise _Refused(404, f"there is no image {name[:128]}")
                return 200, "application/x-tar", self._images.open(name)
            if verb == "PUT" and name:
                length = self._length(headers)
                self._connection.settimeout(PIECE_TIMEOUT)
                body: BinaryIO = _Body(rest, self._connection, length)  # type: ignore[assignment]
                found = self._images.put(name, body, length, next(iter(query.get("sha256", [])), None))
                return 201, "text/plain", f"{found}\n".encode()
            if verb == "DELETE" and name:
                if not self._images.delete(name):
                    raise _Refused(404, f"there is no image {name[:128]}")
                return 204, "text/plain", b""
        except ImageError as error:
            raise _Refused(400, str(error)) from None
        raise _Refused(405, "GET /images, GET, PUT or DELETE /images/NAME")
