"""Whole Debian images in virtual machines and as slivers: cloud-init and glean, our elements with
stand-ins for what they download, and formats (half an hour; as root).

``doc/operation/images.rst`` has the results in two tables.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import yaml

from nodepool import ssh
from nodepool.adapters.gitea.api import Gitea, Job
from nodepool.adapters.gitea.instance import Runners
from nodepool.adapters.github.listener import ScaleSet, Settings
from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.forge import Kind
from nodepool.client import Pool
from nodepool.lease import certificates
from nodepool.nodeutils import nodescan
from tests import REPOSITORY
from tests.conftest import make_chroot, wait_for
from tests.integration.lease.conftest import Api
from tests.support import image_machine
from tests.support.builder import make_bench
from tests.support.deadline import limit
from tests.support.gitlab_runner import Manager
from tests.support.launcher import LauncherBench
from tests.support.nodemanager.scene import NmDaemon, make_daemon
from tests.support.vendors import GITHUB, Mirror, archive

sys.path.insert(0, str(REPOSITORY / "tools"))
from demo import image as demo_image

MINUTES = 60
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.exhaustive,
    pytest.mark.timeout(90 * MINUTES),
    pytest.mark.skipif(os.geteuid() != 0, reason="images and slivers need root"),
]

#: The node, and the host name that launchers give it.
NODE = "0000000042"
NAME = certificates.principal(NODE)
#: Image -> its elements besides those of all images, and its formats. With more formats,
#: diskimage-builder would write squashfs several times, or not at all.
IMAGES = {
    "cloud-init": (
        ["cloud-init", "cloud-init-datasources", "github-runner"],
        ["qcow2", "tar", "vmdk"],
    ),
    "glean": (["simple-init", "gitea-runner", "gitlab-helper"], ["raw", "tar"]),
    "plain": ([], ["squashfs"]),
}
#: Those that are used as slivers from their tar file.
TARS = ("cloud-init", "glean")
#: What the stand-ins for the runners check: they are started as their adapter starts them. GitHub's
#: is the program that installs its libraries, too.
LISTENER = b"""#!/bin/sh
case "$0" in *installdependencies.sh) exit;; esac
[ "$*" = run ] && [ "$(id -un)" = runner ] && [ "$ACTIONS_RUNNER_INPUT_JITCONFIG" = "a secret" ] &&
    [ "$PWD" = /opt/actions-runner ] && touch works
"""
DAEMON = b"""#!/bin/sh
[ "$*" = daemon ] && [ "$(id -un)" = runner ] && [ "$(cat .runner)" = "a secret" ] && node --version
"""
HELPER = b"""#!/bin/sh
echo "as $(id -un): $*"
"""


def keygen(path: pathlib.Path) -> str:
    """Create a key pair; return the public key without comment."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=30)
    return pathlib.Path(f"{path}.pub").read_text().strip()


@dataclass(frozen=True)
class Images:
    """Builds of all images.

    :param bases: image -> path of its files without the ends of their names.
    :param ca: private key of the CA of `nodepool-ssh-ca`.
    """

    folder: pathlib.Path
    bases: Mapping[str, str]
    ca: pathlib.Path

    def file(self, name: str, end: str) -> pathlib.Path:
        return pathlib.Path(f"{self.bases[name]}.{end}")

    @property
    def public(self) -> str:
        return pathlib.Path(f"{self.ca}.pub").read_text().strip()


def programs(mirror: Mirror) -> dict[str, str]:
    """Serve what the elements download; return their options."""
    github = archive(*GITHUB, script=LISTENER)
    sums = {
        "GITHUB_RUNNER": mirror.put("v2.330.0/actions-runner-linux-x64-2.330.0.tar.gz", github),
        "GITEA_RUNNER": mirror.put("3.3.0/gitea-runner-3.3.0-linux-amd64", DAEMON),
        "GITLAB_HELPER": mirror.put("v18.6.0/binaries/gitlab-runner-linux-amd64", HELPER),
    }
    versions = {"GITHUB_RUNNER": "2.330.0", "GITEA_RUNNER": "3.3.0", "GITLAB_HELPER": "18.6.0"}
    options = {f"DIB_{name}_SHA256": value for name, value in sums.items()}
    options |= {f"DIB_{name}_VERSION": value for name, value in versions.items()}
    return options | {f"DIB_{name}_MIRROR": mirror.url for name in sums}


def packages(mirror: Mirror) -> dict[str, str]:
    """Serve glean as pip of this machine gets it; return the options of pip in the image.

    That one may know neither the certificates nor the index of this machine.
    """
    folder = mirror.folder / "packages"
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "glean", "pbr"]
    subprocess.run([*command, "setuptools", "wheel"], check=True, timeout=limit(300))
    links = "".join(f'<a href="{path.name}">x</a>\n' for path in folder.iterdir())
    (folder / "index.html").write_text(links)
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{mirror.url}/packages/index.html",
        "PIP_CERT": "",
        # No clone of glean: it is installed from the package.
        "DIB_INSTALLTYPE_glean": "package",
    }


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    problem = demo_image.obstacle()
    assert problem is None, problem
    with tempfile.TemporaryDirectory(prefix="nodepool-images-", dir="/var/tmp") as name:
        folder = pathlib.Path(name)
        (folder / "mirror").mkdir()
        mirror = Mirror(folder / "mirror")
        try:
            yield from _built(folder, {**programs(mirror), **packages(mirror)})
        finally:
            mirror.stop()


def _built(folder: pathlib.Path, options: Mapping[str, str]) -> Iterator[Images]:
    """Yield the images, built by a builder."""
    sample = yaml.safe_load((REPOSITORY / "etc" / "nodepool.yaml").read_text())["diskimages"]
    [flat] = [each for each in sample if each["name"] == "debian-flat"]
    public = keygen(folder / "ca")
    variables = {
        "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "0",
        "DIB_IMAGE_CACHE": str(folder / "cache"),
        "DIB_BLOCK_DEVICE_CONFIG": flat["env-vars"]["DIB_BLOCK_DEVICE_CONFIG"],
        "DIB_CLOUD_INIT_DATASOURCES": "ConfigDrive, NoCloud",
        "DIB_NODEPOOL_SSH_CA": public,
        "TMPDIR": str(folder),
        **demo_image.apt_mirrors(demo_image.read_apt_sources()),
        **options,
    }
    entries = [
        {
            "name": name,
            "release": demo_image.RELEASE,
            "elements": ["debian-minimal", "openssh-server", "nodepool-ssh-ca", *elements],
            "formats": formats,
            "env-vars": variables,
        }
        for name, (elements, formats) in IMAGES.items()
    ]
    bases: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for chroot in make_chroot(folder):
            for bench in make_bench(chroot, monkeypatch, folder):
                elements_dir = str(REPOSITORY / "etc" / "elements")
                bench.start(bench.config(entries, **{"elements-dir": elements_dir}))
                for name in IMAGES:
                    build = bench.wait_build(name, timeout=limit(20 * MINUTES))
                    bases[name] = str(bench.images_dir / f"{name}-{build.id}")
    yield Images(folder, bases, folder / "ca")


def test_build_writes_a_file_of_each_format(images: Images) -> None:
    for name, end, begin in (
        ("cloud-init", "qcow2", b"QFI\xfb"),
        ("cloud-init", "vmdk", b"KDMV"),
        ("plain", "squash", b"hsqs"),
    ):
        with open(images.file(name, end), "rb") as file:
            assert file.read(4) == begin, end
    with open(images.file("glean", "raw"), "rb") as file:
        file.seek(1024 + 56)
        assert file.read(2) == b"\x53\xef", "ext4"
    for name in TARS:
        assert tarfile.is_tarfile(images.file(name, "tar"))


# -- virtual machines

#: Image, drive, format, user that gets the key of the drive, address.
MACHINES = [
    ("cloud-init", "config-2", "qcow2", "debian", image_machine.STATIC),
    ("cloud-init", "nocloud", "vmdk", "debian", image_machine.BY_DHCP),
    ("glean", "config-2", "raw", "root", image_machine.STATIC),
]


@pytest.mark.parametrize(("name", "kind", "form", "user", "address"), MACHINES)
def test_machine_has_name_network_and_key_of_its_drive(
    images: Images, tmp_path: pathlib.Path, name: str, kind: str, form: str, user: str, address: str
) -> None:
    if (problem := image_machine.obstacle()) is not None:
        pytest.skip(problem)
    public, kernel, drive = keygen(tmp_path / "key"), tmp_path / "kernel", tmp_path / "drive"
    kernel.mkdir()
    drive.mkdir()
    image_machine.read_kernel(images.file(name, "tar"), kernel)
    write = {
        "config-2": image_machine.write_config_drive,
        "nocloud": image_machine.write_nocloud_drive,
    }
    label = write[kind](drive, NAME, public)
    disk = images.file(name, form)
    with image_machine.booted(disk, kernel, drive, label, address) as machine:
        try:
            keys = nodescan("127.0.0.1", machine.port, timeout=limit(5 * MINUTES))
        except Exception as error:
            raise AssertionError(machine.shown()) from error
        assert {key.split()[0] for key in keys} == {"ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"}
        node = ssh.Node(NODE, address="127.0.0.1", port=machine.port, host_keys=keys)
        reads = "hostname; cat /etc/hostname; ip -4 -o addr show scope global; ip route"
        shown = logged_in(node, user, tmp_path / "key", reads).splitlines()
        assert shown[:2] == [NAME, NAME]
        assert f" {address}/24 " in shown[2] and f"via {image_machine.GATEWAY} " in shown[3]
        # The certificate of a lease opens this machine, and no other one.
        keygen(tmp_path / "own")
        sign(images.ca, tmp_path / "own", NAME)
        # systemd lets only root in before the start has ended, which takes minutes with glean.
        account = "root" if user == "root" else "runner"
        assert logged_in(node, account, tmp_path / "own", "id -un") == f"{account}\n"
        sign(images.ca, tmp_path / "own", certificates.principal("0000000043"))
        with pytest.raises(ssh.Lost, match="Permission denied"):
            logged_in(node, account, tmp_path / "own", "true")


def sign(ca: pathlib.Path, key: pathlib.Path, principal: str) -> None:
    """Write the certificate of a key, as `ssh` finds it."""
    command = ["ssh-keygen", "-q", "-s", str(ca), "-I", "lease", "-n", principal]
    subprocess.run([*command, "-V", "-5m:+1h", f"{key}.pub"], check=True, timeout=30)


def logged_in(node: ssh.Node, user: str, key: pathlib.Path, command: str) -> str:
    """Return what a command writes; it must succeed."""
    named = ssh.Node(
        node.id, address=node.address, port=node.port, username=user, host_keys=node.host_keys
    )
    with tempfile.TemporaryFile() as output:
        deadline = time.monotonic() + limit(2 * MINUTES)
        status = ssh.run_with_key(named, str(key), command, output, deadline, set())
        output.seek(0)
        text = output.read().decode()
    assert status == 0, text
    return text


# -- slivers


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


@pytest.mark.parametrize("name", TARS)
@pytest.mark.parametrize("user", ["root", "debian", "runner"])
def test_sliver_has_the_name_network_and_keys_of_its_record(
    images: Images, nm: NmDaemon, name: str, user: str
) -> None:
    tar = images.file(name, "tar")
    nm.put(
        "s1",
        wait=False,
        image=f"tar:{tar}",
        hostname=NAME,
        network="nat",
        username=user,
        rspec={"nm_disk_quota": 1024000},
    )
    nm.wait("s1", timeout=limit(3 * MINUTES))
    commands = "hostname; cat /etc/hostname; id -un; ps -A -o comm="
    shown = nm.ssh("s1", commands, user=user).splitlines()
    assert shown[:3] == [NAME, NAME, user]
    # Neither cloud-init nor glean runs: process 1 only sleeps.
    assert not {"systemd", "cloud-init", "glean.sh"} & set(shown)
    assert "inet 10." in nm.ssh("s1", "ip -4 addr show eth0", user=user)


def test_node_manager_uses_squashfs_and_raw_files_that_are_mounted(
    images: Images, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    for name, end in (("plain", "squash"), ("glean", "raw")):
        with mounted(images.file(name, end), tmp_path / end):
            nm.put(end, image=f"dir:{tmp_path / end}", hostname=NAME)
            assert nm.ssh(end, "hostname; test -x /usr/bin/apt-get") == f"{NAME}\n"
            nm.delete(end)


@contextlib.contextmanager
def mounted(file: pathlib.Path, target: pathlib.Path) -> Iterator[None]:
    target.mkdir()
    subprocess.run(["mount", "-o", "loop,ro", str(file), str(target)], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", str(target)], check=True, timeout=60)


# -- runners on slivers


@pytest.fixture
def pool(
    images: Images, bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> Iterator[Pool]:
    """Leases of slivers of the images, to which only certificates give access."""
    cloud_images = [
        {"name": name, "root": f"tar:{images.file(name, 'tar')}", "username": "runner"}
        for name in TARS
    ]
    size = {"ram": 192, "cpus": 0.1, "disk": 1}
    labels = [{"name": f"small-{name}", "cloud-image": name, **size} for name in TARS]
    settings = {
        "access": {"certificates": {"key": str(images.ca), "public": images.public}},
        "labels": [{"name": label["name"]} for label in labels],
        "providers": [
            {
                "name": "metal",
                "driver": "nodemanager",
                "hosts": [{"name": "h0", "url": nm.client.url}],
                "cloud-images": cloud_images,
                "pools": [{"name": "main", "max-servers": 2, "labels": labels}],
            }
        ],
    }
    api = Api(bench, bench.start(settings), tmp_path)
    try:
        yield Pool(api.url, api.token())
    finally:
        api.app.stop()


class GitHub:
    """Registers any runner."""

    def register(self, _number: int, _name: str) -> str:
        return "a secret"

    def remove(self, _number: int) -> bool:
        return True

    def runner(self, _name: str) -> None:
        return None


class Forge(Gitea):
    """Registers any runner, and knows none."""

    def __init__(self) -> None:
        pass

    def register(self, name: str, labels: object, job: Job | None) -> tuple[int, bytes]:
        return 1, b"a secret\n"

    def runners(self) -> list[Any]:
        return []

    def exists(self, runner: int) -> bool:
        return False

    def remove(self, runner: int) -> bool:
        return True


def serve_one_job(fleet: Fleet, stopping: threading.Event) -> None:
    """Wait until one runner has ended with status 0."""
    fleet.start()
    fleet.need(1)
    try:
        wait_for(lambda: fleet.done or fleet.failures, limit(4 * MINUTES), "the end of a runner")
        assert fleet.failures == 0, fleet.status()
    finally:
        fleet.need(0)
        wait_for(lambda: fleet.runners() == [], 60, "no runner")
        stopping.set()
        fleet.need(0)  # wakes its thread


def test_github_starts_its_runner_on_a_sliver(pool: Pool) -> None:
    stopping = threading.Event()
    kind = Kind("images", "small-cloud-init", most=1)
    made = ScaleSet(Settings(kind), cast(Any, GitHub()), cast(Any, lambda _name: pool), stopping)
    made.number = 1
    serve_one_job(made.fleet, stopping)


def test_gitea_starts_its_runner_on_a_sliver(pool: Pool) -> None:
    stopping = threading.Event()
    kind, pools = Kind("images", "small-glean", most=1), cast(Any, lambda _name: pool)
    made = Runners(kind, Forge(), ["noble:host"], Gitea.command, pools, stopping)
    serve_one_job(made.fleet, stopping)


def test_job_of_gitlab_runs_the_helper_on_a_sliver(pool: Pool, tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "NODEPOOL_URL": pool.url, "NODEPOOL_TOKEN": pool.token or ""}
    manager = Manager(tmp_path, environment, prepare=("--label", "small-glean"))
    done = manager.run(
        {
            "build_script": "cd /builds && touch file",
            "upload_artifacts_on_success": "gitlab-runner artifacts-uploader",
        }
    )
    assert (done.state, done.log.splitlines()[-1]) == ("success", "as runner: artifacts-uploader")
