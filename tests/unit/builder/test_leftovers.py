"""What a killed builder leaves: real processes, mounts and loop devices."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from nodepool.builder.machine import build_journal, image_files, mounts, processes
from nodepool.builder.machine.build_journal import (
    BuildEntry,
    acquire_images_dir,
    begin,
    clean,
    clean_all,
    entries,
)
from nodepool.exceptions import BuilderError, ConfigurationError
from tests.conftest import wait_for
from tests.support.deadline import limit

log = logging.getLogger("test")


def belongs(entry: BuildEntry) -> list[int]:
    """The running processes of a build."""
    return [process.pid for process in processes.find(entry.origin())]


HEX = "0123456789abcdef0123456789abcdef"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def images_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "images"
    path.mkdir()
    return path


@pytest.fixture
def tmp_base(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    path = tmp_path / "tmp with blank"
    path.mkdir()
    yield path
    for point in mounts.mount_points([str(path)]):
        subprocess.run(["umount", "-l", point], check=False)


@pytest.fixture
def journal(images_dir: pathlib.Path) -> pathlib.Path:
    return images_dir / build_journal.JOURNAL


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts shell scripts as leaders of a session; those that a test leaves are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def call(script: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["bash", "-c", script],
            env={"PATH": os.environ["PATH"], **environment},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sleepers(text: str) -> list[int]:
    """The processes whose command line holds the text."""
    found = []
    for process in processes.processes():
        with contextlib.suppress(OSError):
            if text.encode() in pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes():
                found.append(process.pid)
    return found


def deadline(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


# The journal


def test_journal_of_a_build(journal: pathlib.Path, tmp_base: pathlib.Path, start: Start) -> None:
    entry = begin(str(journal.parent), "debian", HEX, str(tmp_base))
    path = journal / f"debian-{HEX}.json"
    assert stat.S_IMODE(os.stat(journal).st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert entry.private_tmp is not None
    assert stat.S_IMODE(os.stat(entry.private_tmp).st_mode) == 0o700
    assert json.loads(path.read_text())["private_tmp"] == entry.private_tmp
    assert entry.environment == {"NODEPOOL_BUILD": entry.marker}
    assert entry.marker.startswith(f"debian-{HEX}/")
    process = start("sleep 1000", **entry.environment)
    entry.started(process.pid)
    content = json.loads(path.read_text())
    assert content["pid"] == process.pid
    assert content["start_time"] == processes.read_process(process.pid).start_time  # type: ignore[union-attr]
    tree = os.path.join(entry.private_tmp, "dib_build.AbC12345")
    os.mkdir(tree)
    assert entry.note_dir(tree)
    assert entry.note_dir(tree)
    assert json.loads(path.read_text())["build_dirs"] == [tree]
    process.kill()
    process.wait()
    assert entry.end() == []
    assert not path.exists()
    assert not os.path.exists(entry.private_tmp)
    assert entry.end() == []
    assert not entry.note_dir(tree)
    assert entries(str(journal.parent)) == []
    assert os.listdir(journal) == []


def test_only_trees_of_the_tool_are_noted(
    journal: pathlib.Path, tmp_base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The output of a build is not a proof: these directories are going to be removed."""
    (tmp_base / "dib_build.before").mkdir()
    elsewhere = tmp_path / "dib_build.elsewhere"
    elsewhere.mkdir()
    (tmp_base / "dib_build.link").symlink_to(elsewhere)
    for private in (True, False):
        entry = begin(str(journal.parent), "i", f"0{int(private)}", str(tmp_base), private=private)
        for path in (
            "/",
            "/home",
            str(tmp_base),
            str(tmp_base / "data"),
            str(elsewhere),
            str(tmp_base / "dib_build.before"),
            str(tmp_base / "dib_build.link"),
            str(tmp_base / "dib_build.a" / ".." / ".."),
        ):
            assert not entry.note_dir(path), path
        entry.end()
    assert elsewhere.exists()
    assert (tmp_base / "dib_build.before").exists()


def test_temporary_directory_that_cannot_be_used(
    journal: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(
        BuilderError,
        match=r"diskimage i: cannot create a temporary directory in .*missing: .*set TMPDIR",
    ):
        begin(str(journal.parent), "i", "01", str(tmp_path / "missing"))
    assert entries(str(journal.parent)) == []


def test_broken_files_are_moved_aside(
    journal: pathlib.Path, tmp_base: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = begin(str(journal.parent), "good", "01", str(tmp_base))
    directory = journal
    content = json.loads((directory / "good-01.json").read_text())
    for number, text in enumerate(
        (
            "",
            "[]",
            "{}",
            json.dumps({**content, "private_tmp": "/home"}),
            json.dumps({**content, "build_dirs": ["/home"]}),
            json.dumps(content),
        )
    ):
        (directory / f"bad-{number}.json").write_text(text)
    assert clean_all(str(journal.parent), log) == [("good", "01")]
    assert sorted(os.listdir(directory)) == [f"bad-{number}.json.broken" for number in range(6)]
    assert "bad-0.json is invalid" in caplog.text
    assert not os.path.exists(str(entry.private_tmp))


# Processes


def test_belongs_finds_all_kinds(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start
) -> None:
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    assert entry.private_tmp
    bystander = start("sleep 1000")
    leader = start("env -i sleep 1001 & setsid sleep 1002 & exec sleep 1003", **entry.environment)
    entry.started(leader.pid)
    # Without marker, in another session: only where it works gives it away.
    inside = start(f"cd {entry.private_tmp!r} && exec env -i sleep 1004")
    wait_for(lambda: len(belongs(entry)) == 4, what="four processes")
    assert {leader.pid, inside.pid} < set(belongs(entry))
    # The marker of a member proves the session even when its leader no longer exists.
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    # The one with the marker and the one inside; nothing proves the third, once it is that program.
    wait_for(lambda: len(belongs(entry)) == 2, what="two processes")
    assert clean(entry, deadline()) == []
    assert bystander.poll() is None
    assert belongs(entry) == []


def test_environment_in_the_middle_of_execve(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that calls execve() over and over shows its environment at every look."""
    # However long others keep it from the processor in the middle of it.
    monkeypatch.setattr(processes, "_EXEC", 20.0)
    again = start('exec sh -c "$AGAIN"', AGAIN='exec sh -c "$AGAIN"', MARK="seen")
    wait_for(lambda: b"MARK=seen" in processes.environment(again.pid), what="the environment")
    assert all(b"MARK=seen" in processes.environment(again.pid) for _ in range(2000))


def test_session_without_leader(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start
) -> None:
    """One member with the marker is enough for those which have lost it, as under sudo."""
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    leader = start("env -i sleep 1001 & sleep 1002 & wait", **entry.environment)
    entry.started(leader.pid)
    wait_for(lambda: len(belongs(entry)) == 3, what="three processes")
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    assert len(belongs(entry)) == 2
    assert entry.end() == []


def test_number_used_again_is_no_proof(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start
) -> None:
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    stranger = start("sleep 1000 & exec sleep 1000")
    entry.started(stranger.pid)
    assert stranger.pid in belongs(entry)
    entry.start_time = (entry.start_time or 0) - 1
    assert belongs(entry) == []
    entry.boot_id = "another boot"
    assert belongs(entry) == []
    assert entry.end() == []
    assert stranger.poll() is None


def test_own_process_and_its_parents_are_spared() -> None:
    origin = processes.Origin("nobody", directories=(os.getcwd(),))
    found = {process.pid for process in processes.find(origin)}
    assert not found & {os.getpid(), os.getppid(), 1}
    assert processes.find(processes.Origin("nobody", directories=("/", "/tmp"))) == []


def test_those_that_ignore_term_are_killed(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start
) -> None:
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    process = start(
        "trap '' TERM; while :; do setsid sleep 100 & sleep 0.05; done", **entry.environment
    )
    entry.started(process.pid)
    wait_for(lambda: len(belongs(entry)) > 2, what="children")
    started = time.monotonic()
    assert entry.end() == []
    assert time.monotonic() - started < limit(8)
    assert process.wait(1) == -signal.SIGKILL
    assert belongs(entry) == []


# Mounts, loop devices, trees


def loop_device(path: pathlib.Path) -> str:
    with open(path, "wb") as file:
        file.truncate(4 << 20)
    done = subprocess.run(
        ["losetup", "--show", "-f", str(path)], capture_output=True, check=False, text=True
    )
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    return done.stdout.strip()


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


@needs_root
def test_mounts_and_loop_devices_go(
    journal: pathlib.Path,
    tmp_base: pathlib.Path,
    images_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    start: Start,
) -> None:
    """As diskimage-builder leaves them: image mounted from a loop device, on it /proc, /dev and
    a bind mount.
    """
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("data")
    entry = begin(str(journal.parent), "i", HEX, str(tmp_base))
    private = pathlib.Path(str(entry.private_tmp))
    tree, image = private / "dib_build.AbC", private / "dib_image.AbC"
    root = tree / "mnt"
    root.mkdir(parents=True)
    image.mkdir()
    device = loop_device(image / "image0.raw")
    loop_device(images_dir / f"i-{HEX}.raw")
    other = loop_device(images_dir / f"i-{HEX}0.raw")
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        mount(device, root)
        for name in ("proc", "dev", "hooks with blank", "tmp"):
            (root / name).mkdir()
        mount("-t", "proc", "none", root / "proc")
        mount("--bind", "/dev", root / "dev")
        mount("--bind", home, root / "hooks with blank")
        mount("-t", "tmpfs", "none", root / "tmp")
        mount("-t", "tmpfs", "none", root / "tmp")  # on top of the other
        busy = start(f"cd {str(root / 'tmp')!r} && exec sleep 1000")
        wait_for(lambda: busy.pid in belongs(entry), what="the process in the image")
        (image / "image0.raw").unlink()
        assert clean_all(str(images_dir), log) == [("i", HEX)]
        assert busy.wait(5) == -signal.SIGTERM
        assert (home / "precious").read_text() == "data"
        assert mounts.mount_points([str(tmp_base)]) == []
        # Other programs may have taken the devices since.
        attached = mounts.loop_devices(lambda path: path.startswith(str(tmp_path)))
        assert attached == [os.path.basename(other)]
        assert os.listdir(tmp_base) == []
        assert os.listdir(journal) == []
        assert clean(entry, deadline()) == []
    finally:
        subprocess.run(["losetup", "-d", other], check=True)


@needs_root
def test_no_tree_is_removed_through_a_mount(tmp_base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A bind mount of the same file system, which rm --one-file-system would empty."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("data")
    tree = tmp_base / "dib_build.AbC"
    (tree / "mnt").mkdir(parents=True)
    mount("--bind", home, tree / "mnt")
    try:
        sentence = mounts.remove_tree(str(tree), deadline())
        assert sentence == f"{tree} is not deleted: {tree}/mnt is mounted there"
        assert (home / "precious").exists()
    finally:
        subprocess.run(["umount", str(tree / "mnt")], check=True)
    assert mounts.remove_tree(str(tree), deadline()) is None
    assert not tree.exists()


def test_links_are_not_followed(tmp_base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").touch()
    link = tmp_base / "dib_build.link"
    link.symlink_to(home)
    assert (
        mounts.remove_tree(str(link), deadline()) == f"{link} is not deleted: it is not a directory"
    )
    tree = tmp_base / "dib_build.tree"
    tree.mkdir()
    (tree / "link").symlink_to(home)
    assert mounts.remove_tree(str(tree), deadline()) is None
    assert mounts.remove_tree(str(tree), deadline()) is None
    assert (home / "precious").exists()


@needs_root
def test_what_cannot_be_removed_stays_written_down(
    journal: pathlib.Path, tmp_base: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    stuck = pathlib.Path(str(entry.private_tmp)) / "stuck"
    stuck.touch()
    if subprocess.run(["chattr", "+i", str(stuck)], check=False).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        assert clean_all(str(journal.parent), log) == [("i", "01")]
        assert (
            f"Leftovers of build 01 of i remain: {entry.private_tmp} cannot be removed: rm: cannot "
            "remove" in caplog.text
        )
        assert [found.build_id for found in entries(str(journal.parent))] == ["01"]
    finally:
        subprocess.run(["chattr", "-i", str(stuck)], check=True)
    assert clean_all(str(journal.parent), log) == [("i", "01")]
    assert entries(str(journal.parent)) == []
    assert not stuck.exists()


# A TMPDIR of the configuration's


def test_trees_in_a_shared_directory(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start
) -> None:
    """Only what certainly belongs to the build goes: another diskimage-builder may use the
    directory, too.
    """
    (tmp_base / "dib_build.before").mkdir()
    entry = begin(str(journal.parent), "i", "01", str(tmp_base), private=False)
    assert entry.private_tmp is None
    for name in (
        "dib_build.noted",
        "dib_image.params",
        "dib_image.harvest",
        "dib_build.other",
        "data",
    ):
        (tmp_base / name).mkdir()
    parameters = tmp_base / "dib_build.noted" / "block-device"
    parameters.mkdir()
    (parameters / "params.yaml").write_text(f"config: x\nimage-dir: {tmp_base}/dib_image.params\n")
    assert entry.note_dir(str(tmp_base / "dib_build.noted"))
    process = start(
        "sleep 1000", TMP_IMAGE_DIR=str(tmp_base / "dib_image.harvest"), **entry.environment
    )
    wait_for(lambda: processes.find(entry.origin()), what="the process")
    assert clean(entry, deadline()) == []
    assert process.wait(5) == -signal.SIGTERM
    assert sorted(os.listdir(tmp_base)) == ["data", "dib_build.before", "dib_build.other"]


# One builder per directory, and the whole story


def test_lock_names_the_other_process(images_dir: pathlib.Path) -> None:
    lock = acquire_images_dir(str(images_dir))
    code = textwrap.dedent(f"""
        import logging, sys
        from nodepool.builder.machine.build_journal import acquire_images_dir
        from nodepool.exceptions import ConfigurationError
        try:
            acquire_images_dir({str(images_dir)!r})
        except ConfigurationError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"images-dir {images_dir} is in use by builder process {os.getpid()}; "
        "every builder needs a separate directory\n"
    )
    lock.close()
    lock.close()
    again = acquire_images_dir(str(images_dir))
    again.close()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        acquire_images_dir(str(images_dir / "missing"))


BUILDER = """
import logging, os, sys, time
from nodepool.builder.machine import image_files
from nodepool.builder.machine.build_journal import acquire_images_dir, begin
from nodepool.builder.building.process import BuildProcess
images_dir, tmp_base, script = sys.argv[1:]
lock = acquire_images_dir(images_dir)
entry = begin(images_dir, "i", "0f", tmp_base)
environment = {**os.environ, "TMPDIR": entry.private_tmp, **entry.environment}
process = BuildProcess(["bash", "-c", script], environment,
                       image_files.open_log(images_dir + "/build.log"), print)
process.start()
if "early" not in script:
    entry.started(process.pid)
process.wait(time.monotonic() + 1000)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_killed_builder_leaks_nothing(
    images_dir: pathlib.Path, tmp_base: pathlib.Path, when: str, journal: pathlib.Path
) -> None:
    """kill -9 of the builder: the command lives on as an orphan; the next start ends it and
    removes its trees.
    """
    token = f"31{os.getpid()}{when.encode().hex()}"
    script = (
        f": {when}; trap '' TERM PIPE; mkdir \"$(mktemp -d -t dib_build.XXXXXXXX)\"/mnt; setsid "
        f"bash -c 'sleep 100; : {token}' & "
        f'touch "$TMPDIR"/ready; while :; do sleep 100; done; : {token}'
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(images_dir), str(tmp_base), script],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list(tmp_base.glob("nodepool-build.*/ready")), what="the command to run")
        if when == "late":
            wait_for(
                lambda: all(entry.pid for entry in entries(str(journal.parent))),
                what="the pid to be written down",
            )
        with pytest.raises(ConfigurationError, match="is in use by builder process"):
            acquire_images_dir(str(images_dir))
    finally:
        builder.kill()
        builder.wait()
    assert len(sleepers(token)) >= 2
    lock = acquire_images_dir(str(images_dir))
    assert clean_all(str(images_dir), log) == [("i", "0f")]
    lock.close()
    assert sleepers(token) == []
    assert os.listdir(tmp_base) == []
    assert clean_all(str(images_dir), log) == []
    assert image_files.local_builds(str(images_dir)) == set()


def test_builds_of_one_image_share_nothing(journal: pathlib.Path, tmp_base: pathlib.Path) -> None:
    """Two builds of one image have separate journals, markers and directories."""
    first = begin(str(journal.parent), "i", "01", str(tmp_base))
    second = begin(str(journal.parent), "i", "02", str(tmp_base))
    assert first.private_tmp != second.private_tmp
    assert first.marker != second.marker
    first.end()
    assert os.path.isdir(str(second.private_tmp))
    second.end()


def test_without_rights_the_tool_s_sudo_is_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(f"""#!/bin/sh\nprintf '%s ' "$@" >> {tmp_path}/calls\nshift\nexec "$@"\n""")
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert processes.run_privileged(["true"]) is None
    assert (
        processes.run_privileged(["rmdir", "/no/such"])
        == "rmdir: failed to remove '/no/such': No such file or directory"
    )
    assert processes.run_privileged(["false"]) == "false ended with status 1"
    assert (tmp_path / "calls").read_text() == "-n true -n rmdir /no/such -n false "


def test_privileged_commands_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # without sudo
    started = time.monotonic()
    assert processes.run_privileged(["sleep", "1000"], 0.2) == "sleep took more than 0 seconds"
    assert time.monotonic() - started < limit(5)


def test_full_disk_at_the_journal_stops_no_build(
    journal: pathlib.Path, tmp_base: pathlib.Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    entry = begin(str(journal.parent), "i", "01", str(tmp_base))
    os.rename(journal, f"{journal}.away")
    process = start("sleep 1000", **entry.environment)
    entry.started(process.pid)
    assert "Cannot write" in caplog.text
    os.rename(f"{journal}.away", journal)
    assert clean_all(str(journal.parent), log) == [("i", "01")]
    assert process.wait(5) == -signal.SIGTERM
