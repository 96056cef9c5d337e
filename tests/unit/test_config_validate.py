"""``nodepool config-validate``: config.md section 12."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nodepool.cmd.config_validator import ConfigValidator

FIXTURES = Path(__file__).parent.parent / "fixtures" / "config"
ENV = {"NODEPOOL_PORT": "8005"}
GOOD = """labels:
  - name: l
diskimages:
  - name: i
providers:
  - name: fake-1
    cloud: fake
    diskimages:
      - name: i
    pools:
      - name: main
        labels:
          - name: l
            diskimage: i
            min-ram: 1
"""


@pytest.fixture
def validate(tmp_path, caplog):
    def validate(text, env=ENV):
        path = tmp_path / "nodepool.yaml"
        path.write_text(text)
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            status = ConfigValidator(str(path)).validate(env)
        found = [record for record in caplog.records if record.name == "nodepool.cmd.config_validator"]
        return status, [record.getMessage() for record in found if record.levelno >= logging.WARNING]

    return validate


def has(messages, *words):
    return any(all(word in message for word in words) for message in messages)


@pytest.mark.spec("config.md 17: a file with `port: %(NODEPOOL_PORT)` validates and the validator holds the integer 8005")
def test_complete():
    validator = ConfigValidator(str(FIXTURES / "complete.yaml"))
    assert validator.validate(ENV) == 0
    assert validator.config["webapp"]["port"] == 8005


def test_good(validate):
    assert validate(GOOD)[0] == 0


@pytest.mark.spec("config.md 17: Bad YAML -> 1")
def test_bad_yaml(validate, tmp_path):
    status, messages = validate("labels: [")
    assert status == 1
    assert has(messages, "YAML parsing failed", "nodepool.yaml:")
    assert ConfigValidator(str(tmp_path / "absent.yaml")).validate(ENV) == 1


@pytest.mark.spec("issue 11, users fault 6: a variable that is not set is named with its line")
def test_unset_variable(validate):
    status, messages = validate("webapp:\n  port: %(NODEPOOL_NOT_SET)\n")
    assert status == 1
    assert has(messages, "not set in the environment: NODEPOOL_NOT_SET (line 2); not valid YAML")


@pytest.mark.spec("config.md 17: unknown top-level key -> 1; diskimage without name -> 1; duplicate diskimage -> 1; parent missing -> 1")  # noqa: E501
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("labels:\n", "label: 1\nlabels:\n"), (":1:", "label: ", "extra keys not allowed", "did you mean labels?")),
        (("  - name: i\n", "  - name: i\n  - formats: [raw]\n"), (":5", "diskimages[1]", "required key not provided")),
        (("  - name: i\n", "  - name: i\n  - name: i\n"), (":5:", "diskimage i already defined")),
        (("  - name: i\n", "  - {name: i, parent: nope}\n"), (":4", "diskimage i has non-existant parent: nope")),
        (("  - name: i\n", "  - {name: i, parent: i}\n"), (":4", "cycle")),
        (
            ("      - name: i\n", "      - name: nope\n"),
            (":9:", "diskimage nope in provider fake-1 is not defined in the main diskimages list"),
        ),
        (("labels:\n  - name: l\nd", "labels:\n  - name: o\nd"), (":13:", "label l in provider fake-1 not in top-level labels")),
        (
            ("diskimage: i", "diskimage: nope"),
            (":14:", "label l in provider fake-1 uses diskimage nope which is not defined in the main diskimages"),
        ),
        (("diskimage: i", "cloud-image: nope"), (":14:", "cloud-image nope does not exist in provider fake-1")),
        (("min-ram: 1", "min-ram: lots"), (":15:", "providers[fake-1].pools[main].labels[l].min-ram", "expected int")),
        (("            min-ram: 1\n", ""), (":13:", "one of min-ram and flavor-name is required")),
        (("min-ram: 1", "flavor-name: x\n            cloud-image: c"), ("only one of diskimage and cloud-image",)),
        (("    cloud: fake\n", ""), ("providers[fake-1]", "required key not provided", "cloud")),
        (("    cloud: fake\n", "    cloud: fake\n    clod: x\n"), (":8:", "did you mean cloud?")),
        (("labels:\n", "tenant-resource-limits: [{max-cores: 1}]\nlabels:\n"), (":1", "tenant-name")),
        (("labels:\n", "zookeeper-servers: [{port: 1}]\nlabels:\n"), (":1", "host")),
        (("labels:\n", "zookeeper-tls: {cert: x}\nlabels:\n"), (":1", "ca")),
        (
            ("labels:\n", "zookeeper-servers: [{host: a, chroot: /a}, {host: b, chroot: /b}]\nlabels:\n"),
            (":1", "different chroots"),
        ),
        (("labels:\n  - name: l\nd", "labels:\n  - min-ready: 1\nd"), (":2", "labels[0]", "required key not provided")),
        (("  - name: fake-1\n", "  - name: x\n    driver: nope\n  - name: fake-1\n"), (":7:", "nope: unknown driver")),
        (("  - name: fake-1\n", "  - driver: test\n  - name: fake-1\n"), (":6", "name", "required key")),
    ],
)
def test_errors(validate, change, words):
    text = GOOD.replace(*change)
    assert text != GOOD
    status, messages = validate(text)
    assert status == 1
    assert has(messages, *words), messages


@pytest.mark.spec("config.md 12: every error in one run, with provider name and line number")
def test_all_errors_in_one_run(validate):
    text = """wrong: 1
labels:
  - name: l
    min-ready: many
  - {}
diskimages:
  - name: a
    elements: vm
  - name: b
    rebuild-age: x
providers:
  - name: fake-1
    cloud: fake
    rate: fast
    pools:
      - name: main
        max-servers: all
        labels:
          - {name: l, diskimage: a}
          - {name: m, diskimage: a, min-ram: 1, x: 1}
  - name: test-1
    driver: test
    pools:
      - {name: main, labels: [nope]}
  - name: gone
    driver: nope
"""
    status, messages = validate(text)
    assert status == 1
    lines = {int(message.split(":")[1]) for message in messages}
    assert {1, 4, 5, 8, 10, 14, 17, 19, 20, 24, 26} <= lines
    assert not any("Traceback" in message for message in messages)


@pytest.mark.spec("config.md 12.2: zookeeper-timeout int, shell-type and empty lists are accepted")
@pytest.mark.parametrize("extra", ["zookeeper-timeout: 10", "zookeeper-timeout: 10.5", "providers:", "labels:",
                                   "diskimages: [{name: x, shell-type: csh, release: 9, env-vars: {A: 1}}]",
                                   "tenant-resource-limits:", "zookeeper-insecure: true"])  # fmt: skip
def test_accepted(validate, extra):
    assert validate(extra)[0] == 0


@pytest.mark.spec("config.md 12: wanted extras that are warnings")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("elements-dir: /x/%(NODEPOOL_UNSET)", (":1:", "NODEPOOL_UNSET")),
        ("labels: [{name: a}, {name: a}]", ("label a already defined",)),
        ("webapp: {port: 1,\n port: 2}", (":2:", "given twice")),
        ("zookeeper-servers: [{host: a}]", ("zookeeper-tls",)),
        ("providers: [{name: fake-1, driver: static, cloud: x}]", ("gets the driver fake",)),
        ("diskimages: [{name: a/b}]", ("must not contain '/'",)),
        ("diskimages: [{name: a, env-vars: {X: true}}]", ("ambiguous",)),
        ("providers: [{name: a, driver: test}, {name: a, driver: test}]", ("provider a already defined",)),
        (
            "providers: [{name: a, driver: test, pools: [{name: p}, {name: p}]}]",
            ("pool p already defined",),
        ),
    ],
)
def test_warnings(validate, text, words):
    status, messages = validate(text)
    assert has(messages, *words), messages
    assert status == 0


def test_secrets_stay_out(validate):
    _, messages = validate("diskimages: [{name: a, env-vars: {TOKEN: [hunter2]}}]")
    assert messages
    assert not has(messages, "hunter2")


def test_odd_shapes(validate):
    for text in ("[]", "", "providers: [1]", "labels: x", "diskimages: [1]", "providers: {}", "zookeeper-servers: 1",
                 "providers: [{name: a, driver: test, pools: 1}]", "providers: [{name: a, driver: [x]}]",
                 "zookeeper-servers: [{host: a, port: x}]", "drivers-path: 1"):  # fmt: skip
        assert validate(text)[0] == 1, text
