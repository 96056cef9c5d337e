"""Rates, classes and rules, without a network."""

from __future__ import annotations

import pytest

from nodepool.nodemanager.network import shaping, veth
from nodepool.nodemanager.network.tools import NetworkError
from nodepool.nodemanager.records.rspec import UNLIMITED_RATE


@pytest.mark.spec("NM-B.4: min rate is clipped to 25 % of the cap")
def test_minimum_is_clipped() -> None:
    found = shaping.rates({"nm_net_min_rate": 900, "nm_net_max_rate": UNLIMITED_RATE}, 1000)
    assert (found.minimum, found.maximum) == (250, 1000)


def test_minimum_never_exceeds_maximum() -> None:
    found = shaping.rates({"nm_net_min_rate": 200, "nm_net_max_rate": 100}, 1000)
    assert (found.minimum, found.maximum) == (100, 100)


def test_exempt_rates_know_no_node_cap() -> None:
    found = shaping.rates({"nm_net_exempt_min_rate": 5000}, 1000)
    assert (found.exempt_minimum, found.exempt_maximum) == (5000, UNLIMITED_RATE)


@pytest.mark.spec("NM-C.3: quantum = share x 60000, capped")
def test_quantum_is_proportional_to_the_share_and_capped() -> None:
    assert shaping.quantum(3) == 180_000
    assert shaping.quantum(10_000) == shaping.LARGEST_QUANTUM


def test_classes_and_indexes_are_one_to_one() -> None:
    seen = {}
    for index in (0, 1, 2, 999, shaping.LARGEST_INDEX):
        for exempt in (False, True):
            seen[shaping.class_of(index, exempt)] = (index, exempt)
    assert len(seen) == 10
    assert {name: shaping.index_of(name) for name in seen} == seen
    assert [shaping.index_of(name) for name in ("1:1", "1:2", "1:3")] == [None, None, None]
    with pytest.raises(NetworkError):
        shaping.class_of(shaping.LARGEST_INDEX + 1)


def test_exempt_destinations_are_ipv4_networks() -> None:
    assert shaping.routable(
        ["127.0.0.1", "192.0.2.7", "198.51.100.0/24", "192.0.2.7", "2001:db8::1"]
    ) == ["192.0.2.7/32", "198.51.100.0/24"]
    with pytest.raises(NetworkError, match="nowhere"):
        shaping.routable(["nowhere"])


def test_each_index_has_separate_addresses() -> None:
    assert veth.addresses("10.213.0.0/16", 1) == ("10.213.0.5", "10.213.0.6")
    assert veth.addresses("10.213.0.0/16", 64) == ("10.213.1.1", "10.213.1.2")
    for index in (0, -1, 16384):
        with pytest.raises(NetworkError, match="subnet"):
            veth.addresses("10.213.0.0/16", index)


@pytest.mark.spec("NM-C.4: veth names are never reused")
def test_names_of_devices_are_never_used_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from nodepool.nodemanager.config import parse

    network = veth.Network(parse({"state-dir": str(tmp_path)}, "test"))
    names = {network._new_name(30_000) for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 15
