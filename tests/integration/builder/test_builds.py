"""Builds by a whole builder with a stand-in for disk-image-create (BLD-2, BLD-6, BLD-7, BLD-13,
BLD-21).
"""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.base.backoff import Backoff
from nodepool.builder import builder as module
from nodepool.zk.components import BuilderComponent
from nodepool.zk.records import BUILDING, FAILED, READY, ImageBuild
from tests.conftest import delete_tree, wait_for
from tests.support.builder import CREATE, PERIOD, BuilderBench, alive
from tests.support.deadline import limit
from tests.support.launcher import StatsdReceiver, expire_session

Env = dict[str, Any]


@pytest.mark.spec(
    "BLD-21: Start and immediate stop works; builder_id.txt then holds a canonical version-4 UUID"
)
def test_start_and_stop(builders: BuilderBench) -> None:
    config = builders.config([builders.image()])
    builder = builders.start(config)
    builders.stop(builder)
    text = (builders.images_dir / "builder_id.txt").read_text()
    assert str(uuid.UUID(text, version=4)) == text
    again = builders.start(config)
    assert again.state.builder_id == text
    with pytest.raises(RuntimeError, match="already running"):
        again.start()


@pytest.mark.spec("BLD-2: fail when there are no ZooKeeper servers or no images-dir")
def test_configuration_that_cannot_work(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    config = builders.config([builders.image()], **{"images-dir": None})
    with pytest.raises(RuntimeError, match="No images-dir specified in config"):
        builders.make(config).start()
    config = builders.config([builders.image()], **{"zookeeper-servers": []})
    with pytest.raises(RuntimeError, match="No ZooKeeper servers specified in config"):
        builders.make(config).start()
    config = builders.config([builders.image()], **{"images-dir": str(tmp_path / "absent")})
    with pytest.raises(Exception, match=f"images-dir.*{tmp_path}/absent"):
        builders.make(config).start()
    builders.builders.clear()


@pytest.mark.spec("BLD-2: component record with state running, removed at the stop")
def test_builder_is_registered_until_it_stops(builders: BuilderBench) -> None:
    builder = builders.start(builders.config([]))
    path = "/nodepool/components/builder"
    kazoo = builders.zk.kazoo_client
    (name,) = kazoo.get_children(path)
    assert b'"state": "running"' in kazoo.get(f"{path}/{name}")[0]
    builders.stop(builder)
    assert kazoo.get_children(path) == []


def break_connection(monkeypatch: pytest.MonkeyPatch, step: str, times: float) -> list[None]:
    """Let the connection break in a step of the start; return how often it did."""
    target: Any = BuilderComponent if step == "register" else module
    done, broken = getattr(target, step), list[None]()

    def interrupted(*args: object) -> None:
        if len(broken) < times:
            broken.append(None)
            raise ConnectionLoss
        done(*args)

    monkeypatch.setattr(target, step, interrupted)
    return broken


@pytest.mark.parametrize("step", ["register", "fail_interrupted"])
def test_start_continues_when_the_connection_is_back(
    builders: BuilderBench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(module, "START_PAUSE", 0.01)
    broken = break_connection(monkeypatch, step, 2)
    builder = builders.start(builders.config([]))
    assert len(broken) == 2 and builder.getReadiness() == (True, [])
    assert [one["state"] for one in builders.zk.getBuilders()] == ["running"]


def test_start_without_a_connection_logs_what_it_waits_for_until_it_is_canceled(
    builders: BuilderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = break_connection(monkeypatch, "register", math.inf)
    builder = builders.make(builders.config([]))
    errors: list[BaseException] = []

    def start() -> None:
        try:
            builder.start()
        except ConnectionLoss as error:
            errors.append(error)

    starting = threading.Thread(target=start, name="starting")
    starting.start()
    problem = "starting: cannot register: ConnectionLoss(); retrying"
    wait_for(lambda: problem in builder.getReadiness()[1], what="the problem")
    monkeypatch.setattr(module, "START_PAUSE", 3600)
    builder.cancel_start()
    starting.join(limit(20))
    assert broken and len(errors) == 1
    builder.stop()
    builders.builders.clear()


def test_images_are_built_again_after_the_store_was_emptied(builders: BuilderBench) -> None:
    builders.start(builders.config([builders.image()], [builders.provider()]))
    lost = builders.wait_build()
    builders.wait_upload()
    delete_tree(builders.zk.kazoo_client, "/nodepool")
    build = builders.wait_build(besides=(lost.id,))
    builders.wait_upload(build=build.id)
    wait_for(lambda: len(builders.zk.getBuilders()) == 1, what="the builder registered again")
    assert [b.id for b in builders.builds(state=None)] == [build.id]


@pytest.mark.spec(
    "BLD-21: Start with one provider and one image: build, file, log and upload appear without any "
    "request"
)
def test_build_and_upload(builders: BuilderBench) -> None:
    builders.start(builders.config([builders.image()], [builders.provider()]))
    upload = builders.wait_upload()
    (build,) = builders.builds()
    assert upload.build_id == build.id and upload.id == "0000000001" and upload.format == "qcow2"
    assert builders.files("fake-image", build.id) == {
        f"{build.id}.d",
        f"{build.id}.qcow2",
        f"{build.id}.qcow2.md5",
        f"{build.id}.qcow2.sha256",
    }
    assert builders.log_text("fake-image", build.id).endswith("Exit code: 0\n")
    assert (build.username, build.python_path, build.shell_type, build.formats) == (
        "zuul",
        "auto",
        None,
        ["qcow2"],
    )
    assert (build.builder, len(build.builder_id)) == (builders.builders[0].state.fqdn, 36)


def test_nothing_is_readable_for_strangers(builders: BuilderBench) -> None:
    builders.start(builders.config([builders.image()], [builders.provider()]))
    build = builders.wait_build()
    for path in [*builders.images_dir.glob(f"*{build.id}*"), *builders.log_dir.iterdir()]:
        assert path.stat().st_mode & 0o007 == 0, path


#: What disk-image-create does with its files at the end: some are written in images-dir, and a raw
#: one is moved there.
CONVERT = """#!/bin/bash
set -eu
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then output=$2; fi; shift; done
images=$(mktemp -d --tmpdir="$TMPDIR" dib_image.XXXXXXXX)
echo "2026-01-01 00:00:00.000 | + common-functions:mk_build_dir:48       :   TMP_IMAGE_DIR=$images"
closed='import os, sys; os.getxattr(sys.argv[1], "system.posix_acl_default")'
until python3 -c "$closed" "$images" 2> /dev/null; do sleep 0.02; done
mkdir -p "$output.d/dib-manifests"
echo secret > "$output.d/dib-manifests/dib_environment"
echo secret > "$images/image0.raw"
echo secret > "$output.qcow2-new"
sleep 0.3
mv "$output.qcow2-new" "$output.qcow2"
mv "$images/image0.raw" "$output.raw-new"
mv "$output.raw-new" "$output.raw"
for file in "$output.raw" "$output.qcow2"; do
  md5sum "$file" > "$file.md5"; sha256sum "$file" > "$file.sha256"
done
sleep 0.3
"""
#: Tries all the time to read what is in a directory, and prints what it could.
SPY = """
import os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
seen, told = set(), set()
print("looking", flush=True)
while True:
    for top, _folders, names in os.walk(sys.argv[1]):
        for name in names:
            path = os.path.join(top, name)
            try:
                os.close(os.open(path, os.O_RDONLY))
            except PermissionError:
                word = "saw"
            except FileNotFoundError:
                continue
            else:
                word = "READ"
            if (word, name) not in told:
                told.add((word, name))
                print(word, path, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as somebody else")
@pytest.mark.parametrize("temporary", ["same file system", "other file system"])
@pytest.mark.spec(
    "issue 10, F11: nobody else can read an image, from its first byte, and the umask of the "
    "command stays"
)
def test_strangers_read_nothing_during_a_build(
    builders: BuilderBench, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as top, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        os.chmod(top, 0o755)
        builders.images_dir = pathlib.Path(top, "images")
        builders.images_dir.mkdir(mode=0o755)
        convert = pathlib.Path(top, "convert")
        convert.write_text(CONVERT)
        convert.chmod(0o755)
        monkeypatch.setenv("TMPDIR", top if temporary == "same file system" else other)
        image = builders.image(
            **{"dib-cmd": str(convert), "formats": ["raw", "qcow2"], "env-vars": {}}
        )
        config = builders.config([image])
        spy = subprocess.Popen(
            [sys.executable, "-c", SPY, str(builders.images_dir)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert spy.stdout is not None and spy.stdout.readline() == "looking\n"
            builder = builders.start(config)
            build = builders.wait_build()
            builders.stop(builder)
        finally:
            spy.kill()
            told = spy.communicate(timeout=10)[0].splitlines()
        assert [line for line in told if line.startswith("READ") and "builder_id" not in line] == []
        for name in ("raw", "qcow2", "qcow2-new"):
            assert f"saw {builders.images_dir}/fake-image-{build.id}.{name}" in told
        assert (builders.images_dir / f"fake-image-{build.id}.raw").stat().st_mode & 0o777 == 0o640


@pytest.mark.spec("BLD-7: the exact command line and environment")
@pytest.mark.spec(
    "BLD-21: Inherited abstract images reach the command with elements in order and merged "
    "environment; "
    "DIB_RELEASE is the text 21 for an integer 21"
)
def test_command_gets_exact_arguments_and_environment(
    builders: BuilderBench, tmp_path: pathlib.Path
) -> None:
    record = tmp_path / "calls"
    base = {
        "name": "base",
        "abstract": True,
        "elements": ["a", "b"],
        "release": 21,
        "dib-cmd": str(CREATE),
        "env-vars": {
            "TMPDIR": str(tmp_path),
            "CREATE_RECORD": str(record),
            "OLD": "1",
            "BOTH": "1",
        },
    }
    image = {
        "name": "leaf",
        "parent": "base",
        "elements": ["c"],
        "formats": ["tar", "raw"],
        "env-vars": {"BOTH": "2", "NEW": "3"},
    }
    builders.start(builders.config([base, image], [builders.provider(images=["leaf"])]))
    build = builders.wait_build("leaf")
    (call,) = builders.records(record)
    output = f"{builders.images_dir}/leaf-{build.id}"
    assert call["arguments"] == [
        "-x",
        "-t",
        "qcow2,raw,tar",
        "--checksum",
        "--no-tmpfs",
        "--qemu-img-options",
        "compat=0.10",
        "-o",
        output,
        "a",
        "b",
        "c",
    ]
    environment = call["environment"]
    assert {
        key: environment.get(key)
        for key in (
            "DIB_RELEASE",
            "DIB_IMAGE_NAME",
            "DIB_IMAGE_FILENAME",
            "ELEMENTS_PATH",
            "OLD",
            "BOTH",
            "NEW",
            "TMPDIR",
        )
    } == {
        "DIB_RELEASE": "21",
        "DIB_IMAGE_NAME": "leaf",
        "DIB_IMAGE_FILENAME": output,
        "ELEMENTS_PATH": ".",
        "OLD": "1",
        "BOTH": "2",
        "NEW": "3",
        "TMPDIR": str(tmp_path),
    }
    assert environment["HOME"] == os.environ["HOME"]
    assert call["umask"] == 0o022


def test_private_temporary_directory(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    """Without a TMPDIR of the image, the build gets a directory that is removed with all that
    was left in it.
    """
    record = tmp_path / "calls"
    builders.monkeypatch.setenv("TMPDIR", str(tmp_path))
    builders.start(
        builders.config(
            [builders.image(formats=["tar"], **{"env-vars": {"CREATE_RECORD": str(record)}})]
        )
    )
    builders.wait_build()
    (call,) = builders.records(record)
    directory = pathlib.Path(call["environment"]["TMPDIR"])
    assert directory.parent == tmp_path
    wait_for(lambda: not directory.exists(), what="temporary directory gone")


@pytest.mark.spec(
    "BLD-21: Image only in formats: [tar], no provider: build with formats exactly tar, rc 0, size "
    "gauge, "
    "last_build and duration reported"
)
def test_formats_without_provider(builders: BuilderBench, statsd: StatsdReceiver) -> None:
    builders.start(builders.config([builders.image(formats=["tar"])]))
    build = builders.wait_build()
    assert build.formats == ["tar"]
    name = "nodepool.dib_image_build.fake-image"
    statsd.wait(f"{name}.status.rc", "0|g")
    size = 512 * (builders.images_dir / f"fake-image-{build.id}.tar").stat().st_blocks
    statsd.wait(f"{name}.tar.size", f"{size}|g")
    statsd.wait_any(f"{name}.status.last_build")
    statsd.wait_any(f"{name}.status.duration")
    for phase in ("starting", "root", "install"):
        statsd.wait_any(f"{name}.phase.{phase}")


@pytest.mark.spec(
    "BLD-21: Default cloud -> formats qcow2; vhd cloud -> vhd; size gauges per format"
)
@pytest.mark.spec(
    "BLD-21: Provider with a format different from the default builds and uploads that format"
)
@pytest.mark.parametrize(
    "clouds,formats",
    [(["fake"], ["qcow2"]), (["fake-vhd"], ["vhd"]), (["fake-vhd", "fake"], ["qcow2", "vhd"])],
)
def test_formats_of_providers(
    builders: BuilderBench, statsd: StatsdReceiver, clouds: list[str], formats: list[str]
) -> None:
    providers = [builders.provider(f"fake-{n}", cloud=cloud) for n, cloud in enumerate(clouds)]
    builders.start(builders.config([builders.image()], providers))
    build = builders.wait_build()
    assert build.formats == formats
    assert builders.formats("fake-image", build.id) == set(formats)
    uploaded = {builders.wait_upload(provider=p["name"]).format for p in providers}
    assert uploaded == set(formats)
    for fmt in formats:
        statsd.wait_any(f"nodepool.dib_image_build.fake-image.{fmt}.size")


@pytest.mark.spec("BLD-7.9: a format for which the tool makes no file (docker) is no failure")
def test_docker_makes_no_file(builders: BuilderBench) -> None:
    builders.start(builders.config([builders.image(formats=["docker"])]))
    assert builders.wait_build().formats == ["docker"]


# -- failures


@pytest.mark.spec("BLD-21: Build exceeding build-timeout ends failed, also when nothing is printed")
@pytest.mark.parametrize(
    "how",
    [
        {"CREATE_SLEEP": "3600"},
        {"CREATE_CHATTER": "1"},
        {"CREATE_SLEEP": "3600", "CREATE_DEAF": "1"},
    ],
)
def test_build_that_exceeds_its_timeout_fails(
    builders: BuilderBench, tmp_path: pathlib.Path, how: Env, statsd: StatsdReceiver
) -> None:
    children = tmp_path / "children"
    image = builders.image(formats=["tar"], **{"build-timeout": 1})
    image["env-vars"] |= {"CREATE_CHILDREN": str(children), **how}
    builders.start(builders.config([image]), cleanup_interval=0)
    before = time.monotonic()
    build = builders.wait_build(state=FAILED, timeout=30)
    took = time.monotonic() - before
    assert took < limit(4 if "CREATE_DEAF" not in how else 14)
    assert build.formats == [] and build.username == "zuul"
    wait_for(
        lambda: (
            builders.log_text("fake-image", build.id)
            .rstrip()
            .endswith("Build timeout of 1 seconds exceeded")
        )
    )
    statsd.wait("nodepool.dib_image_build.fake-image.status.rc", "1|g")
    assert builders.wait_progress(build.id, FAILED).reason == "build-timeout of 1 s exceeded"
    pids = [int(line) for line in children.read_text().split()]
    assert pids
    wait_for(lambda: not any(alive(pid) for pid in pids[:2]), what="children of the command gone")


def test_build_with_an_empty_file_fails_and_is_not_uploaded(builders: BuilderBench) -> None:
    image = builders.image()
    image["env-vars"]["CREATE_SIZE"] = "0"
    builders.start(builders.config([image], [builders.provider()]), cleanup_interval=0)
    build = builders.wait_build(state=FAILED)
    reason = builders.wait_progress(build.id, FAILED).reason
    assert reason == "the command ended with exit status 0, but wrote an empty file for qcow2"
    assert builders.uploads(state=None) == []


def test_empty_file_that_is_no_image_does_not_fail_the_build(builders: BuilderBench) -> None:
    image = builders.image()
    image["env-vars"]["CREATE_EXTRA"] = "done"
    builders.start(builders.config([image], [builders.provider()]), cleanup_interval=0)
    assert builders.wait_build(state=READY).formats == ["qcow2"]


def test_command_that_writes_nothing(builders: BuilderBench) -> None:
    image = builders.image()
    image["env-vars"]["CREATE_NOTHING"] = "1"
    builders.start(builders.config([image], [builders.provider()]), cleanup_interval=0)
    build = builders.wait_build(state=FAILED)
    builders.wait_progress(build.id, FAILED)
    progress = builders.progress(build.id)
    assert progress.exit_code == 0
    assert "exit status 0, but wrote no file for qcow2" in progress.reason


@pytest.mark.spec("BLD-7.10: cannot start the command -> record failed, like created")
def test_command_that_is_missing(builders: BuilderBench) -> None:
    broken = builders.image("broken", formats=["tar"], **{"dib-cmd": "/does/not/exist -v"})
    builders.start(builders.config([broken, builders.image(formats=["tar"])]), cleanup_interval=0)
    build = builders.wait_build("broken", state=FAILED)
    assert (build.username, build.formats) == (None, ["tar"])
    builders.wait_progress(build.id, FAILED)
    assert (
        "cannot start /does/not/exist: No such file or directory"
        in builders.progress(build.id).reason
    )
    builders.wait_build()


@pytest.mark.spec(
    "BLD-21: A failing image (exit status 127) gives a failed record; after the configuration is "
    "repaired "
    "the image builds and the failed record goes; rc gauge reported 127"
)
def test_failing_image_and_repair(builders: BuilderBench, statsd: StatsdReceiver) -> None:
    image = builders.image()
    image["env-vars"]["CREATE_STATUS"] = "127"
    builder = builders.start(builders.config([image], [builders.provider()]), cleanup_interval=2)
    failed = builders.wait_build(state=FAILED)
    statsd.wait("nodepool.dib_image_build.fake-image.status.rc", "127|g")
    assert "exit status 127: element not found" in builders.wait_progress(failed.id, FAILED).reason
    # It reads the mirror of the records.
    ready, details = wait_for(
        lambda: (found := builders.builders[0].getReadiness())[1] and found, what="a detail"
    )
    assert ready and any(
        "the last build failed: " in line and "element not found" in line for line in details
    ), details
    builder.state.build_backoff._backoff = Backoff(3600, 3600)  # only the repair can end that
    builders.config([builders.image()], [builders.provider()])
    builders.wait_build()
    wait_for(lambda: not builders.builds(state=FAILED), what="failed records gone")
    builders.wait_upload()
    assert builders.progress(failed.id).state == FAILED  # the reason stays for a while


def test_delay_of_a_failing_build_grows(builders: BuilderBench) -> None:
    image = builders.image(formats=["tar"])
    image["env-vars"]["CREATE_STATUS"] = "1"
    builder = builders.start(builders.config([image]), cleanup_interval=0)
    wait_for(lambda: len(builders.builds(state=FAILED)) == 3, what="three attempts")
    times = sorted(b.stat.ctime for b in builders.builds(state=FAILED))
    assert (
        times[1] - times[0] >= 1000 * PERIOD - 10 and times[2] - times[1] >= 2 * 1000 * PERIOD - 10
    )
    builder.state.build_backoff._backoff = Backoff(3600, 3600)
    builders.wait_builds(4, state=FAILED)
    count = len(builders.builds(state=FAILED))
    builders.zk.submitBuildRequest("fake-image")  # asks for an attempt now
    builders.wait_builds(count + 1, state=FAILED)
    assert builders.zk.hasBuildRequest("fake-image")
    builders.zk.submitBuildRequest("fake-image")  # and again
    builders.wait_builds(count + 2, state=FAILED)


@pytest.mark.spec(
    "BLD-21: Storing the result fails (session lost): all local files of that build are removed "
    "even without a cleanup worker"
)
def test_result_that_cannot_be_stored(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    block = tmp_path / "block"
    block.touch()
    image = builders.image(formats=["tar"])
    image["env-vars"]["CREATE_BLOCK"] = str(block)
    builder = builders.start(builders.config([image]), cleanup_interval=0)
    build = builders.wait_build(state=BUILDING)

    def refuse(*_arguments: Any) -> str:
        raise OSError("cannot be stored")

    builders.monkeypatch.setattr(builder.zk, "storeBuild", refuse)
    block.unlink()
    wait_for(lambda: builder._build_workers[0].run_in_work is None, what="end of the build")
    assert builders.files("fake-image", build.id) == set()
    builders.monkeypatch.undo()


@pytest.mark.spec(
    "BLD-21: While the build command is blocked, the record is building and carries the formats"
)
def test_record_while_building(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    block = tmp_path / "block"
    block.touch()
    image = builders.image(formats=["tar"])
    image["env-vars"]["CREATE_BLOCK"] = str(block)
    builders.start(builders.config([image], [builders.provider()]))
    build = builders.wait_build(state=BUILDING)
    assert build.formats == ["qcow2", "tar"]
    assert (build.username, build.python_path, build.shell_type) == (None, None, None)
    wait_for(
        lambda: builders.progress(build.id) and builders.progress(build.id).phase == "root",
        what="phase root",
    )
    progress = builders.progress(build.id)
    assert progress.running and progress.log.endswith(f"fake-image-{build.id}.log")
    block.unlink()
    builders.wait_build()
    builders.wait_progress(build.id, READY)
    assert set(builders.progress(build.id).sizes) == {"qcow2", "tar"}


@pytest.mark.parametrize(
    "built", ["another builder built it", "nobody else built it", "it was stored without an answer"]
)
def test_result_of_a_build_in_a_lost_session_is_stored_unless_another_builder_built_the_image(
    builders: BuilderBench, tmp_path: pathlib.Path, built: str
) -> None:
    block = tmp_path / "block"
    block.touch()
    image = builders.image(formats=["tar"])
    image["env-vars"]["CREATE_BLOCK"] = str(block)
    builder = builders.start(builders.config([image]), cleanup_interval=0)
    build = builders.wait_build(state=BUILDING)
    client = builder.state.zk.client
    session = client.session_id
    expire_session(builder)
    wait_for(
        lambda: client.session_id not in (None, session) and builder.session_usable.is_set(),
        30,
        "new session",
    )
    theirs = ImageBuild("fake-image")
    theirs.state, theirs.formats = READY, ["tar"]
    others = built == "another builder built it"
    if others:
        builders.zk.storeBuild("fake-image", theirs)
    elif built == "it was stored without an answer":
        build.state = READY
        builders.zk.storeBuild("fake-image", build, build.id)
    block.unlink()
    reason = wait_for(
        lambda: (progress := builders.progress(build.id)).ended and (progress.reason or "stored")
    )
    assert ("another builder has built the image since" in reason) is others
    assert [found.id for found in builders.builds()] == [theirs.id if others else build.id]
    assert bool(builders.files("fake-image", build.id)) is not others


def test_secrets_are_not_logged(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    secure = tmp_path / "secure.conf"
    secure.write_text(
        "diskimages:\n  - name: fake-image\n    env-vars:\n      CREATE_STATUS: '66'\n      "
        "PASSWORD: Building in\n"
    )
    builders.start(
        builders.config([builders.image(formats=["tar"])]), secure=str(secure), cleanup_interval=0
    )
    build = builders.wait_build(state=FAILED)
    wait_for(lambda: "Exit code: 66" in builders.log_text("fake-image", build.id))
    assert "Building in" not in builders.log_text("fake-image", build.id)
    assert "***" in builders.log_text("fake-image", build.id)


def test_not_enough_disk_space(builders: BuilderBench) -> None:
    builders.start(
        builders.config([builders.image(formats=["tar"])], **{"build-min-free": 10**9}),
        cleanup_interval=0,
    )
    build = builders.wait_build(state=FAILED)
    builders.wait_progress(build.id, FAILED)
    assert str(builders.images_dir) in builders.progress(build.id).reason
    assert "MiB" in builders.progress(build.id).reason


# -- rotation, requests, pauses


@pytest.mark.spec(
    "BLD-21: Newest build older than rebuild-age -> a new build; then exactly two ready builds; "
    "both logs exist (retention 1)"
)
@pytest.mark.spec(
    "BLD-21: A third one -> the oldest build's record, uploads, files and log are gone; two ready "
    "builds "
    "remain; the third is uploaded"
)
def test_old_builds_are_replaced_and_deleted(builders: BuilderBench) -> None:
    builder = builders.start(builders.config([builders.image()], [builders.provider()]))
    first = builders.wait_build()
    builders.wait_upload(build=first.id)

    def age(build: ImageBuild) -> None:
        build.state_time -= 86500  # type: ignore[operator]
        builder.zk.storeBuild("fake-image", build, build.id)

    age(first)
    second = builders.wait_build(besides=(first.id,))
    builders.wait_upload(build=second.id)
    assert {b.id for b in builders.builds()} == {first.id, second.id}
    assert builders.logs() == {first.id, second.id}
    age(second)
    third = builders.wait_build(besides=(first.id, second.id))
    builders.wait_upload(build=third.id)
    builders.wait_gone("fake-image", first.id)
    assert {b.id for b in builders.builds()} == {second.id, third.id}
    assert builders.logs() == {second.id, third.id}
    assert {u.build_id for u in builders.uploads()} == {second.id, third.id}


@pytest.mark.spec(
    "BLD-21: Manual request: second build appears, two ready builds, request gone; status shows it "
    "pending "
    "before and building while the lock is held"
)
def test_manual_request_causes_a_second_build(
    builders: BuilderBench, tmp_path: pathlib.Path
) -> None:
    from nodepool import status

    block = tmp_path / "block"
    image = builders.image()
    image["env-vars"]["CREATE_BLOCK"] = str(block)
    builder = builders.start(builders.config([image], [builders.provider()]))
    first = builders.wait_build()
    builders.wait_upload(build=first.id)
    block.touch()
    before = time.monotonic()
    builders.zk.submitBuildRequest("fake-image")
    second = builders.wait_build(besides=(first.id,), state=BUILDING)
    assert time.monotonic() - before < limit(1)
    assert status.image_status(builders.zk).rows[0]["build_request"] == "building"
    assert builders.zk.getBuildRequest("fake-image").pending is False
    block.unlink()
    builders.wait_upload(build=second.id)
    wait_for(lambda: not builders.zk.hasBuildRequest("fake-image"), what="request gone")
    assert {b.id for b in builders.builds()} == {first.id, second.id}
    builders.stop(builder)
    builders.zk.submitBuildRequest("fake-image")
    assert status.image_status(builders.zk).rows[0]["build_request"] == "pending"


def test_manual_requests_go_first(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    block = tmp_path / "block"
    block.touch()
    images = [builders.image(name, formats=["tar"]) for name in ("a", "b", "c")]
    images[0]["env-vars"] = {**images[0]["env-vars"], "CREATE_BLOCK": str(block)}
    builders.start(builders.config(images))
    builders.wait_build("a", state=BUILDING)
    builders.zk.submitBuildRequest("c")
    block.unlink()
    wait_for(
        lambda: (
            builders.builds("b") and builders.builds("c") and not builders.zk.hasBuildRequest("c")
        )
    )
    (b,), (c,) = builders.builds("b"), builders.builds("c")
    assert c.stat.ctime < b.stat.ctime


@pytest.mark.spec(
    "BLD-21: pause: true: no build; other images go on. Provider-level pause: built, not uploaded"
)
def test_paused_image_is_not_built(builders: BuilderBench) -> None:
    paused, other = builders.image("paused", pause=True), builders.image("other")
    provider = builders.provider(images=["paused", {"name": "other", "pause": True}])
    flagged = builders.image("flagged", formats=["tar"])
    builders.zk.setImagePaused("flagged", True)
    builder = builders.start(builders.config([paused, flagged, other], [provider]))
    builders.wait_build("other")
    builders.zk.submitBuildRequest("paused")
    builder._janitor._cleanup()
    assert builders.builds("paused", None) == builders.builds("flagged", None) == []
    assert builders.uploads("other", state=None) == []
    builders.zk.setImagePaused("flagged", False)
    builders.wait_build("flagged")
    assert builders.zk.hasBuildRequest("paused")


def test_two_builders_share_the_work(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    images = [builders.image(f"image{n}", formats=["tar"]) for n in range(6)]
    for image in images:
        image["env-vars"] = {**image["env-vars"], "CREATE_SLEEP": "0.2"}
    (tmp_path / "images2").mkdir()
    first = builders.make(builders.config(images))
    second = builders.make(
        builders.config(images, name="second.yaml", **{"images-dir": str(tmp_path / "images2")})
    )
    first.start()
    second.start()
    for image in images:
        builders.wait_build(image["name"])
    every = [b for image in images for b in builders.builds(image["name"], None)]
    assert len(every) == len(images)
    assert {b.builder_id for b in every} == {first.state.builder_id, second.state.builder_id}


@pytest.mark.spec("BLD-4.8: state_time decides what is newest")
def test_new_build_is_used_although_the_clock_of_the_last_builder_was_ahead(
    builders: BuilderBench, caplog: pytest.LogCaptureFixture
) -> None:
    builders.start(builders.config([builders.image()], [builders.provider()]))
    upload = builders.wait_upload()
    first = builders.wait_build()
    first.state_time += 3600
    builders.zk.storeBuild("fake-image", first, first.id)
    upload.state_time += 3600
    builders.zk.storeImageUpload("fake-image", first.id, "fake-provider", upload, upload.id)
    builders.zk.submitBuildRequest("fake-image")
    second = builders.wait_build(besides=(first.id,))
    builders.wait_upload(build=second.id)
    assert builders.builds()[0].id == second.id
    newest = builders.zk.getMostRecentImageUpload("fake-image", "fake-provider")
    assert newest.build_id == second.id
    assert f"Build {first.id} of fake-image has a time that is 3" in caplog.text


@pytest.mark.spec("BLD-6.3, BLD-9.2: builders that need different formats of an image")
def test_builders_whose_providers_need_different_formats_build_once_each(
    builders: BuilderBench, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "images2").mkdir()
    images = [builders.image(name) for name in ("fake-image", "sign-qcow2", "sign-raw")]
    both = [
        builders.start(
            builders.config(
                images,
                [builders.provider(fmt, ("fake-image", f"sign-{fmt}"), f"fake-{fmt}")],
                f"{fmt}.yaml",
                **{"images-dir": str(folder)},
            )
        )
        for fmt, folder in (("qcow2", builders.images_dir), ("raw", tmp_path / "images2"))
    ]
    for image in ("fake-image", "sign-{}"):
        for fmt in ("qcow2", "raw"):
            builders.wait_upload(image.format(fmt), fmt)
    # Passes of each builder that have seen all that.
    known = {fmt: builders.wait_build(f"sign-{fmt}") for fmt in ("qcow2", "raw")}
    for fmt in known:
        builders.zk.submitBuildRequest(f"sign-{fmt}")
    for fmt, build in known.items():
        builders.wait_build(f"sign-{fmt}", besides=(build.id,))
    made = builders.builds("fake-image", None)
    assert {(build.builder_id, *build.formats) for build in made} == {
        (builder.state.builder_id, fmt) for builder, fmt in zip(both, ("qcow2", "raw"), strict=True)
    }
    assert len(made) == 2


@pytest.mark.spec(
    "BLD-16: values are reloaded without restart; a bad file leaves the last good in force"
)
def test_invalid_reload_keeps_the_last_valid_configuration(builders: BuilderBench) -> None:
    path = pathlib.Path(builders.config([builders.image(formats=["tar"])]))
    builder = builders.start(str(path))
    builders.wait_build()
    good = path.read_text()
    path.write_text("diskimages: [")
    wait_for(lambda: builder.config_state.error is not None, what="bad file noticed")
    assert "fake-image" in builder._config.diskimages
    path.write_text(good.replace("formats:\n  - tar", "formats:\n  - raw\n  - tar"))
    wait_for(
        lambda: (
            builder.config_state.error is None
            and any(b.formats == ["raw", "tar"] for b in builders.builds())
        )
    )


def test_broken_records_stop_nothing(builders: BuilderBench) -> None:
    kazoo = builders.zk.kazoo_client
    kazoo.create("/nodepool/images/fake-image/builds/" + "0" * 32, b"{", makepath=True)
    kazoo.create("/nodepool/images/other/builds/" + "1" * 32, b"", makepath=True)
    builders.start(
        builders.config(
            [builders.image(), builders.image("other")],
            [builders.provider(images=["fake-image", "other"])],
        )
    )
    builders.wait_upload("fake-image")
    builders.wait_upload("other")
    wait_for(
        lambda: "1" * 32 not in kazoo.get_children("/nodepool/images/other/builds"),
        what="empty record removed",
    )
    assert kazoo.get("/nodepool/images/fake-image/builds/" + "0" * 32)[0] == b"{"
