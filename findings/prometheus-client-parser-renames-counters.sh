#!/bin/sh
# prometheus_client 0.26.0 (PyPI): its parser of the text format gives each counter whose name does not end with "_total"
# another name, although the format does not ask for that ending, and exporters such as statsd_exporter do not add it. A
# check that looks for the name that Prometheus stores finds nothing. If the page has a gauge of the new name, too, two
# series have one name. A program that parses pages and exposes them again, as a proxy does, renames the series for
# Prometheus, and writes the name of the gauge twice.
# Seen: "read: launches 5, launches_total 7; parsed: counter launches: launches_total 5, gauge launches_total:
# launches_total 7; exposed again: launches_total 5, launches_total 7" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check prometheus_client==0.26.0
cat >"$work/run.py" <<'END'
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PAGE = """\
# TYPE launches counter
launches 5
# TYPE launches_total gauge
launches_total 7
"""


class Proxy:
    def collect(self):
        return text_string_to_metric_families(PAGE)


def samples(page):
    return ", ".join(line.removesuffix(".0") for line in page.splitlines() if not line.startswith("#"))


registry = CollectorRegistry()
registry.register(Proxy())
parsed = ", ".join(
    f"{family.type} {family.name}: {sample.name} {sample.value:g}"
    for family in text_string_to_metric_families(PAGE)
    for sample in family.samples
)
print(f"read: {samples(PAGE)}; parsed: {parsed}; exposed again: {samples(generate_latest(registry).decode())}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='read: launches 5, launches_total 7; parsed: counter launches: launches_total 5'
second='gauge launches_total: launches_total 7; exposed again: launches_total 5, launches_total 7'
grep -qx "$first, $second" "$work/seen"
