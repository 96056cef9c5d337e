"""Names, units, defaults and validation of resources."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.nodemanager.records import rspec


@pytest.mark.spec("NM-A.1: DEFAULT_RSPEC")
def test_default_rspec_is_that_of_the_contract() -> None:
    full = rspec.with_defaults({})
    assert (full["nm_enabled"], full["nm_cpu_share"], full["nm_cpu_guaranteed_share"]) == (1, 32, 0)
    assert (full["nm_disk_quota"], full["nm_net_share"]) == (5_000_000, 1)
    assert all(type(amount) is int for amount in full.values())


@pytest.mark.spec("NM-A.1, NM-C.3: LOANABLE_RESOURCES and floors")
def test_loanable_resources_and_floors_are_those_of_the_contract() -> None:
    assert {
        "nm_cpu_share",
        "nm_cpu_guaranteed_share",
        "nm_net_max_rate",
        "nm_net_exempt_max_rate",
        "nm_net_share",
        "nm_mem_limit",
        "nm_pids_max",
        "nm_cpu_limit",
    } == rspec.LOANABLE
    assert rspec.FLOORS["nm_mem_limit"] == 64
    assert rspec.FLOORS["nm_pids_max"] == 32
    assert rspec.FLOORS["nm_cpu_guaranteed_share"] == 0
    assert rspec.FLOORS["nm_cpu_limit"] > 0, "a lender at 0 would have no limit any more"


@pytest.mark.spec("NM-B.2: names without prefix, net rates in kbit/s, cpu_cores with suffix b")
def test_old_resource_names_and_units_are_converted() -> None:
    assert rspec.validate(
        {
            "cpu_share": "7",
            "net_max_rate": 5,
            "cpu_cores": "2b",
            "disk_max": 9000,
            "net_max_kbyte": 10,
        }
    ) == {
        "nm_cpu_share": 7,
        "nm_net_max_rate": 5000,
        "nm_cpu_cores": 2,
        "nm_cpu_cores_both": 1,
        "nm_disk_quota": 9000,
        "nm_net_max_kbyte": 10,
    }


@pytest.mark.spec("NM-B.4: net_max_rate -1 turns shaping off")
def test_rate_minus_one_turns_shaping_off() -> None:
    assert rspec.validate({"nm_net_max_rate": -1}) == {"nm_net_max_rate": rspec.UNLIMITED_RATE}


@pytest.mark.parametrize(
    "wrong",
    [
        {"nm_cpu": 1},
        {"nm_cpu_share": 0},
        {"nm_cpu_share": "much"},
        {"nm_cpu_share": True},
        {"nm_cpu_share": 1.5},
        {"nm_cpu_share": "1_000"},
        {"nm_cpu_share": "\u0661"},
        {"nm_cpu_share": None},
        {"nm_cpu_guaranteed_share": 1001},
        {"nm_mem_limit": -1},
        {"nm_pids_max": 10**30},
        {"nm_pids_max": "9" * 5000},
        {"nm_net_min_rate": 9, "nm_net_max_rate": 8},
        {"nm_cpu_cores": "b"},
        {"": 1},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(rspec.RSpecError) as caught:
        rspec.validate(wrong)
    assert next(iter(wrong)) in str(caught.value)


def test_defaults_and_grant_that_contradict_each_other() -> None:
    """What is stored must never make the node fail."""
    full = rspec.with_defaults({"nm_net_min_rate": 5000, "nm_net_max_rate": 100})
    assert full["nm_net_min_rate"] == full["nm_net_max_rate"] == 100


@pytest.mark.parametrize("name", ["a", "princeton_sirius", "np0000000123", "a-b", "a" * 63])
def test_valid_names_are_accepted(name: str) -> None:
    assert rspec.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "../a",
        "a\n",
        "\na",
        "a\0",
        "A",
        "1a",
        ".",
        "a" * 64,
        "a b",
        "\u00e4",
        None,
        7,
        ["a"],
    ],
)
def test_names_with_slashes_and_newlines(name: Any) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        rspec.check_name(name)


def test_disks_too_small_for_a_file_system_are_refused() -> None:
    with pytest.raises(rspec.RSpecError, match="nm_disk_quota: 4095 is not between 4096"):
        rspec.validate({"nm_disk_quota": 4095})
