"""Full disks: what is promised is there, and what others of the host fill does not prevent
work and deletions.
"""

from __future__ import annotations

import io
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client.rpc import Client, RpcFault
from nodepool.nodemanager.host import group_name
from nodepool.nodemanager.limits import free_space
from nodepool.nodemanager.limits.free_space import FreeSpace
from tests.conftest import wait_for
from tests.support import cgroups
from tests.support.deadline import limit
from tests.support.nodemanager.scene import NmDaemon, run_daemon

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]
MIB = 1 << 20
PART = 100 * 1024


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 700 MB."""
    image, place = tmp_path / "small.img", tmp_path / "small"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(700 * MIB)
    subprocess.run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-N", "30000", str(image)], check=True
    )
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def nm(small: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    # Outside of the state directory there is space for logs and keys.
    daemon = NmDaemon(tmp_path, **{"state-dir": str(small / "state")})
    try:
        yield from run_daemon(daemon)
    finally:
        empty(small)


class Filler:
    """Somebody else of the host."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place / "filler"
        self.place.mkdir(exist_ok=True)
        (self.place / "large").touch()

    def inodes(self) -> None:
        number = 0
        try:
            while True:
                (self.place / f"f{number}").touch(exist_ok=False)
                number += 1
        except OSError:
            pass

    def bytes(self) -> None:
        descriptor = os.open(self.place / "large", os.O_WRONLY | os.O_APPEND)
        try:
            for piece in (MIB, 65536, 4096, 1):
                try:
                    while True:
                        os.write(descriptor, b"x" * piece)
                except OSError:
                    continue
        finally:
            os.fsync(descriptor)
            os.close(descriptor)


def empty(small: pathlib.Path) -> None:
    subprocess.run(["rm", "-rf", str(small / "filler")], check=True)


@pytest.mark.spec(
    "issue 10, F2: a disk is admitted only if the quotas that exist and a reserve leave room for it"
)
def test_quotas_are_admitted(nm: NmDaemon) -> None:
    wait_for(lambda: nm.client.call("GetCapacity")["prepared"], 60, "the template of image host")
    before = nm.client.call("GetCapacity")
    assert before["disk"] < 700 * 1024
    assert before["disk"] == pytest.approx(before["disk_free"], abs=2048)
    count = before["disk"] // PART
    for number in range(count):
        nm.put(f"s{number}")
    with pytest.raises(RpcFault, match=r"quota: disks of \d+ KiB are more than the \d+ KiB"):
        nm.put("toomuch")
    found = nm.client.call("GetCapacity")
    assert found["allocated"]["disk"] >= count * PART
    assert found["disk_free"] < PART
    # One that grows is asked the same.
    with pytest.raises(RpcFault, match="quota: disks"):
        nm.put("s0", rspec={"nm_disk_quota": 2 * PART})
    nm.delete("s1")
    nm.put("instead")


@pytest.mark.spec("issue 10, F2: no sliver's file system breaks by what another, or the host, does")
def test_what_was_promised_is_there(nm: NmDaemon, small: pathlib.Path) -> None:
    nm.put("quiet")
    nm.put("greedy")
    image = small / "state/slivers/quiet/disk.img"
    wait_for(
        lambda: image.stat().st_blocks * 512 >= image.stat().st_size, 10, "the room being taken"
    )
    nm.ssh("greedy", "head -c 200M /dev/zero > /root/large; true", check=False)
    Filler(small).bytes()
    nm.ssh(
        "quiet",
        "head -c 60M /dev/urandom > /root/mine && sync -f /root/mine && md5sum /root/mine > "
        "/root/sum",
    )
    nm.ssh(
        "quiet",
        "rm /root/mine; head -c 60M /dev/urandom > /root/again && sync -f /root/again && touch "
        "/root/fine",
    )
    assert os.statvfs(small).f_bavail * 4096 < 4 * MIB


@pytest.mark.spec(
    "issue 10, F2: with the file system full to the last byte and inode the daemon starts, deletes "
    "and recovers"
)
def test_full_to_the_last_byte_and_inode(nm: NmDaemon, small: pathlib.Path) -> None:
    nm.put("alpha")
    nm.put("beta")
    others = Filler(small)
    others.inodes()
    others.bytes()
    assert nm.ssh("alpha", "echo fine") == "fine\n"
    nm.stop(signal.SIGKILL)
    nm.start()
    assert {s["name"]: s["state"] for s in nm.client.call("ListSlivers")} == {
        "alpha": "ready",
        "beta": "ready",
    }
    assert nm.ssh("alpha", "echo fine") == "fine\n"
    others.bytes()
    nm.delete("alpha")
    assert "The file system of" in nm.log
    others.bytes()
    others.inodes()
    nm.stop()
    # Filled again while it did not run: now without a ballast.
    others.inodes()
    others.bytes()
    nm.start()
    with pytest.raises(RpcFault, match="quota"):
        nm.put("gamma")
    nm.delete("beta")
    empty(small)
    nm.put("gamma")
    nm.stop()
    nm.start()
    assert (small / "state/ballast/room").stat().st_blocks * 512 >= free_space.BALLAST


@pytest.fixture
def generous(small: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from run_daemon(
        NmDaemon(tmp_path, **{"state-dir": str(small / "state"), "overcommit": {"disk": 3}})
    )


@pytest.mark.spec("issue 10, F2: the option for over-commitment is off by default")
def test_overcommit_factor_allows_larger_promises(generous: NmDaemon, small: pathlib.Path) -> None:
    wait_for(
        lambda: generous.client.call("GetCapacity")["prepared"], 60, "the template of image host"
    )
    assert generous.client.call("GetCapacity")["disk"] > 900 * 1024
    for number in range(5):
        generous.put(f"s{number}", rspec={"nm_disk_quota": 150 * 1024})
    assert os.statvfs(small).f_bavail * 4096 > 200 * MIB
    with pytest.raises(RpcFault, match="quota: disks"):
        generous.put("large", rspec={"nm_disk_quota": 1000 * 1024})


@pytest.mark.spec("issue 10, F2: the ballast is made again when there is room")
def test_ballast_is_created_again_when_there_is_space(small: pathlib.Path) -> None:
    kept = FreeSpace(small)
    kept.keep()
    assert (small / "ballast/room").stat().st_blocks * 512 >= free_space.BALLAST
    kept.ensure()
    assert (small / "ballast/room").exists()
    others = Filler(small)
    others.inodes()
    others.bytes()
    kept.ensure()
    assert not list((small / "ballast").iterdir())
    assert os.statvfs(small).f_ffree >= free_space.SPARE
    (small / "needed").write_bytes(b"x" * MIB)
    others.inodes()
    others.bytes()
    kept.keep()
    assert not list((small / "ballast").iterdir())
    empty(small)
    kept.keep()
    assert len(list((small / "ballast").iterdir())) == free_space.SPARE + 1


@pytest.mark.spec(
    "issue 10, F2: deleting needs no descriptor, process or memory that others have used up"
)
def test_descriptors_of_others(nm: NmDaemon) -> None:
    """The table of open files of the whole machine, as full as another process may make it."""
    nm.put("alpha")
    hog = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, resource, time\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, "
            "(resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n"
            "try:\n    while True: os.open('/dev/null', os.O_RDONLY)\nexcept OSError: "
            "print('full', flush=True)\n"
            "time.sleep(100)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"full\n"
        assert nm.ssh("alpha", "echo fine") == "fine\n"
        nm.delete("alpha")
    finally:
        hog.kill()
        hog.communicate()


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    """With the defaults for memory."""
    yield from run_daemon(NmDaemon(tmp_path, **{"default-rspec": {}}))


@pytest.mark.spec(
    "issue 10, F13: a sliver that says nothing about memory has a limit, and no limit counts as "
    "the whole host"
)
def test_memory_of_slivers_without_a_limit(bare: NmDaemon) -> None:
    capacity = bare.client.call("GetCapacity")
    given = capacity["default"]["memory"]
    assert 256 <= given <= max(256, capacity["memory"] // 4)
    found = bare.put("alpha")
    assert found["rspec"]["nm_mem_limit"] == given
    assert bare.client.call("GetCapacity")["allocated"]["memory"] == given
    shm = int(bare.ssh("alpha", "df -m --output=size /dev/shm | tail -1"))
    assert shm == pytest.approx(given / 2, rel=0.01)
    with pytest.raises(
        RpcFault, match=r"quota: memory of \d+ MiB .* 0, no limit, counts as all of it"
    ):
        bare.put("unlimited", rspec={"nm_mem_limit": 0})
    bare.delete("alpha")
    bare.put("unlimited", rspec={"nm_mem_limit": 0})
    with pytest.raises(RpcFault, match="quota: memory"):
        bare.put("alpha")


def make_image(path: pathlib.Path, files: int, size: int) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("bin", "proc", "sys", "dev", "run", "data"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name, length in (
            ("bin/sh", 10),
            *((f"data/f{number}", size) for number in range(files)),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.mode = length, 0o755
            tar.addfile(info, io.BytesIO(b"x" * length))


@pytest.fixture
def roomy(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from run_daemon(NmDaemon(tmp_path))


@pytest.mark.slow
@pytest.mark.spec("issue 10, F3a: an image that is unpacked holds up no sliver of another image")
def test_slivers_while_an_image_is_unpacked(roomy: NmDaemon, tmp_path: pathlib.Path) -> None:
    roomy.put("first")
    make_image(tmp_path / "large.tar", 20000, 8000)
    templates = roomy.tmp / "state/templates"
    done = threading.Event()

    def upload() -> None:
        with open(tmp_path / "large.tar", "rb") as file:
            Client(f"unix:{roomy.tmp}/run/nodemanager.api").put_image("large", file)
        done.set()

    thread = threading.Thread(target=upload, name="Thread-test-upload")
    thread.start()
    took = []
    try:
        wait_for(
            lambda: list(templates.glob("tar-*.new/root/data")), 30, "the image being unpacked"
        )
        while not done.is_set() and len(took) < 20:
            begin = time.monotonic()
            roomy.put("meanwhile")
            if not done.is_set():
                took.append(time.monotonic() - begin)
            roomy.delete("meanwhile")
    finally:
        thread.join(60)
    print(f"slivers made while an image is unpacked: {[round(each * 1000) for each in took]} ms")
    assert took, "the image was unpacked before a sliver could be made"
    assert statistics.median(took) < limit(0.5)
    roomy.client.delete_image("large")


@pytest.mark.spec("issue 10, F2: an upload and its tree take only room that is promised to nobody")
def test_an_upload_leaves_what_is_promised(nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    wait_for(lambda: nm.client.call("GetCapacity")["prepared"], 60, "the template of image host")
    make_image(tmp_path / "image.tar", 60, MIB)
    left = nm.client.call("GetCapacity")["disk_free"]
    # Space for the file, not for its tree as well.
    nm.put("large", rspec={"nm_disk_quota": left - 90 * 1024})
    with (
        open(tmp_path / "image.tar", "rb") as file,
        pytest.raises(RpcFault, match=r"cannot create a root tree.*larger than"),
    ):
        nm.client.put_image("image", file)
    assert nm.client.call("GetCapacity")["images"] == []
    nm.put("more", rspec={"nm_disk_quota": 40 * 1024})
    with (
        open(tmp_path / "image.tar", "rb") as file,
        pytest.raises(RpcFault, match="not enough space for 60 MiB"),
    ):
        nm.client.put_image("image", file)


@pytest.mark.spec(
    "issue 10, F13a: the daemon and its helper have a group of their own, and leave none behind"
)
def test_the_daemon_has_a_separate_group(roomy: NmDaemon) -> None:
    def groups() -> list[pathlib.Path]:
        return cgroups.named(f"{group_name(str(roomy.tmp / 'state'))}-daemon")

    assert roomy.process is not None
    found = groups()
    if not found:
        pytest.skip(
            "a service manager has given it one, or this host has no cgroup controller for CPU"
        )
    assert str(roomy.process.pid) in (found[0] / "cgroup.procs").read_text().split()
    assert len((found[0] / "cgroup.procs").read_text().split()) >= 2
    roomy.put("alpha")
    inside = roomy.ssh("alpha", "cat /proc/self/cgroup")
    assert "-daemon" not in inside
    roomy.stop(signal.SIGKILL)
    roomy.start()
    assert str(roomy.process.pid) in (found[0] / "cgroup.procs").read_text().split()
    roomy.stop()
    assert groups() == []
    roomy.start()
