"""What the daemons adopt from a file, what they warn of and what they refuse."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest

from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.exceptions import ConfigError, ConfigurationError
from tests.support.named_pipe import named_pipe

SPEC = "issue 11, point 3: daemons apply at load what config-validate knows; "
GOOD = """zookeeper-servers: [{host: localhost, port: 1}]
zookeeper-insecure: true
images-dir: /nonexistent
labels:
  - name: l
providers:
  - name: p
    driver: test
    pools:
      - name: main
        labels: [l]
  - name: s
    driver: static
    pools:
      - name: main
        nodes:
          - name: host
            labels: l
"""
FOREIGN = """
from nodepool.driver import Driver, ProviderConfig, ConfigPool
import voluptuous as v
class Pool(ConfigPool):
    def load(self, pool_config):
        super().load(pool_config)
class Config(ProviderConfig):
    pools = {}
    manage_images = False
    def load(self, newconfig):
        self.size = int(self.provider["size"])
    def getSchema(self):
        return v.Schema({"size": int, "zones": [str], "pools": list})
    def getSupportedLabels(self, pool_name=None):
        return set()
class FarDriver(Driver):
    def getProviderConfig(self, provider):
        return Config(provider)
    def getProvider(self, provider_config):
        raise NotImplementedError
"""


class Daemon:
    """The part of a daemon that loads."""

    def __init__(self, tmp_path, caplog):
        self.path, self.secure = tmp_path / "nodepool.yaml", tmp_path / "secure.yaml"
        self.caplog = caplog
        self.log = logging.getLogger("test.daemon")
        self.keeper = self.restarted()

    def restarted(self, secure=None):
        return ConfigFileStatus(
            (str(self.path), secure and str(secure)), self.log, lambda stale: None
        )

    def load(self, text):
        """The configuration and the warnings."""
        self.path.write_text(text)
        self.caplog.clear()
        config = self.keeper.load()
        self.keeper.good()
        return config, [r.getMessage() for r in self.caplog.records if r.name == "test.daemon"]


@pytest.fixture
def daemon(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return Daemon(tmp_path, caplog)


def changed(old, new):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    return text


@pytest.mark.spec(SPEC + "unknown keys warn with 'did you mean'")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "        labels: [l]",
            "        max-server: 2\n        labels: [l]",
            ("main].max-server", "did you mean max-servers?"),
        ),
        (
            "    driver: test",
            "    max-concurency: 1\n    driver: test",
            ("did you mean max-concurrency?",),
        ),
        ("labels:\n", "label: 1\nlabels:\n", (":4:", "did you mean labels?")),
        (
            "            labels: l",
            "            labels: l\n            max-parallel-job: 2",
            ("did you mean max-parallel-jobs?",),
        ),
    ],
)
def test_unknown_options_warn_with_a_suggestion(daemon, old, new, words):
    _, warnings = daemon.load(changed(old, new))
    assert len(warnings) == 1 and all(word in warnings[0] for word in words), warnings


@pytest.mark.spec(SPEC + "wrong types refuse the file")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "        labels: [l]",
            '        max-servers: "20"\n        labels: [l]',
            (":11:", "main].max-servers"),
        ),
        (
            "        labels: [l]",
            "        max-servers:\n        labels: [l]",
            (":11:", "expected int"),
        ),
        (
            "    driver: test",
            '    max-concurrency: "5"\n    driver: test',
            ("[p].max-concurrency", "expected int"),
        ),
        (
            "    driver: test",
            "    max-concurrency:\n    driver: test",
            ("providers[p].max-concurrency", "expected int"),
        ),
        (
            "    driver: test",
            "    priority: [1]\n    driver: test",
            ("providers[p].priority", "expected int"),
        ),
        (
            "            labels: l",
            "            labels: l\n            username: [a]",
            ("username", "expected str"),
        ),
        ("  - name: l", "  - name: l\n    min-ready: many", (":6", "expected a whole number")),
        ("    driver: test", "    driver:", (":8:", "providers[p].driver", "expected str")),
        ("    driver: test", "    driver: [fake]", (":8:", "providers[p].driver", "expected str")),
        ("  - name: p", "  - name: [p]", (":7", "name", "expected str")),
        (
            "        labels: [l]",
            '        labels: [l]\n      - ""',
            (":12:", "expected a dictionary"),
        ),
        (
            "        nodes:",
            '        nodes:\n          - ""',
            ("providers[s].pools[main].nodes[0]", "must be a dictionary of options"),
        ),
    ],
)
def test_wrong_types_refuse_the_file(daemon, old, new, words):
    config, warnings = daemon.load(GOOD)
    assert not warnings and set(config.providers) == {"p", "s"}
    for keeper in (daemon.keeper, daemon.restarted()):
        daemon.path.write_text(changed(old, new))
        for _ in range(2):  # also when nothing is validated because the text is the same
            with pytest.raises(ConfigurationError) as info:
                keeper.load()
            assert all(word in str(info.value) for word in ("nodepool.yaml", *words)), info.value


@pytest.mark.spec(SPEC + "what 11.0.0 takes and does no harm stays a warning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  - name: l", '  - name: l\n    min-ready: "0"'),
        ("  - name: l", "  - name: l\n    min-ready:"),
        ("zookeeper-insecure", 'zookeeper-timeout: "10"\nzookeeper-insecure'),
        ("            labels: l", '            labels: l\n            timeout: "5"'),
        ("            labels: l", '            labels: l\n            connection-port: "22"'),
        ("            labels: l", "            labels: l\n            host-key-checking: 0"),
        ("        labels: [l]", "        max-servers: 2.0\n        labels: [l]"),
        ("        labels: [l]", "        node-attributes:\n        labels: [l]"),
        ("    driver: test", "    priority:\n    driver: test"),
    ],
)
def test_harmless_errors_stay_warnings(daemon, old, new):
    config, warnings = daemon.load(changed(old, new))
    assert set(config.providers) == {"p", "s"}
    assert warnings
    assert daemon.load(daemon.path.read_text())[1] == [], "the same text is not judged again"


@pytest.mark.spec(SPEC + "an unknown driver leaves out its provider only")
def test_unknown_driver_disables_only_its_provider(daemon):
    config, warnings = daemon.load(changed("driver: test", "driver: nope"))
    assert set(config.providers) == {"s"} and warnings == []


@pytest.mark.spec(SPEC + "the types of a driver from elsewhere are its own matter")
def test_external_driver_checks_its_own_types(daemon, tmp_path):
    (tmp_path / "drivers" / "far").mkdir(parents=True)
    (tmp_path / "drivers" / "far" / "__init__.py").write_text(FOREIGN)
    text = (
        f'drivers-path: {tmp_path}/drivers\n{GOOD}  - name: f\n    driver: far\n    size: "3"\n '
        "   zones: a\n"
    )
    config, warnings = daemon.load(text)
    assert config.providers["f"].size == 3
    assert len(warnings) == 2
    with pytest.raises(ConfigError, match="max-concurrency"):
        daemon.load(text + '    max-concurrency: "5"\n')


@pytest.mark.spec(SPEC + "a value which the secure file replaces is judged after the replacement")
def test_secure_values_are_checked_after_replacement(daemon):
    bad = changed("{host: localhost, port: 1}", "{host: a, port: x, chroot: noslash}")
    with pytest.raises(ConfigError):
        daemon.load(bad)
    daemon.secure.write_text(
        "zookeeper-servers: [{host: b, port: 2181, prt: 1}]\nzookeeper-tls: {cert: c, key: k, ca: "
        "a}\n"
    )
    daemon.keeper = daemon.restarted(daemon.secure)
    config, warnings = daemon.load(bad)
    assert config.zookeeper_servers == "b:2181"
    assert (
        len(warnings) == 1
        and "secure.yaml:1" in warnings[0]
        and "did you mean port?" in warnings[0]
    )


def refused_start(program, daemon, tmp_path, text):
    """What the daemon says on standard error."""
    daemon.path.write_text(text)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                f"nodepool.cmd.{program}",
                "-f",
                "-c",
                str(daemon.path),
                "-p",
                str(tmp_path / "pid"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
        )
        with pytest.raises(BlockingIOError):  # such as READY=1
            systemd.recv(100)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.spec(SPEC + "when they start")
@pytest.mark.parametrize("program", ["launcher", "builder"])
def test_daemon_refuses_to_start_with_a_wrong_type(daemon, tmp_path, program):
    text = changed("        labels: [l]", '        max-servers: "20"\n        labels: [l]')
    error = refused_start(program, daemon, tmp_path, text)
    assert f"{daemon.path}:11: providers[p].pools[main].max-servers" in error


@pytest.mark.spec("issue 11, users fault 7: a first start with TLS files that cannot be read fails")
@pytest.mark.parametrize("program", ["launcher", "builder"])
def test_start_without_tls_files(daemon, tmp_path, program):
    text = changed(
        "zookeeper-insecure: true",
        "zookeeper-tls: {cert: /nonexistent/c, key: /nonexistent/k, ca: /nonexistent/a}",
    )
    text = text.replace("/nonexistent\n", f"{tmp_path}\n")
    error = refused_start(program, daemon, tmp_path, text)
    assert (
        error
        == f"nodepool-{program}: error: zookeeper-tls: cert: cannot read /nonexistent/c: No such "
        "file or directory\n"
    )


@pytest.mark.spec("issue 11, users fault 6: a variable that is not set is named with its line")
def test_unset_variable_is_reported_with_its_line(daemon, monkeypatch):
    monkeypatch.delenv("NODEPOOL_NOT_SET", raising=False)
    with pytest.raises(ConfigurationError) as info:
        daemon.load(GOOD + "webapp:\n  # %(NODEPOOL_COMMENT)\n  port: %(NODEPOOL_NOT_SET)\n")
    assert str(info.value).startswith(
        "not set in the environment: NODEPOOL_NOT_SET (line 21); not valid YAML: "
    )
    _, warnings = daemon.load(GOOD + "elements-dir: /x/%(NODEPOOL_NOT_SET) # %(NODEPOOL_COMMENT)\n")
    assert (
        len(warnings) == 1
        and ":19: %(NODEPOOL_NOT_SET) is not set in the environment" in warnings[0]
    ), warnings
    daemon.secure.write_text("zookeeper-servers: [{host: %(NODEPOOL_NOT_SET)}]")
    daemon.keeper = daemon.restarted(daemon.secure)
    with pytest.raises(
        ConfigurationError, match=r"^not set in the environment: NODEPOOL_NOT_SET \(line 1\)"
    ):
        daemon.load(GOOD)


def test_named_pipe_is_refused_and_does_not_block_the_next_load(daemon):
    daemon.load(GOOD)
    refused = pytest.raises(ConfigurationError, match="the configuration is empty")
    with named_pipe(daemon.path), refused:
        daemon.keeper.load()
    assert daemon.load(GOOD)[1] == []
