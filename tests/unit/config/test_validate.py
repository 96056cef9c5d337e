"""``nodepool config-validate``: CFG-12."""

from __future__ import annotations

import logging

import pytest

from nodepool.cmd.config_validator import ConfigValidator
from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.exceptions import ConfigurationError
from tests import FIXTURES

CONFIGURATIONS = FIXTURES / "config"
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
        found = [
            record for record in caplog.records if record.name == "nodepool.cmd.config_validator"
        ]
        return status, [
            record.getMessage() for record in found if record.levelno >= logging.WARNING
        ]

    return validate


def has(messages, *words):
    return any(all(word in message for word in words) for message in messages)


@pytest.mark.spec(
    "CFG-17: a file with `port: %(NODEPOOL_PORT)` validates and the validator holds the integer "
    "8005"
)
def test_complete_sample_is_valid_and_environment_gives_an_integer_port():
    validator = ConfigValidator(str(CONFIGURATIONS / "complete.yaml"))
    assert validator.validate(ENV) == 0
    assert validator.config["webapp"]["port"] == 8005


def test_valid_file_has_status_0(validate):
    assert validate(GOOD)[0] == 0


@pytest.mark.spec("CFG-17: Bad YAML -> 1")
def test_invalid_yaml_and_missing_file_have_status_1(validate, tmp_path):
    status, messages = validate("labels: [")
    assert status == 1
    assert has(messages, "YAML parsing failed", "nodepool.yaml:")
    assert ConfigValidator(str(tmp_path / "absent.yaml")).validate(ENV) == 1


@pytest.mark.spec("issue 11, users fault 6: a variable that is not set is named with its line")
def test_unset_variable_is_reported_with_its_line(validate):
    status, messages = validate("webapp:\n  port: %(NODEPOOL_NOT_SET)\n")
    assert status == 1
    assert has(messages, "not set in the environment: NODEPOOL_NOT_SET (line 2); not valid YAML")


@pytest.mark.spec(
    "CFG-17: unknown top-level key -> 1; diskimage without name -> 1; duplicate diskimage -> 1; "
    "parent missing -> 1"
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("labels:\n", "label: 1\nlabels:\n"),
            (":1:", "label: ", "extra keys not allowed", "did you mean labels?"),
        ),
        (
            ("  - name: i\n", "  - name: i\n    verify: {ssh-key: /k, flavor: big}\n"),
            (":5:", "diskimages[i].verify.flavor: ", "define a label with this flavor"),
        ),
        (
            ("  - name: i\n", "  - name: i\n  - formats: [raw]\n"),
            (":5", "diskimages[1]", "required key not provided"),
        ),
        (("  - name: i\n", "  - name: i\n  - name: i\n"), (":5:", "diskimage i already defined")),
        (
            ("  - name: i\n", "  - {name: i, parent: nope}\n"),
            (":4", "diskimage i has non-existant parent: nope"),
        ),
        (("  - name: i\n", "  - {name: i, parent: i}\n"), (":4", "cycle")),
        (
            ("      - name: i\n", "      - name: nope\n"),
            (":9:", "diskimage nope in provider fake-1 is not defined in the main diskimages list"),
        ),
        (
            ("labels:\n  - name: l\nd", "labels:\n  - name: o\nd"),
            (":13:", "label l in provider fake-1 not in top-level labels"),
        ),
        (
            ("diskimage: i", "diskimage: nope"),
            (
                ":14:",
                "label l in provider fake-1 uses diskimage nope which is not defined in the main "
                "diskimages",
            ),
        ),
        (
            ("diskimage: i", "cloud-image: nope"),
            (":14:", "cloud-image nope does not exist in provider fake-1"),
        ),
        (
            ("min-ram: 1", "min-ram: lots"),
            (":15:", "providers[fake-1].pools[main].labels[l].min-ram", "expected int"),
        ),
        (("            min-ram: 1\n", ""), (":13:", "one of min-ram and flavor-name is required")),
        (
            ("min-ram: 1", "flavor-name: x\n            cloud-image: c"),
            ("only one of diskimage and cloud-image",),
        ),
        (("    cloud: fake\n", ""), ("providers[fake-1]", "required key not provided", "cloud")),
        (("    cloud: fake\n", "    cloud: fake\n    clod: x\n"), (":8:", "did you mean cloud?")),
        (
            ("labels:\n", "tenant-resource-limits: [{max-cores: 1}]\nlabels:\n"),
            (":1", "tenant-name"),
        ),
        (("labels:\n", "zookeeper-servers: [{port: 1}]\nlabels:\n"), (":1", "host")),
        (("labels:\n", "zookeeper-servers: [{host: ''}]\nlabels:\n"), (":1", "host")),
        (("labels:\n", "zookeeper-tls: {cert: x}\nlabels:\n"), (":1", "ca")),
        (
            (
                "labels:\n",
                "zookeeper-servers: [{host: a, chroot: /a}, {host: b, chroot: /b}]\nlabels:\n",
            ),
            (":1", "different chroots"),
        ),
        (
            ("labels:\n  - name: l\nd", "labels:\n  - min-ready: 1\nd"),
            (":2", "labels[0]", "required key not provided"),
        ),
        (
            ("  - name: fake-1\n", "  - name: x\n    driver: nope\n  - name: fake-1\n"),
            (":7:", "nope: unknown driver"),
        ),
        (
            ("  - name: fake-1\n", "  - driver: test\n  - name: fake-1\n"),
            (":6", "name", "required key"),
        ),
    ],
)
def test_error_is_reported_with_line_and_option_path(validate, change, words):
    text = GOOD.replace(*change)
    assert text != GOOD
    status, messages = validate(text)
    assert status == 1
    assert has(messages, *words), messages


@pytest.mark.spec("CFG-12: every error in one run, with provider name and line number")
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


@pytest.mark.spec("CFG-12.2: zookeeper-timeout int, shell-type and empty lists are accepted")
@pytest.mark.parametrize(
    "extra",
    [
        "zookeeper-timeout: 10",
        "zookeeper-timeout: 10.5",
        "providers:",
        "labels:",
        "diskimages: [{name: x, shell-type: csh, release: 9, env-vars: {A: 1}}]",
        "tenant-resource-limits:",
        "zookeeper-insecure: true",
    ],
)
def test_tolerated_values_are_accepted(validate, extra):
    assert validate(extra)[0] == 0


@pytest.mark.spec("CFG-12: wanted extras that are warnings")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("elements-dir: /x/%(NODEPOOL_UNSET)", (":1:", "NODEPOOL_UNSET")),
        ("labels: [{name: a}, {name: a}]", ("label a already defined",)),
        ("webapp: {port: 1,\n port: 2}", (":2:", "given twice")),
        ("zookeeper-servers: [{host: a}]", ("zookeeper-tls",)),
        ("providers: [{name: fake-1, driver: static, cloud: x}]", ("uses driver fake",)),
        ("diskimages: [{name: a/b}]", ("must not contain '/'",)),
        ("diskimages: [{name: a, env-vars: {X: true}}]", ("ambiguous",)),
        (
            "providers: [{name: a, driver: test}, {name: a, driver: test}]",
            ("provider a already defined",),
        ),
        (
            "providers: [{name: a, driver: test, pools: [{name: p}, {name: p}]}]",
            ("pool p already defined",),
        ),
    ],
)
def test_warning_leaves_the_file_valid(validate, text, words):
    status, messages = validate(text)
    assert has(messages, *words), messages
    assert status == 0


def test_error_below_a_repeated_key_has_the_line_that_counts(validate):
    text = "labels: [{name: a}]\nlabels:\n  - name: a\n  - name: b\n    min-ready: many\n"
    _, messages = validate(text)
    assert has(messages, ":5:", "labels[b].min-ready"), messages


def test_secrets_stay_out(validate):
    _, messages = validate("diskimages: [{name: a, env-vars: {TOKEN: [hunter2]}}]")
    assert messages
    assert not has(messages, "hunter2")


def test_values_of_a_wrong_shape_are_refused(validate):
    for text in (
        "[]",
        "",
        "providers: [1]",
        "labels: x",
        "diskimages: [1]",
        "providers: {}",
        "zookeeper-servers: 1",
        "providers: [{name: a, driver: test, pools: 1}]",
        "providers: [{name: a, driver: [x]}]",
        "zookeeper-servers: [{host: a, port: x}]",
        "drivers-path: 1",
    ):
        assert validate(text)[0] == 1, text


@pytest.mark.parametrize("server", ["x", "{port: 1}", "{host: a, chroot: x}"])
def test_a_wrong_server_of_zookeeper_is_reported_once(validate, server):
    _, messages = validate(f"zookeeper-insecure: true\nzookeeper-servers: [{server}]")
    assert len(messages) == 1, messages


BACKED = """labels: [{name: a}, {name: b}]
providers:
  - name: m
    driver: metastatic
    pools:
      - name: main
        labels:
          - name: a
            backing-label: b
          - name: b
            backing-label: a
"""
STATIC = """labels: [{name: a}]
providers:
  - name: s
    driver: static
    pools:
      - name: main
        nodes:
          - name: h
            labels: a
"""
SLIVERS = """labels: [{name: a}]
providers:
  - name: n
    driver: nodemanager
    ssh-keys: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1aJf2aW3cFQmYk5mC1q1vLZfBqk1c6m7j0tq0J8s9u
    hosts: [{name: h, url: "unix:/run/x"}]
    cloud-images: [{name: host}]
    pools:
      - name: main
        labels:
          - name: a
            cloud-image: host
            ram: 100
"""
PODS = """labels: [{name: a}]
providers:
  - name: k
    driver: kubernetes
    context: c
    pools:
      - name: main
        labels:
          - name: a
            type: pod
            image: docker.io/library/debian
"""


@pytest.fixture(params=["config-validate", "daemon"])
def judge(request, validate, tmp_path, caplog):
    """Whether the file is taken, and what is said."""

    def judge(text):
        if request.param == "config-validate":
            status, messages = validate(text)
            return not status, messages
        path = tmp_path / "nodepool.yaml"
        path.write_text(text)
        caplog.clear()
        keeper = ConfigFileStatus(
            (str(path), None), logging.getLogger("test.daemon"), lambda stale: None
        )
        try:
            keeper.load()
            keeper.good()
        except ConfigurationError as exc:
            return False, [str(exc)]
        return True, [
            r.getMessage()
            for r in caplog.records
            if r.name in ("test.daemon", "nodepool.driver.static")
        ]

    return judge


@pytest.mark.spec(
    "issue 11, users fault 2: what cannot work is refused, by config-validate and by the daemons"
)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BACKED, ("cycle: a -> b -> a", "labels[a].backing-label")),
        (BACKED.replace("backing-label: b", "backing-label: a"), ("cycle: a -> a",)),
        ("webapp: {port: 99999}", ("webapp.port", "99999 is not a valid port")),
        ("webapp: {port: -1}", ("-1 is not a valid port",)),
        ("zookeeper-servers: [{host: a, port: 70000}]", ("70000 is not a valid port",)),
        (
            STATIC + "            connection-port: 99999",
            ("connection-port", "99999 is not a valid port"),
        ),
        (STATIC + "          - {name: h, labels: [a]}", ("is listed twice",)),
        (STATIC + "            max-parallel-jobs: x", ("max-parallel-jobs",)),
        ("diskimages: [{name: a, rebuild-age: -1}]", ("rebuild-age", "-1 is negative")),
        ("zookeeper-timeout: 0", ("too short",)),
        (SLIVERS.replace("ram: 100", "ram: -1"), ("labels[a].ram", "-1 is negative")),
        (SLIVERS.replace("ram: 100", "cpus: -1"), ("-1 is negative",)),
        (PODS + "            memory: -1", ("labels[a].memory", "-1 is negative")),
        (PODS + "        default-label-cpu: -1", ("default-label-cpu", "-1 is negative")),
        (SLIVERS.replace("unix:/run/x", "bogus"), ("'bogus' is not an address of a node manager",)),
        (SLIVERS.replace("    hosts", "#"), ("either hosts",)),
        (SLIVERS + "    lease-time: 3", ("lease-time must be",)),
    ],
)
def test_options_that_cannot_work_are_refused(judge, text, words):
    taken, messages = judge(text)
    assert not taken and has(messages, *words), messages


@pytest.mark.spec(
    "issue 11, users fault 2: what 11.0.0 lived with is warned of, by config-validate and by the "
    "daemons"
)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            BACKED.replace("backing-label: a", "backing-label: c"),
            ("backing-label c of label b: no pool here offers it",),
        ),
        (
            "labels: [{name: a, min-ready: 2}]",
            ("label a has min-ready, but no pool here offers it",),
        ),
        (STATIC.replace("{name: a}", "{name: a, min-ready: -5}"), ("min-ready", "-5 is negative")),
        (
            STATIC.replace("{name: a}", "{name: a, min-ready: yes}"),
            ("min-ready", "true is taken as the number 1; write a number"),
        ),
        ("labels: [{name: a, max-ready-age: -1}]", ("max-ready-age", "-1 is negative")),
        (STATIC + "        max-servers: -3", ("max-servers", "-3 is negative")),
        (STATIC + "        priority: yes", ("priority", "true is taken as the number 1")),
        (PODS + "        max-cores: -1", ("max-cores", "-1 is negative")),
        (STATIC + "            timeout: 0", ("timeout", "too short")),
        (STATIC + "            connection-port: 0", ("0 is not a valid port",)),
        ("zookeeper-servers:", ("no servers here",)),
    ],
)
def test_options_that_11_0_0_tolerated_only_cause_warnings(judge, text, words):
    taken, messages = judge(text)
    assert taken and has(messages, *words), messages


@pytest.mark.parametrize(
    "text",
    [
        "webapp: {port: 0}",
        STATIC,
        SLIVERS,
        "max-hold-age: -1",
        SLIVERS.replace("driver: nodemanager", "driver: nodemanager\n    max-concurrency: -1"),
        "diskimages: [{name: a, env-vars: {port: 99999, timeout: -1}}]",
    ],
)
def test_unusual_but_valid_options_cause_no_message(judge, text):
    assert judge(text) == (True, [])


@pytest.mark.spec("issue 11, point 3: config-validate ends with one line that counts what is good")
def test_valid_file_ends_with_a_line_that_counts_labels_and_providers(validate, caplog, tmp_path):
    validate(GOOD)
    assert (
        caplog.records[-1].getMessage()
        == f"{tmp_path}/nodepool.yaml is good (1 labels, 1 providers)"
    )
    validate("wrong: 1")
    assert not any("is good" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("usage.sqlite", ("usage-log", "usage.sqlite is not an absolute path")),
        ("/no/such/usage.sqlite", ("usage-log", "cannot be written on this machine by user")),
    ],
)
def test_file_for_usage_is_absolute_and_can_be_written(validate, tmp_path, path, words):
    status, messages = validate(f"{GOOD}usage-log: {path}\n")
    assert has(messages, *words)
    assert status == (0 if path.startswith("/") else 1)
    assert not has(validate(f"{GOOD}usage-log: {tmp_path}/usage.sqlite\n")[1], "usage-log")
