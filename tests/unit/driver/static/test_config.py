from __future__ import annotations

import math
from typing import Any

import pytest
import voluptuous as v

from nodepool.config import Config, ConfigError
from nodepool.driver.static import StaticDriver
from nodepool.driver.static.config import NodeTuple, StaticPool, StaticProviderConfig, nodeTuple
from nodepool.driver.static.slots import Slots
from nodepool.zk.zookeeper import READY, Node


def load(*providers: dict[str, Any], labels: tuple[str, ...] = ("a", "b", "c")) -> Config:
    config = Config()
    config.setLabels([{"name": name} for name in labels])
    config.setProviders(list(providers))
    return config


def provider(*nodes: dict[str, Any], name: str = "static-provider", **pool: Any) -> dict[str, Any]:
    return {
        "name": name,
        "driver": "static",
        "pools": [{"name": "main", "nodes": list(nodes), **pool}],
    }


def test_omitted_options_of_a_node_have_the_documented_defaults() -> None:
    config = load(provider({"name": "host1", "labels": "a"}))
    pool = config.providers["static-provider"].pools["main"]
    assert isinstance(pool, StaticPool)
    assert pool.nodes == [
        {
            "name": "host1",
            "labels": ["a"],
            "host-key": [],
            "host-key-checking": True,
            "timeout": 5,
            "connection-port": 22,
            "connection-type": "ssh",
            "shell-type": None,
            "username": "zuul",
            "max-parallel-jobs": 1,
            "python-path": "auto",
            "probe": config.labels["a"].probe,
        }
    ]
    assert pool.labels == {"a"}
    assert pool.max_servers == math.inf
    assert config.labels["a"].pools == [pool]
    assert config.labels["b"].pools == []
    assert pool.provider is config.providers["static-provider"]
    assert not pool.provider.manage_images


@pytest.mark.spec("STA-1: a label string is split at blanks in both places")
def test_label_strings_are_split() -> None:
    config = load(
        provider({"name": "host1", "labels": "a b"}, {"name": "host2", "labels": ["b", "c"]})
    )
    pool = config.providers["static-provider"].pools["main"]
    assert isinstance(pool, StaticPool)
    assert pool.nodes[0]["labels"] == ["a", "b"]
    assert pool.labels == {"a", "b", "c"}
    assert config.labels["b"].pools == [pool]
    assert config.providers["static-provider"].getSupportedLabels() == {"a", "b", "c"}
    assert config.providers["static-provider"].getSupportedLabels("other") == set()


@pytest.mark.spec("STA-1: the older key ssh-port is still read, but refused by the schema")
def test_ssh_port_is_read_but_refused_by_the_schema() -> None:
    entry = provider({"name": "host1", "labels": "a", "ssh-port": 2222, "host-key": "ssh-rsa AAA"})
    config = load(entry)
    node = config.providers["static-provider"].pools["main"].nodes[0]  # type: ignore[attr-defined]
    assert node["connection-port"] == 2222
    assert node["host-key"] == ["ssh-rsa AAA"]
    with pytest.raises(v.Invalid, match="ssh-port"):
        StaticProviderConfig(entry).getSchema()(entry)


@pytest.mark.spec("STA-6.1: validation refuses unknown provider keys")
@pytest.mark.spec("LAU-21.158; CFG-17: static provider with an unknown key -> 1")
def test_unknown_provider_key_is_an_error() -> None:
    entry = provider(
        {
            "name": "host1",
            "labels": ["a"],
            "host-key": ["k"],
            "timeout": 3,
            "connection-port": 22,
            "connection-type": "winrm",
            "username": "x",
            "max-parallel-jobs": 2,
            "python-path": "/p",
            "shell-type": "cmd",
            "host-key-checking": False,
        },
        **{"max-servers": 3, "node-attributes": {"k": "v"}, "priority": 1},
    )
    schema = StaticDriver().getProviderConfig(entry).getSchema()
    schema({**entry, "max-concurrency": 2, "priority": 5})
    with pytest.raises(v.Invalid):
        schema({**entry, "cloud": "x"})
    with pytest.raises(v.Invalid):
        schema(provider({"name": "host1"}))


@pytest.mark.spec("STA-6.1: two equal loads are equal; configs compare by content and class")
def test_equal_configurations_compare_equal() -> None:
    entry = provider({"name": "host1", "labels": "a"})
    assert load(entry) == load(provider({"name": "host1", "labels": "a"}))
    assert load(entry) != load(provider({"name": "host1", "labels": "b"}))
    one, two = StaticPool(), StaticPool()
    assert one == two
    one.max_servers = 3
    assert one != two
    first, second = StaticProviderConfig({"name": "foo"}), StaticProviderConfig({"name": "foo"})
    assert first == second
    assert hash(first) == hash(second)
    second.name = "bar"
    assert first != second


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (provider({"name": "h", "labels": "missing"}), "missing"),
        (provider({"name": "h", "labels": "a"}, {"name": "h", "labels": "b"}), "twice"),
        (provider({"labels": "a"}), "name"),
        (provider({"name": "h"}), "label"),
        (provider({"name": "h", "labels": "a", "max-parallel-jobs": "x"}), "max-parallel-jobs"),
        ({"name": "static-provider", "driver": "static", "pools": [{"nodes": []}]}, "name"),
    ],
)
def test_load_errors_name_the_place(entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(entry)
    assert "static-provider" in str(caught.value)
    assert caught.value.where[:3] == ("providers", 0, "pools")


def test_same_host_with_another_user_or_port_is_another_host() -> None:
    config = load(
        provider(
            {"name": "h", "labels": "a"},
            {"name": "h", "labels": "b", "username": "other"},
            {"name": "h", "labels": "b", "connection-port": 5986},
        )
    )
    found = config.providers["static-provider"]
    assert isinstance(found, StaticProviderConfig)
    assert set(found.hosts()) == {
        NodeTuple("h", "zuul", 22),
        NodeTuple("h", "other", 22),
        NodeTuple("h", "zuul", 5986),
    }


def test_same_host_in_two_providers_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    load(
        provider({"name": "h", "labels": "a"}),
        provider({"name": "h", "labels": "a"}, name="second"),
    )
    assert "static-provider and second" in caplog.text


def test_node_tuple_of_a_record() -> None:
    node = Node("0000000001")
    node.hostname, node.username, node.connection_port = "h", "zuul", 22
    assert nodeTuple(node) == NodeTuple("h", "zuul", 22)


def _node(node_id: str, slot: int | None) -> Node:
    node = Node(node_id)
    node.state = READY
    node.slot = slot
    return node


@pytest.mark.spec("STA-4: nodes without usable slot take the first free one, the rest is excess")
def test_nodes_without_usable_slot_take_the_first_free_one() -> None:
    nodes = [_node("5", 1), _node("1", None), _node("2", 7), _node("6", 1), _node("3", -1)]
    slots = Slots(4, nodes)
    assert [node.id if node else None for node in slots.nodes] == ["1", "5", None, None]
    assert sorted(node.id or "" for node in slots.excess) == ["2", "3", "6"]
    assert slots.empty == [2, 3]
    full = Slots(1, [_node("1", 0), _node("2", None)])
    assert full.empty == []
    assert [node.id for node in full.excess] == ["2"]
