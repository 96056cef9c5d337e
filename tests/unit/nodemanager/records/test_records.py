"""What records may contain."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from nodepool.nodemanager.records import records
from tests.support.nodemanager.node import KEY, delegate, sliver


@pytest.mark.spec("NM-A.5: record_key is <account_type>_<name>; unknown fields are kept")
def test_sliver_record_gets_its_key_and_keeps_unknown_fields() -> None:
    parsed = records.parse_record(
        sliver(
            "princeton_sirius",
            id=7,
            timestamp=3,
            expiry=9,
            rspec={"nm_cpu_share": 3},
            ssh_keys=f"{KEY}\n\n",
            colour="red",
            delegations=[("del_snoop", "GetRSpec")],
            initscript=base64.b64encode(b"#!/bin/sh\n").decode(),
        )
    )
    assert parsed["record_key"] == "sliver_princeton_sirius"
    assert parsed["ssh_keys"] == KEY
    assert parsed["delegations"] == [["del_snoop", "GetRSpec"]]
    assert (parsed["colour"], parsed["id"], parsed["image"]) == ("red", 7, "host")
    assert (
        records.parse_record({"account_type": "sliver", "name": "a"})["plc_instantiated"] is False
    )


@pytest.mark.spec("NM-A.5: delegate_<name>, plc_instantiated True")
def test_delegate_record_gets_its_key() -> None:
    parsed = records.parse_record(delegate("del_snoop", ssh_keys=KEY))
    assert (parsed["record_key"], parsed["plc_instantiated"]) == ("delegate_del_snoop", True)


@pytest.mark.spec("NM-A.5: bwcap, shipped cap 5000000000 and exempt 127.0.0.1")
def test_bandwidth_cap_record_keeps_cap_and_exempt_addresses() -> None:
    parsed = records.parse_record({"record_key": "bwcap", "timestamp": 1})
    assert (parsed["cap"], parsed["exempt_ips"]) == (5_000_000_000, ["127.0.0.1"])
    for wrong in (
        {"cap": 0},
        {"cap": "much"},
        {"exempt_ips": ["1.2.3.4; rm"]},
        {"exempt_ips": "127.0.0.1"},
    ):
        with pytest.raises(records.RecordError, match="bwcap"):
            records.parse_record({"record_key": "bwcap", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "x",
        {},
        {"account_type": "root", "name": "a"},
        sliver("a/b"),
        sliver("a\n"),
        sliver("a", ssh_keys=7),
        sliver("a", ssh_keys='command="x" ssh-rsa AAAA'),
        sliver("a", ssh_keys="cert-authority rsa AAAA"),
        sliver("a", ssh_keys=f"cert-authority {KEY}"),
        sliver("a", ssh_keys=f'cert-authority,principals="*" {KEY}'),
        sliver("a", ssh_keys=f'cert-authority,principals="a",command="x" {KEY}'),
        sliver("a", ssh_keys=f'principals="a" {KEY}'),
        sliver("a", ssh_keys="x" * 70000),
        sliver("a", initscript="***"),
        sliver("a", initscript="A" * 400000),
        sliver("a", junk="x" * 600000),
        sliver("a", rspec=[1]),
        sliver("a", rspec={"nm_x": 1}),
        sliver("a", timestamp="soon"),
        sliver("a", expiry=float("nan")),
        sliver("a", expiry=True),
        sliver("a", image="/etc"),
        sliver("a", image="dir:/"),
        sliver("a", image="dir:/srv/../"),
        sliver("a", image="image:../x"),
        sliver("a", network="bridge:a b"),
        sliver("a", username="a b"),
        sliver("a", hostname="a\nb"),
        sliver("a", hostname="-x"),
        sliver("a", delegations=["x"]),
        sliver("a", metadata=[1]),
        sliver("a", metadata={"n": 2**63}),
        sliver("a", junk=b"bytes"),
        sliver("a", junk={1: 2}),
    ],
)
def test_invalid_records_are_refused(wrong: Any) -> None:
    with pytest.raises(records.RecordError):
        records.parse_record(wrong)


def test_ca_whose_certificates_name_the_host_is_accepted() -> None:
    line = f'cert-authority,principals="np0000000012" {KEY}'
    assert records.parse_record(sliver("a", ssh_keys=line))["ssh_keys"] == line


def test_deep_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(records.RecordError):
        records.parse_record(sliver("a", junk=deep))
