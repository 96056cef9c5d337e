"""What is installed elsewhere than in a clone: wheel, manual pages, completion, units,
manifests, deb, container images.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.base import optional
from nodepool.nodemanager.backends import podman
from tests import REPOSITORY
from tests.conftest import Chroot, load_tool, wait_for
from tests.support.ports import reserve

ETC = REPOSITORY / "etc"
MINUTES = 60
PROGRAMS = load_tool("package").PROGRAMS
WHEELS = load_tool("package").WHEELS
PAGE_OF = load_tool("manual_pages.py").file_of
#: Programs of the wheel ``nodepool-nodemanager`` that have options.
MANAGER_PROGRAMS = {"nodepool-nm", "nodepool-nodemanager"}
#: Those of the wheel ``nodepool-adapters``.
ADAPTERS = {"nodepool-github", "nodepool-gitea", "nodepool-gitlab"}


def run(*command: str | pathlib.Path, **options: Any) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=10 * MINUTES, **options
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each with the words that lead to it."""
    yield "", parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                for words, each in parsers(child):
                    yield f"{name} {words}".strip(), each


# -- in the repository


@pytest.mark.spec("issue: manual pages and shell completion for all commands")
@pytest.mark.parametrize("program", PROGRAMS)
def test_manual_pages_and_completion_have_all_commands_and_options(
    program: str, tmp_path: pathlib.Path
) -> None:
    """They have each command and option of the program (tools/package pages generates them),
    and each shell takes them.
    """
    path = ETC / "man" / PAGE_OF(program)
    page = path.read_text().replace("\\-", "-")
    bash = ETC / "completion" / "bash" / program
    zsh = ETC / "completion" / "zsh" / f"_{program}"
    missing, texts = [], " ".join(re.sub(r"\\f.|\\&|\\", "", page).split())
    for words, parser in parsers(importlib.import_module(PROGRAMS[program]).create_parser()):
        wanted = {
            option
            for action in parser._actions
            if action.dest != "help"
            for option in action.option_strings
        }
        wanted |= set(words.split())
        described = " ".join((parser.description or "").replace("\\", "").split()).rstrip(".")
        missing += [("page", words, described)] if words and described not in texts else []
        for text, where in ((page, "page"), (bash.read_text(), "bash"), (zsh.read_text(), "zsh")):
            missing += [(where, words, each) for each in wanted if each not in text]
    # shtab takes it for the same as "request list", of which it is another name.
    assert [each for each in missing if each != ("zsh", "request-list", "request-list")] == []
    assert f"{program} \\- " in path.read_text().splitlines()[2].replace(
        program.replace("-", "\\-"), program
    )
    run("bash", "-n", bash)


def test_bash_completes_commands() -> None:
    """As bash does it."""
    script = f"""
source {ETC}/completion/bash/nodepool
COMP_WORDS=(nodepool dib-im) COMP_CWORD=1
_shtab_nodepool 2> /dev/null || true
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert set(run("bash", "-c", script).split()) == {"dib-image-list", "dib-image-delete"}


@pytest.mark.spec("issue: systemd units with hardening")
@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd on this machine"
)
def test_systemd_accepts_the_units_and_their_hardening(tmp_path: pathlib.Path) -> None:
    for unit in (ETC / "systemd").glob("*.service"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), unit
    for name in ("launcher", "github", "gitea"):
        unit = ETC / "systemd" / f"nodepool-{name}.service"
        # 20: at most 2.0 of 10.0, which systemd calls OK.
        run("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)


@pytest.mark.spec("issue: logrotate")
@pytest.mark.skipif(
    shutil.which("logrotate") is None or os.geteuid() != 0, reason="needs logrotate and root"
)
def test_logrotate_rotates_the_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log" / "nodepool.log"
    log.parent.mkdir()
    log.write_text("a line\n")
    rules = tmp_path / "rules"
    text = (ETC / "logrotate" / "nodepool").read_text()
    rules.write_text(
        text.replace("/var/log/nodepool", str(log.parent)).replace(
            "su nodepool nodepool", "su root root"
        )
    )
    rules.chmod(0o644)
    run("logrotate", "--force", "--state", tmp_path / "state", rules)
    assert [path.name for path in log.parent.iterdir()] == ["nodepool.log.1"]


@pytest.mark.spec("issue: plain manifests, checked with kubernetes-validate")
def test_kubernetes_manifests_are_valid() -> None:
    import kubernetes_validate

    kinds = []
    for path in sorted((ETC / "manifests").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            kubernetes_validate.validate(document, "1.30", strict=True)
            kinds.append(document["kind"])
            assert (
                document["kind"] == "Namespace" or document["metadata"]["namespace"] == "nodepool"
            )
    assert kinds.count("StatefulSet") == 2 and kinds.count("DaemonSet") == 1


def test_configuration_in_the_manifests_is_valid(tmp_path: pathlib.Path) -> None:
    """The sample in it is a good one, and programs get the options that they have."""
    documents = [
        each
        for path in (ETC / "manifests").glob("*.yaml")
        for each in yaml.safe_load_all(path.read_text())
    ]
    for each in documents:
        for name, text in each.get("stringData", {}).items():
            (tmp_path / name).write_text(text)
    run(
        sys.executable,
        "-m",
        "nodepool.cmd.nodepoolcmd",
        "-c",
        tmp_path / "nodepool.yaml",
        "config-validate",
    )
    for each in documents:
        if each["kind"] in ("StatefulSet", "DaemonSet"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            program = f"nodepool-{container['name']}"
            importlib.import_module(PROGRAMS[program]).create_parser().parse_args(
                container.get("args", [])
            )
            assert f"AS {container['name']}\n" in (ETC / "container" / "Containerfile").read_text()


@pytest.mark.spec("issue: each extra's packages are known to the part that tells what is missing")
def test_packages_of_each_extra_are_known_to_the_error_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    import configparser

    from nodepool.config import loading

    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    extras = {
        name: lines
        for name, lines in setup["options.extras_require"].items()
        if name not in ("all", "test", "doc", "profile", "simulate", "buildbot")
    }
    known = {
        re.split(r"[^\w.-]", line)[0].lower()
        for lines in extras.values()
        for line in lines.split("\n")
    } - {"", "#"}
    assert {name.lower() for name in optional.DISTRIBUTIONS.values()} == known
    # The core brings them, too; nothing is to be reported.
    core = {
        re.split(r"[^\w.-]", line)[0].lower()
        for line in setup["options"]["install_requires"].split()
    }
    assert not core & known
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("boto3", "botocore") else real(name),
    )
    path = tmp_path / "nodepool.yaml"
    provider = {"name": "cloud", "driver": "aws", "region-name": "us-east-1"}
    zookeeper = {"zookeeper-servers": [{"host": "localhost"}], "zookeeper-insecure": True}
    path.write_text(yaml.safe_dump({**zookeeper, "labels": [], "providers": [provider]}))
    config = loading.loadConfig(str(path))
    assert config.provider_errors["cloud"] == (
        "provider cloud is not used: driver aws needs boto3, botocore, not installed here: "
        f"{sys.executable} -m pip install 'boto3>=1.34' 'botocore>=1.34'"
    )


# -- wheel


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("archives")
    run(sys.executable, REPOSITORY / "tools" / "package", "wheel", "--dir", folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(10 * MINUTES)
@pytest.mark.spec("issue: wheel and sdist")
def test_wheel_and_sdist_are_complete(archives: pathlib.Path) -> None:
    (source,) = archives.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel(archives, "nodepool")).namelist())
    assert {
        "nodepool/py.typed",
        "nodepool/web/static/app.js",
        "nodepool/web/static/api.js",
        "nodepool/base/optional.py",
    } <= names
    shared = {name.partition(".data/data/")[2] for name in names} - {""}
    for name in (
        "man/man1/nodepool.1",
        "man/man5/nodepool.yaml.5",
        "man/man8/nodepool-launcher.8",
        "bash-completion/completions/nodepool",
        "nodepool/systemd/nodepool-launcher.service",
        "nodepool/logrotate/nodepool",
        "nodepool/nodepool.yaml",
        "nodepool/prometheus/nodepool-alerts.yaml",
    ):
        assert f"share/{name}" in shared
    assert not [
        name
        for name in names
        if name.startswith(("tests", "doc", "tools")) or "__pycache__" in name
    ]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "setup.cfg",
        "README.rst",
        "tests/conftest.py",
        "tools/quickstart",
        "doc/index.rst",
        "etc/man/nodepool.1",
    } <= inside


def wheel(archives: pathlib.Path, name: str) -> pathlib.Path:
    (found,) = archives.glob(f"{name.replace('-', '_')}-12*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(10 * MINUTES)
def test_each_file_belongs_to_one_wheel(archives: pathlib.Path) -> None:
    names = {
        name: set(zipfile.ZipFile(wheel(archives, name)).namelist())
        for name in ("nodepool", *WHEELS)
    }
    files = [name for each in names.values() for name in each if ".dist-info/" not in name]
    assert len(files) == len(set(files))
    assert {name for name in files if name.endswith(".py")} == {
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "nodepool").rglob("*.py")
    }
    daemon = re.compile(r"nodepool/(nodemanager/(?!client/|__init__\.py)|adapters/|lab/)")
    assert not [name for name in names["nodepool"] if daemon.match(name)]
    shared = {
        name: {file.partition(".data/data/")[2] for file in found} - {""}
        for name, found in names.items()
    }
    for program in PROGRAMS:
        owner = next(
            (w for w, part in WHEELS.items() if re.match(part.programs, program)), "nodepool"
        )
        page = PAGE_OF(program)
        assert {
            f"share/man/man{page[-1]}/{page}",
            f"share/bash-completion/completions/{program}",
        } <= shared[owner]
    assert {
        "share/nodepool/nodemanager.yaml",
        "share/nodepool/systemd/nodepool-nodemanager.service",
    } <= shared["nodepool-nodemanager"]
    assert "share/nodepool/systemd/nodepool-github.service" in shared["nodepool-adapters"]


def environment(folder: pathlib.Path, *archives: pathlib.Path | str) -> pathlib.Path:
    """Return the Python of a new environment with these installed."""
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "venv", folder)
    run(python, "-m", "pip", "install", "-q", *archives)
    return python


@pytest.mark.slow
@pytest.mark.timeout(10 * MINUTES)
def test_launcher_works_without_the_other_wheels(
    archives: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise Python would find the modules of the clone.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    core, manager = wheel(archives, "nodepool"), wheel(archives, "nodepool-nodemanager")
    python = environment(tmp_path / "venv", core)
    for program in PROGRAMS:
        assert python.with_name(program).exists() == (program not in MANAGER_PROGRAMS | ADAPTERS)
    for module in ("hosts", "adapter", "machines", "pushed.adapter", "pushed.ssh_link"):
        run(python, "-c", f"import nodepool.driver.nodemanager.{module}")
    config = tmp_path / "nodepool.yaml"
    pool = {"name": "main", "labels": [{"name": "small", "cloud-image": "host"}]}
    servers = {
        "zookeeper-servers": [{"host": "127.0.0.1"}],
        "zookeeper-insecure": True,
        "labels": [{"name": "small"}],
    }

    def validate(**options: object) -> tuple[int, str]:
        provider = {"name": "hosts", "driver": "nodemanager", "pools": [pool], **options}
        config.write_text(yaml.safe_dump({**servers, "providers": [provider]}))
        return called("config-validate")

    def called(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [python.with_name("nodepool"), "-c", config, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    cloud_images = [{"name": "host", "username": "root"}]
    hosts = {
        "hosts": [{"name": "a", "url": "unix:/run/nodepool/nodemanager.api"}],
        "cloud-images": cloud_images,
    }
    backing = {
        "backing-label": "big",
        "backing-ssh-key": "/etc/nodepool/key",
        "cloud-images": cloud_images,
    }
    assert validate(**hosts)[0] == 0, validate(**hosts)
    trace = tmp_path / "trace.csv"
    trace.write_text("")
    for needed, (status, text) in {
        "nodepool-nodemanager": validate(**backing),
        "nodepool-lab": called("dev", "--directory", str(tmp_path / "dev")),
        "the wheel nodepool-lab": called("simulate", "--trace", str(trace)),
        "nodepool-adapters": called("mcp"),
    }.items():
        assert status != 0 and needed in text and "Traceback" not in text, text
    run(python, "-m", "pip", "install", "-q", core, manager)
    for program in MANAGER_PROGRAMS:
        run(python.with_name(program), "--help")
    assert validate(**backing)[0] == 0, validate(**backing)


@pytest.mark.slow
@pytest.mark.timeout(10 * MINUTES)
def test_adapters_and_laboratory_work_without_the_other_wheels(
    archives: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    core = wheel(archives, "nodepool")
    extras = f"{wheel(archives, 'nodepool-adapters')}[github,gitea,mcp]"
    python = environment(tmp_path / "adapters", core, extras)
    for program in ADAPTERS:
        run(python.with_name(program), "--help")
    for module in ("client", "adapters.mcp", "adapters.gitlab"):
        run(python, "-c", f"import nodepool.{module}")
    python = environment(tmp_path / "lab", core, f"{wheel(archives, 'nodepool-lab')}[simulate]")
    trace = tmp_path / "trace.csv"
    trace.write_text("time,labels,duration,tenant\n0,small,1,\n")
    config = tmp_path / "nodepool.yaml"
    node = {"name": "host.example.org", "labels": "small", "host-key": "ssh-ed25519 x"}
    static = {"name": "own", "driver": "static", "pools": [{"name": "main", "nodes": [node]}]}
    config.write_text(
        yaml.safe_dump(
            {
                "zookeeper-servers": [{"host": "zk.example.org", "port": 2281}],
                "labels": [{"name": "small"}],
                "providers": [static],
            }
        )
    )
    run(python.with_name("nodepool"), "-c", config, "simulate", "--trace", trace, "--json")
    with subprocess.Popen(
        [python, "-m", "nodepool.lab.zkserver", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and "port" in server.stdout.readline()
        server.terminate()


@pytest.mark.slow
@pytest.mark.timeout(10 * MINUTES)
@pytest.mark.spec(
    "issue: without extras only what a launcher needs is installed; a missing one is told with the "
    "exact command"
)
def test_plain_installation_names_missing_packages_with_the_command(
    archives: pathlib.Path, tmp_path: pathlib.Path, zk_chroot: Chroot
) -> None:
    core, adapters = wheel(archives, "nodepool"), wheel(archives, "nodepool-adapters")
    python = environment(tmp_path / "venv", core, adapters)
    there = {
        each["name"].lower()
        for each in json.loads(run(python, "-m", "pip", "list", "--format=json"))
    }
    assert not there & {
        "boto3",
        "openstacksdk",
        "diskimage-builder",
        "kubernetes",
        "requests",
        "lxml",
        "opentelemetry-sdk",
    }
    assert len(there) <= 35  # 9 of them are the web server
    forges = {"nodepool-github", "nodepool-gitea"}
    for program in PROGRAMS.keys() - MANAGER_PROGRAMS - forges:
        assert "12.0.0" in run(python.with_name(program), "--version")
    for program in forges:
        done = subprocess.run(
            [python.with_name(program), "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "is not installed; it comes with the extra: pip install" in done.stderr
    config = tmp_path / "nodepool.yaml"
    azure = {
        "name": "cloud",
        "driver": "azure",
        "zuul-public-key": "ssh-rsa x",
        "resource-group-location": "x",
        "location": "x",
        "resource-group": "x",
        "auth-path": "/nonexistent",
        "subnet-id": "x",
        "network": "x",
    }
    host, port = zk_chroot.hosts.split("/")[0].rsplit(":", 1)
    zookeeper = {
        "zookeeper-servers": [{"host": host, "port": int(port), "chroot": zk_chroot.chroot}],
        "zookeeper-tls": {"ca": zk_chroot.ca, "cert": zk_chroot.cert, "key": zk_chroot.key},
    }
    config.write_text(yaml.safe_dump({**zookeeper, "labels": [], "providers": [azure]}))

    def told(*command: str) -> str:
        done = subprocess.run(
            [python.with_name("nodepool"), "-c", config, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout + done.stderr

    # Each way to work with providers reports it; the other commands need none.
    for command in (["config-validate"], ["alien-image-list"]):
        found = re.search(r"driver azure needs requests, not installed here: (.*)", told(*command))
        assert found, told(*command)
        assert found[1].strip() == f"{python} -m pip install 'requests>=2.32.2'"
    assert "+----+" in told("list")
    run("sh", "-c", f"{found[1]} -q")
    assert "not installed here" not in told("config-validate")


# -- deb and container, in a separate system


def release() -> str:
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


needs_system = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("mmdebstrap") is None
    or shutil.which("systemd-nspawn") is None,
    reason="needs root, mmdebstrap and systemd-container",
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """An archive with a small Debian (or Ubuntu), as this machine's release."""
    path = tmp_path_factory.mktemp("system") / "root.tar"
    packages = "systemd,systemd-sysv,dbus,adduser,python3,logrotate,ca-certificates,man-db"
    packages += ",openssh-client"
    run("mmdebstrap", "--variant=minbase", f"--include={packages}", release(), path)
    yield path
    path.unlink()


#: Runs in the system that is installed: each line of its output that begins with "==" names what is
#: shown.
CHECK = """#!/bin/sh
exec > /root/result 2>&1
echo == version; nodepool --version
echo == start; systemctl start nodepool-launcher; systemctl is-active nodepool-launcher
echo == user; stat -c %U /proc/$(systemctl show -P MainPID nodepool-launcher)
for i in $(seq 120); do nodepool list | grep -q ready && break; sleep 1; done
echo == list; nodepool list
echo == others; systemctl start nodepool-builder nodepool-github
systemctl start nodepool-nodemanager; systemctl stop nodepool-nodemanager
stat -c %U /run/nodepool /var/log/nodepool /var/lib/nodepool /var/lib/nodepool/nodemanager
echo == ssh
sed -n 's/^/-p/; /^-pNoNewPrivileges=/,/^-p$/p' /usr/lib/systemd/system/nodepool-github.service |
grep = > /root/sandbox
xargs -d '\\n' -a /root/sandbox sh -c \
'systemd-run -q --pipe --wait -pUser=nodepool "$@" ssh -p 9 127.0.0.1' sh
echo == update
pids() { for unit in launcher builder github; do systemctl show -P MainPID nodepool-$unit; done; }
pids > /root/before; dpkg -i /root/nodepool.deb > /dev/null; pids > /root/after
systemctl is-active nodepool-launcher nodepool-builder nodepool-github nodepool-gitea
grep -xFf /root/before /root/after
echo == rotate; logrotate -f /etc/logrotate.d/nodepool; nodepool list > /dev/null
systemctl restart nodepool-launcher; ls /var/log/nodepool
echo == page; man -w nodepool
echo == log; journalctl -u 'nodepool-*' --no-pager | grep -iE "denied|not permitted|traceback"
cat /var/log/nodepool/nodepool.log* | grep -E "ERROR|WARNING|denied|not permitted|Traceback"
echo == stop; systemctl stop nodepool-launcher; systemctl show -P Result nodepool-launcher
dpkg --purge nodepool; ls -d /usr/lib/nodepool /etc/logrotate.d/nodepool /usr/bin/nodepool
echo == left; systemctl list-units --no-legend 'nodepool-*'
echo == end
systemctl poweroff
"""
#: Of a forge that does not answer: the daemon waits for it.
GITHUB = {
    "nodepool": {"url": "http://127.0.0.1:9", "token-file": "/etc/nodepool/tls/token"},
    "github": {"url": "https://127.0.0.1:9/acme", "token-file": "/etc/nodepool/tls/token"},
    "scale-sets": [{"name": "noble"}],
}
UNIT = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/root/check
[Install]
WantedBy=default.target
"""


@needs_system
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.exhaustive
@pytest.mark.timeout(20 * MINUTES)
@pytest.mark.spec("issue: deb package; hardened units run in a real systemd")
def test_deb_package_runs_hardened_units_in_a_real_systemd(
    system: pathlib.Path, tmp_path: pathlib.Path, zk_chroot: Chroot
) -> None:
    deb = pathlib.Path(
        run(sys.executable, REPOSITORY / "tools" / "package", "deb", "--dir", tmp_path).strip()
    )
    root = tmp_path / "root"
    root.mkdir()
    run("tar", "-C", root, "-xf", system)
    shutil.copy(deb, root / "root" / "nodepool.deb")
    run("chroot", root, "dpkg", "-i", "/root/nodepool.deb")
    assert "nodepool" in (root / "etc" / "passwd").read_text()
    assert not list((root / "etc" / "systemd" / "system").rglob("nodepool*")), "nothing is enabled"
    for name in ("ca", "cert", "key"):
        shutil.copy(getattr(zk_chroot, name), root / "etc" / "nodepool" / "tls" / f"{name}.pem")
        (root / "etc" / "nodepool" / "tls" / f"{name}.pem").chmod(0o644)
    host, port = zk_chroot.hosts.split("/")[0].rsplit(":", 1)
    node = {
        "name": "127.0.0.1",
        "labels": "metal",
        "username": "root",
        "host-key-checking": False,
        "connection-port": int(port),
    }
    config = {
        "zookeeper-servers": [{"host": host, "port": int(port), "chroot": zk_chroot.chroot}],
        "zookeeper-tls": {name: f"/etc/nodepool/tls/{name}.pem" for name in ("ca", "cert", "key")},
        "webapp": {"port": reserve()},
        "images-dir": "/var/lib/nodepool/images",
        "labels": [{"name": "metal", "min-ready": 1}],
        "providers": [
            {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [node]}]}
        ],
    }
    (root / "etc" / "nodepool" / "nodepool.yaml").write_text(yaml.safe_dump(config))
    (root / "etc" / "nodepool" / "github.yaml").write_text(
        yaml.safe_dump({**GITHUB, "listen": f"127.0.0.1:{reserve()}"})
    )
    token = root / "etc" / "nodepool" / "tls" / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    run("chroot", root, "chown", "nodepool:", "/etc/nodepool/tls/token")
    (root / "root" / "check").write_text(CHECK)
    (root / "root" / "check").chmod(0o755)
    (root / "etc" / "systemd" / "system" / "check.service").write_text(UNIT)
    run("chroot", root, "systemctl", "enable", "check.service")
    run(
        "systemd-nspawn",
        "--quiet",
        "--boot",
        "-D",
        root,
        "--register=no",
        "--keep-unit",
        "--console=pipe",
        stdin=subprocess.DEVNULL,
    )
    text = (root / "root" / "result").read_text()
    shown = {
        part.partition("\n")[0].split(";")[0]: part.partition("\n")[2]
        for part in text.split("== ")[1:]
    }
    assert "12.0.0" in shown["version"], text
    assert shown["start"] == "active\n", text
    assert shown["user"].strip() == "nodepool", text
    assert "| metal |" in shown["list"] and "ready" in shown["list"], text
    # The directories that a node manager shares keep their owner; its own have root's.
    assert shown["others"].split()[-4:] == ["nodepool", "nodepool", "nodepool", "root"], text
    # The adapters start ssh in their sandbox.
    assert "connect to host 127.0.0.1 port 9: Connection refused" in shown["ssh"], text
    # An update restarts what runs, and starts nothing: no process is the same.
    assert shown["update"] == "active\nactive\nactive\ninactive\n", text
    assert "nodepool.log.1" in shown["rotate"] and re.search(
        r"nodepool\.log$", shown["rotate"], re.MULTILINE
    ), text
    assert shown["page"].strip() == "/usr/share/man/man1/nodepool.1.gz", text
    assert shown["log"] == "", text
    assert shown["stop"].startswith("success\n") and "end" in shown, text
    assert shown["left"] == "", text
    for path in ("/usr/lib/nodepool", "/etc/logrotate.d/nodepool", "/usr/bin/nodepool"):
        assert f"'{path}': No such file" in shown["stop"], text


@needs_system
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.exhaustive
@pytest.mark.timeout(20 * MINUTES)
@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
@pytest.mark.spec("issue: container image definition for launcher, builder, node manager")
def test_container_images_run_launcher_builder_and_node_manager(
    system: pathlib.Path, tmp_path: pathlib.Path, zk_chroot: Chroot
) -> None:
    tag = f"localhost/nodepool-test-{os.getpid()}"
    certificates = "/etc/ssl/certs/ca-certificates.crt"
    made = [f"{tag}-base"]
    run("podman", "import", "-q", system, f"{tag}-base")
    try:
        for target in ("launcher", "builder", "nodemanager"):
            # Not from the index of images, which not every machine reaches; nor with an isolation
            # that a container lacks.
            run(
                "podman",
                "build",
                "-q",
                "--isolation=chroot",
                "--network=host",
                "-v",
                "/etc/ssl/certs:/etc/ssl/certs:ro",
                "--env",
                f"PIP_CERT={certificates}",
                "--unsetenv",
                "PIP_CERT",
                "--build-arg",
                f"BASE={tag}-base",
                "--build-arg",
                "EXTRAS=builder,nodemanager",
                "-f",
                ETC / "container" / "Containerfile",
                "--target",
                target,
                "--tag",
                f"{tag}-{target}",
                REPOSITORY,
            )
            made.append(f"{tag}-{target}")
            version = run(*podman.command(), "run", "--rm", *LOOSE, f"{tag}-{target}", "--version")
            assert "12.0.0" in version
        programs = (
            "disk-image-create --version && debootstrap --version && sudo -n true && "
            "qemu-img --version"
        )
        run(
            *podman.command(),
            "run",
            "--rm",
            *LOOSE,
            "--entrypoint",
            "/bin/sh",
            f"{tag}-builder",
            "-c",
            programs,
        )
        launcher(f"{tag}-launcher", tmp_path, zk_chroot)
    finally:
        subprocess.run(
            ["podman", "rmi", "--force", *reversed(made)],
            capture_output=True,
            check=False,
            timeout=MINUTES,
        )


#: Control groups and limits that a container on a machine for tests may not have.
LOOSE = (
    "--cgroups=disabled",
    "--network=host",
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=1024:1024",
)


def launcher(image: str, folder: pathlib.Path, chroot: Chroot) -> None:
    """It works with a root that is read-only, without privileges, and ends on request."""
    tls = folder / "tls"
    tls.mkdir()
    for name in ("ca", "cert", "key"):
        shutil.copy(getattr(chroot, name), tls / f"{name}.pem")
        (tls / f"{name}.pem").chmod(0o644)
    host, port = chroot.hosts.split("/")[0].rsplit(":", 1)
    web = reserve()
    config = {
        "zookeeper-servers": [{"host": host, "port": int(port), "chroot": chroot.chroot}],
        "zookeeper-tls": {name: f"/etc/nodepool/tls/{name}.pem" for name in ("ca", "cert", "key")},
        "webapp": {"port": web, "listen_address": "127.0.0.1"},
        "labels": [],
        "providers": [],
    }
    (folder / "nodepool.yaml").write_text(yaml.safe_dump(config))
    (folder / "nodepool.yaml").chmod(0o644)
    folder.chmod(0o755)
    with subprocess.Popen(
        [
            *podman.command(),
            "run",
            "--rm",
            *LOOSE,
            "--read-only",
            "--cap-drop=all",
            "-v",
            f"{folder}:/etc/nodepool:ro",
            image,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_for(lambda: process.poll() is not None or ready(web), 60, "launcher ready")
            assert process.poll() is None, process.stdout and process.stdout.read()
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
