"""Reads clouds.yaml for fake clouds without loading the SDK (about 35 MB of memory)."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import yaml

from nodepool.config.errors import ProviderUnavailable
from nodepool.config.reading import SafeLoader

DEFAULT_IMAGE_FORMAT = "qcow2"


def config_files() -> list[str]:
    """Return the paths where the SDK would search for clouds.yaml, in order."""
    loader = sys.modules.get("openstack.config.loader")
    if loader is not None:
        files = list(loader.CONFIG_FILES)
    else:
        home = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
        places = [
            os.getcwd(),
            os.path.join(home, "openstack"),
            os.path.join("~", ".config", "openstack"),
        ]
        site = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
        places += [os.path.join(item, "openstack") for item in site.split(os.pathsep)]
        places.append("/etc/openstack")
        files = [
            os.path.join(os.path.expanduser(place), "clouds" + suffix)
            for place in places
            for suffix in (".yaml", ".yml", ".json")
        ]
    override = os.environ.get("OS_CLIENT_CONFIG_FILE")
    return [override, *files] if override else files


@dataclasses.dataclass
class CloudDescription:
    """The part of a cloud's entry that the OpenStack driver reads."""

    name: str
    config: dict[str, Any]
    region_name: str | None = None


class FakeClouds:
    """The part of the SDK's ``OpenStackConfig`` that fake providers need."""

    def __init__(self) -> None:
        self.files = config_files()
        self.clouds: dict[str, Any] = {}
        for path in self.files:
            if os.path.isfile(path):
                self._read(path)
                break

    def _read(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as stream:
                data = yaml.load(stream, Loader=SafeLoader)
        except (OSError, yaml.YAMLError) as exc:
            raise ProviderUnavailable(f"{path} cannot be read: {exc}") from exc
        clouds = data.get("clouds") if isinstance(data, dict) else None
        self.clouds = clouds if isinstance(clouds, dict) else {}

    def get_one(
        self, cloud: str | None = None, validate: bool = False, **kw: Any
    ) -> CloudDescription:
        """Return *cloud*, or the only one if None. Raises ProviderUnavailable if it is missing."""
        if cloud is None:
            cloud = os.environ.get("OS_CLOUD") or (
                next(iter(self.clouds)) if len(self.clouds) == 1 else None
            )
        if cloud is None or cloud not in self.clouds:
            raise ProviderUnavailable(
                f"cloud {cloud} was not found; add it to clouds.yaml in one of"
                f" {', '.join(dict.fromkeys(os.path.dirname(path) for path in self.files))}"
            )
        region = kw.get("region-name") or kw.get("region_name")
        config = {key.replace("-", "_"): value for key, value in (self.clouds[cloud] or {}).items()}
        config.setdefault("image_format", DEFAULT_IMAGE_FORMAT)
        if region:
            config["region_name"] = region
        return CloudDescription(cloud, config, region)
