"""Comparison of the drivers, from ``nodepool/driver/quality.yaml`` and those of each driver.

``.. driver-quality::`` shows which driver follows which rule, and the reasons of those that do not.
"""

from __future__ import annotations

import pathlib
from typing import Any

import yaml

DRIVERS = pathlib.Path(__file__).resolve().parent.parent.parent / "nodepool" / "driver"
#: Marked with what the tests run against instead of ``done``.
TESTED = "tested-against"
KINDS = ("real server", "emulator", "model")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], widths: str) -> list[str]:
    """As reStructuredText."""
    found = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in [head, *rows]:
        found += [f"   {'*' if not index else ' '} - {cell}" for index, cell in enumerate(row)]
    return [*found, ""]


def rules() -> dict[str, str]:
    """Return the text of each rule by its id."""
    loaded: dict[str, str] = yaml.safe_load((DRIVERS / "quality.yaml").read_text())
    return loaded


def names() -> list[str]:
    """Return the names of the drivers that have marks."""
    return sorted(path.parent.name for path in DRIVERS.glob("*/quality.yaml"))


def marks(driver: str) -> dict[str, Any]:
    """Return the mark of each rule: ``done``, or a dict with ``done``, ``exempt`` or a member of
    ``KINDS``.
    """
    loaded: dict[str, Any] = yaml.safe_load((DRIVERS / driver / "quality.yaml").read_text())
    return loaded


def is_done(mark: Any) -> bool:
    return mark == "done" or "done" in mark


def lines() -> list[str]:
    """Return the comparison as reStructuredText."""
    texts = rules()
    done = [rule for rule in texts if rule != TESTED]
    rows: list[tuple[str, ...]] = []
    reasons: list[tuple[str, ...]] = []
    for driver in names():
        found = marks(driver)
        rows.append((f"``{driver}``", *("yes" if is_done(found[rule]) else "no" for rule in done)))
        reasons += [
            (f"``{driver}``", rule, found[rule]["exempt"])
            for rule in done
            if not is_done(found[rule])
        ]
    tested: list[tuple[str, ...]] = [
        (f"``{driver}``", kind, text)
        for driver in names()
        for kind, text in marks(driver)[TESTED].items()
        if kind in KINDS
    ]
    return [
        *table(("Driver", *done), rows, " ".join(["16"] + ["9"] * len(done))),
        *(line for rule in done for line in (f"{rule}", f"    {texts[rule]}")),
        "",
        texts[TESTED],
        "",
        *table(("Driver", "Tested against", ""), tested, "20 20 60"),
        "Reasons for each *no*:",
        "",
        *table(("Driver", "Rule", "Reason"), reasons, "20 20 60"),
    ]


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class DriverQuality(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for path in (DRIVERS / "quality.yaml", *DRIVERS.glob("*/quality.yaml")):
                self.env.note_dependency(str(path))
            parent = nodes.Element()
            self.state.nested_parse(
                StringList(lines(), source="quality of drivers"), self.content_offset, parent
            )
            return list(parent.children)

    app.add_directive("driver-quality", DriverQuality)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
