"""Logs of builds, export and import, alien images: the commands against a real ZooKeeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from kazoo.exceptions import NoNodeError

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import context
from nodepool.cmd.commands.context import CommandError
from nodepool.cmd.commands.images.log import for_terminal
from nodepool.driver import lifecycle
from nodepool.zk import paths
from nodepool.zk.mirror.progress import BuildProgress, UploadFailure
from nodepool.zk.zookeeper import ZooKeeper
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
from tests.integration.cli.test_images import IMAGE, progress, start

# -- image-log


@pytest.fixture
def log_file(tmp_path):
    path = tmp_path / f"{IMAGE}-{'b' * 32}.log"
    path.write_text("".join(f"line {n}\n" for n in range(1, 201)))
    return path


@pytest.fixture
def building(plain):
    """The builder that holds the lock; without it, the build has failed."""
    with plain.imageBuildLock(IMAGE, blocking=False):
        yield plain.progress


def test_log_from_the_file(run, plain, log_file):
    plain.progress.write(progress(state="ready", log=str(log_file), tail=["not this"]))
    assert run("image-log", IMAGE) == log_file.read_text()
    assert run("image-log", f"{IMAGE}-{'b' * 32}", "--lines", "2") == "line 199\nline 200\n"
    assert run("image-log", IMAGE, "-n", "0") == ""
    assert run("image-log", IMAGE, "-n", "1000") == log_file.read_text()
    with log_file.open("a") as stream:
        stream.write("x" * 200000 + "\nno newline")
    assert run("image-log", IMAGE, "-n", "2") == "x" * 200000 + "\nno newline"
    assert run("image-log", IMAGE, "--follow", "-n", "1") == "no newline"


def test_log_of_the_running_build_first(run, building):
    now = time.time()
    building.write(progress("1" * 32, state="building", started=now - 100, tail=["running"]))
    building.write(progress("2" * 32, state="failed", started=now, tail=["failed"]))
    assert run("image-log", IMAGE) == "running\n"
    assert run("image-log", f"{IMAGE}-{'2' * 32}") == "failed\n"
    building.delete(BuildProgress("", "1" * 32))
    building.write(progress("3" * 32, state="ready", started=now - 50, tail=["older"]))
    assert run("image-log", IMAGE) == "failed\n"


def test_log_on_another_host(console, plain):
    plain.progress.write(
        progress(state="failed", log=f"/nowhere/{'b' * 32}.log", tail=["a", "b", "c"])
    )
    result = console("image-log", IMAGE, "--lines", "2")
    assert (result.returncode, result.stdout) == (0, "b\nc\n")
    assert f"The log file is on nb01: /nowhere/{'b' * 32}.log" in result.stderr


def test_log_path_of_something_else(run, plain, tmp_path):
    """A record in ZooKeeper cannot make the command print any file of this machine."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    link = tmp_path / f"{'b' * 32}.log"
    link.symlink_to(secret)
    fifo = tmp_path / f"fifo-{'b' * 32}.log"
    os.mkfifo(fifo)
    for path in (secret, link, fifo, tmp_path):
        plain.progress.write(progress(state="ready", log=str(path), tail=["tail"]))
        assert run("image-log", IMAGE) == "tail\n"


@pytest.mark.parametrize("name", ["nothing", "a/b"])
def test_log_of_an_unknown_build_is_an_error(console, plain, name):
    result = console("image-log", name)
    assert (
        result.returncode == 1
        and f"no build of {name} is known; see dib-image-list --detail" in result.stderr
    )


def test_log_of_a_builder_of_an_earlier_release(console, plain):
    build = make_build(plain)
    for name in (IMAGE, f"{IMAGE}-{build}"):
        result = console("image-log", name)
        assert result.returncode == 1 and f"no log of {name}" in result.stderr


def test_follow_the_file(start, building, log_file):
    record = progress(state="building", log=str(log_file))
    building.write(record)
    process = start("image-log", IMAGE, "--follow", "--lines", "1")
    process.prints("line 200\n")
    with log_file.open("a") as stream:
        for number in range(3):
            stream.write(f"new {number}\n")
            stream.flush()
            process.prints(f"new {number}\n", 3)
        stream.write("Exit code: 0\n")
    record.state = "ready"
    building.write(record)
    status, out, errors = process.end()
    assert (status, out) == (0, "line 200\nnew 0\nnew 1\nnew 2\nExit code: 0\n")
    assert f"{IMAGE}-{'b' * 32}: ready" in errors


def test_follow_the_tail(start, building):
    record = progress(state="building", tail=["1", "2"])
    building.write(record)
    process = start("image-log", IMAGE, "--follow")
    process.prints("2\n")
    for tail, shown in ((["2", "3"], "3\n"), (["x", "y"], "[...]\nx\ny\n")):
        record.tail = tail
        building.write(record)
        process.prints(shown, 5)
    record.state, record.reason = "failed", "no space"
    building.write(record)
    status, out, errors = process.end()
    assert (status, out) == (0, "1\n2\n3\n[...]\nx\ny\n") and "failed: no space" in errors


def test_following_ends_when_the_record_goes(start, building, log_file):
    building.write(progress(state="building", log=str(log_file)))
    process = start("image-log", IMAGE, "-f", "-n", "1")
    process.prints("line 200")
    building.delete(BuildProgress("", "b" * 32))
    status, _, errors = process.end()
    assert status == 0 and "Nothing is known of" in errors


def test_log_into_head(config, plain, log_file):
    log_file.write_text("line\n" * 1_000_000)
    plain.progress.write(progress(state="ready", log=str(log_file)))
    command = (
        f"{sys.executable} -m nodepool.cmd.nodepoolcmd -c {config} image-log {IMAGE} | head "
        f"-n 1; exit ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "line\n", "")


# -- export and import


@pytest.mark.spec("BLD-18: export: mode 0600, JSON object of path -> text")
def test_export_to_a_new_and_to_an_empty_file(run, plain, tmp_path):
    build = make_build(plain)
    number = make_upload(plain, build)
    run("image-pause", IMAGE)
    path = tmp_path / "export.json"
    out = run("export-image-data", str(path), "--format", "json")
    assert json.loads(out) == {"path": str(path), "builds": 1, "uploads": 1, "paused": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    records = json.loads(path.read_text())
    assert sorted(records) == sorted(
        [
            f"{paths.image(IMAGE)}/pause",
            paths.build(IMAGE, build),
            paths.upload(IMAGE, build, "p", number),
        ]
    )
    path.write_text("")
    assert run("export-image-data", str(path)) == ""
    assert json.loads(path.read_text()) == records
    assert sorted(os.listdir(tmp_path)) == ["export.json", "nodepool.yaml"]


def test_export_refuses_an_existing_file(console, plain, tmp_path):
    make_build(plain)
    path = tmp_path / "export.json"
    path.write_text("precious")
    result = console("export-image-data", str(path))
    assert (
        result.returncode == 1 and f"{path} exists" in result.stderr and "--force" in result.stderr
    )
    assert path.read_text() == "precious"
    assert console("export-image-data", "--force", str(path)).returncode == 0
    assert len(json.loads(path.read_text())) == 1
    assert "is not a file" in console("export-image-data", "--force", str(tmp_path)).stderr
    assert sorted(os.listdir(tmp_path)) == ["export.json", "nodepool.yaml"]


def test_export_keeps_a_file_created_while_the_records_were_read(
    config, plain, tmp_path, monkeypatch
):
    path = tmp_path / "export.json"
    original = ZooKeeper.exportImageData

    def slow(zk):
        path.write_text("somebody else's")
        return original(zk)

    monkeypatch.setattr(ZooKeeper, "exportImageData", slow)
    with pytest.raises(CommandError, match="--force"):
        nodepoolcmd.main(["-c", config, "export-image-data", str(path)])
    assert path.read_text() == "somebody else's" and sorted(os.listdir(tmp_path)) == [
        "export.json",
        "nodepool.yaml",
    ]


def test_export_leaves_out_what_is_no_record(run, plain, tmp_path, caplog):
    build = make_build(plain)
    kazoo = plain.kazoo_client
    kazoo.create(f"{paths.uploads(IMAGE, build, 'p')}/stray", b"x", makepath=True)
    kazoo.create(paths.build(IMAGE, "binary"), b"\xff\xfe")
    path = tmp_path / "export.json"
    run("export-image-data", str(path))
    assert list(json.loads(path.read_text())) == [paths.build(IMAGE, build)]
    assert caplog.text.count("Ignoring ") == 2
    assert run("import-image-data", str(path)) == ""


@pytest.mark.spec("BLD-18: import overwrites existing nodes, leaves others alone")
def test_import_reports_what_it_did(run, plain, tmp_path):
    build = make_build(plain)
    path = tmp_path / "export.json"
    run("export-image-data", str(path))
    other = make_build(plain)
    record = plain.getBuild(IMAGE, build)
    record.state = "deleting"
    plain.storeBuild(IMAGE, record, build)
    assert json.loads(run("import-image-data", str(path), "--format", "json"))["builds"] == 1
    assert (
        plain.getBuild(IMAGE, build).state == "ready" and plain.getBuild(IMAGE, other) is not None
    )
    with pytest.raises(NoNodeError):
        plain.kazoo_client.get("/nodepool/image-progress")


@pytest.mark.parametrize("content", [b"\xff\xfe", b""])
def test_import_of_no_text(console, plain, tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    result = console("import-image-data", str(path))
    assert (
        result.returncode == 1 and str(path) in result.stderr and "Traceback" not in result.stderr
    )
    assert snapshot(plain.kazoo_client) == {}


@pytest.mark.spec("CLI-9: after erase P --force nothing of P is left")
def test_erase_takes_failed_uploads_along(run, plain):
    for provider in ("p", "q"):
        plain.progress.write(UploadFailure(IMAGE, provider, reason="quota"))
    run("erase", "p", "--force")
    assert [failure.provider for failure in plain.readProgress().failures.values()] == ["q"]


# -- alien images


class Manager:
    def __init__(self, adapter):
        self.adapter = adapter

    def start(self, zk):
        pass

    stop = join = lambda self: None


def test_aliens_of_clouds_that_list_resources(rows, plain, monkeypatch, caplog):
    ours = {"nodepool_build_id": "b", "Name": "noble-1"}
    resources = [
        SimpleNamespace(id="ami-1", type="ami", metadata=ours),
        SimpleNamespace(id="snap-1", type="snapshot", metadata=ours),
        SimpleNamespace(id="ami-2", type="ami", metadata={}),
        SimpleNamespace(id="ami-3", type="ami", metadata=ours),
    ]
    make_upload(plain, make_build(plain), external_id="ami-3")
    slow = threading.Event()
    adapters = {
        "p": SimpleNamespace(listResources=lambda: resources),
        "q": SimpleNamespace(listImages=lambda: slow.wait(30) and []),
        "r": SimpleNamespace(),
    }
    original = context.load_config

    def load(*args, **options):
        result = original(*args, **options)
        result.providers = {
            name: SimpleNamespace(name=name, manage_images=True, diskimages={IMAGE: None})
            for name in adapters
        }
        return result

    monkeypatch.setattr(context, "load_config", load)
    monkeypatch.setattr(
        lifecycle, "get_provider", lambda provider: Manager(adapters[provider.name])
    )
    monkeypatch.setattr("nodepool.cmd.commands.aliens.LIST_TIMEOUT", 1.0)
    try:
        assert rows("alien-image-list") == [["p", "noble-1", "ami-1"]]
    finally:
        slow.set()
    assert "Exception listing alien images for q: no answer within 1 s" in caplog.text
    assert "Exception listing alien images for r: the driver of r cannot list images" in caplog.text


def test_log_on_a_terminal_has_no_control_characters() -> None:
    assert for_terminal(b"a\x1b[2J\xc2\x9b1m\x07\x7f\tb\r\n") == b"a?[2J?1m??\tb\r\n"
