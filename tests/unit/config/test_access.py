"""The section ``access`` of the main file, as daemons load it."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from nodepool.config.loading import loadConfig
from nodepool.exceptions import ConfigError

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJb4lPZ1C3ZpZ2ZkZ2ZkZ2ZkZ2ZkZ2ZkZ2ZkZ2Zk"


def load(tmp_path: pathlib.Path, content: dict[str, Any]) -> Any:
    path = tmp_path / "nodepool.yaml"
    path.write_text(yaml.safe_dump(content))
    return loadConfig(str(path))


def test_invalid_section_is_an_error_with_its_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"access": {"users": {"alice": "root"}}})
    assert (
        "access" in str(caught.value) and "alice" in str(caught.value) and ":3" in str(caught.value)
    )


def test_slivers_get_the_ca_with_their_host_name(tmp_path: pathlib.Path) -> None:
    provider = {
        "name": "hosts",
        "driver": "nodemanager",
        "hosts": [{"name": "a", "url": "unix:/run/a"}],
        "pools": [],
    }
    with_ca = {
        "providers": [provider],
        "access": {"certificates": {"key": "/etc/nodepool/ca", "public": PUBLIC}},
    }
    found = load(tmp_path, with_ca).providers["hosts"]
    assert found.keys_of("np0000000007", "ssh-rsa AAAA").splitlines() == [
        "ssh-rsa AAAA",
        f'cert-authority,principals="np0000000007" {PUBLIC}',
    ]
    assert (
        load(tmp_path, {"providers": [provider]})
        .providers["hosts"]
        .keys_of("np0000000007", "ssh-rsa AAAA")
        == "ssh-rsa AAAA"
    )


@pytest.mark.parametrize(
    "public", ["ssh-ed25519", f"{PUBLIC} comment", f'command="x" {PUBLIC}', f"{PUBLIC}\n{PUBLIC}"]
)
def test_public_key_of_the_ca_is_checked(tmp_path: pathlib.Path, public: str) -> None:
    with pytest.raises(ConfigError, match="expected a public key"):
        load(tmp_path, {"access": {"certificates": {"key": "/etc/nodepool/ca", "public": public}}})
