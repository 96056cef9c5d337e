from __future__ import annotations

import math
from typing import Any

import pytest

from nodepool.config import Config, ConfigError
from nodepool.driver.metastatic import MetastaticDriver
from nodepool.driver.metastatic.config import MetastaticProviderConfig

LABEL = {"name": "small", "backing-label": "big"}


def provider(*labels: dict[str, Any], **options: Any) -> dict[str, Any]:
    pool = {"name": "main", "labels": list(labels)}
    for key in ("max-servers", "priority", "node-attributes", "host-key-checking"):
        if key in options:
            pool[key] = options.pop(key)
    return {"name": "meta", "driver": "metastatic", "pools": [pool], **options}


def load(entry: dict[str, Any]) -> MetastaticProviderConfig:
    config = Config()
    config.setLabels([{"name": name} for name in ("small", "small2", "big")])
    config.setProviders([entry])
    result = config.providers["meta"]
    assert isinstance(result, MetastaticProviderConfig)
    return result


def test_omitted_options_have_the_documented_defaults() -> None:
    config = load(provider(LABEL))
    assert (config.boot_timeout, config.launch_timeout, config.launch_retries) == (120, 3600, 3)
    assert not config.manage_images
    pool = config.pools["main"]
    assert pool.max_servers == math.inf
    assert not pool.host_key_checking
    assert not pool.use_internal_ip
    label = pool.labels["small"]
    assert (label.max_parallel_jobs, label.grace_time, label.min_retention_time, label.max_age) == (
        1,
        60,
        0,
        None,
    )
    assert not label.host_key_checking
    assert label.diskimage is None
    assert label.cloud_image.name == "unused"
    assert label.cloud_image.connection_port == "unknown"
    assert label.pool is pool
    assert pool.provider is config
    assert config._getLabel("small") is label
    assert config._getLabel("gone") is None
    assert config.getSupportedLabels() == {"small"}
    assert config.getSupportedLabels("other") == set()


@pytest.mark.spec("MST-8.12: max-servers and priority of the pool are read")
def test_options_of_the_pool_are_read() -> None:
    options: dict[str, Any] = {
        "max-servers": 7,
        "priority": 3,
        "node-attributes": {"a": "b"},
        "host-key-checking": True,
    }
    pool = load(
        provider(LABEL, {**LABEL, "name": "small2", "host-key-checking": False}, **options)
    ).pools["main"]
    assert (pool.max_servers, pool.priority, pool.node_attributes) == (7, 3, {"a": "b"})
    assert pool.labels["small"].host_key_checking
    assert not pool.labels["small2"].host_key_checking


@pytest.mark.spec("MST-8.11: equal settings load, different ones raise 'Multiple label def...'")
@pytest.mark.spec("LAU-21.158; CFG-17: refused at load")
def test_labels_sharing_a_backing_label() -> None:
    load(provider(LABEL, {**LABEL, "name": "small2"}))
    different = {"max-parallel-jobs": 2, "grace-time": 1, "min-retention-time": 5, "max-age": 9}
    for key, value in different.items():
        entry = provider(LABEL, {**LABEL, "name": "small2", key: value})
        with pytest.raises(ConfigError, match=r"^Multiple label definitions for the same"):
            load(entry)
        MetastaticDriver().getProviderConfig(entry).getSchema()(entry)


@pytest.mark.spec("MST-2: max-age smaller than min-retention-time is an error")
def test_max_age_below_min_retention_time_is_refused() -> None:
    load(provider({**LABEL, "max-age": 10, "min-retention-time": 10}))
    text = "The max_age must be greater than or equal to the min_retention_time"
    with pytest.raises(ConfigError, match=text) as caught:
        load(provider({**LABEL, "max-age": 9, "min-retention-time": 10}))
    assert caught.value.where == ("providers", 0, "pools", 0, "labels", 0, "max-age")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (provider({"name": "small"}), "backing-label"),
        (provider({"backing-label": "big"}), "name"),
        (provider({**LABEL, "name": "nowhere"}), "nowhere"),
        (provider({**LABEL, "max-parallel-jobs": 0}), "max-parallel-jobs"),
        ({"name": "meta", "driver": "metastatic", "pools": [{"labels": []}]}, "name"),
    ],
)
def test_errors_name_the_place(entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(entry)
    assert caught.value.where[:3] == ("providers", 0, "pools")


@pytest.mark.spec("DRV-14.31: two equal configuration loads are equal")
def test_equal_configurations_compare_equal() -> None:
    assert load(provider(LABEL)) == load(provider(dict(LABEL)))
    assert load(provider(LABEL)) != load(provider({**LABEL, "grace-time": 5}))
    first = MetastaticDriver().getProviderConfig({"name": "foo"})
    second = MetastaticDriver().getProviderConfig({"name": "foo"})
    assert first == second
    second.name = "bar"
    assert first != second
