"""Definitions of metrics: one for both the statsd names and the Prometheus family."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"\{(\w+)\}")


class Series(str):
    """The statsd name of one value, which knows its family and labels."""

    __slots__ = ("definition", "values")

    definition: Definition
    values: tuple[object, ...]

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.definition.labels, map(str, self.values), strict=True))


@dataclass(frozen=True)
class Definition:
    """A metric; call it with its label values, in template order, to get a :class:`Series`.

    :param statsd: name with ``{label}`` for each label.
    :param family: of Prometheus, without the suffix for its type.
    """

    statsd: str
    family: str
    help: str
    labels: tuple[str, ...] = field(init=False)
    _format: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(_LABEL.findall(self.statsd)))
        object.__setattr__(self, "_format", _LABEL.sub("%s", self.statsd))

    def __call__(self, *values: object) -> Series:
        """Return the series of these label values.

        :raises TypeError: the number of values differs from the number of labels.
        """
        series = Series(self._format % values)
        series.definition, series.values = self, values
        return series
