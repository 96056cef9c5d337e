"""Records kept in ZooKeeper and their JSON form (zookeeper-schema.md sections 1, 5, 7, 11)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kazoo.protocol.states import ZnodeStat

BUILDING = "building"
UPLOADING = "uploading"
READY = "ready"
DELETING = "deleting"
FAILED = "failed"
REQUESTED = "requested"
FULFILLED = "fulfilled"
PENDING = "pending"
TESTING = "testing"
IN_USE = "in-use"
USED = "used"
HOLD = "hold"
INIT = "init"
ABORTED = "aborted"
DELETED = "deleted"

_encode = json.JSONEncoder(ensure_ascii=True, separators=(", ", ": ")).encode


#: Seconds; beyond it there is no date.
_LATEST = 1e11
#: Numbers beyond it (and Infinity and NaN, which JSON readers let pass) are no amounts.
LARGEST = 1e15


class RecordError(ValueError):
    """Data in ZooKeeper that are not a usable record; the text says why."""


def parse_object(data: bytes | None) -> dict[str, Any] | None:
    """The JSON object in a znode; None when it is empty.

    :raises RecordError: not JSON, or not an object.
    """
    if not data:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecordError(f"a JSON object is expected, found {type(value).__name__}")
    return value


class BaseModel:
    """A record with an id and a checked state; setting the state stamps ``state_time``."""

    VALID_STATES: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, o_id: str | None) -> None:
        self._id: str | None = None
        if o_id is not None:
            self.id = o_id
        self._state: str | None = None
        self.state_time: float | None = None
        self.stat: ZnodeStat | None = None

    @property
    def id(self) -> str | None:
        return self._id

    @id.setter
    def id(self, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError("'id' attribute must be a string type")
        self._id = value

    @property
    def state(self) -> str | None:
        return self._state

    @state.setter
    def state(self, value: str) -> None:
        if value not in self.VALID_STATES:
            raise TypeError(f"'{value}' is not a valid state")
        self._state = value
        self.state_time = time.time()

    def toDict(self) -> dict[str, Any]:
        """What is stored: everything but the id."""
        return {"state": self._state, "state_time": self.state_time}

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        """Take over stored values.

        :raises RecordError: the state is unknown or its time is no number of seconds.
        """
        state = d.get("state")
        if state is not None and (not isinstance(state, str) or state not in self.VALID_STATES):
            raise RecordError(f"unknown state {state!r}")
        state_time = d.get("state_time")
        # Everybody sorts by it: one text among the numbers would stop them all. NaN fails the comparison, too.
        if state_time is not None and (not isinstance(state_time, (int, float)) or not abs(state_time) < _LATEST):
            raise RecordError(f"state_time {state_time!r} is no time in seconds")
        self._state = state
        self.state_time = state_time

    def serialize(self) -> bytes:
        return _encode(self.toDict()).encode("utf8")

    def _comparable(self) -> dict[str, Any]:
        return self.toDict()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._id == other._id and self._comparable() == other._comparable()

    # Records change; they are told apart by identity when they are put into sets.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        values = " ".join(f"{key}={value!r}" for key, value in self.toDict().items() if key not in SECRETS)
        return f"<{type(self).__name__} {self._id} {values}>"


#: Fields that may hold credentials (Kubernetes-like connection data) and are kept out of logs.
SECRETS = frozenset({"connection_port", "ssh_port", "driver_data"})


class ImageBuild(BaseModel):
    """A build of an image; ``formats`` is a list here and a comma-joined text in ZooKeeper."""

    VALID_STATES = frozenset({BUILDING, READY, DELETING, FAILED})

    def __init__(self, image_name: str | None = None, build_id: str | None = None) -> None:
        super().__init__(build_id)
        self.image_name = image_name
        self.builder: str | None = None
        self.builder_id: str | None = None
        self.formats: list[str] = []
        self.username: str | None = None
        self.python_path: str | None = None
        self.shell_type: str | None = None

    def toDict(self) -> dict[str, Any]:
        result = super().toDict()
        if self.builder is not None:
            result["builder"] = self.builder
        if self.builder_id is not None:
            result["builder_id"] = self.builder_id
        if self.formats:
            result["formats"] = ",".join(sorted(self.formats))
        result["username"] = self.username
        result["python_path"] = self.python_path
        result["shell_type"] = self.shell_type
        return result

    @staticmethod
    def fromDict(d: Mapping[str, Any], image_name: str | None = None, o_id: str | None = None) -> ImageBuild:
        build = ImageBuild(image_name, o_id)
        build.updateFromDict(d)
        build.builder = d.get("builder")
        build.builder_id = d.get("builder_id")
        formats = d.get("formats")
        build.formats = sorted(formats.split(",")) if isinstance(formats, str) and formats else []
        build.username = d.get("username", "zuul")
        build.python_path = d.get("python_path", "/usr/bin/python2")
        build.shell_type = d.get("shell_type")
        return build


class ImageUpload(BaseModel):
    """An image uploaded to a provider; image, build, provider and number come from the path."""

    VALID_STATES = frozenset({UPLOADING, READY, DELETING, FAILED})

    def __init__(
        self, build_id: str | None = None, provider_name: str | None = None, image_name: str | None = None,
        upload_id: str | None = None, username: str | None = None, python_path: str | None = None,
        shell_type: str | None = None,
    ) -> None:
        super().__init__(upload_id)
        self.build_id = build_id
        self.provider_name = provider_name
        self.image_name = image_name
        self.format: str | None = None
        self.username = username
        self.python_path = python_path
        self.shell_type = shell_type
        self.external_id: str | None = None
        self.external_name: str | None = None

    def toDict(self) -> dict[str, Any]:
        result = super().toDict()
        result["external_id"] = self.external_id
        result["external_name"] = self.external_name
        result["format"] = self.format
        result["username"] = self.username
        result["python_path"] = self.python_path
        result["shell_type"] = self.shell_type
        return result

    def _comparable(self) -> dict[str, Any]:
        return {**self.toDict(), "image": self.image_name, "build": self.build_id, "provider": self.provider_name}

    @staticmethod
    def fromDict(
        d: Mapping[str, Any], build_id: str | None = None, provider_name: str | None = None,
        image_name: str | None = None, upload_id: str | None = None,
    ) -> ImageUpload:
        upload = ImageUpload(build_id, provider_name, image_name, upload_id)
        upload.updateFromDict(d)
        upload.external_id = d.get("external_id")
        upload.external_name = d.get("external_name")
        upload.format = d.get("format")
        upload.username = d.get("username", "zuul")
        upload.python_path = d.get("python_path", "/usr/bin/python2")
        upload.shell_type = d.get("shell_type")
        return upload


class ImageBuildRequest:
    """A manual request to build an image; ``stat.ctime`` is when it was made."""

    def __init__(self, image_name: str, pending: bool, stat: ZnodeStat | None = None) -> None:
        self.image_name = image_name
        self.pending = pending
        self.stat = stat

    @property
    def state_time(self) -> float | None:
        return self.stat.ctime / 1000 if self.stat else None

    def __repr__(self) -> str:
        return f"<ImageBuildRequest {self.image_name} pending={self.pending}>"


class NodeRequest(BaseModel):
    """A request for nodes; the name is ``<priority>-<sequence>`` (zookeeper-schema.md section 5)."""

    VALID_STATES = frozenset({REQUESTED, PENDING, FULFILLED, FAILED})

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id)
        self.lock: Any = None
        self.declined_by: list[str] = []
        self.node_types: list[str] = []
        self.nodes: list[str] = []
        self.reuse = True
        self.requestor: str | None = None
        self.requestor_data: Any = None
        self.provider: str | None = None
        self.relative_priority = 0
        self.event_id: str | None = None
        self.created_time: float | None = None
        self.tenant_name: str | None = None

    @property
    def priority(self) -> tuple[str, int, str]:
        """Sort key, ascending = served first.

        :raises RecordError: the name is not ``<priority>-<sequence>``.
        """
        precedence, dash, sequence = (self._id or "").partition("-")
        if not dash or not precedence or not sequence.isdigit():
            raise RecordError(f"the name {self._id!r} is not <priority>-<sequence>")
        return precedence, self.relative_priority, sequence

    def toDict(self) -> dict[str, Any]:
        return {
            "state": self._state, "state_time": self.state_time, "declined_by": self.declined_by,
            "node_types": self.node_types, "nodes": self.nodes, "reuse": self.reuse, "requestor": self.requestor,
            "requestor_data": self.requestor_data, "provider": self.provider,
            "relative_priority": self.relative_priority, "event_id": self.event_id,
            "created_time": self.created_time, "tenant_name": self.tenant_name,
        }

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        get = d.get
        self.declined_by = texts_of(d, "declined_by")
        self.node_types = texts_of(d, "node_types")
        self.nodes = texts_of(d, "nodes")
        self.reuse = bool(get("reuse", True))
        self.requestor = text_of(d, "requestor")
        self.requestor_data = get("requestor_data")
        self.provider = text_of(d, "provider")
        priority = get("relative_priority", 0)
        if priority is None:
            priority = 0
        if isinstance(priority, bool) or not isinstance(priority, (int, float)) or not abs(priority) < LARGEST:
            raise RecordError(f"relative_priority {priority!r} is not a number")
        self.relative_priority = int(priority)
        self.event_id = get("event_id")
        self.created_time = get("created_time")
        self.tenant_name = text_of(d, "tenant_name")

    @classmethod
    def fromDict(cls, d: Mapping[str, Any], o_id: str | None = None) -> NodeRequest:
        request = cls(o_id)
        request.updateFromDict(d)
        return request

    def copy(self) -> NodeRequest:
        """A record of our own to change; lists are copied too."""
        other = NodeRequest.__new__(NodeRequest)
        other.__dict__.update(self.__dict__)
        other.declined_by = list(self.declined_by)
        other.node_types = list(self.node_types)
        other.nodes = list(self.nodes)
        other.lock = None
        return other

    def getSafeAttributes(self) -> Any:
        """What drivers may use in templates (driver-api.md section 8)."""
        from nodepool.nodeutils import Attributes

        return Attributes(
            id=self._id, labels=self.node_types, requestor=self.requestor, requestor_data=self.requestor_data,
            relative_priority=self.relative_priority, event_id=self.event_id, created_time=self.created_time,
            tenant_name=self.tenant_name)


def text_of(d: Mapping[str, Any], key: str) -> str | None:
    """A field that is looked up, compared and sorted by everybody.

    :raises RecordError: it is neither a text nor null.
    """
    value = d.get(key)
    if value is not None and not isinstance(value, str):
        raise RecordError(f"{key} is not a text but {type(value).__name__}")
    return value


def texts_of(d: Mapping[str, Any], key: str) -> list[str]:
    """:raises RecordError: it is not a list of texts."""
    value = d.get(key)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecordError(f"{key} is not a list of texts")
    return list(value)


#: Stored fields of a node whose absence reads as null.
_NODE_PLAIN = (
    "cloud", "provider", "pool", "allocated_to", "az", "region", "public_ipv4", "private_ipv4", "public_ipv6",
    "host_id", "interface_ip", "image_id", "launcher", "created_time", "external_id", "hostname", "comment",
    "user_data", "hold_job", "connection_type", "shell_type", "resources", "slot", "attributes", "python_path",
    "tenant_name", "driver_data", "requestor", "node_properties",
)
#: Those of them that the mirror and the launcher look up.
_NODE_KEYS = ("provider", "pool", "allocated_to", "launcher", "tenant_name", "requestor", "az")


class Node(BaseModel):
    """A node (zookeeper-schema.md section 7).  ``lock_contenders`` is kept by the mirror."""

    VALID_STATES = frozenset(
        {INIT, BUILDING, TESTING, READY, IN_USE, USED, HOLD, DELETING, FAILED, ABORTED, DELETED})

    provider: str | None
    pool: str | None
    cloud: str | None
    az: str | None
    region: str | None
    public_ipv4: str | None
    private_ipv4: str | None
    public_ipv6: str | None
    interface_ip: str | None
    host_id: str | None
    image_id: str | None
    launcher: str | None
    allocated_to: str | None
    created_time: float | None
    external_id: Any
    hostname: str | None
    comment: str | None
    user_data: Any
    hold_job: str | None
    connection_type: str | None
    shell_type: str | None
    resources: dict[str, Any] | None
    slot: int | None
    attributes: dict[str, Any] | None
    python_path: str | None
    tenant_name: str | None
    driver_data: Any
    requestor: str | None
    node_properties: dict[str, Any] | None
    #: In memory only: changes that are written together with something else.
    unsaved = False

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id)
        self.lock: Any = None
        self.lock_contenders: set[str] = set()
        for name in _NODE_PLAIN:
            setattr(self, name, None)
        self.connection_port: Any = 22
        self.node_properties = {}
        self.username: str | None = "zuul"
        self.host_keys: list[str] = []
        self.hold_expiration: int | None = None
        self._type: list[str] = []

    @property
    def type(self) -> list[str]:
        return self._type

    @type.setter
    def type(self, value: str | list[str] | None) -> None:
        self._type = [value] if isinstance(value, str) else list(value or [])

    def toDict(self) -> dict[str, Any]:
        return {
            "state": self._state, "state_time": self.state_time, "cloud": self.cloud, "provider": self.provider,
            "pool": self.pool, "type": self._type, "allocated_to": self.allocated_to, "az": self.az,
            "region": self.region, "public_ipv4": self.public_ipv4, "private_ipv4": self.private_ipv4,
            "public_ipv6": self.public_ipv6, "host_id": self.host_id, "interface_ip": self.interface_ip,
            "connection_port": self.connection_port, "ssh_port": self.connection_port, "image_id": self.image_id,
            "launcher": self.launcher, "created_time": self.created_time, "external_id": self.external_id,
            "hostname": self.hostname, "comment": self.comment, "user_data": self.user_data,
            "hold_job": self.hold_job, "host_keys": self.host_keys, "username": self.username,
            "connection_type": self.connection_type, "shell_type": self.shell_type,
            "hold_expiration": self.hold_expiration, "resources": self.resources, "slot": self.slot,
            "attributes": self.attributes, "python_path": self.python_path, "tenant_name": self.tenant_name,
            "driver_data": self.driver_data, "requestor": self.requestor, "node_properties": self.node_properties,
        }

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        get = d.get
        kind = get("type")
        if kind is not None and not isinstance(kind, str) and not (
                isinstance(kind, list) and all(isinstance(item, str) for item in kind)):
            raise RecordError("type is not a list of labels")
        self.type = kind
        values = self.__dict__
        for name in _NODE_PLAIN:
            values[name] = get(name)
        for name in _NODE_KEYS:
            text_of(d, name)
        if "connection_port" in d:
            self.connection_port = d["connection_port"]
        else:
            self.connection_port = get("ssh_port", 22)
        keys = get("host_keys")
        self.host_keys = keys if isinstance(keys, list) else []
        self.username = get("username", "zuul")
        expiration = get("hold_expiration")
        if expiration is not None:
            try:
                expiration = min(int(expiration), int(_LATEST))
            except (TypeError, ValueError, OverflowError):
                expiration = 0
        self.hold_expiration = expiration

    @classmethod
    def fromDict(cls, d: Mapping[str, Any], o_id: str | None = None) -> Self:
        node = cls(o_id)
        node.updateFromDict(d)
        return node

    def copy(self) -> Node:
        """A record of our own to change, not locked."""
        other = Node.__new__(Node)
        other.__dict__.update(self.__dict__)
        other.lock = None
        other.__dict__.pop("unsaved", None)
        other._type = list(self._type)
        other.host_keys = list(self.host_keys)
        return other


class NodeRequestLockStats:
    """The lock directory of a request and its znode stat."""

    def __init__(self, lock_id: str | None = None) -> None:
        self.lock_id = lock_id
        self.stat: ZnodeStat | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeRequestLockStats) and self.lock_id == other.lock_id

    def __hash__(self) -> int:
        return hash(self.lock_id)

    def __repr__(self) -> str:
        return f"<NodeRequestLockStats {self.lock_id}>"
