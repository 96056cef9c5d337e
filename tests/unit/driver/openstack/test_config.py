"""Options of the OpenStack driver: OST-1."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import yaml

from nodepool import config as npconfig
from nodepool.base.option import load
from nodepool.config.checks.validation import Validation
from nodepool.config.source import Source
from nodepool.driver.openstack.config import (
    OpenStackProviderConfig,
    ProviderCloudImage,
    ProviderDiskImage,
    ProviderLabel,
    ProviderPool,
)
from tests import FIXTURES

CONFIGURATIONS = FIXTURES / "config"


@pytest.fixture(autouse=True)
def clouds(monkeypatch):
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(CONFIGURATIONS / "clouds.yaml"))


@pytest.fixture
def provider():
    return npconfig.loadConfig(
        str(CONFIGURATIONS / "complete.yaml"), {"NODEPOOL_PORT": "1"}
    ).providers["cloud-1"]


@pytest.mark.spec("OST-3.3: Config classes compare equal when fresh and unequal on any change")
@pytest.mark.parametrize(
    ("make", "attributes"),
    [
        (ProviderDiskImage, ["name", "pause", "meta"]),
        (ProviderCloudImage, ["name", "image_id"]),
        (ProviderLabel, ["name", "networks", "flavor_name"]),
        (ProviderPool, ["name", "max_servers", "max_ram", "azs"]),
        (
            lambda: OpenStackProviderConfig(None, {"name": "foo"}),
            ["name", "max_concurrency", "rate", "cloud_config"],
        ),
    ],
)
def test_configurations_differ_after_any_change(make, attributes):
    assert make() == make()
    for attribute in attributes:
        changed = make()
        setattr(changed, attribute, "changed")
        assert make() != changed
        assert changed != make()


def test_back_references_are_skipped():
    one, two = ProviderPool(), ProviderPool()
    two.provider = object()  # type: ignore[assignment]
    assert one == two
    label = ProviderLabel()
    label.pool = one
    assert label == ProviderLabel()


@pytest.mark.spec("OST-1.1: provider options and defaults")
def test_provider_options_are_loaded(provider):
    assert provider.rate == 0.5
    assert provider.region_name == "region-1"
    assert (provider.max_concurrency, provider.priority, provider.boot_timeout) == (10, 5, 120)
    assert (provider.launch_timeout, provider.launch_retries, provider.image_upload_timeout) == (
        3600,
        3,
        3600,
    )
    assert (provider.clean_floating_ips, provider.port_cleanup_interval) == (True, 600)
    assert provider.image_name_format == "{image_name}-{timestamp}"
    assert provider.image_type == "qcow2"
    assert provider.cloud_config.name == "fake"
    assert provider.manage_images is True
    assert provider.getSupportedLabels() == {"fake-label", "cloud-label"}
    assert provider.getSupportedLabels("main") == {"fake-label", "cloud-label"}
    assert provider.getSupportedLabels("other") == set()


@pytest.mark.spec("OST-1.2, OST-1.3: images")
def test_image_options_are_loaded(provider):
    image = provider.diskimages["fake-image"]
    assert (image.pause, image.meta, image.config_drive) == (True, {"a": "b"}, True)
    assert (image.connection_type, image.connection_port) == ("winrm", 5986)
    assert (image.username, image.python_path, image.shell_type) == ("debian", "auto", "csh")
    cloud = provider.cloud_images
    assert (cloud["by-name"].external_name, cloud["by-name"].connection_port) == ("by-name", 22)
    assert (cloud["by-id"].external_name, cloud["by-id"].connection_port) == ("1234", 5000)
    assert cloud["windows"].external_name == "Windows 11"
    assert (cloud["windows"].connection_port, cloud["windows"].username) == (5986, "administrator")
    assert cloud["by-name"].username is None


@pytest.mark.spec("OST-1.4, OST-1.5: pools and labels; label networks replace the pool's")
def test_pool_and_labels(provider):
    pool = provider.pools["main"]
    assert pool.provider is provider
    assert (pool.max_servers, pool.max_cores, pool.max_ram, pool.max_volumes) == (
        10,
        40,
        math.inf,
        math.inf,
    )
    assert (pool.azs, pool.networks, pool.security_groups) == (["az1"], ["net-1"], ["default"])
    assert (pool.auto_floating_ip, pool.host_key_checking, pool.use_internal_ip) == (
        False,
        True,
        False,
    )
    assert (pool.ignore_provider_quota, pool.node_attributes) == (False, {"executor-zone": "vpn"})
    label = pool.labels["fake-label"]
    assert label.pool is pool
    assert label.diskimage.name == "fake-image"
    assert (label.networks, label.host_key_checking, label.console_log) == (["net-2"], False, True)
    assert (label.min_ram, label.flavor_name, label.volume_size) == (8192, "Fake", 50)
    other = pool.labels["cloud-label"]
    assert other.cloud_image.name == "windows"
    assert (other.networks, other.host_key_checking) == (["net-1"], True)
    assert (other.boot_from_volume, other.volume_size, other.userdata) == (True, 70, "hello")


@pytest.mark.filterwarnings("ignore")  # the SDK warns about libraries it could use
@pytest.mark.spec("OST-1.6: the SDK's configuration is used, CONFIG_FILES is honoured at each load")
def test_clouds_yaml_is_read_at_each_load(tmp_path, monkeypatch):
    from openstack.config import loader

    text = "providers: [{name: real, cloud: %s, region-name: real-region}]"
    path = tmp_path / "nodepool.yaml"
    path.write_text(text % "real-cloud")
    config = npconfig.loadConfig(str(path))
    cloud = config.providers["real"].cloud_config
    assert (cloud.name, cloud.config["auth"]["username"]) == ("real-cloud", "real")
    assert cloud.region_name == "real-region"
    assert config.providers["real"].image_type == "qcow2"
    assert npconfig.loadConfig(str(path)) == config

    monkeypatch.delenv("OS_CLIENT_CONFIG_FILE")
    other = tmp_path / "clouds.yaml"
    other.write_text(
        (CONFIGURATIONS / "clouds.yaml").read_text().replace("username: real", "username: changed")
    )
    monkeypatch.setattr(loader, "CONFIG_FILES", [str(other)])
    changed = npconfig.loadConfig(str(path))
    assert changed.providers["real"].cloud_config.config["auth"]["username"] == "changed"
    assert changed.providers["real"] != config.providers["real"]
    path.write_text("providers: [{name: fake-1, cloud: fake-vhd}]")
    assert npconfig.loadConfig(str(path)).providers["fake-1"].image_type == "vhd"


def test_fake_cloud_needs_no_sdk():
    code = (
        "import sys; from nodepool import config;"
        f"c = config.loadConfig({str(CONFIGURATIONS / 'complete.yaml')!r}, {{'NODEPOOL_PORT': "
        f"'1'}});"
        "from nodepool.driver import Drivers; p = c.providers['cloud-1'];"
        "a = Drivers.get('fake').getAdapter(p); a.getQuotaLimits(); list(a.listInstances()); "
        "a.stop();"
        "print('openstack' in sys.modules, 'keystoneauth1' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.spec(
    "OST-3.1: a missing cloud is refused by validation; the error comes from us, not from the SDK"
)
def test_missing_cloud_is_refused(tmp_path):
    path = tmp_path / "nodepool.yaml"
    path.write_text("providers:\n- name: p\n  driver: openstack\n  pools: []\n")
    (problem,) = [
        problem
        for problem in Validation(Source(str(path))).run()
        if problem.path == "providers[p].cloud"
    ]
    assert (problem.error, problem.line, problem.text) == (
        True,
        2,
        "Schema validation failed: required key not provided",
    )


def test_alternatives_of_a_label_are_read_and_compared(provider):
    def loaded(**alternatives):
        label = ProviderLabel()
        label.pool = provider.pools["main"]
        load(label, {"name": "x", "cloud-image": "i", "flavor-name": "f", **alternatives})
        return label

    assert loaded().alternatives == ProviderLabel().alternatives == []
    assert loaded(alternatives=None).alternatives == []
    one = [{"flavor-names": ["a", "b"], "availability-zone": "z"}]
    assert loaded(alternatives=one).alternatives == one
    assert loaded(alternatives=one) != loaded()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"flavor-name": "a", "flavor-names": ["b"]}, "flavor"),
        ({"availability-zone": "a", "availability-zones": ["b"]}, "zone"),
        ({"flavour-name": "a"}, "flavour-name"),
    ],
)
def test_wrong_alternatives_are_errors(entry, problem, tmp_path):
    label = {"name": "l", "cloud-image": "i", "flavor-name": "f", "alternatives": [entry]}
    pools = [{"name": "main", "labels": [label]}]
    provider = {"name": "p", "cloud": "c", "cloud-images": [{"name": "i"}], "pools": pools}
    path = tmp_path / "nodepool.yaml"
    path.write_text(yaml.safe_dump({"labels": [{"name": "l"}], "providers": [provider]}))
    found = Validation(Source(str(path))).run()
    assert any("alternatives" in each.path and problem in each.path + each.text for each in found)
