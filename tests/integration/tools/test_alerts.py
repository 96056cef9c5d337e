"""Alert rules and dashboard: Prometheus takes them, their metrics exist, and the manual has a
section for each alert.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from nodepool import metrics
from nodepool.metrics import Definition
from tests import REPOSITORY

RULES = REPOSITORY / "etc" / "prometheus" / "nodepool-alerts.yaml"
DASHBOARD = REPOSITORY / "etc" / "grafana" / "nodepool.json"
SUFFIXES = (
    "",
    "_total",
    "_duration_seconds_bucket",
    "_duration_seconds_count",
    "_duration_seconds_sum",
)
#: Of Prometheus itself, and of every process.
OTHERS = {"up", "process_resident_memory_bytes"}


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def known() -> dict[str, set[str]]:
    """Metric -> its labels."""
    definitions = [value for value in vars(metrics).values() if isinstance(value, Definition)]
    return {
        f"{each.family}{suffix}": set(each.labels) for each in definitions for suffix in SUFFIXES
    }


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [rule["expr"] for rule in rules()] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


@pytest.mark.spec("issue: dashboard and alert rules name metrics and labels that exist")
def test_dashboard_and_alerts_use_only_existing_metrics() -> None:
    there = known()
    for expression in expressions():
        found = re.findall(r"\b(nodepool_\w+|up|process_\w+)(?:\{([^}]*)\})?", expression)
        assert found, expression
        for name, selector in found:
            assert name in there or name in OTHERS, name
            for label in re.findall(r"(\w+)\s*(?:=~|!=|=|!~)", selector):
                assert label in there.get(name, set()) | {"job"}, (name, label)


@pytest.mark.spec("issue 49, 7: panels with filters by label, provider and tenant")
def test_each_panel_is_filtered_by_what_its_metrics_have() -> None:
    dashboard, there = json.loads(DASHBOARD.read_text()), known()
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    filters = variables.keys() - {"datasource"}
    assert filters == {"label", "provider", "tenant"}
    for name in filters:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["query"])
        assert found is not None and found[2] == name and name in there[found[1]]
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for metric, selector in re.findall(r"\b(nodepool_\w+)(?:\{([^}]*)\})?", target["expr"]):
                for name in filters & there[metric]:
                    assert f'{name}=~"${name}"' in selector, (panel["title"], metric, name)
                    used.add(name)
    assert used == filters


@pytest.mark.spec("issue: every alert has a manual section, and every section an alert")
def test_each_alert_has_a_section_in_the_manual() -> None:
    text = (REPOSITORY / "doc" / "operation" / "alerts.rst").read_text()
    sections = re.findall(r"^(Nodepool\w+)\n-+$", text, re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]


@pytest.mark.spec("issue: promtool checks the rules")
def test_promtool_accepts_the_alert_rules(tmp_path: pathlib.Path) -> None:
    found = subprocess.run(
        ["promtool", "check", "rules", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    check = [
        "promtool",
        "check",
        "config",
        "--syntax-only",
        str(RULES.with_name("prometheus.yaml")),
    ]
    found = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    series = {
        "NodepoolDown": ('up{job="nodepool-launcher",instance="a"}', "0x120"),
        "NodepoolConfigurationStale": ('nodepool_builder_config_stale{host="a"}', "1x120"),
        "NodepoolLaunchesFail": (
            'nodepool_provider_launches_total{provider="p",result="error.quota"}',
            "0+10x120",
        ),
        "NodepoolRequestsWait": ('nodepool_launcher_requests_waiting{host="a"}', "3x120"),
        "NodepoolCloudRefuses": (
            'nodepool_provider_api_errors_total{provider="p",operation="o",kind="configuration"}',
            "0+1x120",
        ),
        "NodepoolMemoryKills": (
            'nodepool_node_memory_kills_total{label="l",provider="p"}',
            "0+1x120",
        ),
        "NodepoolBehindZooKeeper": ('nodepool_zookeeper_queue{host="a",queue="q"}', "5000x120"),
    }
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series[name][0], "values": series[name][1]}],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                    "eval_time": "100m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for name in series
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    found = subprocess.run(
        ["promtool", "test", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stdout + found.stderr
