"""The files under etc/ are usable as they are."""

from __future__ import annotations

import configparser
import logging.config
import pathlib

import yaml

from nodepool import logconfig
from nodepool.config import loadConfig, loadSecureConfig

ETC = pathlib.Path(__file__).resolve().parents[2] / "etc"


def test_configuration_loads():
    config = loadConfig(str(ETC / "nodepool.yaml"))
    loadSecureConfig(config, str(ETC / "secure.conf"))
    assert config.webapp == {"port": 8005, "listen_address": "127.0.0.1"}
    assert set(config.labels) == {"bare-metal", "small"}


def test_logging_configuration(tmp_path):
    text = (ETC / "logging.yaml").read_text()
    values = yaml.safe_load(text)
    values["handlers"]["file"]["filename"] = str(tmp_path / "x.log")
    assert isinstance(logconfig.load_config(str(ETC / "logging.yaml")), logconfig.DictLoggingConfig)
    logging.config.DictConfigurator(values)
    for part in [*values["loggers"].values(), values["root"]]:
        assert set(part["handlers"]) <= set(values["handlers"])


def test_systemd_unit():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(ETC / "systemd" / "nodepool-launcher.service")
    assert unit["Service"]["Type"] == "notify"
    assert "nodepool-launcher" in unit["Service"]["ExecStart"]
