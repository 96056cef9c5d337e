"""One request and its answer: XML-RPC by POST; images by PUT, GET, DELETE (NM-A.8, C.5).

Deliberately small: HTTP/1.0 semantics, one request per connection, limits on size and time
everywhere.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from nodepool.nodemanager.api.forward import FORWARD_HEADER, SMALL_REQUEST
from nodepool.nodemanager.api.identity import Identity
from nodepool.nodemanager.api.methods import (
    BAD_ARGUMENT,
    CONTROLLER,
    DELEGATE,
    DENIED,
    INTERNAL,
    ROOT,
    Api,
    Caller,
    Fault,
    Parked,
    Program,
)
from nodepool.nodemanager.client import xml_rpc
from nodepool.nodemanager.rootfs.uploaded import ImageError, Images

log = logging.getLogger("nodepool.nodemanager.api")

MAX_HEAD = 16 * 1024
#: Maximum bytes of a call: for root, controllers and delegates, and for all others.
MAX_BODY = 1 << 20
SMALL_BODY = SMALL_REQUEST
#: Seconds for the whole head and body of a call, and for one piece of an image.
REQUEST_TIMEOUT = 30.0
PIECE_TIMEOUT = 60.0
PIECE = 1 << 20
#: Bytes that are still read from a refused client, and for how many seconds: closing immediately
#: would destroy the answer before the client has read it.
LINGER_BYTES = 8 << 20
LINGER_TIME = 2.0
_REASONS = {
    200: "OK",
    201: "Created",
    204: "No Content",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


class Refused(Exception):
    """The request is refused: status and text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def head(status: int, content_type: str, length: int) -> bytes:
    """Return the head of an answer."""
    return (
        f"HTTP/1.0 {status} {_REASONS.get(status, 'Answer')}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode("ascii")


def refusal(refused: Refused) -> bytes:
    """Return a complete answer that refuses a request."""
    text = f"{refused}\n".encode("utf-8", "replace")
    return head(refused.status, "text/plain; charset=utf-8", len(text)) + text


def xml_answer(body: bytes) -> bytes:
    """Return a complete answer with an XML body."""
    return head(200, "text/xml", len(body)) + body


class Request:
    """A request that is parsed as it arrives.

    :param trusted: the caller is root or a controller.
    """

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted
        self._length = -1
        self.verb = ""
        self.path = ""
        self.query = ""
        self.headers: dict[str, str] = {}
        #: The head until it is complete, then the body; for an image, the data received with the
        #: head.
        self.data = bytearray()

    @property
    def is_call(self) -> bool:
        return self.verb == "POST" and self.path in ("/", "/RPC2")

    @property
    def is_image(self) -> bool:
        return self.path == "/images" or self.path.startswith("/images/")

    def feed(self, piece: bytes) -> bool:
        """Add data; return whether it is complete (head and body of a call, else the head).

        :raises Refused: it is malformed or too large.
        """
        self.data += piece
        if self._length < 0:
            place = [
                found for mark in (b"\r\n\r\n", b"\n\n") if (found := self.data.find(mark)) >= 0
            ]
            if not place:
                if len(self.data) > MAX_HEAD:
                    raise Refused(431, f"the head of the request has more than {MAX_HEAD} bytes")
                return False
            end = min(place)
            self._head(bytes(self.data[:end]))
            del self.data[: end + (4 if self.data[end : end + 4] == b"\r\n\r\n" else 2)]
            if not self.is_call:
                return True
            self._length = self.length()
            limit = MAX_BODY if self._trusted or FORWARD_HEADER in self.headers else SMALL_BODY
            if self._length > limit:
                raise Refused(413, f"a request may have at most {limit} bytes")
        if len(self.data) < self._length:
            return False
        del self.data[self._length :]
        return True

    def ended(self) -> Refused | None:
        """Return the refusal of an incomplete request; None: the client has sent nothing."""
        return Refused(400, "the request ended early") if self.data or self.verb else None

    def _head(self, data: bytes) -> None:
        lines = [line.rstrip("\r") for line in data.decode("latin-1").split("\n")]
        words = lines[0].split(" ")
        if len(words) not in (2, 3):
            raise Refused(400, "the request line is not HTTP")
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or name != name.strip() or name.lower() in self.headers:
                raise Refused(400, "a header is malformed or given twice")
            self.headers[name.lower()] = value.strip()
        if "transfer-encoding" in self.headers:
            raise Refused(411, "Content-Length is needed")
        try:
            parts = urlsplit(words[1])
        except ValueError as error:
            raise Refused(400, f"the address is malformed: {error}") from None
        self.verb, self.path, self.query = words[0], parts.path, parts.query

    def length(self) -> int:
        text = self.headers.get("content-length", "")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise Refused(411, "Content-Length is needed")
        return int(text)


class Desk:
    """Answers requests; used by many threads."""

    def __init__(self, api: Api, images: Images, identity: Identity) -> None:
        self._api = api
        self._images = images
        self._identity = identity

    # -- calls

    def call(self, request: Request, caller: Caller) -> bytes | Parked | Program:
        """Return the answer, or what is to be waited for or started.

        :raises Refused: this caller may not send such a request.
        """
        if not request.is_call:
            raise Refused(404 if request.verb in ("GET", "POST") else 405, "POST XML-RPC to /")
        try:
            speaker = self._speaker(request, caller)
            if len(request.data) > SMALL_BODY and speaker.kind not in (ROOT, CONTROLLER, DELEGATE):
                raise Refused(413, f"a request may have at most {SMALL_BODY} bytes")
            try:
                method, arguments = xml_rpc.parse_call(bytes(request.data))
            except ValueError as error:
                raise Fault(BAD_ARGUMENT, str(error)) from None
            result = self._api.call(speaker, method, arguments)
            if isinstance(result, (Parked, Program)):
                return result
        except Fault as fault:
            return xml_answer(xml_rpc.fault(fault.code, fault.text))
        return self.encode(caller, result)

    @staticmethod
    def encode(caller: Caller, result: object) -> bytes:
        """Return the XML answer with a result."""
        try:
            return xml_answer(xml_rpc.response(result))
        except (TypeError, OverflowError) as error:
            log.error("The answer to %s cannot be encoded: %s", caller, error)
            return xml_answer(
                xml_rpc.fault(INTERNAL, "internal error; see the log of the node manager")
            )

    def _speaker(self, request: Request, caller: Caller) -> Caller:
        name = request.headers.get(FORWARD_HEADER)
        if not name:
            return caller
        if not self._identity.may_forward(caller):
            raise Fault(DENIED, f"Permission denied: {caller} may not speak for others")
        delegate = self._identity.forwarded(name)
        if delegate is None:
            raise Fault(DENIED, "Permission denied: no such delegate")
        return delegate

    # -- images

    def image(self, connection: socket.socket, request: Request, caller: Caller) -> bytes | None:
        """Execute a request about images over a blocking connection.

        :return: the answer; None: it has been sent.
        :raises Refused: this caller may not send it, it is wrong, or it took too long.
        :raises OSError: the connection broke.
        """
        if caller.kind not in (ROOT, CONTROLLER):
            raise Refused(403, f"{caller} may not touch images")
        try:
            status, content_type, answer = self._image(connection, request)
        except TimeoutError:
            raise Refused(408, "the request took too long") from None
        if isinstance(answer, bytes):
            return head(status, content_type, len(answer)) + answer
        with answer:
            connection.sendall(head(status, content_type, os.fstat(answer.fileno()).st_size))
            while piece := answer.read(PIECE):
                connection.sendall(piece)
        return None

    def _image(
        self, connection: socket.socket, request: Request
    ) -> tuple[int, str, bytes | BinaryIO]:
        verb, name, query = (
            request.verb,
            unquote(request.path[len("/images/") :]),
            parse_qs(request.query),
        )
        try:
            if verb == "GET" and not name:
                return 200, "application/json", json.dumps(self._images.names()).encode()
            if verb == "GET":
                if not os.path.exists(self._images.path(name)):
                    raise Refused(404, f"image {name[:128]} does not exist")
                return 200, "application/x-tar", self._images.open(name)
            if verb == "PUT" and name:
                length = request.length()
                body: BinaryIO = _Body(bytes(request.data), connection)  # type: ignore[assignment]
                found = self._images.put(
                    name, body, length, next(iter(query.get("sha256", [])), None)
                )
                return 201, "text/plain", f"{found}\n".encode()
            if verb == "DELETE" and name:
                if not self._images.delete(name):
                    raise Refused(404, f"image {name[:128]} does not exist")
                return 204, "text/plain", b""
        except ImageError as error:
            raise Refused(400, str(error)) from None
        raise Refused(405, "GET /images, GET, PUT or DELETE /images/NAME")


class _Body(io.RawIOBase):
    """The data of the body that was read with the head, then the rest from the socket."""

    def __init__(self, first: bytes, connection: socket.socket) -> None:
        self._first = first
        self._connection = connection

    def read(self, size: int = -1) -> bytes:
        if not self._first:
            return self._connection.recv(size)
        data, self._first = self._first[:size], self._first[size:]
        return data
