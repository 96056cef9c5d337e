"""Who has a node and how to log in, as explanations and pages show it."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.lease.record import Terms, end_of
from nodepool.status.nodes import LOGIN, facts_of, fingerprint
from nodepool.zk.records import HOLD, IN_USE, Node

NOW = 1_000_000.0
#: ssh-keygen -l prints this fingerprint for this key.
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
FINGERPRINT = "ssh-ed25519 SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


class Cluster:
    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes

    def readNodes(self) -> list[Node]:
        return list(self.nodes)

    def readUnreleasedNodes(self) -> list[Node]:
        return self.readNodes()


def node(number: int = 7, **values: Any) -> Node:
    made = Node(f"{number:010}")
    made.provider, made.interface_ip, made.state = "east", "192.0.2.7", IN_USE
    for name, value in values.items():
        setattr(made, name, value)
    made.state_time = NOW - 60
    return made


def facts(given: Node, *others: Node) -> dict[str, str]:
    cluster: Any = Cluster(given, *others)
    return dict(facts_of(cluster, given, NOW))


def test_login_names_address_port_user_and_host_keys() -> None:
    found = facts(node(host_keys=[KEY, "rubbish", 5, "ssh-rsa ###"], connection_port=2222))
    assert (found["address"], found["port"], found["user"]) == ("192.0.2.7", "2222", "zuul")
    assert found[LOGIN] == "ssh -p 2222 zuul@192.0.2.7"
    assert found["host keys"] == FINGERPRINT


@pytest.mark.parametrize("key", ["", "ssh-ed25519", "ssh-ed25519 %%%", "ssh-ed25519 \u00e4"])
def test_what_is_no_host_key_has_no_fingerprint(key: str) -> None:
    assert fingerprint(key) == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"connection_type": "winrm"}, "node 0000000007 is used by winrm, not by SSH"),
        ({"username": "a; rm -rf /"}, "node 0000000007 has no usable address or user name"),
        ({"username": ["root"]}, "node 0000000007 has no usable address or user name"),
        ({"interface_ip": {"a": 1}}, "node 0000000007 has no usable address or user name"),
        ({"connection_port": "secret"}, "node 0000000007 has no SSH port"),
    ],
)
def test_node_without_ssh_has_no_command_and_shows_why(values: dict[str, Any], why: str) -> None:
    found = facts(node(**values))
    assert LOGIN not in found and found["no login with ssh"] == why
    assert "secret" not in str(found)


def test_node_that_is_deleted_has_no_command() -> None:
    assert LOGIN not in facts(node(state="deleting"))


def test_user_of_zuul_is_shown_with_job_and_build() -> None:
    data = {"zuul_system": "z", "project_name": "nova", "builds": ["b1"]}
    found = facts(node(tenant_name="acme", requestor="NodePool:min-ready", user_data=data))
    assert (found["tenant"], found["requestor"], found["project"]) == (
        "acme",
        "NodePool:min-ready",
        "nova",
    )
    assert found["user data builds"] == '["b1"]'


def test_lease_is_shown_with_its_owner_and_without_the_hash_of_its_token() -> None:
    terms = Terms(owner="alice", via="unix:1000", purpose="bisect", secret="f00")
    found = facts(
        node(state=HOLD, allocated_to="100-1", user_data=terms.stored(), hold_expiration=3660)
    )
    assert (found["lease"], found["owner"], found["purpose"]) == (
        "100-1",
        "alice (unix:1000)",
        "bisect",
    )
    assert found["hold ends"].endswith("(in 1 h)")
    assert "f00" not in str(found)


def test_hold_without_an_end_shows_when_it_ends() -> None:
    found = facts(node(state=HOLD, comment="debugging", hold_job="acme nova"))
    assert found["hold ends"] == "when the node is deleted"
    assert (found["hold reason"], found["hold job"]) == ("debugging", "acme nova")


def test_slot_names_its_backing_node_and_the_other_way_around() -> None:
    backing, slot = (
        node(1),
        node(2, external_id="0000000002", driver_data={"backing_node": "0000000001", "slot": 0}),
    )
    assert facts(slot, backing)["backing node"] == "0000000001" and "server" not in facts(
        slot, backing
    )
    assert facts(backing, slot)["nodes on it"] == "0000000002"


def test_sliver_names_its_host() -> None:
    assert facts(node(external_id={"host": "h1", "sliver": "s"}))["host"] == "h1"


def test_hold_whose_record_has_no_time_has_no_end() -> None:
    held = node(state=HOLD, hold_expiration=60)
    assert end_of(held) == NOW
    held.state_time = None
    assert end_of(held) is None
