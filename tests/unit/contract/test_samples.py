"""The files under etc/ are usable as they are."""

from __future__ import annotations

import configparser
import logging.config
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from nodepool import logconfig
from nodepool.config import loadConfig, loadSecureConfig
from tests import REPOSITORY

ETC = REPOSITORY / "etc"


def test_sample_configuration_loads():
    config = loadConfig(str(ETC / "nodepool.yaml"))
    loadSecureConfig(config, str(ETC / "secure.conf"))
    assert config.webapp == {"port": 8005, "listen_address": "127.0.0.1"}
    assert set(config.labels) == {"bare-metal", "small"}


def test_sample_logging_configuration_is_valid(tmp_path):
    text = (ETC / "logging.yaml").read_text()
    values = yaml.safe_load(text)
    values["handlers"]["file"]["filename"] = str(tmp_path / "x.log")
    assert isinstance(logconfig.load_config(str(ETC / "logging.yaml")), logconfig.DictLoggingConfig)
    logging.config.DictConfigurator(values)
    for part in [*values["loggers"].values(), values["root"]]:
        assert set(part["handlers"]) <= set(values["handlers"])


def test_images_of_the_sample():
    """Every image of the sample is built, without device-mapper and without a cloud."""
    config = loadConfig(str(ETC / "nodepool.yaml"))
    image = config.diskimages["debian-flat"]
    assert image.image_types == {"qcow2", "raw"}
    assert image.elements == "debian-minimal openssh-server"
    devices = yaml.safe_load(image.env_vars["DIB_BLOCK_DEVICE_CONFIG"])
    assert [next(iter(device)) for device in devices] == ["local_loop", "mkfs"]
    assert config.build_min_free == 4096 and config.failed_build_retention == 604800


@pytest.mark.parametrize(
    "daemon", ["nodepool-launcher", "nodepool-builder", "nodepool-nodemanager"]
)
def test_systemd_units_start_their_daemon(daemon):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(ETC / "systemd" / f"{daemon}.service")
    assert unit["Service"]["Type"] == "notify"
    assert daemon in unit["Service"]["ExecStart"]


def test_launcher_of_the_unit_can_write_the_usage_log_of_the_manual():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(ETC / "systemd" / "nodepool-launcher.service")
    assert unit["Service"]["ProtectSystem"] == "strict"
    page = (REPOSITORY / "doc" / "operation" / "usage.rst").read_text()
    found = re.search(r"usage-log: (/\S+)/usage.sqlite", page)
    assert found is not None and found[1] == f"/var/lib/{unit['Service']['StateDirectory']}"


TOOL = pathlib.Path(sys.executable).with_name("disk-image-create")


@pytest.mark.skipif(not TOOL.exists(), reason="diskimage-builder is not installed beside Python")
def test_builder_of_the_unit_needs_no_home_directory(tmp_path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(ETC / "systemd" / "nodepool-builder.service")
    cache = f"/var/cache/{unit['Service']['CacheDirectory']}/"
    values = unit["Service"]["Environment"].replace(cache, f"{tmp_path}/").split()
    environment = {
        "PATH": f"{TOOL.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": "/proc/nonexistent",  # where even root cannot create it
        **dict(each.split("=", 1) for each in values),
    }
    done = subprocess.run(
        [TOOL, "-o", tmp_path / "image", "no-such-element"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert "no-such-element" in done.stdout
    assert "mkdir" not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"image-create", "lockfiles"}


def test_slivers_on_nodes_of_another_provider():
    config = loadConfig(str(ETC / "nodepool-backing.yaml"))
    backing = config.providers["slivers"].backing
    assert backing.label == "large" and backing.max_slivers == 50 and backing.grace_time == 600
    assert config.providers["rack-west"].getSupportedLabels() == {"large"}


def test_node_manager_configuration():
    from nodepool.nodemanager import config

    loaded = config.load(str(ETC / "nodemanager.yaml"))
    assert loaded.ssh.ports == (22000, 22199) and loaded.api.tcp == 812
    memory = (
        {"nm_mem_limit": config.default_memory(config.total_memory())} if os.geteuid() == 0 else {}
    )
    assert loaded.default_rspec == {"nm_pids_max": 1024, "nm_disk_quota": 5_000_000, **memory}


def test_aws_sample_is_valid():
    from nodepool.config.checks.validation import Validation
    from nodepool.config.source import Source

    assert not [
        problem.text for problem in Validation(Source(str(ETC / "aws.yaml"))).run() if problem.error
    ]
    provider = loadConfig(str(ETC / "aws.yaml")).providers["aws-frankfurt"]
    small = provider.pools["main"].labels["debian-small"]
    assert [offer.spot for offer in small.offers] == [True] * 6 + [False] * 2
    assert provider.cloud_images["windows-2025"].connection_port == 5986
