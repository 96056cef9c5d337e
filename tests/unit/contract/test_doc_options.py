"""The generated reference of drivers: every option is there, and has the default that it is said to have."""

from __future__ import annotations

import importlib
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml

from nodepool.config import loadConfig
from nodepool.config.drivers import BUILTIN_NAMES
from tests import FIXTURES, REPOSITORY

CONFIGURATIONS = FIXTURES / "config"
#: The least that each driver takes.
LEAST: dict[str, dict[str, Any]] = {
    "openstack": {"cloud": "fake", "label": {"flavor-name": "small"}, "image": {}},
    "aws": {"region-name": "us-east-1", "label": {"instance-type": "t3.medium", "key-name": "zuul"},
            "image": {"username": "u", "image-id": "ami-1"}},
    "azure": {"location": "l", "resource-group": "g", "resource-group-location": "l", "network": "n", "auth-path": "/a",
              "label": {"hardware-profile": {"vm-size": "s"}}, "image": {"username": "u", "image-id": "i"}},
    "gce": {"project": "p", "region": "r-1", "zone": "r-1-a", "object-storage": {"bucket-name": "b"},
            "label": {"instance-type": "t"}, "image": {"image-id": "i"}},
    "ibmvpc": {"vpc": "v", "region": "r", "zone": "z", "subnet": "s",
               "object-storage": {"instance-name": "i", "endpoint": "e", "bucket-name": "b"},
               "diskimage": {"operating-system": "o"}, "label": {"profile": "p"}, "image": {"username": "u", "image-id": "i"}},
}  # fmt: skip
WORDS = {"no limit": math.inf, "true": True, "false": False}
#: Where options are kept by another name.
RENAMED = {"availability-zone": "az", "instance-properties": "instance_properties", "image-format": "image_type"}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "doc" / "ext"))
    return importlib.import_module("driver_options")


def load(driver: str, path: pathlib.Path) -> dict[str, Any]:
    """Objects that hold the options, by where these are."""
    least = dict(LEAST[driver])
    label, image, own = least.pop("label"), least.pop("image"), least.pop("diskimage", {})
    path.write_text(yaml.safe_dump({
        "labels": [{"name": "small"}], "diskimages": [{"name": "image"}],
        "providers": [{
            "name": "p", "driver": driver, **least, "diskimages": [{"name": "image", **own}],
            "cloud-images": [{"name": "base", **image}],
            "pools": [{"name": "main", "labels": [{"name": "small", "cloud-image": "base", **label}]}]}]}))  # fmt: skip
    provider = loadConfig(str(path)).providers["p"]
    pool = provider.pools["main"]
    return {"": provider, "cloud-images": provider.cloud_images["base"], "diskimages": provider.diskimages["image"],
            "pools": pool, "pools.labels": pool.labels["small"]}  # fmt: skip


@pytest.mark.parametrize("driver", sorted(LEAST))
def test_every_option_has_a_text(reference: Any, driver: str) -> None:
    assert reference.check(driver) == []
    text = "\n".join(reference.lines(driver))
    assert "Options of ``pools.labels``" in text
    assert "* - ``host-key-checking``" in text


def test_what_is_missing_is_told(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = reference.texts("aws")
    del said["rate"]
    monkeypatch.setattr(reference, "texts", lambda driver: {**said, "speed": ("1", "no such option")})
    assert reference.check("aws") == ["aws: option rate has no text", "aws: there is no option speed"]
    with pytest.raises(reference.ReferenceError, match="option rate has no text"):
        reference.lines("aws")


@pytest.mark.parametrize("driver", sorted(LEAST))
def test_defaults_are_those_of_the_code(
        reference: Any, driver: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(CONFIGURATIONS / "clouds.yaml"))
    holders, compared = load(driver, tmp_path / "nodepool.yaml"), 0
    for key, (text, _) in reference.texts(driver).items():
        where, _, name = key.rpartition(".")
        default = text.strip("`")
        if key in ("priority", "driver", "max-concurrency") or where not in holders:
            continue  # of the framework, which has no attribute for what was not given
        value = WORDS.get(default, int(default) if default.isdigit() else default)
        if not default or (isinstance(value, str) and set(value) & set(" ,'")):
            continue  # nothing, or another option's
        found = getattr(holders[where], RENAMED.get(name, name.replace("-", "_")))
        if key == "image-import-timeout" and value == math.inf:
            assert found is None  # what is not limited
        elif key == "clean-floating-ips":
            assert not found
        elif default == "name":
            assert found in (None, holders[where].name)
        else:
            assert found == (float(default) if key == "rate" else value), key
        compared += 1
    assert compared > 15


def test_manual_is_built(tmp_path: pathlib.Path) -> None:
    built = subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(REPOSITORY / "doc"), str(tmp_path)],
                           capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert (built.returncode, built.stderr) == (0, "")
    assert "scheduler-hints" in (tmp_path / "openstack.html").read_text()
    # The reference of all: of each driver, and of the metrics.
    text = (tmp_path / "reference.html").read_text()
    assert [name for name in BUILTIN_NAMES if f"Providers with driver {name}<" not in text] == []
    for each in ("pools.labels.cloud-image", "tenant-resource-limits.tenant-name", "pools.nodes.host-key-checking",
                 "nodepool_label_request_wait", "nodepool.provider.{provider}.max_servers"):  # fmt: skip
        assert each in text
    assert "alternatives" in (tmp_path / "aws.html").read_text()
