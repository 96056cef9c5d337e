"""What a metric is: one definition, from which its statsd names and its Prometheus family both come."""

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
    """A metric; call it with the values of its labels, in the order of the template, for a :class:`Series`.

    :param statsd: name with ``{label}`` for each label.
    :param family: of Prometheus, without the suffixes that tell the kind.
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
        """:raises TypeError: another number of values than the definition has labels."""
        series = Series(self._format % values)
        series.definition, series.values = self, values
        return series
