"""What holds for the configuration of every driver: CFG-17, DRV-3 and DRV-14.31."""

from __future__ import annotations

import copy
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool import config as npconfig
from nodepool.cmd.config_validator import ConfigValidator
from nodepool.driver import ConfigValue, Drivers
from tests import FIXTURES

ENV = {"NODEPOOL_PORT": "8005"}
LABELS = ("cloud", "image", "shelf", "slot", "plain", "sample", "bread", "anvil")
PROVIDERS: dict[str, dict[str, Any]] = {
    "fake": {
        "name": "fake-provider",
        "cloud": "fake",
        "rate": 1,
        "launch-retries": 2,
        "diskimages": [{"name": "disk"}],
        "cloud-images": [{"name": "ready-made", "username": "u"}],
        "pools": [
            {
                "name": "main",
                "max-servers": 3,
                "max-ram": 9,
                "availability-zones": ["az1"],
                "node-attributes": {"a": "b"},
                "priority": 4,
                "labels": [
                    {
                        "name": "cloud",
                        "cloud-image": "ready-made",
                        "min-ram": 1,
                        "host-key-checking": False,
                    },
                    {
                        "name": "image",
                        "diskimage": "disk",
                        "flavor-name": "Fake Flavor",
                        "boot-from-volume": True,
                    },
                ],
            }
        ],
    },
    "static": {
        "name": "shelves",
        "driver": "static",
        "max-concurrency": 3,
        "pools": [
            {
                "name": "main",
                "max-servers": 9,
                "nodes": [
                    {
                        "name": "h",
                        "labels": ["shelf"],
                        "username": "u",
                        "timeout": 2,
                        "connection-port": 22,
                        "max-parallel-jobs": 2,
                    }
                ],
            }
        ],
    },
    "metastatic": {
        "name": "meta",
        "driver": "metastatic",
        "boot-timeout": 3,
        "pools": [
            {
                "name": "main",
                "max-servers": 9,
                "labels": [
                    {
                        "name": "slot",
                        "backing-label": "cloud",
                        "max-parallel-jobs": 2,
                        "grace-time": 4,
                        "min-retention-time": 1,
                        "max-age": 7,
                    }
                ],
            }
        ],
    },
    "test": {"name": "simple", "driver": "test", "pools": [{"name": "main", "labels": ["plain"]}]},
    "example": {
        "name": "samples",
        "driver": "example",
        "region": "r",
        "project": "p",
        "boot-timeout": 2,
        "cloud-images": [{"name": "i", "image-id": "x"}],
        "pools": [
            {
                "name": "main",
                "labels": [{"name": "sample", "cloud-image": "i", "instance-type": "t"}],
            }
        ],
    },
    "bakery": {
        "name": "baker",
        "driver": "bakery",
        "oven": "stone",
        "launch-retries": 1,
        "pools": [{"name": "main", "priority": 3, "labels": [{"name": "bread", "flour": 2}]}],
    },
    "foundry": {
        "name": "founder",
        "driver": "foundry",
        "cloud-images": [{"name": "iron"}],
        "pools": [
            {"name": "main", "labels": [{"name": "anvil", "cloud-image": "iron", "cores": 4}]}
        ],
    },
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """Drivers of others can be found, and the clouds of the fake driver."""
    clouds = tmp_path / "clouds.yaml"
    clouds.write_text((FIXTURES / "config" / "clouds.yaml").read_text())
    monkeypatch.delenv("OS_CLIENT_CONFIG_FILE", raising=False)
    monkeypatch.setattr("openstack.config.loader.CONFIG_FILES", [str(clouds)])
    monkeypatch.syspath_prepend(str(FIXTURES / "drivers"))
    yield
    Drivers.load([])
    for name in [n for n in sys.modules if n.split(".")[0] == "bakery"]:
        del sys.modules[name]


def content(*drivers: str) -> dict[str, Any]:
    return {
        "drivers-path": str(FIXTURES / "drivers"),
        "labels": [{"name": name} for name in LABELS],
        "diskimages": [{"name": "disk", "elements": ["vm"]}],
        "providers": [copy.deepcopy(PROVIDERS[driver]) for driver in drivers],
    }


def write(tmp_path: pathlib.Path, values: dict[str, Any]) -> str:
    path = tmp_path / "nodepool.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def load(tmp_path: pathlib.Path, *drivers: str) -> npconfig.Config:
    return npconfig.loadConfig(write(tmp_path, content(*drivers)), ENV)


def objects(value: Any, seen: dict[int, Any]) -> list[ConfigValue]:
    """Configuration objects reachable through attributes that count for equality."""
    if isinstance(value, dict):
        return [found for item in value.values() for found in objects(item, seen)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in objects(item, seen)]
    if not isinstance(value, ConfigValue) or id(value) in seen:
        return []
    seen[id(value)] = value
    counted = [item for key, item in vars(value).items() if key not in value.ignore_equality]
    return [value, *[found for item in counted for found in objects(item, seen)]]


@pytest.mark.spec(
    "DRV-14.31: two equal loads are equal; unequal when one attribute (own or inherited) differs"
)
@pytest.mark.parametrize("driver", [name for name in PROVIDERS if name != "test"])
def test_every_attribute_counts(tmp_path: pathlib.Path, driver: str) -> None:
    drivers = ("fake", driver) if driver == "metastatic" else (driver,)
    name = PROVIDERS[driver]["name"]
    one = load(tmp_path, *drivers).providers[name]
    assert one == load(tmp_path, *drivers).providers[name]
    if driver != "bakery":  # has __eq__ without __hash__, as drivers of that time do
        assert hash(one) == hash(load(tmp_path, *drivers).providers[name])
    parts = objects(one, {})
    assert {"ProviderConfig", "ConfigPool"} <= {
        cls.__name__ for part in parts for cls in type(part).__mro__
    }
    for part in parts:
        for key, value in list(vars(part).items()):
            if key in part.ignore_equality or key in ("driver_object", "driver_config"):
                continue
            setattr(part, key, object())
            try:
                assert one != load(tmp_path, *drivers).providers[name], f"{part!r}.{key}"
            finally:
                setattr(part, key, value)
    assert one == load(tmp_path, *drivers).providers[name]


@pytest.mark.spec("FAK-2: TestConfig: equality by name only")
def test_test_driver_equality(tmp_path: pathlib.Path) -> None:
    one, two = (load(tmp_path, "test").providers["simple"] for _ in range(2))
    assert one == two
    two.name = "other"
    assert one != two


@pytest.mark.spec("CFG-17: every fixture configuration used by other tests validates before use")
@pytest.mark.parametrize(
    "drivers", [*[("fake", name) for name in PROVIDERS if name != "fake"], tuple(PROVIDERS)]
)
def test_what_loads_is_valid(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, drivers: tuple[str, ...]
) -> None:
    config = load(tmp_path, *drivers)
    assert config.provider_errors == {}
    assert len(config.providers) == len(drivers)
    with caplog.at_level(logging.INFO):
        assert ConfigValidator(str(tmp_path / "nodepool.yaml")).validate(ENV) == 0, caplog.text


@pytest.mark.spec("DRV-3.4: the schema is applied by config-validate only, extra keys are refused")
@pytest.mark.parametrize("driver", PROVIDERS)
def test_extra_options_fail_validation_but_not_loading(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    values = content("fake", driver) if driver != "fake" else content("fake")
    values["providers"][-1]["no-such-option"] = 1
    path = write(tmp_path, values)
    assert PROVIDERS[driver]["name"] in npconfig.loadConfig(path, ENV).providers
    assert ConfigValidator(path).validate(ENV) == 1
    assert "no-such-option" in caplog.text


@pytest.mark.spec(
    "DRV-3.4: duties of load: pools of labels, back reference of pools, supported labels"
)
@pytest.mark.parametrize("driver", PROVIDERS)
def test_duties_of_load(tmp_path: pathlib.Path, driver: str) -> None:
    config = load(tmp_path, *({"fake", driver} if driver != "fake" else {"fake"}))
    provider = config.providers[PROVIDERS[driver]["name"]]
    assert provider.driver.name == driver
    offered = set()
    for name, pool in provider.pools.items():
        assert pool.provider is provider
        assert provider.getSupportedLabels(name) == set(pool.labels)
        for label in pool.labels:
            assert any(found is pool for found in config.labels[label].pools), label
        offered |= set(pool.labels)
    assert provider.getSupportedLabels() == offered
    assert offered
    if provider.manage_images:
        assert config.diskimages["disk"].image_types == {"qcow2"}
        assert provider.diskimages["disk"].name == "disk"


@pytest.mark.spec("DRV-3.1: objects of different classes are never equal")
def test_objects_of_different_providers_are_never_equal(tmp_path: pathlib.Path) -> None:
    config = load(tmp_path, *PROVIDERS)
    providers = list(config.providers.values())
    pools = [pool for provider in providers for pool in provider.pools.values()]
    for group in (providers, pools):
        for one in group:
            assert [other for other in group if one == other] == [one]
