"""Reading and modelling the configuration: CFG."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nodepool import config as npconfig
from nodepool.base.connection_string import split_hosts
from nodepool.config import reading
from nodepool.config.errors import UnknownName
from nodepool.config.live.watch import ConfigWatcher
from nodepool.driver import ConfigPool, DriverConfig, Drivers
from nodepool.exceptions import ConfigurationError
from tests import FIXTURES
from tests.support.deadline import limit

CONFIGURATIONS = FIXTURES / "config"
ENV = {"NODEPOOL_PORT": "8005"}


@pytest.fixture(autouse=True)
def clouds(monkeypatch):
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(CONFIGURATIONS / "clouds.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text, name="nodepool.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def load(write, text, env=ENV):
    return npconfig.loadConfig(write(text), env)


def complete():
    return npconfig.loadConfig(str(CONFIGURATIONS / "complete.yaml"), ENV)


class TestReading:
    @pytest.mark.spec(
        "CFG-2.1: each NODEPOOL_ variable replaces %(NAME); others and undefined ones stay"
    )
    def test_each_known_variable_is_replaced_once(self):
        env = {"NODEPOOL_A": "1", "NODEPOOL_B": "%(NODEPOOL_A)", "OTHER": "x"}
        text = "%(NODEPOOL_A) '%(NODEPOOL_B)' %(OTHER) %(NODEPOOL_C) %(NODEPOOL_A)s"
        assert (
            npconfig.substitute_env_vars(text, env) == "1 '%(NODEPOOL_A)' %(OTHER) %(NODEPOOL_C) 1s"
        )

    @pytest.mark.spec("CFG-2.1: the YAML type is decided after substitution")
    def test_type_after_substitution(self, write):
        assert npconfig.openConfig(write("port: %(NODEPOOL_PORT)"), ENV) == {"port": 8005}

    @pytest.mark.spec("CFG-2.3: a missing file is tried again, three attempts in all")
    def test_missing_file_is_retried(self, write, tmp_path, monkeypatch):
        monkeypatch.setattr(reading, "READ_RETRY_INTERVAL", 0.05)
        with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
            npconfig.loadConfig(str(tmp_path / "absent.yaml"), ENV)
        monkeypatch.setattr(reading, "READ_RETRY_INTERVAL", 5)
        real_stat, seen = os.stat, []

        def flaky_stat(path, *args, **kw):
            if str(path).endswith("nodepool.yaml") and not seen:
                seen.append(path)
                monkeypatch.setattr(reading, "READ_RETRY_INTERVAL", 0.01)
                raise FileNotFoundError(path)
            return real_stat(path, *args, **kw)

        path = write("labels: [{name: a}]")
        monkeypatch.setattr(os, "stat", flaky_stat)
        assert "a" in npconfig.loadConfig(path, ENV).labels

    @pytest.mark.spec("CFG-2.5: unknown top-level keys are ignored, with a warning")
    def test_unknown_top_level_option_is_ignored_with_a_warning(self, write, caplog):
        load(write, "some-new-key: 1\nlabels: [{name: a}]")
        assert "some-new-key" in caplog.text

    @pytest.mark.spec("CFG-2.6: an empty main file is a readable error")
    @pytest.mark.parametrize("text", ["", "# nothing\n", "- a list\n"])
    def test_empty_main_file_is_refused(self, write, text):
        with pytest.raises(ConfigurationError, match="the configuration"):
            load(write, text)

    def test_bad_yaml_names_file_and_line(self, write):
        with pytest.raises(yaml.YAMLError, match=r"nodepool\.yaml:3"):
            load(write, "labels:\n  - [")

    @pytest.mark.spec("CFG-9.1: as_list")
    def test_as_list_wraps_single_values(self):
        assert npconfig.as_list(None) == []
        assert npconfig.as_list([1]) == [1]
        assert npconfig.as_list("a") == ["a"]

    @given(
        st.dictionaries(
            st.sampled_from(["NODEPOOL_A", "NODEPOOL_B", "OTHER"]), st.text(max_size=20)
        ),
        st.lists(st.sampled_from(["%(NODEPOOL_A)", "%(NODEPOOL_B)", "%(OTHER)", "%(", ")", "x"])),
    )
    def test_substitution_is_one_pass(self, env, parts):
        expected = [
            env.get(part[2:-1], part) if part.startswith("%(NODEPOOL_") else part for part in parts
        ]
        # Separated, so that the parts cannot form a reference together.
        assert npconfig.substitute_env_vars("|".join(parts), env) == "|".join(expected)


class TestTopLevel:
    @pytest.mark.spec(
        "CFG-17: webapp section with port 8080 and address 127.0.0.1 is read back as such"
    )
    def test_webapp_section_is_read(self, write):
        config = load(write, "webapp: {port: 8080, listen_address: 127.0.0.1}")
        assert config.webapp == {"port": 8080, "listen_address": "127.0.0.1"}
        assert npconfig.Config().webapp == {"port": 8005, "listen_address": "0.0.0.0"}

    @pytest.mark.spec("CFG-4.9: max-hold-age absent, 0 or negative means unlimited")
    @pytest.mark.parametrize(
        ("text", "age"),
        [
            ("{}", math.inf),
            ("max-hold-age: 0", math.inf),
            ("max-hold-age: -1", math.inf),
            ("max-hold-age: 5", 5),
        ],
    )
    def test_max_hold_age(self, write, text, age):
        assert load(write, text).max_hold_age == age

    @pytest.mark.spec("CFG-7: stored names of tenant limits")
    def test_missing_tenant_limits_are_infinite(self):
        assert complete().tenant_resource_limits == {
            "tenant-1": {
                "instances": math.inf,
                "cores": 10,
                "ram": math.inf,
                "volumes": 5,
                "L-NOT-A-REAL-CODE": 7,
            }
        }

    def test_tenant_limit_that_is_null_is_unlimited(self, write):
        limits = load(
            write, "tenant-resource-limits: [{tenant-name: t, max-cores: , max-volumes: , L-1: }]"
        ).tenant_resource_limits
        assert limits == {"t": {"instances": math.inf, "cores": math.inf, "ram": math.inf}}

    def test_tenant_limit_without_name(self, write):
        with pytest.raises(ConfigurationError, match=r"tenant-name.*nodepool\.yaml:2"):
            load(write, "tenant-resource-limits:\n  - max-cores: 1\n")

    def test_complete_sample_has_the_expected_values(self):
        config = complete()
        assert config.webapp["port"] == 8005
        assert config.zookeeper_timeout == 20.0
        assert isinstance(config.zookeeper_timeout, float)
        assert (config.zookeeper_tls_cert, config.zookeeper_tls_ca) == (
            "/etc/cert.pem",
            "/etc/ca.pem",
        )
        assert config.build_log_retention == 3
        assert config.labels["fake-label"].min_ready == 2
        assert config.labels["fake-label"].max_ready_age == 300
        assert [pool.name for pool in config.labels["fake-label"].pools] == ["main"]
        assert config.zookeeper_insecure is False

    def test_numbers_in_quotes(self, write, caplog):
        assert load(write, "build-log-retention: '3'").build_log_retention == 3
        assert "remove the quotes" in caplog.text
        with pytest.raises(ConfigurationError, match="expected a whole number"):
            load(write, "build-log-retention: many")

    @pytest.mark.parametrize(
        "text",
        [
            "max-hold-age:\nbuild-log-retention:\nfailed-build-retention:\nbuild-min-"
            "free:\nzookeeper-timeout:\n",
            "elements-dir:\nimages-dir:\nbuild-log-dir:\nzookeeper-tls:\nzookeeper-"
            "insecure:\nwebapp:\n",
            "webapp: {port: , listen_address: , pages: }",
            "webapp: {}\nzookeeper-tls: {}\nzookeeper-servers: []\ntenant-resource-limits: []\n",
            "failed-build-retention: 604800\nmax-hold-age: 0\nzookeeper-timeout: '10'\nwebapp: "
            "{port: '8005', x: 1}\n",
        ],
    )
    def test_empty_options_and_defaults_give_the_fresh_configuration(self, write, text):
        assert load(write, text) == npconfig.Config()

    @pytest.mark.parametrize("text", ["failed-build-retention: -1\nbuild-min-free: '-5'"])
    def test_negative_limits_of_builds_are_zero(self, write, text):
        config = load(write, text)
        assert (config.failed_build_retention, config.build_min_free) == (0, 0)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                "zookeeper-timeout: soon",
                ("expected a number, not 'soon'", "nodepool.yaml:1", "zookeeper-timeout"),
            ),
            (
                "webapp:\n  port: x",
                ("expected a whole number, not 'x'", "nodepool.yaml:2", "webapp.port"),
            ),
            ("webapp: 5", ("webapp: expected a dictionary",)),
            (
                "labels: [{name: a, min-ready: x}]",
                ("expected a whole number", "labels[a].min-ready"),
            ),
            ("labels: a", ("labels: expected a list",)),
            (
                "diskimages: [{name: a, formats: raw}]",
                ("expected a list, not 'raw'", "diskimages[a].formats"),
            ),
            (
                "diskimages: [{name: a, rebuild-age: x}]",
                ("expected a whole number", "diskimages[a].rebuild-age"),
            ),
            (
                "diskimages: [{name: a, metadata: [x]}]",
                ("expected a dictionary", "diskimages[a].metadata"),
            ),
            (
                "diskimages: [{name: a, env-vars: [x]}]",
                ("must be a dictionary", "diskimages[a].env-vars"),
            ),
            (
                "tenant-resource-limits: [{tenant-name: t, L-1: x}]",
                ("L-1: expected a whole number", "tenant-resource-limits"),
            ),
            (
                "zookeeper-servers: [{host: a, port: x}]",
                ("expected a whole number", "zookeeper-servers[0].port"),
            ),
            (
                "zookeeper-servers: [{host: a, chroot: 5}]",
                ("5 must start with '/'", "zookeeper-servers[0].chroot"),
            ),
            ("zookeeper-tls: x", ("expected a dictionary with cert, key and ca",)),
        ],
    )
    def test_wrong_values_are_errors_with_file_line_and_option(self, write, text, words):
        with pytest.raises(ConfigurationError) as error:
            load(write, text)
        assert [word for word in (*words, "nodepool.yaml:") if word not in str(error.value)] == []

    def test_null_in_a_setter_changes_nothing(self):
        config = npconfig.Config()
        config.setBuildLog("/logs", 3)
        config.setWebApp({"port": 1, "pages": "off"})
        config.setZooKeeperTLS({"cert": "c", "key": "k", "ca": "a"})
        config.setBuildLog(None, None)
        config.setWebApp(None)
        config.setZooKeeperTLS(None)
        assert (config.build_log_dir, config.build_log_retention) == ("/logs", 3)
        assert (config.webapp, config.web_pages) == (
            {"port": 1, "listen_address": "0.0.0.0"},
            "off",
        )
        assert (config.zookeeper_tls_cert, config.zookeeper_tls_key, config.zookeeper_tls_ca) == (
            "c",
            "k",
            "a",
        )

    def test_empty_lists_are_accepted(self, write):
        config = load(write, "providers:\nlabels:\ndiskimages:\nzookeeper-servers:\n")
        assert not config.providers


class TestZooKeeper:
    @pytest.mark.spec(
        "CFG-17: One host, several hosts (order kept), IPv6 literal in brackets, chroot appended"
    )
    def test_connection_string_keeps_order_and_brackets_ipv6(self):
        server = npconfig.ZooKeeperConnectionConfig
        build = npconfig.buildZooKeeperHosts
        assert build([server("127.0.0.1", 2181)]) == "127.0.0.1:2181"
        two = [server("127.0.0.1", 2181, "/test1"), server("127.0.0.2", 2182, "/test2")]
        assert build(two) == "127.0.0.1:2181/test1,127.0.0.2:2182/test2"
        assert build([server("::1", 2281), server("[::1]", 1, "/a")]) == "[::1]:2281,[::1]:1/a"
        assert build([server("2607:0000::1", 2181)]) == "[2607::1]:2181"
        with pytest.raises(Exception, match="list"):
            build(server("127.0.0.1"))  # type: ignore[arg-type]
        assert server("a").port == 2181
        assert server("a") == server("a")
        assert server("a") != server("b")

    @pytest.mark.spec("CFG-4.5: default port 2281; hosts and the one chroot")
    def test_hosts_and_chroot(self):
        config = complete()
        assert config.zookeeper_servers == "zk1.example.com:2281,[::1]:2281/test"
        assert split_hosts(config.zookeeper_servers) == ("zk1.example.com:2281,[::1]:2281", "/test")

    @pytest.mark.spec(
        "CFG-4.5: the same chroot on every entry is accepted, differing ones are an error"
    )
    def test_different_chroots_are_refused(self, write, caplog):
        config = load(write, "zookeeper-servers: [{host: a, chroot: /x}, {host: b, chroot: /x}]")
        assert split_hosts(config.zookeeper_servers) == ("a:2281,b:2281", "/x")
        assert "'/x,b:2281/x'" in caplog.text
        with pytest.raises(ConfigurationError, match="different chroots"):
            load(write, "zookeeper-servers: [{host: a, chroot: /x}, {host: b, chroot: /y}]")
        with pytest.raises(ConfigurationError, match="host"):
            load(write, "zookeeper-servers: [{port: 1}]")

        with pytest.raises(ConfigurationError, match="must start with '/'"):
            load(write, "zookeeper-servers: [{host: a, chroot: x}]")

    def test_chroot_is_split_from_the_hosts(self):
        assert split_hosts("a:1,[::1]:2/x/y") == ("a:1,[::1]:2", "/x/y")
        assert split_hosts("a:1/x/, b:2/x,") == ("a:1,b:2", "/x")
        assert split_hosts("a") == ("a", "")

    def test_insecure_must_be_asked_for(self, write):
        assert load(write, "zookeeper-insecure: true").zookeeper_insecure is True
        assert load(write, "zookeeper-insecure: 'yes'").zookeeper_insecure is False


IMAGES = """
diskimages:
  - {name: leaf, parent: middle, elements: [d], env-vars: {A: y, D: zoo}, metadata: {x: 1},
     pause: false}
  - {name: base, abstract: true, elements: [a, b], env-vars: {A: foo, B: bar}, release: 21,
     dib-cmd: parent,
     delete-after-upload: true, keep-formats: [raw], formats: [raw], rebuild-age: 5, pause: true,
     metadata: {x: 0, y: 2}, rollback-after: 5, canary: 2, replace-idle: true,
     verify: {ssh-key: /etc/key, command: id}}
  - {name: middle, abstract: true, parent: base, elements: [c], env-vars: {A: x, C: moo},
     rebuild-age: 0, formats: []}
  - {name: other, parent: leaf, dib-cmd: own, delete-after-upload: false, build-timeout: 10,
     rollback-after: 0, canary: 0, replace-idle: false}
"""


def test_command_of_a_probe_is_read(write):
    probe = "{interval: 60, method: command, command: df /, ssh-key: /etc/key, timeout: 9}"
    found = load(write, f"labels: [{{name: a, probe: {probe}}}]").labels["a"].probe
    assert (found.method, found.command, found.ssh_key) == ("command", "df /", "/etc/key")
    assert (found.interval, found.timeout) == (60, 9)


@pytest.mark.parametrize(
    ("probe", "option", "text"),
    [
        ("{method: command, ssh-key: /k}", "command", "method command needs command: add it"),
        ("{method: command, command: id}", "ssh-key", "method command needs ssh-key: add it"),
        ("{command: id}", "command", "no effect with method ssh: use method command"),
        ("{method: port, ssh-key: /k}", "ssh-key", "no effect with method port"),
        ("{timeout: 7}", "timeout", "no effect with method ssh"),
        ("{method: tcp}", "method", "expected ssh, port or command, not 'tcp'"),
        (
            "{method: command, command: id, ssh-key: key}",
            "ssh-key",
            "expected an absolute path, not 'key'",
        ),
    ],
)
def test_probe_whose_options_do_not_fit_is_an_error_with_its_place(write, probe, option, text):
    with pytest.raises(ConfigurationError) as error:
        load(write, f"labels: [{{name: a}}, {{name: b, probe: {probe}}}]")
    assert text in str(error.value)
    assert error.value.where == ("labels", 1, "probe", option)


class TestDiskImages:
    @pytest.mark.spec("CFG-17: Two abstract levels plus a leaf")
    def test_image_inherits_over_two_abstract_levels(self, write):
        config = load(write, IMAGES)
        assert list(config.diskimages) == ["leaf", "other"]
        leaf = config.diskimages["leaf"]
        assert leaf.elements == "a b c d"
        assert leaf.env_vars == {"A": "y", "B": "bar", "C": "moo", "D": "zoo"}

    @pytest.mark.spec(
        "CFG-17: Child with parent: own dib-cmd wins, integer release arrives as a string"
    )
    def test_option_of_a_child_image_overrides_its_parent(self, write):
        images = load(write, IMAGES).diskimages
        assert images["leaf"].dib_cmd == "parent"
        assert images["other"].dib_cmd == "own"
        assert images["other"].release == "21"
        assert images["other"].elements == "a b c d"
        assert images["leaf"].rebuild_age == 5
        assert images["other"].build_timeout == 10
        assert images["leaf"].build_timeout == npconfig.DiskImage.BUILD_TIMEOUT
        assert (images["leaf"].rollback_after, images["other"].rollback_after) == (5, 0)
        assert (images["leaf"].canary, images["other"].canary) == (2, 0)
        assert (images["leaf"].replace_idle, images["other"].replace_idle) == (True, False)
        assert npconfig.DiskImage("another").rollback_after == 3
        verify = images["leaf"].verify
        assert (verify.ssh_key, verify.command, verify.timeout) == ("/etc/key", "id", 600)
        assert images["other"].verify == verify and npconfig.DiskImage("x").verify is None

    @pytest.mark.spec(
        "CFG-17: delete-after-upload and keep-formats set on a parent are effective for its child"
    )
    def test_flags_of_a_parent_image_apply_to_its_child(self, write):
        images = load(write, IMAGES).diskimages
        assert images["leaf"].delete_after_upload is True
        assert images["leaf"].keep_image_types == {"raw"}
        assert images["leaf"].image_types == {"raw"}
        assert images["other"].delete_after_upload is False
        assert images["leaf"].pause is False
        assert images["leaf"].meta == {"x": 1, "y": 2}

    @pytest.mark.spec("CFG-5.3: unknown parent and cycle are clear errors")
    def test_unknown_parent_and_cycle_are_errors(self, write):
        with pytest.raises(
            KeyError, match=r"diskimage a has non-existant parent: b \(.*nodepool.yaml:1"
        ):
            load(write, "diskimages: [{name: a, parent: b}]")
        with pytest.raises(ConfigurationError, match="cycle: a -> b -> a"):
            load(write, "diskimages: [{name: a, parent: b}, {name: b, parent: a}]")

    @pytest.mark.spec("CFG-5.1: numbers and booleans in env-vars become strings")
    def test_numbers_and_booleans_in_env_vars_become_strings(self, write, caplog):
        config = load(write, "diskimages: [{name: a, env-vars: {N: 5, B: true}}]")
        assert config.diskimages["a"].env_vars == {"N": "5", "B": "true"}
        assert "boolean" in caplog.text

    @pytest.mark.spec(
        "CFG-5.1: an empty value keeps the parent's; any explicit value of a flag wins"
    )
    def test_empty_option_of_a_child_image_keeps_that_of_its_parent(self, write):
        text = """
diskimages:
  - {name: p, formats: [raw], rebuild-age: 5, build-timeout: '7', release: 3, dib-cmd: c,
     username: u, shell-type: s, pause: true,
     delete-after-upload: true, elements: [a b], env-vars: {A: 1}, metadata: {x: 1}}
  - {name: c, parent: p, formats: [], rebuild-age: 0, build-timeout: , release: '', dib-cmd: '',
     username: , shell-type: '',
     pause: , delete-after-upload: 0, elements: [], env-vars: {}, metadata: }
"""
        images = load(write, text).diskimages
        parent, child = vars(images["p"]), vars(images["c"])
        assert {key for key in parent if parent[key] != child[key]} == {
            "name",
            "delete_after_upload",
        }
        assert (child["pause"], child["delete_after_upload"], child["build_timeout"]) == (
            True,
            False,
            7,
        )

    def test_image_has_documented_defaults(self):
        image = npconfig.DiskImage("x")
        assert (image.username, image.python_path, image.shell_type) == ("zuul", "auto", None)
        assert (image.rebuild_age, image.build_timeout, image.dib_cmd) == (
            86400,
            28800,
            "disk-image-create",
        )

    @pytest.mark.spec(
        "CFG-17: Built formats are the union of `formats` and the formats of the providers"
    )
    @pytest.mark.spec("DRV-3.4: image types of managed images")
    def test_image_formats_include_those_of_its_providers(self, write):
        text = """
diskimages: [{name: only, formats: [raw]}, {name: both, formats: [raw]}]
providers:
  - {name: fake-1, cloud: fake-vhd, diskimages: [{name: both}]}
  - {name: fake-2, cloud: fake, diskimages: [{name: both}]}
"""
        images = load(write, text).diskimages
        assert images["only"].image_types == {"raw"}
        assert images["both"].image_types == {"raw", "vhd", "qcow2"}


class TestSecure:
    MAIN = """
zookeeper-servers: [{host: unreachable, port: 1, chroot: /main}]
zookeeper-tls: {cert: a, key: b, ca: c}
diskimages: [{name: image, env-vars: {A: a, B: b}}]
"""

    @pytest.mark.spec("CFG-17: Servers given only in the secure file are used; host:port + chroot")
    @pytest.mark.spec(
        "CFG-17: An env-var given only in the secure file appears in env_vars; user zuul"
    )
    def test_secure_file_replaces_servers_and_env_vars(self, write):
        config = load(write, self.MAIN)
        secure = write(
            "zookeeper-servers: [{host: good, port: 2, chroot: /secure}]\nzookeeper-tls: {cert: "
            "x}\n"
            "diskimages: [{name: image, env-vars: {B: '%(NODEPOOL_PORT)', S: secret}}]",
            "secure.yaml",
        )
        npconfig.loadSecureConfig(config, secure, ENV)
        assert config.zookeeper_servers == "good:2/secure"
        assert (config.zookeeper_tls_cert, config.zookeeper_tls_key) == ("x", None)
        assert config.diskimages["image"].env_vars == {"A": "a", "B": "8005", "S": "secret"}
        assert config.diskimages["image"].username == "zuul"

    @pytest.mark.spec("CFG-8: unknown diskimage fails with its name")
    def test_unknown_image_in_the_secure_file_is_an_error(self, write):
        config = load(write, self.MAIN)
        secure = write("diskimages: [{name: nope, env-vars: {}}]", "secure.yaml")
        with pytest.raises(ConfigurationError, match=r"secure\.yaml: unknown diskimage nope"):
            npconfig.loadSecureConfig(config, secure, ENV)

    @pytest.mark.spec("CFG-8: an empty secure file is fine and its modification time recorded")
    def test_empty_secure_file_is_accepted(self, write):
        config = load(write, self.MAIN)
        main, secure = write(self.MAIN), write("# nothing\n", "secure.yaml")
        config = npconfig.loadConfig(main, ENV)
        npconfig.loadSecureConfig(config, secure, ENV)
        assert npconfig.checkRecentConfig(config, main, secure)

    def test_secrets_are_not_printed(self, write, caplog):
        config = load(write, self.MAIN)
        secure = write(
            "diskimages: [{name: image, env-vars: {S: true, T: [hunter2]}}]", "secure.yaml"
        )
        with pytest.raises(ConfigurationError) as error:
            npconfig.loadSecureConfig(config, secure, ENV)
        assert "hunter2" not in str(error.value) + caplog.text
        assert "'true'" not in caplog.text


class TestFreshness:
    @pytest.mark.spec("CFG-9.1: checkRecentConfig compares modification times for equality")
    def test_changed_modification_time_means_not_recent(self, write):
        path = write("labels: []")
        config = npconfig.loadConfig(path, ENV)
        assert npconfig.checkRecentConfig(config, path)
        os.utime(path, (1, 1))
        assert not npconfig.checkRecentConfig(config, path)
        os.unlink(path)
        assert not npconfig.checkRecentConfig(config, path)

    @pytest.mark.parametrize("replaced", [False, True], ids=["written", "replaced"])
    def test_changed_content_with_an_equal_modification_time_means_not_recent(
        self, write, replaced
    ):
        path = write("labels: [{name: a}]")
        os.utime(path, (1, 1))
        config = npconfig.loadConfig(path, ENV)
        target = f"{path}.new" if replaced else path
        with open(target, "w") as file:
            file.write("labels: [{name: b}]")
        os.utime(target, (1, 1))
        os.replace(target, path)
        assert not npconfig.checkRecentConfig(config, path)
        assert npconfig.checkRecentConfig(npconfig.loadConfig(path, ENV), path)

    def test_watcher_notices_changed_files(self, write):
        path = write("a")
        called = threading.Event()
        watcher = ConfigWatcher([path, None], called.set, name="CleanupWorker test")
        watcher.start()
        try:
            write("new content", "nodepool.yaml.tmp")
            assert not called.is_set()
            began = time.monotonic()
            os.replace(path + ".tmp", path)
            assert called.wait(5)
            assert time.monotonic() - began < limit(1.5)
            called.clear()
            with open(path, "a") as stream:
                stream.write("more")
            assert called.wait(5)
            called.clear()
            other = write("a", "other.yaml")
            watcher.watch_also([other])
            assert called.wait(5)  # it may have changed before
            called.clear()
            write("b", "other.yaml")
            assert called.wait(5)
            called.clear()
            watcher.watch_also([other])
            watcher.watch_also([])
            assert called.wait(5)
        finally:
            watcher.stop()
            watcher.stop()
            watcher.watch_also(["/of/no/effect"])
        assert not any(thread.name == "CleanupWorker test" for thread in threading.enumerate())

    def test_watcher_never_started(self, write):
        ConfigWatcher([write("a")], lambda: None).stop()


class ConcretePool(ConfigPool):
    def load(self, pool_config, *args, **kwargs):
        super().load(pool_config)


class OtherPool(ConcretePool):
    pass


class TestEquality:
    @pytest.mark.spec(
        "CFG-17: Two fresh Config, Label, DiskImage, DriverConfig, concrete ConfigPool are equal"
    )
    @pytest.mark.parametrize(
        ("make", "attribute"),
        [
            (npconfig.Config, "images_dir"),
            (npconfig.Config, "zookeeper_tls_key"),
            (npconfig.Label, "name"),
            (lambda: npconfig.DiskImage("x"), "name"),
            (lambda: npconfig.DiskImage("x"), "delete_after_upload"),
            (lambda: npconfig.DiskImage("x"), "keep_image_types"),
            (DriverConfig, "name"),
            (ConcretePool, "max_servers"),
        ],
    )
    def test_fresh_and_changed(self, make, attribute):
        one, two = make(), make()
        assert one == two
        assert hash(one) == hash(two)
        setattr(two, attribute, "changed")
        assert one != two

    @pytest.mark.spec("CFG-17: Pools of different classes are never equal")
    def test_objects_of_different_classes_are_never_equal(self):
        assert ConcretePool() != OtherPool()
        assert OtherPool() != ConcretePool()
        assert npconfig.Label() != npconfig.DiskImage("x")

    @pytest.mark.spec("DRV-14.31: Two equal configuration loads give equal objects")
    def test_equal_files_give_equal_configurations(self):
        one, two = complete(), complete()
        assert one == two
        assert one.providers["cloud-1"] == two.providers["cloud-1"]
        two.providers["cloud-1"].pools["main"].labels["fake-label"].min_ram = 1
        assert one.providers["cloud-1"] != two.providers["cloud-1"]
        assert one != two

    @pytest.mark.spec("CFG-10: editing the elements of an image does not change the providers")
    def test_only_what_matters(self, write):
        text = (CONFIGURATIONS / "complete.yaml").read_text()
        changed = npconfig.loadConfig(
            write(text.replace("elements: [nodepool]", "elements: [other]")), ENV
        )
        assert changed.diskimages["fake-image"] != complete().diskimages["fake-image"]
        assert changed.providers["cloud-1"] == complete().providers["cloud-1"]
        text = text.replace("username: debian\n    metadata", "username: z\n    metadata")
        renamed = npconfig.loadConfig(write(text), ENV)
        assert renamed.providers["cloud-1"] != complete().providers["cloud-1"]


class TestProviders:
    @pytest.mark.spec(
        "CFG-6: A provider whose name starts with `fake` always gets the driver `fake`"
    )
    def test_fake_by_name(self, write, caplog):
        config = load(
            write,
            "providers: [{name: fake-1, cloud: fake}, {name: fakeish, driver: static, cloud: "
            "fake}]",
        )
        assert config.providers["fake-1"].driver.name == "fake"
        assert config.providers["fakeish"].driver.name == "fake"
        assert "fakeish" in caplog.text

    @pytest.mark.spec("DRV-1: get_provider_config sets driver to openstack when absent")
    def test_default_driver_is_openstack(self):
        entry = {"name": "foo"}
        assert type(npconfig.get_provider_config(entry)).__name__ == "OpenStackProviderConfig"
        assert entry["driver"] == "openstack"

    def test_unknown_driver_leaves_the_others(self, write):
        config = load(write, "providers: [{name: a, driver: nope}, {name: fake-1, cloud: fake}]")
        assert list(config.providers) == ["fake-1"]
        assert "nope: unknown driver" in config.provider_errors["a"]

    @pytest.mark.spec("CFG-17: one provider with a broken set-up does not prevent others")
    def test_missing_library_leaves_the_others(self, write, monkeypatch):
        Drivers.load([])

        def broken(self, provider):
            raise ImportError("No module named 'libcloudy'", name="libcloudy")

        monkeypatch.setattr(type(Drivers.get("test")), "getProviderConfig", broken)
        config = load(write, "providers: [{name: a, driver: test}, {name: fake-1, cloud: fake}]")
        assert list(config.providers) == ["fake-1"]
        assert "a" in config.provider_errors

    def test_cloud_not_described_leaves_the_others(self, write):
        text = """
labels: [{name: l}]
providers:
  - {name: fake-bad, cloud: nope, pools: [{name: main, labels: [{name: l, cloud-image: x}]}]}
  - {name: real-bad, cloud: nope}
  - {name: fake-1, cloud: fake}
"""
        config = load(write, text)
        assert list(config.providers) == ["fake-1"]
        assert "nope" in config.provider_errors["fake-bad"]
        assert "clouds.yaml" in config.provider_errors["real-bad"]
        assert config.labels["l"].pools == []

    @pytest.mark.spec("CFG-6: the error of a broken provider names provider, pool and label")
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (
                "pools: [{name: main, labels: [{name: nope, diskimage: i}]}]",
                ["nope", "fake-1", "main", "yaml:4"],
            ),
            (
                "pools: [{name: main, labels: [{name: l, diskimage: other}]}]",
                ["other", "fake-1", "main", "yaml:4"],
            ),
            (
                "pools: [{name: main, labels: [{name: l, cloud-image: c}]}]",
                ["label l", "fake-1", "main", "yaml:4"],
            ),
            ("pools: [{labels: []}]", ["name", "fake-1", "yaml:4"]),
            ("diskimages: [{name: other}]", ["other", "fake-1", "yaml:4"]),
        ],
    )
    @pytest.mark.spec("DRV-3.4: unknown label -> load fails")
    def test_error_names_provider_pool_and_label(self, write, options, expected):
        text = "labels: [{name: l}]\ndiskimages: [{name: i}]\nproviders:\n"
        text += f"  - {{name: fake-1, cloud: fake, {options}}}"
        with pytest.raises(ConfigurationError) as error:
            load(write, text)
        for word in expected:
            assert word in str(error.value)

    def test_error_of_another_driver(self, write):
        text = "labels: [{name: l}]\nproviders:\n  - name: t\n    driver: test\n    pools:\n"
        text += "      - name: main\n        labels:\n          - nope"
        with pytest.raises(KeyError) as error:
            load(write, text)
        assert "nodepool.yaml:8" in str(error.value)
        assert "providers[t].pools[main].labels" in str(error.value)

    def test_place_of_another_driver_that_is_not_in_the_entry_is_ignored(self, write, monkeypatch):
        def refuse(_self, _newconfig):
            error = UnknownName("nope is not defined", where=("nowhere", 3))
            error.name = "nope"
            raise error

        monkeypatch.setattr("nodepool.driver.test.config.TestConfig.load", refuse)
        with pytest.raises(UnknownName, match="nope is not defined"):
            load(write, "providers: [{name: t, driver: test, pools: []}]")

    @pytest.mark.spec("DRV-1.8: an added search path option of the configuration")
    def test_drivers_path_adds_a_driver(self, write, tmp_path):
        (tmp_path / "drivers" / "mine").mkdir(parents=True)
        (tmp_path / "drivers" / "mine" / "__init__.py").write_text(
            "from nodepool.driver.test import TestDriver\nclass Mine(TestDriver):\n    pass\n"
        )
        try:
            config = load(write, "drivers-path: [drivers]\nproviders: [{name: m, driver: mine}]")
            assert config.providers["m"].driver.name == "mine"
        finally:
            Drivers.load([])

    @pytest.mark.spec(
        "CFG-6: provider name twice: the later one replaces the earlier, in the labels too"
    )
    def test_later_provider_replaces_an_earlier_one_of_the_same_name(self, write, caplog):
        text = "labels: [{name: l}]\nproviders:\n"
        text += "  - {name: t, driver: test, pools: [{name: one, labels: [l]}]}\n"
        text += "  - {name: t, driver: test, pools: [{name: two, labels: [l]}]}\n"
        config = load(write, text)
        assert list(config.providers["t"].pools) == ["two"]
        assert [pool.name for pool in config.labels["l"].pools] == ["two"]
        assert "defined twice" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diskimages: [{name: a, rebuild-age: .inf}]", "rebuild-age: cannot convert float inf"),
        ("diskimages: [{name: a, verify: {ssh-key: 5}}]", "ssh-key: expected an absolute path"),
        ("diskimages: [{name: a, parent: {b: c}}]", "non-existant parent"),
        ("diskimages: [{name: [a]}]", "name: expected str"),
        ("labels: [{name: {a: b}}]", "name: expected str"),
        ("providers: [{name: [[]], driver: static}]", "name: expected str"),
        ("tenant-resource-limits: [{tenant-name: [a]}]", "tenant-name: expected str"),
        ("providers: [{name: p, driver: kubernetes, pools: 5}]", "pools: expected a list"),
        ("providers: [{name: p, driver: kubernetes, pools: [5]}]", "pools: entry 1 must be a"),
        (
            "providers: [{name: p, driver: kubernetes, pools: [{name: m, labels: [a]}]}]",
            "labels: entry 1 must be a dictionary",
        ),
    ],
)
def test_value_of_a_wrong_type_is_named_with_its_line(write, text, message):
    with pytest.raises(npconfig.ConfigError, match=message) as caught:
        load(write, f"# a comment\n{text}\n")
    assert "nodepool.yaml:2, " in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "names", "place"),
    [
        ("{driver: openstack, cloud: fake}", "label: none", "pools[main].labels[none].name"),
        ("{driver: openstack, cloud: fake}", "image: none", "diskimages[none].name"),
        ("{driver: openstack, cloud: fake}", "used: none", "pools[main].labels[l].diskimage"),
        ("{driver: aws, region-name: r}", "label: none", "pools[main].labels[none].name"),
        ("{driver: aws, region-name: r}", "image: none", "diskimages[none].name"),
    ],
)
def test_use_of_an_unknown_name_is_reported_with_the_line_of_the_name(write, driver, names, place):
    used = {"label": "l", "image": "i", "used": "i"} | yaml.safe_load(f"{{{names}}}")
    options = {"cloud-image": "c"} if names.startswith("label") else {"diskimage": used["used"]}
    label = {**options, "min-ram": 1, "instance-type": "n1", "name": used["label"]}
    provider = {
        "name": "p",
        **yaml.safe_load(driver),
        "object-storage": {"bucket-name": "b"},
        "cloud-images": [{"image-id": "x", "name": "c"}],
        "diskimages": [{"python-path": "x", "name": used["image"]}],
        "pools": [{"name": "main", "labels": [label]}],
    }
    top = {"diskimages": [{"name": "i"}], "labels": [{"name": "l"}]}
    text = yaml.safe_dump({**top, "providers": [provider]}, sort_keys=False)
    with pytest.raises(npconfig.ConfigError, match="'none' is not defined") as caught:
        load(write, text)
    number = next(n for n, line in enumerate(text.splitlines(), 1) if line.endswith(": none"))
    assert f"nodepool.yaml:{number}, " in str(caught.value)
    assert place in str(caught.value)


def test_parent_whose_name_is_a_number_is_found(write):
    images = load(
        write, "diskimages: [{name: 010, elements: [vm]}, {name: b, parent: 010}]"
    ).diskimages
    assert images["b"].elements == images["8"].elements


@pytest.mark.parametrize("chroot", ["/a/../b", "/.", "/a\\0b", "/a\\nb"])
def test_chroot_that_zookeeper_cannot_have_is_refused_with_its_line(write, chroot):
    with pytest.raises(npconfig.ConfigError, match="is not a path of ZooKeeper") as caught:
        load(write, f'zookeeper-servers: [{{host: a, chroot: "{chroot}"}}]\n')
    assert "nodepool.yaml:1, zookeeper-servers[0].chroot" in str(caught.value)
