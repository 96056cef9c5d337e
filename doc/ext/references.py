"""``.. metric-reference::``: the reference of all metrics, generated from their definitions."""

from __future__ import annotations

from typing import Any


def metrics() -> list[tuple[str, str, str]]:
    """statsd name, family of Prometheus with its labels, meaning; by statsd name."""
    from nodepool import metrics
    from nodepool.metrics import Definition

    found = {each for each in vars(metrics).values() if isinstance(each, Definition)}
    return sorted(
        (
            f"``{each.statsd}``",
            f"``{each.family}`` " + (f"({', '.join(each.labels)})" if each.labels else ""),
            each.help,
        )
        for each in found
    )


def lines() -> list[str]:
    """As reStructuredText. Any width fits, which a table of three columns does not on a phone."""
    return [
        line
        for statsd, family, meaning in metrics()
        for line in (statsd, f"    {meaning}. Prometheus: {family}", "")
    ]


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class MetricReference(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            parent = nodes.Element()
            self.state.nested_parse(
                StringList(lines(), source=self.name), self.content_offset, parent
            )
            return list(parent.children)

    app.add_directive("metric-reference", MetricReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
