"""Records: what is stored, what absence means, what is refused (ZK-1, ZK-5, ZK-7, ZK-11)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.zk import zookeeper as zk
from nodepool.zk.records import RecordError, parse_object

SPEC = "LAU-21: "


def stored(record: Any) -> dict[str, Any]:
    return dict(json.loads(record.serialize().decode("utf8")))


@pytest.mark.spec("PY-2, DRV-8: state constants")
def test_state_constants_are_lower_case_names() -> None:
    for name in (
        "BUILDING",
        "UPLOADING",
        "READY",
        "DELETING",
        "FAILED",
        "REQUESTED",
        "FULFILLED",
        "PENDING",
        "TESTING",
        "USED",
        "HOLD",
        "INIT",
        "ABORTED",
        "DELETED",
    ):
        assert getattr(zk, name) == name.lower()
    assert zk.IN_USE == "in-use"


@pytest.mark.spec(SPEC + "BaseModel_bad_id, BaseModel_bad_state, BaseModel_toDict")
@pytest.mark.parametrize(
    "model", [zk.Node, zk.NodeRequest, zk.BaseModel, lambda o: zk.ImageBuild("i", o)]
)
def test_base_model_refuses_invalid_ids_and_states(model: Any) -> None:
    with pytest.raises(TypeError, match="'id' attribute must be a string type"):
        model(123)
    record = model("0000000001")
    with pytest.raises(TypeError, match="'not-a-state' is not a valid state"):
        record.state = "not-a-state"
    with pytest.raises(TypeError):
        record.id = None
    assert "id" not in record.toDict() and set(record.toDict()) >= {"state", "state_time"}


@pytest.mark.spec("ZK-1: assigning a state stamps the time, reading does not")
def test_assigning_a_state_sets_its_time() -> None:
    node = zk.Node()
    assert (node.state, node.state_time) == (None, None)
    before = time.time()
    node.state = zk.READY
    assert node.state_time is not None and before <= node.state_time <= time.time()
    assert zk.Node.fromDict({"state": "ready", "state_time": 5.5}, "1").state_time == 5.5


@pytest.mark.spec("ZK-1: legal states")
def test_records_have_the_documented_states() -> None:
    assert {"requested", "pending", "fulfilled", "failed"} == zk.NodeRequest.VALID_STATES
    assert set(zk.Node.VALID_STATES) == {
        "init",
        "building",
        "testing",
        "ready",
        "in-use",
        "used",
        "hold",
        "deleting",
        "failed",
        "aborted",
        "deleted",
    }
    assert set(zk.ImageBuild.VALID_STATES) == {"building", "ready", "deleting", "failed"}
    assert set(zk.ImageUpload.VALID_STATES) == {"uploading", "ready", "deleting", "failed"}


@pytest.mark.spec(SPEC + "ImageBuild_toDict, ImageBuild_fromDict; ZK-11")
def test_image_build_survives_serialization() -> None:
    build = zk.ImageBuild("image", "0" * 32)
    assert set(stored(build)) == {"state", "state_time", "username", "python_path", "shell_type"}
    build.state = zk.BUILDING
    build.builder, build.builder_id, build.formats = "host.example", "id-1", ["raw", "qcow2"]
    build.username, build.python_path, build.shell_type = "u", "/p", "cmd"
    data = stored(build)
    assert data["formats"] == "qcow2,raw" and "id" not in data and "image_name" not in data
    again = zk.ImageBuild.fromDict(data, "image", "0" * 32)
    assert (again.id, again.image_name, again.formats) == ("0" * 32, "image", ["qcow2", "raw"])
    assert again.toDict() == build.toDict()
    plain = zk.ImageBuild.fromDict({"state": "ready", "state_time": 1.0})
    assert (plain.username, plain.python_path, plain.shell_type) == (
        "zuul",
        "/usr/bin/python2",
        None,
    )
    assert (plain.builder, plain.builder_id, plain.formats) == (None, None, [])
    null = zk.ImageBuild.fromDict({"state": "ready", "username": None, "python_path": None})
    assert (null.username, null.python_path) == (None, None)


@pytest.mark.spec(SPEC + "ImageUpload_toDict, ImageUpload_fromDict; ZK-11")
def test_image_upload_survives_serialization() -> None:
    upload = zk.ImageUpload("b" * 32, "provider", "image", "0000000001", "u", "/p", "cmd")
    upload.state, upload.external_id, upload.external_name, upload.format = (
        zk.READY,
        "ext",
        "image-1",
        "raw",
    )
    data = stored(upload)
    assert set(data) == {
        "state",
        "state_time",
        "external_id",
        "external_name",
        "format",
        "username",
        "python_path",
        "shell_type",
    }
    again = zk.ImageUpload.fromDict(data, "b" * 32, "provider", "image", "0000000001")
    assert again == upload and again.toDict() == upload.toDict()
    assert again != zk.ImageUpload.fromDict(data, "c" * 32, "provider", "image", "0000000001")
    plain = zk.ImageUpload.fromDict({"state": "ready"}, "b", "p", "i", "1")
    assert (plain.username, plain.python_path, plain.external_id) == (
        "zuul",
        "/usr/bin/python2",
        None,
    )


TEXT = st.text(max_size=20)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NULLABLE = st.none() | TEXT
REQUEST = st.fixed_dictionaries(
    {
        "state": st.sampled_from(sorted(zk.NodeRequest.VALID_STATES)),
        "state_time": st.floats(0, 2e9),
        "declined_by": st.lists(TEXT, max_size=3),
        "node_types": st.lists(TEXT, max_size=3),
        "nodes": st.lists(TEXT, max_size=3),
        "reuse": st.booleans(),
        "requestor": NULLABLE,
        "requestor_data": ANY,
        "provider": NULLABLE,
        "relative_priority": st.integers(0, 1000),
        "event_id": NULLABLE,
        "created_time": st.none() | st.floats(0, 2e9),
        "tenant_name": NULLABLE,
    }
)


@pytest.mark.spec(SPEC + "NodeRequest_toDict, NodeRequest_fromDict; ZK-5")
@given(REQUEST)
def test_node_request_round_trip(values: dict[str, Any]) -> None:
    record = zk.NodeRequest.fromDict(values, "200-0000000001")
    assert stored(record) == values
    assert zk.NodeRequest.fromDict(stored(record), "200-0000000001") == record
    assert record.copy() == record
    assert record != zk.NodeRequest.fromDict(values, "200-0000000002")


@pytest.mark.spec("ZK-5: absent keys; DRV-8: priority, getSafeAttributes")
def test_node_request_defaults() -> None:
    record = zk.NodeRequest.fromDict({"state": "requested"}, "199-0000000042")
    assert (record.declined_by, record.node_types, record.nodes, record.reuse) == ([], [], [], True)
    assert (record.relative_priority, record.requestor, record.event_id, record.tenant_name) == (
        0,
        None,
        None,
        None,
    )
    assert record.priority == ("199", 0, "0000000042")
    assert zk.NodeRequest.fromDict({"relative_priority": None}, "1-2").relative_priority == 0
    record.tenant_name = "t"
    text = (
        "{request.id} {request.tenant_name} {request.labels} {request.requestor} {request.event_id}"
    )
    assert text.format(request=record.getSafeAttributes()) == "199-0000000042 t [] None None"
    fresh = zk.NodeRequest()
    fresh.declined_by.append("x")
    assert zk.NodeRequest().declined_by == []


@pytest.mark.spec("issue, bad input: malformed names and values concern their own record")
@pytest.mark.parametrize(
    "values",
    [
        {"state": "odd"},
        {"state": 5},
        {"node_types": "text"},
        {"node_types": [1]},
        {"declined_by": {"a": 1}},
        {"relative_priority": "high"},
        {"relative_priority": True},
        {"nodes": [None]},
        {"relative_priority": float("inf")},
        {"relative_priority": float("nan")},
        {"relative_priority": 10**400},
        {"provider": []},
        {"provider": 5},
        {"tenant_name": {"a": 1}},
        {"requestor": ["x"]},
    ],
)
def test_malformed_request_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        zk.NodeRequest.fromDict(values, "200-0000000001")


@pytest.mark.parametrize("name", ["", "200", "200-", "-0000000001", "200-x"])
def test_bad_request_names(name: str) -> None:
    with pytest.raises(RecordError, match="priority"):
        _ = zk.NodeRequest(name).priority


PLAIN = [
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
    "hostname",
    "comment",
    "hold_job",
    "connection_type",
    "shell_type",
    "python_path",
    "tenant_name",
    "requestor",
    "username",
]
NODE = st.fixed_dictionaries(
    {
        "state": st.sampled_from(sorted(zk.Node.VALID_STATES)),
        "state_time": st.floats(0, 2e9),
        "type": st.lists(TEXT, max_size=3),
        "created_time": st.none() | st.floats(0, 2e9),
        "external_id": ANY,
        "user_data": ANY,
        "driver_data": ANY,
        "host_keys": st.lists(TEXT, max_size=2),
        "hold_expiration": st.none() | st.integers(0, 10**9),
        "connection_port": st.integers(1, 65535) | st.dictionaries(TEXT, TEXT, max_size=2),
        "resources": st.none() | st.dictionaries(TEXT, st.integers(0, 1000), max_size=3),
        "slot": st.none() | st.integers(0, 9),
        "attributes": st.none() | st.dictionaries(TEXT, ANY, max_size=2),
        "node_properties": st.dictionaries(TEXT, ANY, max_size=2),
        **dict.fromkeys(PLAIN, NULLABLE),
    }
)


@pytest.mark.spec(SPEC + "Node_toDict, Node_fromDict; ZK-7; DRV-8: fields")
@given(NODE)
def test_node_round_trip(values: dict[str, Any]) -> None:
    node = zk.Node.fromDict(values, "0000000001")
    expected = {**values, "ssh_port": values["connection_port"]}
    assert stored(node) == expected
    assert zk.Node.fromDict(stored(node), "0000000001") == node
    assert node.copy() == node and node.copy() is not node


@pytest.mark.spec("ZK-7, DRV-8: absent keys")
def test_missing_node_fields_have_defaults() -> None:
    node = zk.Node.fromDict({"state": "ready"}, "1")
    for name in PLAIN:
        assert getattr(node, name) == ("zuul" if name == "username" else None), name
    assert (node.type, node.host_keys, node.connection_port, node.hold_expiration) == (
        [],
        [],
        22,
        None,
    )
    assert zk.Node.fromDict({"username": None}, "1").username is None
    fresh = zk.Node()
    assert (fresh.node_properties, fresh.username, fresh.connection_port, fresh.type) == (
        {},
        "zuul",
        22,
        [],
    )
    assert (fresh.lock, fresh.lock_contenders) == (None, set())


@pytest.mark.spec(SPEC + "custom_connection_port; ZK-7: ssh_port mirrors it for old readers")
def test_ssh_port_mirrors_the_connection_port() -> None:
    assert zk.Node.fromDict({"ssh_port": 2222}, "1").connection_port == 2222
    assert (
        zk.Node.fromDict({"ssh_port": 2222, "connection_port": 5986}, "1").connection_port == 5986
    )
    node = zk.Node()
    node.connection_port = 99
    assert (stored(node)["connection_port"], stored(node)["ssh_port"]) == (99, 99)


@pytest.mark.spec(SPEC + "Node_fromDict: plain-string type wrapped; hold_expiration coerced")
def test_odd_node_values() -> None:
    assert zk.Node.fromDict({"type": "label"}, "1").type == ["label"]
    assert (
        zk.Node.fromDict({"type": None}, "1").type
        == zk.Node.fromDict({"type": ""}, "1").type[:0]
        == []
    )
    node = zk.Node()
    node.type = "label"
    assert node.type == ["label"] and stored(node)["type"] == ["label"]
    for value, expected in (("100", 100), (100, 100), ("x", 0), ([], 0), (None, None), (7.9, 7)):
        assert zk.Node.fromDict({"hold_expiration": value}, "1").hold_expiration == expected
    # Zuul adds the id.
    assert (
        "id" not in zk.Node.fromDict({"id": "0000000001", "state": "used"}, "0000000001").toDict()
    )


@pytest.mark.parametrize(
    "values",
    [
        {"state": "flying"},
        {"state": ["ready"]},
        {"type": 5},
        {"type": [1]},
        {"provider": ["p"]},
        {"pool": {"a": 1}},
        {"allocated_to": ["200-0000000001"]},
        {"tenant_name": []},
        {"requestor": 5},
        {"launcher": {}},
        {"az": ["a"]},
    ],
)
def test_malformed_node_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        zk.Node.fromDict(values, "1")


@pytest.mark.parametrize("data", [b"{", b"[]", b"5", b'"text"', b"\xff\xfe", b"[" * 100000])
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        parse_object(data)


def test_empty_data_is_no_record() -> None:
    assert parse_object(b"") is None and parse_object(None) is None


@pytest.mark.spec("ZK-7: credentials are kept out of texts")
def test_secrets_are_not_shown() -> None:
    node = zk.Node("1")
    node.connection_port = {"token": "s3cret"}
    node.driver_data = {"password": "s3cret"}
    assert "s3cret" not in repr(node)


@pytest.mark.spec("PY-2: NodeRequestLockStats, ImageBuildRequest")
def test_small_records_compare_by_value() -> None:
    assert (
        zk.NodeRequestLockStats("a") == zk.NodeRequestLockStats("a") != zk.NodeRequestLockStats("b")
    )
    assert zk.NodeRequestLockStats().lock_id is None
    request = zk.ImageBuildRequest("image", True)
    assert (request.image_name, request.pending) == ("image", True)


NEWER = {"of_a_newer_release": {"a": [1, None]}, "zz": "text"}


@pytest.mark.spec(
    "issue 11, users 5: keys that we do not know stay when a record is rewritten, in all records"
)
@pytest.mark.parametrize(
    "read, write",
    [
        (lambda d: zk.Node.fromDict(d, "1"), lambda record: record.copy()),
        (lambda d: zk.NodeRequest.fromDict(d, "100-1"), lambda record: record.copy()),
        (lambda d: zk.ImageBuild.fromDict(d, "i", "1"), lambda record: record),
        (lambda d: zk.ImageUpload.fromDict(d, "1", "p", "i", "1"), lambda record: record),
    ],
)
def test_unknown_keys_stay(read: Any, write: Any) -> None:
    record = write(read({"state": "failed", "state_time": 1.0, "id": "1", **NEWER}))
    known = set(record.toDict())
    assert not known & set(NEWER)
    record.state = "ready" if "ready" in record.VALID_STATES else "fulfilled"
    after = stored(record)
    assert {key: after[key] for key in NEWER} == NEWER
    assert set(after) == known | set(NEWER)
    assert "of_a_newer_release" not in repr(record), "it may be a secret"
    record.updateFromDict({"state": "failed"})
    assert set(stored(record)) == known
    assert set(stored(type(record)())) == set(type(record)().toDict())


def test_copy_of_a_record_is_changed_without_changing_the_record() -> None:
    node, request = zk.Node("1"), zk.NodeRequest("100-1")
    node.lock, node.promise, node.unsaved = "held", 7, True
    copied, asked = node.copy(), request.copy()
    assert (copied.lock, copied.promise, copied.unsaved) == (None, None, False)
    copied.type.append("a")
    copied.host_keys.append("key")
    for names in (asked.declined_by, asked.node_types, asked.nodes):
        names.append("a")
    assert (node.type, node.host_keys) == ([], [])
    assert (request.declined_by, request.node_types, request.nodes) == ([], [], [])


def test_nodes_keep_their_fields_in_slots_and_equal_texts_once() -> None:
    """A launcher mirrors tens of thousands of them."""
    data = json.dumps({"state": "ready", "provider": "east", "type": ["noble"], "strange": 1})
    one, other = (zk.Node.fromDict(json.loads(data), name) for name in ("1", "2"))
    assert vars(one).keys() == {"_id", "_state", "state_time", "stat", "extra"}
    assert (one.provider, one.type[0]) == ("east", "noble")
    assert one.provider is other.provider and one.type[0] is other.type[0]
    assert one.lock_contenders is other.lock_contenders
    asked = [
        zk.NodeRequest.fromDict({"node_types": [f"{name}ble"], "requestor": f"{name}body"})
        for name in ("no", "no")
    ]
    assert asked[0].node_types[0] is asked[1].node_types[0]
    assert asked[0].requestor is asked[1].requestor
