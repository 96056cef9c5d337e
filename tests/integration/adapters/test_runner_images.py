"""Elements for images of runners: their hooks run as diskimage-builder runs them, in a copy of
this system that is discarded.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import diskimage_builder
import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from tests import REPOSITORY
from tests.support import manual
from tests.support.vendors import GITHUB, SCRIPT, Mirror, archive

ELEMENTS = REPOSITORY / "etc" / "elements"
LIBRARY = pathlib.Path(diskimage_builder.__file__).parent / "lib"
#: Everything that is written goes to a file system in memory, which ends with this shell.
INSIDE = """
set -eu
mount -t tmpfs tmpfs {folder}
mkdir {folder}/upper {folder}/work {folder}/root
mount -t overlay overlay -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work {folder}/root
mount -t tmpfs tmpfs {folder}/root/tmp
mkdir {folder}/root/tmp/in_target.d
mount --bind {hooks} {folder}/root/tmp/in_target.d
mount -o remount,ro,bind {hooks} {folder}/root/tmp/in_target.d
env -u TMPDIR -u VIRTUAL_ENV HOME=/root chroot {folder}/root sh -c '{then}'
"""

#: Runs the hooks of elements and then a command in the image; returns both outputs.
Build = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mirror(tmp_path: pathlib.Path) -> Iterator[Mirror]:
    (tmp_path / "mirror").mkdir()
    made = Mirror(tmp_path / "mirror")
    yield made
    made.stop()


def with_dependencies(element: str) -> list[str]:
    """Return the elements of this repository that diskimage-builder includes with this one."""
    paths = f"{ELEMENTS}:{LIBRARY.parent / 'elements'}"
    command = [sys.executable, str(LIBRARY / "element-info.py"), "debian-minimal", element]
    done = subprocess.run(
        command,
        env={**os.environ, "ELEMENTS_PATH": paths},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "package-installs" in done.stdout.split()
    return [name for name in done.stdout.split() if (ELEMENTS / name).exists()]


@pytest.fixture
def build(tmp_path: pathlib.Path, mirror: Mirror) -> Build:
    def build(element: str, then: str = "true", **options: str) -> subprocess.CompletedProcess[str]:
        hooks = tmp_path / "hooks"
        shutil.rmtree(hooks, ignore_errors=True)
        for name in with_dependencies(element):
            shutil.copytree(ELEMENTS / name, hooks, dirs_exist_ok=True)
        shutil.copy(LIBRARY / "dib-run-parts", hooks)
        environment = {
            **os.environ,
            "TMP_HOOKS_PATH": str(hooks),
            "ARCH": "amd64",
            "DIB_IMAGE_CACHE": str(tmp_path / "cache"),
            **options,
        }
        fetched = subprocess.run(
            [hooks / "dib-run-parts", hooks / "extra-data.d"],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if fetched.returncode:
            return fetched
        folder = tmp_path / "image"
        folder.mkdir(exist_ok=True)
        inside = INSIDE.format(
            folder=folder,
            hooks=hooks,
            then=f"/tmp/in_target.d/dib-run-parts /tmp/in_target.d/install.d && ({then})",
        )
        return subprocess.run(
            ["unshare", "--mount", "bash", "-c", inside],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return build


def test_github_runner_belongs_to_its_account_and_runs(build: Build, mirror: Mirror) -> None:
    checksum = mirror.put("v2.330.0/actions-runner-linux-x64-2.330.0.tar.gz", archive(*GITHUB))
    options = {
        "DIB_GITHUB_RUNNER_VERSION": "2.330.0",
        "DIB_GITHUB_RUNNER_SHA256": checksum,
        "DIB_GITHUB_RUNNER_MIRROR": mirror.url,
    }
    then = (
        "cd /opt/actions-runner && stat -c %U . bin bin/Runner.Listener && su runner -c "
        "bin/Runner.Listener && ls /etc/sudoers.d"
    )
    done = build("github-runner", then, **options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Once by installdependencies.sh, once by the account.
    assert lines.count("it works") == 2 and lines[
        lines.index("runner") : lines.index("runner") + 4
    ] == ["runner"] * 3 + ["it works"]
    assert "nodepool-runner" not in lines


def test_account_may_use_sudo_if_asked_for(build: Build, mirror: Mirror) -> None:
    checksum = mirror.put("3.3.0/gitea-runner-3.3.0-linux-arm64", SCRIPT)
    options = {
        "DIB_GITEA_RUNNER_VERSION": "3.3.0",
        "DIB_GITEA_RUNNER_SHA256": checksum,
        "DIB_GITEA_RUNNER_MIRROR": mirror.url,
        "DIB_NODEPOOL_RUNNER_SUDO": "1",
        "ARCH": "arm64",
    }
    done = build(
        "gitea-runner",
        "stat -c %a%U /etc/sudoers.d/nodepool-runner && gitea-runner && id runner",
        **options,
    )
    assert done.returncode == 0, done.stderr
    assert "440root\nit works\nuid=" in done.stdout


def test_gitlab_helper_is_in_the_path_and_the_account_owns_the_folders(
    build: Build, mirror: Mirror
) -> None:
    checksum = mirror.put("v18.6.0/binaries/gitlab-runner-linux-amd64", SCRIPT)
    options = {
        "DIB_GITLAB_HELPER_VERSION": "18.6.0",
        "DIB_GITLAB_HELPER_SHA256": checksum,
        "DIB_GITLAB_HELPER_MIRROR": mirror.url,
    }
    done = build("gitlab-helper", "gitlab-runner && stat -c %U /builds /cache", **options)
    assert done.returncode == 0, done.stderr
    assert "it works\nrunner\nrunner\n" in done.stdout


def test_wrong_checksum_fails_the_build_and_is_not_kept(
    build: Build, mirror: Mirror, tmp_path: pathlib.Path
) -> None:
    right = mirror.put("3.3.0/gitea-runner-3.3.0-linux-amd64", SCRIPT)
    options = {"DIB_GITEA_RUNNER_VERSION": "3.3.0", "DIB_GITEA_RUNNER_MIRROR": mirror.url}
    wrong = "0" * 64
    done = build("gitea-runner", DIB_GITEA_RUNNER_SHA256=wrong, **options)
    assert (
        done.returncode != 0
        and f"gitea-runner-3.3.0-linux-amd64 has the checksum {right}, expected {wrong}"
        in done.stderr
    )
    assert (
        not list(tmp_path.glob("cache/**/*")) and not (tmp_path / "hooks" / "gitea-runner").exists()
    )


def test_second_build_needs_no_mirror_but_checks_the_copy(
    build: Build, mirror: Mirror, tmp_path: pathlib.Path
) -> None:
    checksum = mirror.put("3.3.0/gitea-runner-3.3.0-linux-amd64", SCRIPT)
    options = {
        "DIB_GITEA_RUNNER_VERSION": "3.3.0",
        "DIB_GITEA_RUNNER_SHA256": checksum,
        "DIB_GITEA_RUNNER_MIRROR": mirror.url,
    }
    assert build("gitea-runner", **options).returncode == 0
    (mirror.folder / "3.3.0" / "gitea-runner-3.3.0-linux-amd64").unlink()
    assert build("gitea-runner", **options).returncode == 0
    [copy] = (tmp_path / "cache" / "nodepool-runner").iterdir()
    copy.write_text("damaged")
    assert "expected " in build("gitea-runner", **options).stderr
    # It has been removed, so the next build asks the mirror, which has none.
    done = build("gitea-runner", **options)
    assert done.returncode != 0 and "could not be downloaded" in done.stderr


@pytest.mark.parametrize(
    ("element", "options", "text"),
    [
        (
            "github-runner",
            {},
            "DIB_GITHUB_RUNNER_VERSION: github-runner: set it to the version of the runner, such "
            "as 2.330.0",
        ),
        (
            "gitlab-helper",
            {},
            "DIB_GITLAB_HELPER_VERSION: gitlab-helper: set it to the version of the runner that "
            "manages the jobs",
        ),
        (
            "gitea-runner",
            {},
            "DIB_GITEA_RUNNER_VERSION: gitea-runner: set it to the version of the runner",
        ),
        (
            "github-runner",
            {"DIB_GITHUB_RUNNER_VERSION": "2"},
            "github-runner: set DIB_GITHUB_RUNNER_SHA256",
        ),
        (
            "gitea-runner",
            {"DIB_GITEA_RUNNER_VERSION": "2", "ARCH": "s390x"},
            "gitea-runner: there is no runner for ARCH=s390x",
        ),
    ],
)
def test_missing_option_is_named(
    build: Build, element: str, options: dict[str, str], text: str
) -> None:
    done = build(element, **options)
    assert done.returncode != 0 and text in done.stderr


def test_archive_without_a_runner_fails_the_build(build: Build, mirror: Mirror) -> None:
    checksum = mirror.put("v2.330.0/actions-runner-linux-x64-2.330.0.tar.gz", archive("./run.cmd"))
    options = {
        "DIB_GITHUB_RUNNER_VERSION": "2.330.0",
        "DIB_GITHUB_RUNNER_SHA256": checksum,
        "DIB_GITHUB_RUNNER_MIRROR": mirror.url,
    }
    assert "the archive has no bin/Runner.Listener" in build("github-runner", **options).stderr


def test_configuration_of_the_page_is_valid(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = manual.block("runner-images", "yaml").replace(
        "/usr/local/share/nodepool/elements", str(ELEMENTS)
    )
    rest = {
        "zookeeper-servers": [{"host": "zk"}],
        "images-dir": str(tmp_path),
        "labels": [],
        "providers": [],
    }
    path = tmp_path / "nodepool.yaml"
    path.write_text(text + yaml.safe_dump(rest))
    assert nodepoolcmd.main(["-c", str(path), "config-validate"]) == 0, capsys.readouterr().err
    named = yaml.safe_load(text)["diskimages"][0]
    assert all(
        (ELEMENTS / name).is_dir()
        for name in named["elements"]
        if "-runner" in name or "-helper" in name
    )
    hooks = "".join(path.read_text() for path in ELEMENTS.glob("*/extra-data.d/*"))
    assert {name for name in named["env-vars"] if name.startswith("DIB_GIT")} <= set(
        re.findall(r"DIB_\w+", hooks)
    )
