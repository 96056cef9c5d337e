"""The image commands against a real ZooKeeper; the tests write what a builder would."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import yaml
from kazoo.client import KazooClient

from nodepool.cmd.commands import images as image_commands
from nodepool.cmd.commands.images import follow as image_follow
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk_module
from nodepool.zk.mirror.progress import BuildProgress, ProgressStore, UploadFailure, UploadProgress
from tests.conftest import wait_for
from tests.integration.cli.test_commands import (
    config,
    console,
    make_build,
    make_upload,
    plain,
    rows,
    run,
    snapshot,
)

IMAGE = "fake-image"


class Builder:
    """Writes records in the order in which a builder does."""

    def __init__(self, zk):
        self.zk = zk
        self.image = IMAGE
        self.build = None
        self.locks = contextlib.ExitStack()
        self.registered = None

    def register(self):
        self.registered = self.zk.kazoo_client.create(
            f"{paths.COMPONENTS}/builder/nb01",
            b'{"hostname": "nb01", "kind": "builder"}',
            ephemeral=True,
            makepath=True,
            sequence=True,
        )

    def begin(self, **values):
        self.locks.enter_context(self.zk.imageBuildLock(self.image, blocking=False))
        record = zk_module.ImageBuild()
        record.state, record.builder, record.formats = "building", "nb01", ["qcow2", "raw"]
        self.build = self.zk.storeBuild(self.image, record)
        self.progress = BuildProgress(
            self.image, self.build, "nb01", started=time.time(), expected=600.0, **values
        )
        self.write(phase="root")
        return self.build

    def write(self, **values):
        for key, value in values.items():
            setattr(self.progress, key, value)
        self.zk.progress.write(self.progress)

    def end(self, state="ready", remove=False, **values):
        self.write(state=state, ended=time.time(), **values)
        if remove:
            self.zk.deleteBuild(self.image, self.build)
        else:
            record = self.zk.getBuild(self.image, self.build)
            record.state = state
            self.zk.storeBuild(self.image, record, self.build)
        if state == "ready":
            self.zk.removeBuildRequest(self.image)
        self.locks.close()


@pytest.fixture
def builder(plain):
    builder = Builder(plain)
    yield builder
    builder.locks.close()


class Process:
    """The command in a separate process; what it prints is collected."""

    def __init__(self, command, terminal=False):
        if terminal:
            self.master, out = pty.openpty()
        else:
            self.master, out = os.pipe()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "80"},
            # A test run in the background of a script ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(out)
        self.out = b""
        self._errors: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._error_reader = threading.Thread(
            target=lambda: self._errors.append(self.process.stderr.read())
        )
        self._reader.start()
        self._error_reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # the other end of a terminal no longer exists
            while chunk := os.read(self.master, 65536):
                self.out += chunk

    def prints(self, text, timeout=20):
        wait_for(lambda: text.encode() in self.out, timeout, f"{text!r} in the output")

    def end(self, timeout=20):
        """Exit status, output, errors."""
        status = self.process.wait(timeout)
        self._reader.join(10)
        self._error_reader.join(10)
        return status, self.out.decode(), self._errors[0].decode()

    def close(self):
        self.process.kill()
        self.end()
        self.process.stderr.close()
        os.close(self.master)


@pytest.fixture
def start(config):
    started = []

    def start(*args, terminal=False):
        process = Process(
            [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "-c", config, *args], terminal
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def progress(build="b" * 32, **values):
    return BuildProgress(
        **{"image": IMAGE, "build": build, "builder": "nb01", "started": time.time() - 60, **values}
    )


# -- listings


@pytest.mark.spec("CLI-5: dib-image-list; columns may be added only behind an option")
def test_dib_image_list_detail(run, rows, plain, builder):
    builder.locks.enter_context(plain.imageBuildLock(IMAGE, blocking=False))
    build = make_build(plain, state="building")
    plain.progress.write(
        progress(build, phase="install", expected=120.0, last_line="Unpacking", log="/l/x.log")
    )
    plain.progress.write(
        progress(
            "f" * 32,
            state="failed",
            reason="no space left",
            exit_code=1,
            duration=5.0,
            ended=time.time(),
            log="/l/f.log",
        )
    )
    old = make_build(plain)
    assert {tuple(row[:1]) for row in rows("dib-image-list")} == {
        (f"{IMAGE}-{build}",),
        (f"{IMAGE}-{old}",),
    }
    assert [len(row) for row in rows("dib-image-list")] == [6, 6]
    assert list(json.loads(run("dib-image-list", "--format", "json"))[0]) == [
        "id",
        "image",
        "builder",
        "formats",
        "state",
        "age",
    ]
    found = {row[0]: row for row in rows("dib-image-list", "--detail")}
    running, failed, other = (found[f"{IMAGE}-{i}"] for i in (build, "f" * 32, old))
    assert running[4] == "building" and running[6] == "install" and running[7].startswith("1 min")
    assert running[8] == "2 min" and running[11:] == ["/l/x.log", "Unpacking"]
    assert failed[4] == "failed" and failed[7] == "5 s" and failed[9:11] == ["1", "no space left"]
    assert other[6:] == [""] * 7
    assert run("dib-image-list", "--detail").splitlines()[1].count("|") == 14
    values = {
        row["id"]: row for row in json.loads(run("dib-image-list", "--detail", "--format", "json"))
    }
    assert values[f"{IMAGE}-{build}"]["progress"] == pytest.approx(0.5, abs=0.1)
    assert values[f"{IMAGE}-{'f' * 32}"]["exit_code"] == 1
    # The pause shows in the rows of builds that have a record.
    run("image-pause", IMAGE)
    assert {row[4] for row in rows("dib-image-list")} == {"paused"}


def test_image_list_detail(run, rows, plain):
    build = make_build(plain)
    first = make_upload(plain, build, state="uploading")
    second = make_upload(plain, build, provider="q", state="failed")
    plain.progress.write(UploadProgress(IMAGE, build, "p", first, bytes_total=6 << 20))
    plain.progress.write(UploadFailure(IMAGE, "q", build, second, "quota exceeded", time.time()))
    plain.progress.write(UploadFailure(IMAGE, "r", build, "0000000007", "no route", time.time()))
    assert [len(row) for row in rows("image-list")] == [8, 8]
    found = rows("image-list", "--detail")
    assert [row[2] for row in found] == ["p", "q", "r"]
    assert found[0][8:] == ["6.0 MiB", ""]
    assert [row[9] for row in found[1:]] == ["quota exceeded", "no route"]
    assert found[2][6] == "failed"
    lines = list(csv.reader(io.StringIO(run("image-list", "--detail", "--format", "csv"))))
    assert lines[1][8] == str(6 << 20)


# -- acting commands


@pytest.mark.parametrize("form", ["json", "yaml", "csv", "table"])
def test_acting_commands_report_what_they_did(run, plain, form):
    build = make_build(plain)
    number = make_upload(plain, build)
    upload = [
        "image-delete",
        "--provider",
        "p",
        "--image",
        IMAGE,
        "--upload-id",
        number,
        "--build-id",
    ]
    for command, expected in (
        (["image-pause", IMAGE], "paused"),
        (["image-unpause", IMAGE], "unpaused"),
        (["image-build", IMAGE], "requested"),
        ([*upload, build], "deleting"),
        ([*upload, "nonsense"], "not found"),
        (["dib-image-delete", f"{IMAGE}-{build}"], "deleting"),
        (["dib-image-delete", f"{IMAGE}-{'0' * 32}"], "not found"),
    ):
        out = run(*command, "--format", form)
        assert expected in out
        if form == "json":
            value = json.loads(out)
            assert value["result"] == expected and value["image"] == IMAGE
        elif form == "yaml":
            assert yaml.safe_load(out)[0]["result"] == expected
    assert plain.getBuild(IMAGE, build).state == "deleting"


@pytest.mark.spec(
    "CLI-5: image-delete of a running upload: Cannot delete because image upload in progress"
)
def test_a_running_upload_is_not_deleted(run, plain):
    build = make_build(plain)
    number = make_upload(plain, build, state="uploading")
    command = [
        "image-delete",
        "--provider",
        "p",
        "--image",
        IMAGE,
        "--upload-id",
        number,
        "--build-id",
        build,
    ]
    assert run(*command) == "Cannot delete because image upload in progress\n"
    assert json.loads(run(*command, "--format", "json"))["result"] == "refused"
    assert plain.getImageUpload(IMAGE, build, "p", number).state == "uploading"


@pytest.mark.spec("CLI-9: image-delete with nonsense arguments ends quietly")
@pytest.mark.parametrize("bad", ["", "a/b", "..", "\x00", "nothing"])
def test_nonsense_is_not_found(run, plain, bad):
    build = make_build(plain)
    out = run(
        "image-delete", "--provider", bad, "--image", IMAGE, "--upload-id", "1", "--build-id", build
    )
    assert out == "Image upload not found\n"
    if bad:
        name = f"{IMAGE}-{bad}"
        assert run("dib-image-delete", name) == f"Build {name} not found\n"


def test_deleting_reads_the_record_again_when_it_changes(run, plain, monkeypatch):
    """Between reading and writing a builder starts the upload: its record is not overruled."""
    build = make_build(plain)
    number = make_upload(plain, build, state="failed")
    original = zk_module.ZooKeeper.getImageUpload
    changed = []

    def racing(self, *args):
        record = original(self, *args)
        if not changed:
            changed.append(True)
            other = original(plain, *args)
            other.state = "uploading"
            plain.storeImageUpload(IMAGE, build, "p", other, number)
        return record

    monkeypatch.setattr(zk_module.ZooKeeper, "getImageUpload", racing)
    out = run(
        "image-delete",
        "--provider",
        "p",
        "--image",
        IMAGE,
        "--upload-id",
        number,
        "--build-id",
        build,
    )
    assert out == "Cannot delete because image upload in progress\n"
    assert original(plain, IMAGE, build, "p", number).state == "uploading"


def test_deleting_continues_after_a_harmless_change(run, plain, monkeypatch):
    build = make_build(plain)
    original = zk_module.ZooKeeper.getBuild
    changed = []

    def racing(self, *args):
        record = original(self, *args)
        if not changed:
            changed.append(True)
            plain.storeBuild(IMAGE, original(plain, *args), build)
        return record

    monkeypatch.setattr(zk_module.ZooKeeper, "getBuild", racing)
    assert run("dib-image-delete", f"{IMAGE}-{build}") == ""
    assert original(plain, IMAGE, build).state == "deleting"


@pytest.mark.spec(
    "CLI-9: double pause and double unpause are quiet; after unpause the state is ready again"
)
def test_unpaused_image_is_ready_again(run, rows, plain):
    make_build(plain)
    for _ in range(2):
        assert run("image-pause", IMAGE) == ""
        assert [row[4] for row in rows("dib-image-list")] == ["paused"]
    for _ in range(2):
        assert run("image-unpause", IMAGE) == ""
        assert [row[4] for row in rows("dib-image-list")] == ["ready"]


@pytest.mark.spec("CLI-9: image-status lists the image while a request is pending")
def test_image_status_follows_the_build(run, plain, builder):
    run("image-build", IMAGE)

    def state():
        return [
            (r["image"], r["build_request"])
            for r in json.loads(run("image-status", "--format", "json"))
        ]

    assert state() == [(IMAGE, "pending")]
    builder.begin()
    assert state() == [(IMAGE, "building")]
    builder.end()
    assert state() == [(IMAGE, None)]


# -- image-build --wait


def live(client):
    """The facade with a complete mirror, as the command has it."""
    zk = zk_module.ZooKeeper(client)
    assert zk.wait_synced(20)
    return zk


def test_wait_for_a_build(start, plain, builder):
    make_build(plain)  # an old one does not count
    process = start("image-build", IMAGE, "--wait")
    process.prints("no builder is registered")
    builder.register()
    process.prints("waiting for a builder")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    build = builder.begin()
    process.prints("root (expected: 10 min)")
    builder.write(phase="install")
    process.prints("install")
    builder.write(last_line="nothing new in plain lines")
    builder.end(
        formats=["qcow2", "raw"],
        sizes={"qcow2": 1 << 20, "raw": 3 << 30},
        duration=75.0,
        log=f"/l/{build}.log",
    )
    status, out, _ = process.end()
    assert status == 0
    assert (
        f"Built {IMAGE}-{build} in 1 min 15 s: qcow2 1.0 MiB, raw 3.0 GiB\nLog: "
        f"nb01:/l/{build}.log\n" in out
    )
    assert "\r" not in out and "nothing new" not in out and out.count("install") == 1


def test_wait_on_a_terminal(start, builder):
    builder.register()
    process = start("image-build", IMAGE, "--wait", terminal=True)
    process.prints("waiting")
    builder.begin()
    builder.write(phase="install", last_line="Unpacking linux-image " + "\u65e5" * 100)
    process.prints("install")
    builder.end()
    status, out, _ = process.end()
    assert status == 0
    drawn = [line for line in out.split("\r") if "install" in line]
    assert (
        drawn
        and "[----------------]   0%  install  " in drawn[0]
        and " s of 10 min  " in drawn[0]
        and "Unpacking" in drawn[0]
    )
    assert len(drawn[0].removeprefix("\x1b[2K")) <= 80, "it fits into a line"
    assert "\x1b[2KBuilt " in out


def test_wait_for_a_failure(start, plain, builder):
    builder.register()
    process = start("image-build", IMAGE, "--wait")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    build = builder.begin()
    process.prints("root")
    builder.end(
        "failed",
        reason="the command ended with exit code 3",
        exit_code=3,
        next_try=time.time() + 60,
    )
    status, out, _ = process.end()
    assert status == 1
    assert f"Failed {IMAGE}-{build}: the command ended with exit code 3 (exit code 3)" in out
    assert "The request remains; the builder retries in 5" in out
    assert plain.hasBuildRequest(IMAGE)


def test_a_failed_build_whose_record_was_deleted(start, plain, builder):
    process = start("image-build", IMAGE, "--wait", "--format", "json")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    build = builder.begin()
    builder.end("failed", remove=True, reason="no space", exit_code=1, log="/l/x")
    status, out, errors = process.end()
    value = json.loads(out)
    assert status == 1 and value["build"] == build and value["requested"] is True
    assert (value["state"], value["reason"], value["exit_code"], value["log"]) == (
        "failed",
        "no space",
        1,
        "/l/x",
    )
    assert "Failed" not in out and "Traceback" not in errors


def test_a_build_that_failed_before_anybody_looked(plain, builder, zk_chroot):
    after = plain.submitBuildRequest(IMAGE)
    build = builder.begin()
    builder.end("failed", remove=True, reason="no space", exit_code=1)
    follower = image_follow.BuildFollower(
        live(zk_chroot.connect()), IMAGE, after, image_follow.Display(io.StringIO())
    )
    outcome = follower.follow(20)
    assert (outcome.status, outcome.build, outcome.reason) == (1, build, "no space")


def test_a_build_that_is_ready_before_the_command_checks_is_not_requested_again(zk):
    asked = []

    def submit(image):
        asked.append(zk.submitBuildRequest(image))
        zk.storeBuild(image, zk_module.ImageBuild())
        zk.removeBuildRequest(image)
        return asked[-1]

    served = types.SimpleNamespace(submitBuildRequest=submit)
    after = image_commands._submit(types.SimpleNamespace(zk=served, kazoo=zk.kazoo_client), IMAGE)
    (build,) = zk.getBuilds(IMAGE)
    assert asked == [after] and after < build.stat.czxid


def test_a_request_that_is_served_immediately_has_the_number_of_its_creation(zk, monkeypatch):
    create = zk.kazoo_client.create

    def create_and_serve(path, **options):
        made = create(path, **options)
        zk.removeBuildRequest(IMAGE)
        return made

    monkeypatch.setattr(zk.kazoo_client, "create", create_and_serve)
    first = zk.submitBuildRequest(IMAGE)
    second = zk.submitBuildRequest(IMAGE)
    assert first is not None and second is not None and first < second


def test_a_build_that_vanishes(start, plain, builder):
    process = start("image-build", IMAGE, "--wait")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    builder.begin()
    process.prints("root")
    plain.progress.delete(BuildProgress("", builder.build))
    plain.deleteBuild(IMAGE, builder.build)
    status, out, _ = process.end()
    assert status == 1 and "vanished without a result" in out


def test_a_builder_of_an_earlier_release(start, plain):
    """No record of progress: the build's own record says enough."""
    process = start("image-build", IMAGE, "--wait")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    with plain.imageBuildLock(IMAGE, blocking=False):
        build = make_build(plain, state="building")
        process.prints("is being built")
        record = plain.getBuild(IMAGE, build)
        record.state = "ready"
        plain.storeBuild(IMAGE, record, build)
    status, out, _ = process.end()
    assert status == 0 and f"Built {IMAGE}-{build}: qcow2\n" in out


def test_a_build_that_runs_already_comes_first(start, plain, builder):
    builder.register()
    first = builder.begin()
    process = start("image-build", IMAGE, "--wait")
    process.prints(f"build {first} is running first (root)")
    other = Builder(plain)
    builder.write(state="ready")
    record = plain.getBuild(IMAGE, first)
    record.state = "ready"
    plain.storeBuild(IMAGE, record, first)
    builder.locks.close()
    second = other.begin()
    process.prints(second)
    other.end()
    status, out, _ = process.end()
    assert status == 0 and f"Built {IMAGE}-{second}" in out


def test_a_request_served_by_the_running_build(start, builder):
    """Builders of an earlier release remove every request at the end of a build."""
    builder.register()
    first = builder.begin()
    process = start("image-build", IMAGE, "--wait")
    process.prints("is running first")
    builder.end()
    status, out, _ = process.end()
    assert status == 0 and f"Built {IMAGE}-{first}" in out


def test_a_request_that_is_withdrawn(start, plain, builder):
    builder.register()
    process = start("image-build", IMAGE, "--wait")
    process.prints("waiting for a builder")
    plain.removeBuildRequest(IMAGE)
    status, out, _ = process.end()
    assert status == 1 and "the request was deleted" in out


def test_waiting_reports_pause_busy_builders_and_lost_ones(start, plain, builder):
    builder.register()
    other = Builder(plain)
    other.image = "other-image"
    other.begin()
    process = start("image-build", IMAGE, "--wait")
    process.prints("waiting for a free builder; running: other-image")
    plain.setImagePaused(IMAGE, True)
    process.prints("paused; it is built after image-unpause")
    plain.setImagePaused(IMAGE, False)
    other.end()
    builder.begin()
    process.prints("root")
    builder.locks.close()  # killed: the lock ends with the session
    process.prints("its builder has ended")
    builder.end("failed", reason="its builder was killed")
    assert process.end()[0] == 1


def test_time_out_of_image_build_has_status_3(start, plain, builder):
    process = start("image-build", IMAGE, "--wait", "--timeout", "0.5")
    status, out, _ = process.end()
    assert status == 3 and f"Not finished in time: {IMAGE}; the request remains" in out
    builder.begin()
    assert plain.hasBuildRequest(IMAGE)


def test_interrupted_image_build_leaves_the_build_running(start, plain, builder):
    process = start("image-build", IMAGE, "--wait")
    wait_for(lambda: plain.hasBuildRequest(IMAGE), what="the request")
    build = builder.begin()
    process.prints("root")
    process.process.send_signal(signal.SIGINT)
    status, _, errors = process.end()
    assert status == 130 and f"Stopped waiting; the build {IMAGE}-{build} continues" in errors
    assert plain.hasBuildRequest(IMAGE) and plain.getBuild(IMAGE, build).state == "building"


@pytest.mark.parametrize("args", [["--timeout", "0"], ["--timeout", "inf"], ["--timeout", "x"]])
def test_wrong_time_outs(console, args):
    result = console("image-build", IMAGE, "--wait", *args)
    assert result.returncode == 2 and "--timeout" in result.stderr


def test_time_out_without_wait(console, plain):
    result = console("image-build", IMAGE, "--timeout", "5")
    assert (
        result.returncode == 1 and result.stderr == "nodepool: error: --timeout requires --wait\n"
    )
    assert snapshot(plain.kazoo_client) == {}


@pytest.mark.spec("CLI-5: image-build of an image paused in the configuration: error, status 1")
def test_wait_refuses_as_before(console, plain):
    result = console("image-build", "paused-image", "--wait")
    assert (
        result.returncode == 1
        and "Skipping build request for image paused-image; paused" in result.stderr
    )
    assert snapshot(plain.kazoo_client) == {}


def test_following_costs_nothing_while_nothing_happens(plain, builder, zk_chroot):
    builder.register()
    zk = live(zk_chroot.connect())
    after = plain.submitBuildRequest(IMAGE)
    builder.begin()
    follower = image_follow.BuildFollower(zk, IMAGE, after, image_follow.Display(io.StringIO()))
    wait_for(lambda: zk.image_tree.data().build_locks.get(IMAGE, (0, False))[1], what="the build")
    wait_for(
        lambda: builder.build in zk.progress_tree.data().builds and follower._complete(),
        what="its progress",
    )
    follower._poll()
    before = [tree.reads for tree in zk.trees]
    for _ in range(100):
        assert follower._poll() is None
    assert [tree.reads for tree in zk.trees] == before


def expire(client):
    """End the client's session as the server does when it hears nothing for too long."""
    kazoo = client.client
    before = client.session_id
    other = KazooClient(
        hosts=",".join(f"{host}:{port}" for host, port in kazoo.hosts),
        client_id=kazoo.client_id,
        use_ssl=True,
        certfile=kazoo.certfile,
        keyfile=kazoo.keyfile,
        ca=kazoo.ca,
        check_hostname=False,
    )
    other.start(timeout=20)
    other.stop()
    other.close()
    wait_for(lambda: client.session_id not in (None, before), what="a new session")


def test_a_lost_session_does_not_end_the_waiting(plain, builder, zk_chroot):
    builder.register()
    client = zk_chroot.connect()
    after = plain.submitBuildRequest(IMAGE)
    out = io.StringIO()
    follower = image_follow.BuildFollower(live(client), IMAGE, after, image_follow.Display(out))
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(follower.follow(30)))
    thread.start()
    build = builder.begin()
    wait_for(lambda: "root" in out.getvalue(), what="the phase")
    expire(client)
    assert thread.is_alive()
    builder.end("failed", remove=True, reason="no space", exit_code=1)
    thread.join(20)
    assert [(o.status, o.build, o.reason) for o in outcomes] == [(1, build, "no space")]


def test_an_upload_continues_in_a_new_session(plain, zk_chroot):
    client = zk_chroot.connect()
    store = ProgressStore(client.client)
    upload = UploadProgress(IMAGE, "b" * 32, "p", "0000000001", bytes_total=1)
    store.write(upload)
    expire(client)
    wait_for(lambda: not plain.readProgress().uploads, what="the end of the old record")
    upload.bytes_total = 2
    store.write(upload)
    assert [u.bytes_total for u in plain.readProgress().uploads.values()] == [2]


def test_build_of_a_dead_builder_has_failed(start, run, rows, plain, builder):
    """Its record of progress outlives it; the lock shows that nobody builds."""
    builder.register()
    build = builder.begin(updated=1.0, tail=["unpacking"])
    log = start("image-log", IMAGE, "--follow")
    log.prints("unpacking")
    assert rows("dib-image-list", "--detail")[0][10] == ""
    builder.locks.close()
    reason = "its builder has ended, or has lost ZooKeeper, during the build"
    status, _, err = log.end()
    assert status == 0 and f"{IMAGE}-{build}: failed: {reason}" in err
    assert start("image-log", IMAGE, "--follow").end()[0] == 0
    assert rows("dib-image-list", "--detail")[0][10] == reason
    text = run("explain", "image", IMAGE)
    assert f"image {IMAGE}: the last build failed: {reason}" in text
    assert "start nodepool-builder on nb01" in text and "being built" not in text
    assert f"image {IMAGE}: the last build failed: {reason}" in run("problem-list")


def test_result_that_is_read_after_the_release_of_the_lock_is_shown(start, plain, builder):
    builder.register()
    build = builder.begin(tail=["unpacking"])
    log = start("image-log", IMAGE, "--follow")
    log.prints("unpacking")
    builder.locks.close()
    builder.end()
    status, _, err = log.end()
    assert status == 0 and f"{IMAGE}-{build}: ready" in err
