"""JSON of calls and answers; parsing and the OpenAPI document follow from these types."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from nodepool.lease.record import LEAST, MOST

#: Printable text without line breaks: it is stored in records and shown in tables.
#: The end is that of the text in Python, which would accept a newline after it, and in ECMAScript.
_PRINTABLE = (
    r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$(?!\n)"
)
Name = Annotated[str, Meta(min_length=1, max_length=255, pattern=_PRINTABLE)]
Text = Annotated[str, Meta(max_length=200, pattern=_PRINTABLE)]
Seconds = Annotated[int, Meta(ge=LEAST, le=MOST, description="seconds from now")]
Wait = Annotated[
    float, Meta(ge=0, le=60, description="seconds to wait for the nodes before the answer")
]
#: Notes of a holder: few and flat, at most 1 KiB as JSON.
Notes = Annotated[dict[Name, str | int | float | bool | None], Meta(max_length=20)]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of what clients send."""


class NewLease(Body):
    labels: Annotated[
        list[Name],
        Meta(min_length=1, max_length=20, description="one node for each, all from one pool"),
    ]
    seconds: Seconds = field(default=3600, name="for")
    purpose: Text = ""
    wait: Wait = 0
    tenant: Name | None = None
    provider: Annotated[Name, Meta(description="preferred provider")] | None = None
    priority: Literal["100", "200", "300"] = "200"
    notes: Notes = {}


class Renewal(Body):
    seconds: Seconds = field(name="for")


class Description(Body):
    purpose: Text | UnsetType = UNSET
    notes: Notes | UnsetType = UNSET


class NewCertificate(Body):
    public_key: Annotated[str, Meta(min_length=1, max_length=16384)]


class NewProgram(Body):
    command: Annotated[
        list[Annotated[str, Meta(max_length=32768)]], Meta(min_length=1, max_length=1000)
    ]
    node: Annotated[int, Meta(ge=1, le=1000, description="number of the node in the lease")] = 1
    input: Annotated[str, Meta(max_length=60000, description="standard input, base64")] = ""
    timeout: Annotated[
        float, Meta(gt=0, le=86400, description="seconds after which the program is killed")
    ] = 3600


class NewHold(Body):
    seconds: Seconds = field(default=86400, name="for")
    purpose: Text = ""


class NewDrain(Body):
    seconds: Annotated[int, Meta(ge=1, le=MOST, description="seconds from now; else no end")] | (
        None
    ) = field(default=None, name="for")
    reason: Text = ""
    keep_idle: Annotated[bool, Meta(description="do not delete idle nodes")] = False


class OrderView(Struct):
    """What an operator has ordered for a target, with the number of nodes that it waits for."""

    kind: str
    name: str
    since: datetime.datetime
    by: str
    reason: str
    nodes: int


class DrainView(OrderView):
    """What gets no new nodes, with the number of nodes that have not ended yet."""

    until: datetime.datetime | None
    keep_idle: bool


class DrainList(Struct):
    """The drains, and why labels get no nodes while these last."""

    drains: list[DrainView]
    labels: dict[str, str]


class NewRotation(Body):
    reason: Text = ""


class RotationView(OrderView):
    """What gets new idle nodes, with the number of those that are not replaced yet."""


class RotationList(Struct):
    rotations: list[RotationView]


class NewRollforward(Body):
    provider: Annotated[Name, Meta(description="default: all that have the image")] | None = None


class NewRollback(NewRollforward):
    reason: Text = ""


class SwitchView(Struct):
    """The upload that launchers use from now on; ``instead_of`` is the build used before."""

    provider: str
    build: str
    upload: str
    instead_of: str | None


class SwitchList(Struct):
    """What was changed, and why not in other providers."""

    image: str
    changed: list[SwitchView]
    unchanged: dict[str, str]


class Why(Struct):
    """Why nodes are not ready yet, or will not be."""

    text: str
    code: str | None = None
    suggestion: str | None = None
    queue_position: int | None = None


class NodeView(Struct):
    id: str
    labels: list[str]
    state: str
    provider: str | None
    az: str | None
    address: str | None
    username: str | None
    host_keys: list[str]
    connection_type: str | None
    python_path: str | None
    shell_type: str | None
    attributes: dict[str, Any] | None
    #: A number, or the connection data of a container cluster, which only the holder and operators
    #: get.
    port: int | str | dict[str, Any] | None = None


class KillView(Struct):
    """A process that was killed because the memory limit of its node was reached."""

    node: str
    #: Of the host.
    pid: int
    program: str
    #: Bytes.
    memory_limit: int
    time: datetime.datetime
    #: Seconds since then, by the clock of the launcher that answers.
    age: float


class LeaseView(Struct):
    id: str
    state: Literal["waiting", "ready", "held", "failed"]
    owner: str
    purpose: str
    tenant: str | None
    labels: list[str]
    created: datetime.datetime
    ends: datetime.datetime | None
    renewed: int
    lost: int
    notes: dict[str, Any]
    nodes: list[NodeView]
    why: Why | None = None
    #: What gave the lease an earlier end than it was asked for: ``max-hold-age``.
    limited_by: str | None = None
    #: Why one of its nodes should be returned soon: what is drained, until when and why.
    drained: str | None = None
    #: The newest 20 processes that were killed for memory on its nodes, oldest first.
    kills: list[KillView] = []
    #: Renews and returns this lease; only in the answer that creates it.
    token: str | None = None


class Caller(Struct):
    """Who calls, and what it may do.

    :param labels: patterns of labels that it may lease; empty: all.
    :param longest: maximum seconds of a lease from now.
    """

    owner: str
    via: str
    role: str
    tenant: str | None
    labels: list[str]
    longest: float | None


class LeaseList(Struct):
    leases: list[LeaseView]


class Certificate(Struct):
    certificate: str
    valid_before: datetime.datetime


class NodeChange(Struct):
    node: str
    state: str


class ImageChange(Struct):
    image: str
    result: Literal["requested", "paused", "resumed"]


class BuildChange(Struct):
    build: str
    state: str


class UploadChange(Struct):
    upload: str
    state: str


class Problem(Struct):
    """RFC 9457; ``code`` is for programs."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"
