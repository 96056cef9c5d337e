"""Records of images: builds, uploads and build requests (ZK-11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

from kazoo.protocol.states import ZnodeStat

from nodepool.zk.records.base import BUILDING, DELETING, FAILED, LATEST, READY, UPLOADING, BaseModel

#: Values of fields that a record lacks; others are null then.
_ABSENT = {"username": "zuul", "python_path": "/usr/bin/python2"}


class _ImageRecord(BaseModel):
    """A build or an upload, with the login of nodes."""

    #: Stored fields in their order.
    FIELDS: ClassVar[tuple[str, ...]]
    username: str | None
    python_path: str | None
    shell_type: str | None

    def __init__(self, o_id: str | None = None) -> None:
        super().__init__(o_id)
        for name in self.FIELDS:
            setattr(self, name, None)

    def toDict(self) -> dict[str, Any]:
        return {**super().toDict(), **{name: getattr(self, name) for name in self.FIELDS}}

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        for name in self.FIELDS:
            setattr(self, name, d.get(name, _ABSENT.get(name)))


class ImageBuild(_ImageRecord):
    """A build; ``formats`` is a list here and a comma-separated text in ZooKeeper."""

    VALID_STATES = frozenset({BUILDING, READY, DELETING, FAILED})
    FIELDS = ("builder", "builder_id", "formats", "username", "python_path", "shell_type")
    KEYS = BaseModel.KEYS | {*FIELDS}
    builder: str | None
    builder_id: str | None

    def __init__(self, image_name: str | None = None, build_id: str | None = None) -> None:
        super().__init__(build_id)
        self.image_name = image_name
        self.formats: list[str] = []

    def toDict(self) -> dict[str, Any]:
        result = super().toDict()
        result["formats"] = ",".join(sorted(self.formats)) or None
        return {
            name: value
            for name, value in result.items()
            if value is not None or name not in self.FIELDS[:3]
        }

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        formats = d.get("formats")
        self.formats = sorted(formats.split(",")) if isinstance(formats, str) and formats else []

    @staticmethod
    def fromDict(
        d: Mapping[str, Any], image_name: str | None = None, o_id: str | None = None
    ) -> ImageBuild:
        return ImageBuild.of(d, image_name, o_id)


#: Who holds uploads back until they are verified.
VERIFICATION = "verification"


@dataclass(frozen=True)
class Rollback:
    """Why launchers use an earlier upload; stored with the upload that it replaces (BLD-22).

    :param by: user and host of the operator, or the launcher.
    :param time: Unix seconds.
    :param build: of the upload that is used instead; empty: there is none.
    :param upload: its number.
    :param was: its ``state_time`` before.
    :param automatic: a launcher did it because of failed launches.
    :param undone: by an operator; launchers do not repeat it.
    :param unverified: until a launcher has tried a machine of the upload (BLD-25).
    """

    by: str
    time: float
    reason: str
    build: str
    upload: str
    was: float
    automatic: bool = False
    undone: bool = False
    unverified: bool = False

    @property
    def holds_back(self) -> bool:
        """Return whether the upload was never used, because it is unverified or bad."""
        return self.by == VERIFICATION

    def names(self, upload: ImageUpload) -> bool:
        """Return whether this upload is used instead."""
        return (self.build, self.upload) == (upload.build_id, upload.id)

    def text(self) -> str:
        """Return what happened, for people."""
        if self.unverified and not self.undone:
            used = f"build {self.build} is used" if self.build else "there is no other one"
            return f"held back until it is verified; {used}"
        undone = ", undone since" if self.undone else ""
        to = f"rolled back to build {self.build}" if self.build else "held back"
        return f"{to} by {self.by}{undone}: {self.reason}"

    @classmethod
    def read(cls, value: object) -> Self | None:
        """Return the stored value; None if it is absent or not valid."""
        if not isinstance(value, dict):
            return None
        texts = [value.get(key) for key in ("by", "reason", "build", "upload")]
        times = [value.get(key) for key in ("time", "was")]
        flags = [value.get(key, False) for key in ("automatic", "undone", "unverified")]
        if not (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(time, (int, float)) and abs(time) < LATEST for time in times)
            and all(isinstance(flag, bool) for flag in flags)
        ):
            return None
        return cls(**{key: value[key] for key in cls.__dataclass_fields__ if key in value})


class ImageUpload(_ImageRecord):
    """An uploaded image; image, build, provider and number come from the path."""

    VALID_STATES = frozenset({UPLOADING, READY, DELETING, FAILED})
    FIELDS = ("external_id", "external_name", "format", "username", "python_path", "shell_type")
    KEYS = BaseModel.KEYS | {*FIELDS, "rolled_back"}
    #: Stored only if it is set.
    rolled_back: Rollback | None = None
    external_id: str | None
    external_name: str | None
    format: str | None

    def __init__(
        self,
        build_id: str | None = None,
        provider_name: str | None = None,
        image_name: str | None = None,
        upload_id: str | None = None,
        username: str | None = None,
        python_path: str | None = None,
        shell_type: str | None = None,
    ) -> None:
        super().__init__(upload_id)
        self.build_id = build_id
        self.provider_name = provider_name
        self.image_name = image_name
        self.username = username
        self.python_path = python_path
        self.shell_type = shell_type

    @property
    def held_back(self) -> bool:
        """Return whether launchers may use it only for its verification."""
        mark = self.rolled_back
        return mark is not None and mark.holds_back and not mark.undone

    def toDict(self) -> dict[str, Any]:
        mark = self.rolled_back
        return super().toDict() | ({"rolled_back": asdict(mark)} if mark is not None else {})

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        self.rolled_back = Rollback.read(d.get("rolled_back"))

    def _comparable(self) -> dict[str, Any]:
        return {
            **self.toDict(),
            "image": self.image_name,
            "build": self.build_id,
            "provider": self.provider_name,
        }

    @staticmethod
    def fromDict(
        d: Mapping[str, Any],
        build_id: str | None = None,
        provider_name: str | None = None,
        image_name: str | None = None,
        upload_id: str | None = None,
    ) -> ImageUpload:
        return ImageUpload.of(d, build_id, provider_name, image_name, upload_id)


R = TypeVar("R", ImageBuild, ImageUpload)


def newest_first(records: Iterable[R], count: int) -> list[R]:
    """Sort by ``state_time``; ids say nothing about age and only break ties."""
    return sorted(
        records, key=lambda record: (record.state_time or 0, record.id or ""), reverse=True
    )[:count]


@dataclass
class ImageBuildRequest:
    """A manual request to build an image; ``stat.ctime`` is its creation time."""

    image_name: str
    pending: bool
    stat: ZnodeStat | None = None

    @property
    def state_time(self) -> float | None:
        return self.stat.ctime / 1000 if self.stat else None
