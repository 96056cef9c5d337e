"""Disks of slivers, on real loop devices."""

from __future__ import annotations

import errno
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.host import group_name
from nodepool.nodemanager.limits import disk_templates, disks
from nodepool.nodemanager.limits.cgroups import Cgroups
from nodepool.nodemanager.limits.disks import DiskError, Disks
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager.scene import NmDaemon

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(Disks("/tmp").problems()),
    reason="disks need root, loop devices and e2fsprogs",
)
MIB = 1 << 20


class Bench:
    def __init__(self, state: pathlib.Path) -> None:
        self.state = state
        self.disks = Disks(state)
        self.disks.prepare()
        self.disks.settle(60)

    def target(self, name: str) -> pathlib.Path:
        path = self.state / "slivers" / name / "mnt"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def make(self, name: str, kib: int) -> pathlib.Path:
        target = self.target(name)
        self.disks.create(name, kib)
        self.disks.mount(name, str(target))
        self.disks.settle_in(name)
        return target


def loops(state: pathlib.Path) -> list[str]:
    """Loop devices over files of this test."""
    found = []
    for device in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            text = device.read_text()
        except OSError:
            continue
        if text.startswith(str(state)):
            found.append(text)
    return found


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.disks.stop()
        for name in made.disks.found():
            made.disks.destroy(name)
        assert str(tmp_path) not in pathlib.Path("/proc/self/mountinfo").read_text()
        wait_for(lambda: not loops(tmp_path), 10, "loop devices freed")


def fill(path: pathlib.Path) -> int:
    """Write until the disk is full; returns the bytes that fitted."""
    written = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            try:
                written += os.write(descriptor, b"x" * MIB)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return written
    finally:
        os.fsync(descriptor)
        os.close(descriptor)


@pytest.mark.spec("NM-C.9: disk full at quota; root is bound too")
@pytest.mark.parametrize("kib", [8192, 65536, 204800])
def test_full_at_quota(bench: Bench, kib: int) -> None:
    target = bench.make("alice", kib)
    assert os.stat(bench.disks.image("alice")).st_size == kib * 1024
    written = fill(target / "file")
    print(f"{kib} KiB: {written // 1024} KiB of files")
    assert 0.75 * kib * 1024 <= written <= kib * 1024
    assert bench.disks.usage("alice") <= kib * 1024
    os.unlink(target / "file")
    assert bench.disks.usage("alice") < MIB


def test_devices_and_set_user_id_files_have_no_effect_on_the_disk(bench: Bench) -> None:
    flags = os.statvfs(bench.make("alice", 8192)).f_flag
    assert flags & os.ST_NOSUID and flags & os.ST_NODEV


@pytest.mark.slow
@pytest.mark.spec("NM-C.3: a disk of its own; create and mount <= 6 ms at the median")
def test_disk_is_created_and_mounted_within_6_ms(bench: Bench) -> None:
    medians = []
    # Up to eight rounds: what else runs on the machine must not decide.
    while len(medians) < 8 and min(medians, default=99.0) > 6:
        medians.append(one_round(bench))
    assert min(medians) <= limit(6)


def one_round(bench: Bench) -> float:
    """Milliseconds to create and mount, at the median."""
    times = []
    for number in range(20):
        target = bench.target(f"s{number}")
        begin = time.perf_counter()
        bench.disks.create(f"s{number}", 1 << 20)
        bench.disks.mount(f"s{number}", str(target))
        times.append((time.perf_counter() - begin) * 1000)
        bench.disks.settle_in(f"s{number}")
        assert bench.disks.settle(60)
    ends = []
    for number in range(20):
        begin = time.perf_counter()
        bench.disks.destroy(f"s{number}")
        ends.append((time.perf_counter() - begin) * 1000)
    print(
        f"disk: create and mount {statistics.median(times):.2f} ms, destroy "
        f"{statistics.median(ends):.2f} ms"
    )
    return statistics.median(times)


@pytest.mark.spec(
    "issue 10, F2: what is promised is taken, and stays taken whatever is written and deleted "
    "inside"
)
def test_the_capacity_is_used(bench: Bench) -> None:
    target = bench.make("alice", 200 << 10)
    image = bench.disks.image("alice")

    def taken() -> bool:
        return image.stat().st_blocks * 512 >= image.stat().st_size

    wait_for(taken, 10, "the room")
    fill(target / "file")
    os.unlink(target / "file")
    os.sync()
    assert taken()
    if disks._may_grow_mounted():
        bench.disks.resize("alice", 300 << 10)
        assert image.stat().st_size == 300 * MIB
        assert taken()
    # A daemon that ended before it was done: the next one finishes it.
    with open(image, "r+b") as file:
        file.truncate(400 * MIB)
    assert not taken()
    again = Disks(bench.state)
    again.prepare()
    again.stop()
    assert taken()


@pytest.mark.spec("issue 10, point 4: deletion beside a busy sliver")
def test_removal_is_finished_by_the_next_start(bench: Bench) -> None:
    """The name is free immediately; what a killed daemon had not yet unmounted counts as taken, and
    goes.
    """
    blocked, freed = threading.Event(), threading.Event()
    bench.disks.stop()
    bench.disks = Disks(bench.state, freed=freed.set)
    bench.make("alice", 64 << 10)
    bench.disks.settle()
    bench.disks._later(blocked.wait, 60)
    bench.disks.discard("alice")
    assert bench.disks.found() == []
    assert sum(bench.disks.allocated().values()) >= 64 * MIB
    assert len(loops(bench.state)) == 1
    again = Disks(bench.state)  # as if the first had been killed before it did it
    again.prepare()
    again.stop()
    assert not list((bench.state / "removed").iterdir())
    wait_for(lambda: not loops(bench.state), 10, "the loop device")
    assert again.allocated() == {}
    blocked.set()
    assert freed.wait(20)  # and the first finds nothing to do


@pytest.mark.spec(
    "issue 10, point 5: deletion that failed for a while is finished by the running daemon"
)
@pytest.mark.parametrize("when", ["later", "at the end"])
def test_removal_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    bench.make("alice", 64 << 10)

    def busy(target: str) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(disks.syscalls, "umount", busy)
        for again in (lambda: bench.disks.discard("alice"), bench.disks.tidy):
            again()
            bench.disks.settle()
            assert len(list((bench.state / "removed").iterdir())) == 1
    if when == "later":
        bench.disks.tidy()
        bench.disks.settle()
    else:
        bench.disks.stop()
    assert not list((bench.state / "removed").iterdir())
    wait_for(lambda: not loops(bench.state), 10, "the loop device")


@pytest.mark.spec("issue 10, point 7: speed kept")
def test_copies_are_made_ahead(bench: Bench) -> None:
    ready = lambda: sorted(path.name for path in (bench.state / "disks").glob("*.ready*"))  # noqa: E731
    bench.make("alice", 64 << 10)
    assert bench.disks.settle(60)
    stock = ready()
    assert len([name for name in stock if "-65536." in name]) == disk_templates.STOCK
    target = bench.target("bob")
    bench.disks.create("bob", 64 << 10)
    assert len(ready()) == len(stock) - 1
    bench.disks.mount("bob", str(target))
    assert fill(target / "file") > 48 * MIB


@pytest.mark.spec("issue 10, F2: over-committed disks take only what is in them")
def test_overcommitted_disks_use_only_written_space(bench: Bench) -> None:
    bench.disks.stop()
    bench.disks = Disks(bench.state, sparse=True)
    target = bench.make("alice", 1 << 20)
    assert os.stat(bench.disks.image("alice")).st_blocks * 512 < 4 * MIB
    (target / "file").write_bytes(b"x" * 50 * MIB)
    os.sync()
    os.unlink(target / "file")

    def small() -> bool:
        os.sync()
        return os.stat(bench.disks.image("alice")).st_blocks * 512 < 10 * MIB

    wait_for(small, 20, "the room of a deleted file given back")


@pytest.mark.spec("NM-C.3: nm_disk_quota, changed at once; never below use")
def test_smaller_limit_applies_immediately(bench: Bench) -> None:
    target = bench.make("alice", 204800)
    (target / "file").write_bytes(b"x" * 50 * MIB)
    with open(target / "file") as file:
        os.fsync(file.fileno())
    with pytest.raises(DiskError, match=r"uses \d+ KiB"):
        bench.disks.resize("alice", 40000)
    bench.disks.resize("alice", 102400)
    written = fill(target / "more")
    assert 30 * MIB < written <= 50 * MIB
    assert bench.disks.usage("alice") <= 102400 * 1024
    # It is still so after the next mount, and can be taken back.
    os.unlink(target / "more")
    disks.syscalls.umount(str(target))
    bench.disks.mount("alice", str(target))
    assert fill(target / "more") <= 50 * MIB
    bench.disks.resize("alice", 204800)
    assert fill(target / "again") > 80 * MIB


@pytest.mark.spec(
    "issue 10, point 5: a disk that a namespace still holds, as that of a sliver in the making "
    "does, is not mounted twice"
)
@pytest.mark.parametrize("kib", [65536, 204800])
def test_held_by_another_namespace(bench: Bench, monkeypatch: pytest.MonkeyPatch, kib: int) -> None:
    target = bench.make("alice", 65536)
    (target / "file").write_text("kept")
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", "echo; read x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdout.readline()
        disks.syscalls.umount(str(target))
        bench.disks.resize("alice", kib)
        with monkeypatch.context() as patch:
            patch.setattr(disks, "RELEASE_TIMEOUT", 0.2)
            with pytest.raises(DiskError, match="still in use as /dev/loop"):
                bench.disks.mount("alice", str(target))
        assert not target.is_mount()
        later = threading.Timer(0.5, holder.stdin.close)
        later.start()
        bench.disks.mount("alice", str(target))
        later.join()
    assert (target / "file").read_text() == "kept"


@pytest.mark.spec("NM-C.3: nm_disk_quota grows")
def test_quota_of_a_mounted_disk_can_grow(bench: Bench) -> None:
    target = bench.make("alice", 65536)
    (target / "file").write_text("kept")
    if not disks._may_grow_mounted():
        with pytest.raises(DiskError, match="stop the sliver first"):
            bench.disks.resize("alice", 204800)
        disks.syscalls.umount(str(target))
        bench.disks.resize("alice", 204800)
        bench.disks.mount("alice", str(target))
    else:
        bench.disks.resize("alice", 204800)
    assert (target / "file").read_text() == "kept"
    assert fill(target / "more") > 150 * MIB


def test_everything_again_is_fine(bench: Bench) -> None:
    target = bench.make("alice", 65536)
    (target / "file").write_text("kept")
    again = Disks(bench.state)
    again.create("alice", 65536)
    again.mount("alice", str(target))
    assert (target / "file").read_text() == "kept"
    assert again.found() == ["alice"]
    (device,) = again.devices("alice")
    assert device == f"7:{os.minor(target.stat().st_dev)}"
    for _ in range(2):
        again.destroy("alice")
    assert again.found() == []


@pytest.mark.spec("NM-C.7: a crash at any point resumes")
def test_what_a_crash_leaves_is_removed(bench: Bench) -> None:
    (bench.state / "slivers" / "alice").mkdir(parents=True)
    left = bench.state / "slivers" / "alice" / "disk.img.new"
    left.write_bytes(b"half")
    (bench.state / "disks" / "template-1-77.new").write_bytes(b"half")
    again = Disks(bench.state)
    again.prepare()
    assert again.settle(60)
    assert not left.exists()
    assert not list((bench.state / "disks").glob("*.new"))
    # Without the image a mount is still found by its place.
    bench.make("bob", 65536)
    os.unlink(bench.disks.image("bob"))
    assert again.found() == ["bob"]
    again.destroy("bob")
    assert again.found() == []


def test_a_disk_that_is_in_use_goes_when_its_last_user_does(bench: Bench) -> None:
    target = bench.make("alice", 65536)
    with open(target / "file", "w") as file:
        bench.disks.destroy("alice")
        file.write("nobody will read this")
        file.flush()
    wait_for(lambda: not loops(bench.state), 10, "loop device freed")


@pytest.mark.spec("NM-C.3: who writes all the time holds up others for moments only")
def test_little_runs_concurrently(bench: Bench) -> None:
    bench.make("alice", 65536)
    (device,) = bench.disks.devices("alice")
    queue = pathlib.Path("/sys/dev/block", device, "queue")
    wait_for(
        lambda: (
            [int((queue / name).read_text()) for name in ("nr_requests", "max_sectors_kb")]
            == [8, 128]
        ),
        10,
        "limits",
    )


@pytest.mark.slow
@pytest.mark.spec("NM-C.3: nm_io_read_bps, nm_io_write_bps")
def test_io_limits_hold(bench: Bench) -> None:
    cgroups = Cgroups.detect(f"nodepool-nm-test-{uuid.uuid4().hex[:8]}", bench.disks.devices)
    if cgroups.controllers["io"] is None:
        pytest.skip("this host has no cgroup controller for I/O")
    target = bench.make("alice", 204800)
    cgroups.create("alice", {"nm_io_write_bps": 10 * MIB, "nm_io_read_bps": 20 * MIB})
    try:
        code = (
            "import sys, os, mmap, time\nfor path in sys.argv[2:]:\n    with open(path, 'w') as "
            "file: file.write('0')\n"
            "block = mmap.mmap(-1, 1 << 20)\nfile = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | "
            "os.O_DIRECT)\n"
            "begin = time.monotonic()\nfor _ in range(20): os.write(file, "
            "block)\nprint(time.monotonic() - begin)\n"
            "os.lseek(file, 0, 0)\nbegin = time.monotonic()\nfor _ in range(20): os.readv(file, "
            "[block])\n"
            "print(time.monotonic() - begin)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(target / "file"), *cgroups.procs_files("alice")],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        written, read = map(float, done.stdout.split())
        print(f"20 MiB at 10 MiB/s: {written:.2f} s; at 20 MiB/s: {read:.2f} s")
        assert 1.7 <= written <= 3
        assert 0.7 <= read <= 2
    finally:
        cgroups.kill("alice", 10)
        cgroups.remove("alice")
        cgroups.stop()


@pytest.mark.parametrize("name", ["../x", "a/b", "", "A"])
def test_names_that_are_none_make_no_path(bench: Bench, name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        bench.disks.create(name, 65536)
    with pytest.raises(ValueError, match="is not a name"):
        bench.disks.destroy(name)


def test_a_link_in_place_of_the_image_is_not_followed(bench: Bench, tmp_path: pathlib.Path) -> None:
    target = bench.target("alice")
    victim = tmp_path / "victim"
    victim.write_bytes(b"\0" * 65536)
    bench.disks.image("alice").symlink_to(victim)
    with pytest.raises(DiskError):
        bench.disks.mount("alice", str(target))
    with pytest.raises(DiskError):
        bench.disks.resize("alice", 128)
    assert victim.read_bytes() == b"\0" * 65536


def test_link_in_place_of_a_new_image_is_not_followed(bench: Bench, tmp_path: pathlib.Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    new = bench.target("alice").with_name("disk.img.new")
    new.symlink_to(victim)
    with pytest.raises(DiskError):
        bench.disks.create("alice", 12288)  # there is no copy of this size
    assert victim.read_text() == "kept"


@pytest.mark.spec("NM-C.3: nm_io_read_bps, nm_io_write_bps hold from the first moment")
def test_io_limits_of_a_sliver_that_was_just_made(tmp_path: pathlib.Path) -> None:
    if Cgroups.detect().controllers["io"] is None:
        pytest.skip("this host has no cgroup controller for I/O")
    daemon = NmDaemon(tmp_path)
    try:
        daemon.start()
        daemon.put("alice", rspec={"nm_io_write_bps": 10 * MIB, "nm_io_read_bps": 20 * MIB})
        groups = [
            pathlib.Path(path).parent
            for path in Cgroups.detect(group_name(daemon.options["state-dir"])).procs_files("alice")
        ]
        files = [
            group / name
            for group in groups
            for name in ("blkio.throttle.write_bps_device", "io.max")
        ]
        (limits,) = [file.read_text().split() for file in files if file.exists()]
        assert limits[0].startswith("7:")  # its loop device
        assert {str(10 * MIB), f"wbps={10 * MIB}"} & set(limits)
    finally:
        daemon.clean()
