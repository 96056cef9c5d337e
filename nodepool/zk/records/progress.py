"""Stored progress records, with tolerant reading; see :mod:`nodepool.zk.mirror.progress`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from nodepool.zk.records import BUILDING, FAILED, READY, RecordError, parse_object

ROOT = "/nodepool/image-progress"
BUILDS = f"{ROOT}/builds"
UPLOADS = f"{ROOT}/uploads"
FAILURES = f"{ROOT}/failed-uploads"

TAIL_LINES = 20
TAIL_BYTES = 4096
#: Characters stored of one log line, and of a reason.
LINE_LENGTH = 500
REASON_LENGTH = 2000
BUILD_STATES = frozenset({BUILDING, READY, FAILED})

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

P = TypeVar("P", "BuildProgress", "UploadProgress", "UploadFailure")

# -- texts


def clean_line(text: str, length: int = LINE_LENGTH) -> str:
    """Return a log line for a terminal: no escape sequences, at most ``length`` characters."""
    # Of a line that was redrawn (progress bars) the last state counts.
    text = _ESCAPE.sub("", text.rstrip("\r\n").rpartition("\r")[2])
    text = _CONTROL.sub(" ", text).replace("\t", "    ").replace("\n", " ")
    # Characters that cannot be encoded must not invalidate the record.
    text = text.encode("utf-8", "replace").decode("utf-8").rstrip()
    return text if len(text) <= length else f"{text[: length - 3]}..."


def clip_tail(lines: Iterable[str]) -> list[str]:
    """Return the last lines: at most 20, at most 4 KiB in total."""
    kept: list[str] = []
    room = TAIL_BYTES
    for line in reversed([clean_line(line) for line in lines][-TAIL_LINES:]):
        room -= len(line.encode("utf-8")) + 1
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]


# -- tolerant reading of values


def _text(value: object, default: str = "") -> str:
    return value if isinstance(value, str) else default


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    # Infinity and NaN are not valid times, and not valid JSON.
    return number if abs(number) < 1e18 else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _sizes(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {str(key): size for key, raw in value.items() if (size := _whole(raw)) is not None}


def _serialize(values: dict[str, Any]) -> bytes:
    values = {key: _number(value) if isinstance(value, float) else value for key, value in values.items()}
    return json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


# -- records


@dataclass
class BuildProgress:
    """A running, finished or failed build.

    ``expected`` and ``duration`` are in seconds, ``sizes`` in bytes.
    """

    image: str
    build: str
    builder: str = ""
    builder_id: str = ""
    state: str = BUILDING
    reason: str | None = None
    exit_code: int | None = None
    phase: str = ""
    started: float | None = None
    updated: float | None = None
    ended: float | None = None
    expected: float | None = None
    duration: float | None = None
    log: str = ""
    last_line: str = ""
    tail: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    next_try: float | None = None
    manual: bool = False

    @property
    def path(self) -> str:
        return f"{BUILDS}/{quote(self.build, safe='')}"

    @property
    def running(self) -> bool:
        return self.state == BUILDING

    def fraction(self, now: float) -> float | None:
        """Return the elapsed part of the expected time; None: unknown.

        0 to 0.99 while it runs, 1 when ready.
        """
        if self.state == READY:
            return 1.0
        if self.state != BUILDING or not self.expected or self.expected <= 0 or self.started is None:
            return None
        return min(0.99, max(0.0, (now - self.started) / self.expected))

    def elapsed(self, now: float) -> float | None:
        """Return the seconds since the start; for an ended build its duration."""
        if self.duration is not None:
            return self.duration
        if self.started is None:
            return None
        end = now if self.state == BUILDING else self.ended
        return None if end is None else max(0.0, end - self.started)

    def serialize(self) -> bytes:
        values = asdict(self)
        values["tail"] = clip_tail(self.tail)
        values["last_line"] = clean_line(self.last_line)
        values["reason"] = None if self.reason is None else clean_line(self.reason, length=REASON_LENGTH)
        return _serialize(values)

    @classmethod
    def fromDict(cls, values: dict[str, Any], name: str) -> BuildProgress:
        """Return the record; missing or invalid values become the default.

        :raises RecordError: the name of the image or a valid state is missing.
        """
        image = _text(values.get("image"))
        state, reason = _text(values.get("state")), values.get("reason")
        if not image or state not in BUILD_STATES:
            raise RecordError("no image name or unknown state")
        return cls(
            image=image, build=unquote(name), builder=_text(values.get("builder")),
            builder_id=_text(values.get("builder_id")), state=state,
            reason=clean_line(reason, length=REASON_LENGTH) if isinstance(reason, str) else None,
            exit_code=_whole(values.get("exit_code")), phase=clean_line(_text(values.get("phase"))),
            started=_number(values.get("started")), updated=_number(values.get("updated")),
            ended=_number(values.get("ended")), expected=_number(values.get("expected")),
            duration=_number(values.get("duration")), log=_text(values.get("log")),
            last_line=clean_line(_text(values.get("last_line"))), tail=clip_tail(_texts(values.get("tail"))),
            formats=_texts(values.get("formats")), sizes=_sizes(values.get("sizes")),
            next_try=_number(values.get("next_try")), manual=values.get("manual") is True)  # fmt: skip


@dataclass
class UploadProgress:
    """A running upload.

    ``rate`` is in bytes per second; a total of None is unknown.
    """

    image: str
    build: str
    provider: str
    upload: str
    builder: str = ""
    started: float | None = None
    updated: float | None = None
    bytes_sent: int | None = None
    bytes_total: int | None = None
    rate: float | None = None
    attempt: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        """Return build, provider and upload number."""
        return self.build, self.provider, self.upload

    @property
    def path(self) -> str:
        return f"{UPLOADS}/{quote(self.build, safe='')}-{quote(self.provider, safe='')}-{self.upload}"

    def serialize(self) -> bytes:
        return _serialize(asdict(self))

    @staticmethod
    def keyOf(name: str) -> tuple[str, str, str]:
        """Return build, provider and number in the name of the znode.

        :raises RecordError: the name is invalid.
        """
        build, _, rest = name.partition("-")
        provider, _, number = rest.rpartition("-")
        if not (build and provider and number):
            raise RecordError(f"{name} is not a valid name of an upload")
        return unquote(build), unquote(provider), number

    @classmethod
    def fromDict(cls, values: dict[str, Any], name: str) -> UploadProgress:
        """Return the record, tolerant as :meth:`BuildProgress.fromDict`."""
        build, provider, number = cls.keyOf(name)
        image = _text(values.get("image"))
        if not image:
            raise RecordError("no image name")
        return cls(
            image=image, build=build, provider=provider, upload=number, builder=_text(values.get("builder")),
            started=_number(values.get("started")), updated=_number(values.get("updated")),
            bytes_sent=_whole(values.get("bytes_sent")), bytes_total=_whole(values.get("bytes_total")),
            rate=_number(values.get("rate")), attempt=_whole(values.get("attempt")) or 1)  # fmt: skip


@dataclass
class UploadFailure:
    """The last failed upload of an image to a provider, until one succeeds."""

    image: str
    provider: str
    build: str = ""
    upload: str = ""
    reason: str = ""
    time: float | None = None
    attempts: int = 1
    next_try: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Return image and provider."""
        return self.image, self.provider

    @property
    def path(self) -> str:
        return failure_path(self.image, self.provider)

    def serialize(self) -> bytes:
        values = asdict(self)
        values["reason"] = clean_line(self.reason, length=REASON_LENGTH)
        return _serialize(values)

    @staticmethod
    def keyOf(name: str) -> tuple[str, str]:
        """Return image and provider in the name of the znode.

        :raises RecordError: the name is invalid.
        """
        image, _, provider = name.partition("@")
        if not (image and provider):
            raise RecordError(f"{name} is not <image>@<provider>")
        return unquote(image), unquote(provider)

    @classmethod
    def fromDict(cls, values: dict[str, Any], name: str) -> UploadFailure:
        """Return the record, tolerant as :meth:`BuildProgress.fromDict`."""
        image, provider = cls.keyOf(name)
        return cls(
            image=image, provider=provider, build=_text(values.get("build")), upload=_text(values.get("upload")),
            reason=clean_line(_text(values.get("reason")), length=REASON_LENGTH), time=_number(values.get("time")),
            attempts=_whole(values.get("attempts")) or 1, next_try=_number(values.get("next_try")))  # fmt: skip


def failure_path(image: str, provider: str) -> str:
    return f"{FAILURES}/{quote(image, safe='')}@{quote(provider, safe='')}"


@dataclass
class ProgressData:
    """All progress records at one time."""

    builds: dict[str, BuildProgress] = field(default_factory=dict)
    #: (build, provider, upload number) -> running upload.
    uploads: dict[tuple[str, str, str], UploadProgress] = field(default_factory=dict)
    #: (image, provider) -> last failed upload.
    failures: dict[tuple[str, str], UploadFailure] = field(default_factory=dict)


def parse(kind: type[P], name: str, data: bytes | None) -> P | None:
    """Return the record in a znode; None if there is nothing (yet).

    :raises RecordError: the data cannot be used.
    """
    values = parse_object(data)
    return None if values is None else kind.fromDict(values, name)
