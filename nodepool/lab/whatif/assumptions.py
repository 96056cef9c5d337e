"""What a configuration does not say about machines: launch times, sizes and quotas."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import voluptuous as v
import yaml

#: Seconds, if nothing else is known.
LAUNCH_TIME, DELETE_TIME = 60.0, 10.0
#: The same for drivers whose nodes are no virtual machines.
QUICK = dict.fromkeys(("kubernetes", "nodemanager", "openshift", "openshiftpods"), 3.0)
#: Attributes of the labels of our drivers, by resource.
_SIZES = {"cores": ("cpus", "cpu"), "ram": ("ram", "memory")}

_seconds = v.All(v.Any(int, float), v.Range(min=0, max=86400))
_times = v.Any(_seconds, v.All([_seconds], v.Length(min=1)))
_amounts = {str: v.All(v.Any(int, float), v.Range(min=0))}
SCHEMA = v.Schema(
    {
        "launch-time": _times,
        "delete-time": _times,
        "labels": {str: {"launch-time": _times, "resources": _amounts}},
        "providers": {str: {"quota": _amounts}},
    }
)


class AssumptionsError(Exception):
    """The file cannot be used; the text says where and why."""


@dataclass
class Assumptions:
    """Times are in seconds.

    A list of two times is a range; of a longer one, each launch takes one of the values.

    :param launch_times: by label.
    :param launch_time: of all other labels; None: it depends on the driver.
    :param resources: amounts that one node needs, by label.
    :param quotas: limits of the clouds, by provider.
    """

    launch_times: dict[str, list[float]] = field(default_factory=dict)
    launch_time: list[float] | None = None
    delete_times: list[float] = field(default_factory=lambda: [DELETE_TIME])
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    quotas: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str) -> Assumptions:
        """Read the assumptions.

        :raises AssumptionsError: the file cannot be read, or does not fit the schema.
        """
        try:
            with open(path, encoding="utf8") as file:
                return cls.of(yaml.safe_load(file) or {})
        except (OSError, UnicodeDecodeError, yaml.YAMLError, v.Invalid) as error:
            raise AssumptionsError(f"{path}: {error}") from None

    @classmethod
    def of(cls, data: Any) -> Assumptions:
        """Return the assumptions.

        :raises v.Invalid: the data do not fit the schema.
        """
        data = SCHEMA(data)
        found = cls()
        if "launch-time" in data:
            found.launch_time = _list(data["launch-time"])
        if "delete-time" in data:
            found.delete_times = _list(data["delete-time"])
        for name, label in data.get("labels", {}).items():
            if "launch-time" in label:
                found.launch_times[name] = _list(label["launch-time"])
            found.resources[name] = label.get("resources", {})
        found.quotas = {
            name: provider.get("quota", {}) for name, provider in data.get("providers", {}).items()
        }
        return found

    def learn(self, launch_times: Mapping[str, list[float]]) -> None:
        """Use measured launch times for labels without other assumptions."""
        for label, times in launch_times.items():
            self.launch_times.setdefault(label, times)

    def _times(self, label: str, driver: str) -> list[float]:
        return self.launch_times.get(label) or self.launch_time or [QUICK.get(driver, LAUNCH_TIME)]

    def launch_seconds(self, label: str, driver: str, choice: random.Random) -> float:
        return _pick(self._times(label, driver), choice)

    def mean_launch(self, label: str, driver: str) -> float:
        return statistics.fmean(self._times(label, driver))

    def delete_seconds(self, choice: random.Random) -> float:
        return _pick(self.delete_times, choice)

    def needs(self, label: Any) -> dict[str, float]:
        """Return what one node of the label of a driver needs."""
        found: dict[str, float] = {"instances": 1.0}
        for resource, names in _SIZES.items():
            for name in names:
                value = getattr(label, name, None)
                if (
                    isinstance(value, (int, float))
                    and not isinstance(value, bool)
                    and math.isfinite(value)
                ):
                    found[resource] = value
        return found | self.resources.get(label.name, {})


def _list(value: Any) -> list[float]:
    return [float(each) for each in (value if isinstance(value, list) else [value])]


def _pick(times: list[float], choice: random.Random) -> float:
    if len(times) == 2:
        return choice.uniform(*times)
    return times[int(choice.random() * len(times))]
