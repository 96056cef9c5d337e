"""Records in ZooKeeper and their JSON form (ZK-1, ZK-5, ZK-7, ZK-11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from sys import intern
from types import NoneType
from typing import Any, Self

from kazoo.protocol.states import ZnodeStat

from nodepool.base.attributes import Attributes
from nodepool.zk.records.base import (
    ABORTED,
    BUILDING,
    DELETED,
    DELETING,
    FAILED,
    FULFILLED,
    HOLD,
    IN_USE,
    INIT,
    LARGEST,
    LATEST,
    PENDING,
    READY,
    REQUESTED,
    SECRETS,
    TESTING,
    UPLOADING,
    USED,
    BaseModel,
    RecordError,
    parse_object,
    text_of,
    texts_of,
)
from nodepool.zk.records.images import (
    ImageBuild,
    ImageBuildRequest,
    ImageUpload,
    Rollback,
    newest_first,
)

#: Fields of a request -> what reads their values.
_REQUEST_FIELDS: dict[str, Callable[[Mapping[str, Any], str], object]] = {
    **dict.fromkeys(("declined_by", "node_types", "nodes"), texts_of),
    **dict.fromkeys(("requestor", "provider", "tenant_name"), text_of),
    **dict.fromkeys(("requestor_data", "event_id", "created_time"), lambda d, name: d.get(name)),
}


class NodeRequest(BaseModel):
    """A request for nodes; the name is ``<priority>-<sequence>`` (ZK-5)."""

    VALID_STATES = frozenset({REQUESTED, PENDING, FULFILLED, FAILED})
    LISTS = ("declined_by", "node_types", "nodes")
    KEYS = BaseModel.KEYS | {
        "declined_by",
        "node_types",
        "nodes",
        "reuse",
        "requestor",
        "requestor_data",
        "provider",
        "relative_priority",
        "event_id",
        "created_time",
        "tenant_name",
    }

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id)
        self.declined_by: list[str] = []
        self.node_types: list[str] = []
        self.nodes: list[str] = []
        self.reuse = True
        self.requestor: str | None = None
        self.requestor_data: object = None
        self.provider: str | None = None
        self.relative_priority = 0
        self.event_id: str | None = None
        self.created_time: float | None = None
        self.tenant_name: str | None = None

    @property
    def priority(self) -> tuple[str, int, str]:
        """Return the sort key, in serving order.

        :raises RecordError: the name is not ``<priority>-<sequence>``.
        """
        precedence, dash, sequence = (self._id or "").partition("-")
        if not dash or not precedence or not sequence.isdigit():
            raise RecordError(f"the name {self._id!r} is not <priority>-<sequence>")
        return precedence, self.relative_priority, sequence

    def toDict(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "state_time": self.state_time,
            "declined_by": self.declined_by,
            "node_types": self.node_types,
            "nodes": self.nodes,
            "reuse": self.reuse,
            "requestor": self.requestor,
            "requestor_data": self.requestor_data,
            "provider": self.provider,
            "relative_priority": self.relative_priority,
            "event_id": self.event_id,
            "created_time": self.created_time,
            "tenant_name": self.tenant_name,
        }

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        for name, read in _REQUEST_FIELDS.items():
            setattr(self, name, read(d, name))
        self.reuse = bool(d.get("reuse", True))
        priority = 0 if d.get("relative_priority") is None else d["relative_priority"]
        if (
            isinstance(priority, bool)
            or not isinstance(priority, (int, float))
            or not abs(priority) < LARGEST
        ):
            raise RecordError(f"relative_priority {priority!r} is not a number")
        self.relative_priority = int(priority)

    @classmethod
    def fromDict(cls, d: Mapping[str, Any], o_id: str | None = None) -> NodeRequest:
        return cls.of(d, o_id)

    def getSafeAttributes(self) -> Attributes:
        """Return the attributes that drivers may use in templates (DRV-8)."""
        return Attributes(
            id=self._id,
            labels=self.node_types,
            requestor=self.requestor,
            requestor_data=self.requestor_data,
            relative_priority=self.relative_priority,
            event_id=self.event_id,
            created_time=self.created_time,
            tenant_name=self.tenant_name,
        )


#: Stored fields of a node that read as null if absent.
_NODE_PLAIN = (
    "cloud",
    "provider",
    "pool",
    "allocated_to",
    "az",
    "region",
    "public_ipv4",
    "private_ipv4",
    "public_ipv6",
    "host_id",
    "interface_ip",
    "image_id",
    "launcher",
    "created_time",
    "external_id",
    "hostname",
    "comment",
    "user_data",
    "hold_job",
    "connection_type",
    "shell_type",
    "resources",
    "slot",
    "attributes",
    "python_path",
    "tenant_name",
    "driver_data",
    "requestor",
    "node_properties",
)
#: Those of them, and others, whose texts are equal in many nodes: each text is kept once.
_NODE_SHARED = frozenset(
    {
        "cloud",
        "provider",
        "pool",
        "az",
        "region",
        "image_id",
        "launcher",
        "connection_type",
        "shell_type",
        "python_path",
        "tenant_name",
        "requestor",
        "username",
    }
)
_NOBODY: AbstractSet[str] = frozenset()
#: Those of them by which the mirror and the launcher search.
_NODE_KEYS = ("provider", "pool", "allocated_to", "launcher", "tenant_name", "requestor", "az")
#: Those that users of a node read as text.
_NODE_TEXTS = (
    "cloud",
    "region",
    "host_id",
    "public_ipv4",
    "private_ipv4",
    "public_ipv6",
    "interface_ip",
    "hostname",
    "connection_type",
    "shell_type",
    "python_path",
    "username",
)


#: Fields with the types that users of a node can read, and what others are.
_NODE_KINDS: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (_NODE_TEXTS, (str, NoneType), "not a string"),
    (("resources", "attributes", "node_properties"), (dict, NoneType), "not an object"),
    (("connection_port",), (int, dict), "neither a number nor an object"),
    (("slot",), (int, NoneType), "not a number"),
)


class Node(BaseModel):
    """A node (ZK-7). ``lock_contenders`` is set by the mirror."""

    LISTS = ("_type", "host_keys")
    VALID_STATES = frozenset(
        {INIT, BUILDING, TESTING, READY, IN_USE, USED, HOLD, DELETING, FAILED, ABORTED, DELETED}
    )
    KEYS = BaseModel.KEYS | {
        *_NODE_PLAIN,
        "type",
        "connection_port",
        "ssh_port",
        "username",
        "host_keys",
        "hold_expiration",
    }
    # There are tens of thousands: a dictionary of all attributes would be several times as
    # large.
    __slots__ = SLOTS = (
        *_NODE_PLAIN,
        "_type",
        "connection_port",
        "hold_expiration",
        "host_keys",
        "lock_contenders",
        "username",
    )

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
    external_id: object
    hostname: str | None
    comment: str | None
    user_data: object
    hold_job: str | None
    connection_type: str | None
    shell_type: str | None
    resources: dict[str, Any] | None
    slot: int | None
    attributes: dict[str, Any] | None
    python_path: str | None
    tenant_name: str | None
    driver_data: object
    requestor: str | None
    node_properties: dict[str, Any] | None
    #: In memory only: changes to be written together with something else.
    unsaved = False
    #: In memory only: the quota promise that this record replaces once it is stored.
    promise: int | None = None

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id)
        self.lock_contenders: AbstractSet[str] = _NOBODY
        for name in _NODE_PLAIN:
            setattr(self, name, None)
        self.connection_port: int | None = 22
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
            "state": self._state,
            "state_time": self.state_time,
            "cloud": self.cloud,
            "provider": self.provider,
            "pool": self.pool,
            "type": self._type,
            "allocated_to": self.allocated_to,
            "az": self.az,
            "region": self.region,
            "public_ipv4": self.public_ipv4,
            "private_ipv4": self.private_ipv4,
            "public_ipv6": self.public_ipv6,
            "host_id": self.host_id,
            "interface_ip": self.interface_ip,
            "connection_port": self.connection_port,
            "ssh_port": self.connection_port,
            "image_id": self.image_id,
            "launcher": self.launcher,
            "created_time": self.created_time,
            "external_id": self.external_id,
            "hostname": self.hostname,
            "comment": self.comment,
            "user_data": self.user_data,
            "hold_job": self.hold_job,
            "host_keys": self.host_keys,
            "username": self.username,
            "connection_type": self.connection_type,
            "shell_type": self.shell_type,
            "hold_expiration": self.hold_expiration,
            "resources": self.resources,
            "slot": self.slot,
            "attributes": self.attributes,
            "python_path": self.python_path,
            "tenant_name": self.tenant_name,
            "driver_data": self.driver_data,
            "requestor": self.requestor,
            "node_properties": self.node_properties,
        }

    def updateFromDict(self, d: Mapping[str, Any]) -> None:
        super().updateFromDict(d)
        get = d.get
        kind = get("type")
        if (
            kind is not None
            and not isinstance(kind, str)
            and not (isinstance(kind, list) and all(isinstance(item, str) for item in kind))
        ):
            raise RecordError("type is not a list of labels")
        self._type = [*map(intern, [kind] if isinstance(kind, str) else kind or ())]
        for name in _NODE_PLAIN:
            setattr(self, name, get(name))
        self.username = get("username", "zuul")
        for name in _NODE_SHARED & d.keys():
            if type(value := d[name]) is str:
                setattr(self, name, intern(value))
        for name in _NODE_KEYS:
            text_of(d, name)
        if "connection_port" in d:
            self.connection_port = d["connection_port"]
        else:
            self.connection_port = get("ssh_port", 22)
        keys = get("host_keys")
        self.host_keys = keys if isinstance(keys, list) else []
        expiration = get("hold_expiration")
        if expiration is not None:
            try:
                expiration = min(int(expiration), int(LATEST))
            except (TypeError, ValueError, OverflowError):
                expiration = 0
        self.hold_expiration = expiration

    @property
    def tenant(self) -> str | None:
        """Return the tenant whose limits the node counts for.

        An idle node counts for none, whoever used it before.
        """
        return None if self.state == READY and self.allocated_to is None else self.tenant_name

    def unfit(self) -> str | None:
        """Return why users of the node could not read this record, or None (ZK-7.2)."""
        for names, kinds, what in _NODE_KINDS:
            for name in names:
                if not isinstance(getattr(self, name), kinds):
                    return f"{name} is {what}"
        for name, amount in (self.resources or {}).items():
            if (
                not isinstance(amount, (int, float)) or not abs(amount) < LARGEST
            ):  # NaN fails the comparison, too
                return f"resources: {name} is not a finite number"
        if not isinstance((self.attributes or {}).get("executor-zone"), (str, NoneType)):
            return "attributes: executor-zone is not a string"
        if not all(isinstance(key, str) for key in self.host_keys):
            return "host_keys is not a list of strings"
        return None

    def copy(self) -> Self:
        other = super().copy()
        if isinstance(self.resources, dict):  # others are unfit
            other.resources = dict(self.resources)
        return other

    @classmethod
    def fromDict(cls, d: Mapping[str, Any], o_id: str | None = None) -> Self:
        return cls.of(d, o_id)


@dataclass(unsafe_hash=True)
class NodeRequestLockStats:
    lock_id: str | None = None
    stat: ZnodeStat | None = field(default=None, compare=False)


__all__ = [
    "ABORTED",
    "BUILDING",
    "DELETED",
    "DELETING",
    "FAILED",
    "FULFILLED",
    "HOLD",
    "INIT",
    "IN_USE",
    "LARGEST",
    "PENDING",
    "READY",
    "REQUESTED",
    "SECRETS",
    "TESTING",
    "UPLOADING",
    "USED",
    "BaseModel",
    "ImageBuild",
    "ImageBuildRequest",
    "ImageUpload",
    "Node",
    "NodeRequest",
    "NodeRequestLockStats",
    "RecordError",
    "Rollback",
    "newest_first",
    "parse_object",
    "text_of",
    "texts_of",
]
