"""config-validate for programs, strict and with the secure file; the JSON schema for editors
(issue point 3).
"""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import jsonschema
import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from nodepool.config import jsonschema as generated
from nodepool.config.checks import crosschecks
from nodepool.config.drivers import BUILTIN_NAMES
from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.process.program import load_config
from tests import REPOSITORY

ROOT = REPOSITORY
FILE = ROOT / "etc" / "nodepool.schema.json"
GOOD = """
labels: [{name: a}]
providers:
  - {name: rack, driver: static, pools: [{name: main, nodes: [{name: h, labels: a}]}]}
"""
WARNED = GOOD + "elements-dir: /no/such/directory\n"


def run(tmp_path: pathlib.Path, text: str, *options: str, secure: str | None = None) -> int:
    path = tmp_path / "nodepool.yaml"
    path.write_text(text)
    before = ["-c", str(path)]
    if secure is not None:
        (tmp_path / "secure.conf").write_text(secure)
        before += ["-s", str(tmp_path / "secure.conf")]
    return nodepoolcmd.main([*before, "config-validate", *options])


def last(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.records[-1].getMessage().rpartition("/")[2]


def test_one_line_counts(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert run(tmp_path, GOOD) == 0
    assert last(caplog) == "nodepool.yaml is good (1 labels, 1 providers)"
    assert run(tmp_path, WARNED) == 0
    assert last(caplog) == "nodepool.yaml is good (1 labels, 1 providers), with 1 warning"
    assert run(tmp_path, WARNED, "--strict") == 1
    assert last(caplog) == "nodepool.yaml is not good: 1 warning (--strict)"
    assert run(tmp_path, WARNED + "label: 1\nlable: 2\n") == 1
    assert last(caplog) == "nodepool.yaml is not good: 2 errors and 1 warning"
    assert (
        nodepoolcmd.main(["-c", str(tmp_path / "nodepool.yaml"), "--strict", "config-validate"])
        == 1
    )


def test_json_report_lists_problems(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, GOOD + "label: 1\n", "--format", "json") == 1
    report = json.loads(capsys.readouterr().out)
    (problem,) = report.pop("problems")
    path = str(tmp_path / "nodepool.yaml")
    assert report == {
        "file": path,
        "good": False,
        "labels": 1,
        "providers": 1,
        "errors": 1,
        "warnings": 0,
    }
    assert (problem["file"], problem["line"], problem["option"], problem["level"]) == (
        path,
        5,
        "label",
        "error",
    )
    assert "did you mean labels?" in problem["text"]
    assert run(tmp_path, "a: [", "--format", "json") == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["text"].startswith(
        "YAML parsing failed"
    )
    assert run(tmp_path, WARNED, "--format", "json", "--strict") == 1
    assert json.loads(capsys.readouterr().out)["good"] is False
    assert run(tmp_path, "- 1\n", "--format", "json") == 1


REPLACED = (
    GOOD
    + """
zookeeper-servers: [{host: main, chroot: no-slash}]
"""
)
SECURE = """
zookeeper-servers: [{host: secure, port: 2281, chroot: /good}]
zookeeper-tls: {cert: /c, key: /k, ca: /a}
"""


def test_users_section_5_what_the_secure_file_replaces(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chroot without its slash in the main file does no harm when the secure file's servers
    stand for it.
    """
    assert run(tmp_path, REPLACED) == 1
    assert run(tmp_path, REPLACED, secure=SECURE) == 0, caplog.text
    main, secure = str(tmp_path / "nodepool.yaml"), str(tmp_path / "secure.conf")
    assert load_config(main, secure).zookeeper_servers == "secure:2281/good"
    keeper = ConfigFileStatus((main, secure), logging.getLogger("test"), lambda stale: None)
    assert keeper.load().zookeeper_servers == "secure:2281/good"
    assert run(tmp_path, GOOD, secure=SECURE.replace("port: 2281", "port: many")) == 1
    assert "secure.conf" in caplog.text
    capsys.readouterr()
    assert (
        nodepoolcmd.main(["-c", main, "-s", "/no/such/file", "config-validate", "--format", "json"])
        == 0
    )
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["level"], problem["file"]) == ("warning", "/no/such/file")


# -- the JSON schema


def schema() -> Any:
    return json.loads(FILE.read_text())


def test_the_file_is_current() -> None:
    """Made with: nodepool config-schema > etc/nodepool.schema.json"""
    assert schema() == json.loads(json.dumps(generated.document(BUILTIN_NAMES)))


def test_it_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(schema())


def test_json_schema_has_no_defaults() -> None:
    """Some validators write defaults into the document, even those of alternatives that do not
    apply, and then refuse it (findings/fastjsonschema-rejects-by-default-of-other-branch.sh).
    """

    def defaults(part: Any) -> list[Any]:
        if isinstance(part, list):
            return [found for each in part for found in defaults(each)]
        if not isinstance(part, dict):
            return []
        found = [part["default"]] if "default" in part else []
        for keyword, value in part.items():
            named = keyword in ("properties", "patternProperties", "definitions")
            found += defaults(list(value.values()) if named else value)
        return found

    assert defaults(schema()) == []


@pytest.mark.parametrize(
    "path",
    sorted(
        [
            *(ROOT / "etc").glob("nodepool*.yaml"),
            ROOT / "etc" / "aws.yaml",
            ROOT / "etc" / "openstack.yaml",
            ROOT / "etc" / "kubernetes.yaml",
            ROOT / "tests" / "fixtures" / "config" / "complete.yaml",
        ]
    ),
    ids=lambda path: path.name,
)
def test_samples_match_the_json_schema(path: pathlib.Path) -> None:
    data = yaml.safe_load(
        path.read_text().replace(": %(", ": '%(").replace(")\n", ")'\n")
        if "%(" in path.read_text()
        else path.read_text()
    )
    assert [error.message for error in jsonschema.Draft7Validator(schema()).iter_errors(data)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "label: 1\n", "'label' was unexpected"),
        (GOOD.replace("labels: a", "labels: a, port: 22"), "'port' was unexpected"),
        (GOOD.replace("driver: static", "driver: statik"), "'statik' is not one of"),
        (GOOD.replace("driver: static, ", ""), "'nodes' was unexpected"),
        (GOOD.replace("{name: a}", "{name: a, min-ready: few}"), "'few'"),
        (GOOD.replace("name: rack, ", ""), "'name' is a required property"),
    ],
)
def test_mistakes_do_not_fit(text: str, words: str) -> None:
    errors = list(jsonschema.Draft7Validator(schema()).iter_errors(yaml.safe_load(text)))
    assert any(words in error.message for error in errors), [error.message for error in errors]


def test_config_schema_needs_no_configuration(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no configuration."""
    assert nodepoolcmd.main(["-c", str(tmp_path / "absent"), "config-schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"] == generated.DIALECT


def numbers(schema: Any, parent: str = "") -> set[str]:
    """Return the names of all options that may be numbers."""
    if isinstance(schema, list):
        return set().union(*(numbers(each, parent) for each in schema))
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    own = {parent} if kinds in ("integer", "number") else set()
    for key, value in schema.items():
        if key == "properties":
            own |= set().union(*(numbers(each, name) for name, each in value.items()))
        elif key in ("anyOf", "oneOf"):
            own |= numbers(value, parent)
        elif key != "additionalProperties":
            own |= numbers(value)
    return own - {""}


def test_each_number_is_checked_for_values_that_cannot_work() -> None:
    # Their own checks are stricter: a price, and a time that is long enough.
    found = numbers(json.loads(FILE.read_text())) - {"hour", "lease-time"}
    assert {"max-servers", "iops", "default-label-cpu"} < found
    assert found <= crosschecks._NUMBERS | {"release", "zone"}
