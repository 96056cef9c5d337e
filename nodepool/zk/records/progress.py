"""Stored progress records, with tolerant reading; see :mod:`nodepool.zk.mirror.progress`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar
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
BUILD_STATES = (BUILDING, READY, FAILED)

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

P = TypeVar("P", bound="ProgressRecord")

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


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


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


#: Type of a field -> what reads its value; None: the field keeps its default.
_READ: dict[str, Callable[[object], object]] = {
    "str": _text,
    "str | None": _text,
    "int": _whole,
    "int | None": _whole,
    "float | None": _number,
    "list[str]": _texts,
    "dict[str, int]": _sizes,
    "bool": lambda value: value is True,
}
_LENGTHS = {"phase": LINE_LENGTH, "last_line": LINE_LENGTH, "reason": REASON_LENGTH}


def _cleaned(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with texts that fit a terminal and a record."""
    cleaned: dict[str, Any] = {
        key: clean_line(values[key], length) for key, length in _LENGTHS.items() if values.get(key)
    }
    if "tail" in values:
        cleaned["tail"] = clip_tail(values["tail"])
    return {**values, **cleaned}


# -- records


@dataclass
class ProgressRecord:
    """Base of the records.

    :data:`NAME` has a group for each field that the name of the znode contains.
    """

    PATH: ClassVar[str]
    NAME: ClassVar[re.Pattern[str]]

    image: str

    @property
    def path(self) -> str:
        return self.PATH.format(
            **{name: quote(getattr(self, name), safe="") for name in self.NAME.groupindex}
        )

    def serialize(self) -> bytes:
        values = {
            key: _number(value) if isinstance(value, float) else value
            for key, value in _cleaned(asdict(self)).items()
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

    @classmethod
    def fromDict(cls, values: dict[str, Any], name: str) -> Self:
        """Return the record; missing or invalid values become the default.

        :raises RecordError: the name of the image or a valid state is missing, or the name of the
            znode is invalid.
        """
        found = cls.NAME.fullmatch(name)
        if found is None:
            raise RecordError(f"{name} is not a valid name of this record")
        read = {field.name: _READ[str(field.type)](values.get(field.name)) for field in fields(cls)}
        read.update({key: unquote(text) for key, text in found.groupdict().items()})
        if not read["image"] or read.get("state", BUILDING) not in BUILD_STATES:
            raise RecordError("no image name or unknown state")
        return cls(**_cleaned({key: value for key, value in read.items() if value is not None}))


@dataclass
class BuildProgress(ProgressRecord):
    """A running, finished or failed build.

    ``expected`` and ``duration`` are in seconds, ``sizes`` in bytes.
    """

    PATH = f"{BUILDS}/{{build}}"
    NAME = re.compile("(?P<build>.+)")

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
    def running(self) -> bool:
        return self.state == BUILDING

    def fraction(self, now: float) -> float | None:
        """Return the elapsed part of the expected time; None: unknown.

        0 to 0.99 while it runs, 1 when ready.
        """
        if self.state == READY:
            return 1.0
        if (
            self.state != BUILDING
            or not self.expected
            or self.expected <= 0
            or self.started is None
        ):
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


@dataclass
class UploadProgress(ProgressRecord):
    """A running upload."""

    PATH = f"{UPLOADS}/{{build}}-{{provider}}-{{upload}}"
    NAME = re.compile("(?P<build>[^-]+)-(?P<provider>.+)-(?P<upload>[^-]+)")

    build: str
    provider: str
    upload: str
    builder: str = ""
    started: float | None = None
    bytes_total: int | None = None
    attempt: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.build, self.provider, self.upload


@dataclass
class UploadFailure(ProgressRecord):
    """The last failed upload of an image to a provider, until one succeeds."""

    PATH = f"{FAILURES}/{{image}}@{{provider}}"
    NAME = re.compile("(?P<image>[^@]+)@(?P<provider>.+)")

    provider: str
    build: str = ""
    upload: str = ""
    reason: str = ""
    time: float | None = None
    attempts: int = 1
    next_try: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.image, self.provider


@dataclass
class ProgressData:
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
