"""The program and its commands as operators meet them: bad input, image commands, builder and
launcher together.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.builder import NodePoolBuilder
from nodepool.launcher import NodePool
from nodepool.zk.records import (
    DELETING,
    FAILED,
    READY,
    ImageBuild,
    ImageUpload,
    Node,
    NodeRequest,
    RecordError,
)
from tests.conftest import Chroot, wait_for
from tests.support.builder import CREATE, BuilderBench
from tests.support.launcher import CLOUDS, StatsdReceiver, Zuul
from tests.support.openstack.balky_cloud import DRIVERS, BalkyCloud

IMAGE = "fake-image"
BUILDER = pathlib.Path(sys.executable).with_name("nodepool-builder")
CONSOLE = pathlib.Path(sys.executable).with_name("nodepool")
#: Words in front of the program that take root's right to write everywhere away.
ORDINARY = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


class Program:
    """Real processes: one builder and the ``nodepool`` command."""

    def __init__(self, builders: BuilderBench, tmp: pathlib.Path) -> None:
        self.tmp = tmp
        self.log = tmp / "builder.log"
        (tmp / "real-clouds.yaml").write_text(yaml.safe_dump(CLOUDS))
        self.environment = {**os.environ, "OS_CLIENT_CONFIG_FILE": str(tmp / "real-clouds.yaml")}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, config: str, *prefix: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [*prefix, str(BUILDER), "-f", "-c", config, "-p", str(self.tmp / "builder.pid")],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd="/",
            )
        return self.process

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def refusal(self, config: str, *prefix: str) -> str:
        """What a builder says that ends immediately with status 1."""
        status = self.start(config, *prefix).wait(30)
        assert status == 1, self.text()
        lines = self.text().splitlines()
        assert len(lines) == 1, self.text()
        return lines[0]

    def command(self, config: str, *args: str, status: int = 0) -> str:
        """Both outputs of the ``nodepool`` command."""
        result = subprocess.run(
            [str(CONSOLE), "-c", config, *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.environment,
        )
        assert result.returncode == status, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout + result.stderr

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(25)
            finally:
                self.process.kill()
                self.process.wait(10)


@pytest.fixture
def program(builders: BuilderBench, tmp_path: pathlib.Path) -> Iterator[Program]:
    running = Program(builders, tmp_path)
    yield running
    running.stop()


# -- bad input


def bad_images(builders: BuilderBench, tmp: pathlib.Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Image name -> (entry, what the reason must contain)."""
    nonsense, script = tmp / "nonsense", tmp / "script"
    nonsense.write_bytes(b"\x01\x02")
    nonsense.chmod(0o755)
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)

    def entry(
        name: str,
        cmd: str = str(CREATE),
        elements: tuple[str, ...] = ("vm",),
        timeout: int = 60,
        **environment: str,
    ) -> dict[str, Any]:
        return builders.image(
            name,
            formats=["tar"],
            elements=list(elements),
            **{
                "dib-cmd": cmd,
                "build-timeout": timeout,
                "env-vars": {"TMPDIR": str(tmp), **environment},
            },
        )

    return {
        "no-element": (
            entry("no-element", "disk-image-create", ()),
            "exit status 1: ERROR: At least one distribution root",
        ),
        "wrong-element": (
            entry("wrong-element", "disk-image-create", ("no-such-thing", "vm")),
            "Element 'no-such-thing' not found",
        ),
        "missing": (
            entry("missing", "disk-image-kreate"),
            "cannot start disk-image-kreate: No such file or directory; install diskimage-builder "
            "on this host or",
        ),
        "nonsense": (
            entry("nonsense", str(nonsense)),
            f"cannot start {nonsense}: Exec format error; correct dib-cmd",
        ),
        "no-shell": (
            entry("no-shell", str(script)),
            "the interpreter named in its first line is missing",
        ),
        "no-right": (
            entry("no-right", "/etc/passwd"),
            "cannot start /etc/passwd: Permission denied; make it executable",
        ),
        "quotes": (entry("quotes", f"{CREATE} 'x"), "dib-cmd"),
        "chatter": (
            entry("chatter", timeout=1, CREATE_CHATTER="1"),
            "build-timeout of 1 s exceeded",
        ),
        "nothing": (
            entry("nothing", CREATE_NOTHING="1"),
            "exit status 0, but wrote no file for tar",
        ),
        "killed": (entry("killed", "sh -c 'kill -9 $$'"), "the command ended with signal 9"),
    }


@pytest.mark.spec(
    "issue 3: each bad image gives one clear error in record, log and command; all others go on"
)
def test_bad_image_fails_alone(
    builders: BuilderBench, program: Program, tmp_path: pathlib.Path
) -> None:
    bad = bad_images(builders, tmp_path)
    config = builders.config(
        [*(image for image, _ in bad.values()), builders.image(formats=["tar"])],
        [builders.provider()],
    )
    program.start(config)
    builders.wait_upload(timeout=60)
    for name, (_, text) in bad.items():
        build = builders.wait_build(name, state=FAILED, timeout=60)
        progress = builders.wait_progress(build.id, FAILED)
        assert text in progress.reason, name
        errors = [
            line for line in program.text().splitlines() if build.id in line and "failed: " in line
        ]
        assert len(errors) == 1 and progress.reason in errors[0] and progress.log in errors[0], (
            errors
        )
        # The log of the build says it, too, in the command's own words or ours.
        said = builders.log_text(name, build.id)
        assert any(
            words in said
            for words in (
                progress.reason,
                progress.last_line or "-",
                "Build timeout",
                "Exit code: -9",
            )
        )
        shown = program.command(config, "image-log", f"{name}-{build.id}")
        assert shown.strip()
    assert "Traceback" not in program.text()
    listing = program.command(config, "dib-image-list", "--detail")
    for name, (_, text) in bad.items():
        assert name in listing and text in listing
    answer = program.command(
        config, "image-build", "nothing", "--wait", "--timeout", "40", status=1
    )
    assert "wrote no file for tar" in answer and "its builder has ended" not in answer


@pytest.mark.spec("issue 3: a command that ignores TERM")
def test_command_that_ignores_term_is_killed(builders: BuilderBench, program: Program) -> None:
    deaf = builders.image("deaf", formats=["tar"], **{"build-timeout": 1})
    deaf["env-vars"].update(CREATE_SLEEP="3600", CREATE_DEAF="1")
    program.start(builders.config([deaf, builders.image(formats=["tar"])]))
    build = builders.wait_build("deaf", state=FAILED, timeout=40)
    assert builders.wait_progress(build.id, FAILED).reason == "build-timeout of 1 s exceeded"
    builders.wait_build(timeout=40)


@pytest.mark.spec(
    "CFG-4.3: images-dir must exist; issue 3: missing or not writable is one clear error"
)
def test_unusable_images_dir_is_one_clear_error(
    builders: BuilderBench, program: Program, tmp_path: pathlib.Path
) -> None:
    def refusal(*prefix: str, **top: Any) -> str:
        program.log.unlink(missing_ok=True)
        return program.refusal(builders.config([builders.image()], **top), *prefix)

    absent, file, closed = tmp_path / "absent", tmp_path / "file", tmp_path / "closed"
    file.touch()
    closed.mkdir(mode=0o555)
    assert f"images-dir {absent} does not exist; create it" in refusal(
        **{"images-dir": str(absent)}
    )
    assert f"images-dir {file} is not a directory" in refusal(**{"images-dir": str(file)})
    assert "No images-dir specified in config." in refusal(**{"images-dir": None})
    prefix = ORDINARY if os.geteuid() == 0 else []
    assert not prefix or shutil.which(prefix[0]), "util-linux is needed"
    assert (
        f"images-dir {closed} is not writable for user {os.geteuid()}: Permission denied"
        in refusal(*prefix, **{"images-dir": str(closed)})
    )


@pytest.mark.spec(
    "issue 3: images-dir or build-log-dir that vanishes or is closed later: failed builds with "
    "that reason"
)
def test_directories_fail_later(
    builders: BuilderBench, program: Program, tmp_path: pathlib.Path
) -> None:
    config = builders.config([builders.image(formats=["tar"])])
    program.start(config, *(ORDINARY if os.geteuid() == 0 else []))
    first = builders.wait_build()
    for directory, reason in (
        (builders.log_dir, "Permission denied; make it writable for the user of the builder"),
        (builders.images_dir, f"is not writable for user {os.geteuid()}: Permission denied"),
    ):
        directory.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            answer = program.command(
                config, "image-build", IMAGE, "--wait", "--timeout", "40", status=1
            )
        finally:
            directory.chmod(0o755)
        assert str(directory) in answer and reason in answer
        assert "Traceback" not in program.text()
    # The requests stay: with the right returned, they are served.
    builders.wait_build(besides=(first.id,), timeout=60)


@pytest.mark.spec(
    "issue 3: each bad image gives one clear error: no temporary directory can be made"
)
def test_no_temporary_directory(
    builders: BuilderBench, program: Program, tmp_path: pathlib.Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    config = builders.config([builders.image(formats=["tar"], **{"env-vars": {}})])
    program.environment["TMPDIR"] = str(closed)
    program.start(config, *(ORDINARY if os.geteuid() == 0 else []))
    build = builders.wait_build(state=FAILED)
    reason = builders.wait_progress(build.id, FAILED).reason
    assert (
        f"cannot create a temporary directory in {closed}: Permission denied; set TMPDIR" in reason
    )
    assert "internal" not in reason and "Traceback" not in program.text()


@pytest.mark.spec(
    "CFG-5.3: parent cycle: one clear error; a running builder keeps the last good configuration"
)
def test_parent_cycle_keeps_the_last_valid_configuration(
    builders: BuilderBench, program: Program
) -> None:
    cycle = [
        builders.image("a", formats=["tar"], parent="b"),
        builders.image("b", parent="a"),
        builders.image(formats=["tar"]),
    ]
    config = builders.config(cycle)
    assert "diskimage parents form a cycle: a -> b -> a" in program.refusal(config)
    assert "form a cycle" in program.command(config, "image-build", IMAGE, status=1)
    builders.config([builders.image(formats=["tar"])])
    program.start(config)
    first = builders.wait_build()
    builders.config(cycle)
    wait_for(
        lambda: "keeping the last valid one: diskimage parents form a cycle" in program.text(),
        what="clear error",
    )
    builders.zk.submitBuildRequest(IMAGE)
    builders.wait_build(besides=(first.id,))


BROKEN_BUILDS = {
    "0" * 32: b"{",
    "1" * 32: b"",
    "2" * 32: b'{"state": "ready", "state_time": "soon"}',
    "3" * 32: b"[]",
    "4" * 32: b'{"state": "no-such", "state_time": 1}',
    "5" * 32: b'{"state": "ready", "state_time": NaN}',
    "6" * 32: b"\xff\xfe",
    "7" * 32: b'{"state": "ready", "state_time": {}}',
    "8" * 32: b'{"formats": 5}',
}


@pytest.mark.spec("issue 3: broken JSON or an empty build znode: an error each, all goes on")
def test_broken_record_does_not_stop_the_builder(builders: BuilderBench, program: Program) -> None:
    config = builders.config(
        [builders.image(), builders.image("other")], [builders.provider(images=[IMAGE, "other"])]
    )
    kazoo = builders.zk.kazoo_client
    program.start(config)
    build = builders.wait_upload(IMAGE).build_id
    builders.wait_upload("other")
    container = f"/nodepool/images/{IMAGE}/builds/{build}/providers/fake-provider/images"
    for number, data in enumerate(BROKEN_BUILDS.values(), 50):
        kazoo.create(f"{container}/{number:010}", data)
    for build_id, data in BROKEN_BUILDS.items():
        kazoo.create(f"/nodepool/images/{IMAGE}/builds/{build_id}", data)
    for name in (IMAGE, "other"):
        known = {b.id for b in builders.builds(name)}
        assert f"Built {name}-" in program.command(
            config, "image-build", name, "--wait", "--timeout", "40"
        )
        new = builders.wait_build(name, besides=tuple(known))
        builders.wait_upload(name, build=new.id)
    text = program.text()
    assert "Traceback" not in text
    for build_id in ("0" * 32, "2" * 32, "3" * 32, "4" * 32, "5" * 32, "6" * 32, "7" * 32):
        # Once by the mirror; the builder checks again with the lock held before it builds.
        said = [
            line
            for line in text.splitlines()
            if f"Ignoring /nodepool/images/{IMAGE}/builds/{build_id}: " in line
        ]
        assert (
            len([line for line in said if "nodepool.zk.cache.event" in line]) == 1
            and len(said) <= 2
        ), said
    for command in ("dib-image-list", "image-list", "image-status"):
        assert IMAGE in program.command(config, command)


@pytest.mark.spec("ZK-11: corrupt records read as none: what everybody sorts by must be a time")
@pytest.mark.parametrize("record", [ImageBuild, ImageUpload, Node, NodeRequest])
def test_state_time_is_a_time(record: Any) -> None:
    for good in (None, 0, 1.5, 1_800_000_000):
        assert record.fromDict({"state": None, "state_time": good}).state_time == good
    for bad in ("1", [], {}, float("nan"), float("inf"), 10**400):
        with pytest.raises(RecordError, match="state_time"):
            record.fromDict({"state": None, "state_time": bad})


@pytest.mark.spec(
    "issue 3: provider gone from the configuration during the upload: one clear error, no image "
    "stays"
)
def test_provider_removed_during_upload(
    builders: BuilderBench, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, other = BalkyCloud(tmp_path, "gone"), BalkyCloud(tmp_path, "other")
    gone.do("upload-blocks")
    top = {"drivers-path": [DRIVERS]}
    builder = builders.start(
        builders.config([builders.image()], [gone.provider(), other.provider()], **top)
    )
    wait_for(gone.images, what="image in the cloud")
    builders.config([builders.image()], [other.provider()], **top)
    wait_for(lambda: "gone" not in builder._config.providers, what="new configuration")
    gone.stop_doing("upload-blocks")
    wait_for(lambda: not gone.images(), what="image deleted again")
    wait_for(
        lambda: "provider gone was removed from the configuration during the upload" in caplog.text,
        what="clear error",
    )
    builders.wait_upload(provider="other")


# -- commands alongside a running builder


@pytest.mark.spec(
    "BLD-21: Pausing via command shows paused for the image's builds; unpausing likewise"
)
@pytest.mark.spec(
    "CLI-9: image-build of a normal image makes a second ready build; of one paused in the "
    "configuration it refuses and leaves no build"
)
@pytest.mark.spec(
    "CLI-9: image-delete with a real upload: its record disappears while a builder runs"
)
@pytest.mark.spec(
    "CLI-9: dib-image-delete removes record and files, also without the manifest directory"
)
def test_image_commands_work_with_a_running_builder(
    builders: BuilderBench, program: Program
) -> None:
    images = [builders.image(), builders.image("asleep", pause=True)]
    config = builders.config(images, [builders.provider(images=[IMAGE, "asleep"])])
    program.start(config)
    first = builders.wait_upload()

    program.command(config, "image-build", IMAGE)
    second = builders.wait_upload(build=builders.wait_build(besides=(first.build_id,)).id)
    assert {b.id for b in builders.builds()} == {first.build_id, second.build_id}
    wait_for(lambda: not builders.zk.hasBuildRequest(IMAGE), what="request gone")
    assert "paused" in program.command(config, "image-build", "asleep", status=1)
    assert not builders.zk.getBuildIds("asleep")

    program.command(config, "image-pause", IMAGE)
    program.command(config, "image-pause", IMAGE)
    states = {
        row["state"]
        for row in json.loads(program.command(config, "dib-image-list", "--format", "json"))
    }
    assert states == {"paused"}

    program.command(
        config,
        "image-delete",
        "--provider",
        "fake-provider",
        "--image",
        IMAGE,
        "--build-id",
        second.build_id,
        "--upload-id",
        second.id,
    )
    wait_for(
        lambda: (
            second.id
            not in [u.id for u in builders.uploads(state=None) if u.build_id == second.build_id]
        ),
        what="upload gone",
    )
    for build_id, manifest in ((second.build_id, True), (first.build_id, False)):
        if not manifest:
            shutil.rmtree(builders.images_dir / f"{IMAGE}-{build_id}.d")
        program.command(config, "dib-image-delete", f"{IMAGE}-{build_id}")
        builders.wait_gone(IMAGE, build_id)

    program.command(config, "image-unpause", IMAGE)
    program.command(config, "image-unpause", IMAGE)
    builders.wait_build(besides=(first.build_id, second.build_id))
    assert '"ready"' in program.command(config, "dib-image-list", "--format", "json")


@pytest.mark.spec(
    "BLD-21: Export, wipe, import: identical tree; later uploads and builds get fresh ids"
)
def test_export_wipe_import(
    builders: BuilderBench, program: Program, tmp_path: pathlib.Path
) -> None:
    config = builders.config([builders.image()], [builders.provider()])
    program.start(config)
    upload = builders.wait_upload()
    program.stop()

    def tree() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        waiting = ["/nodepool/images"]
        while waiting:
            path = waiting.pop()
            if not path.endswith("/lock"):
                found[path] = kazoo.get(path)[0]
                waiting += [f"{path}/{child}" for child in kazoo.get_children(path)]
        return found

    kazoo = builders.zk.kazoo_client
    before = tree()
    program.command(config, "export-image-data", str(tmp_path / "data.json"))
    kazoo.delete("/nodepool", recursive=True)
    program.command(config, "import-image-data", str(tmp_path / "data.json"))
    assert tree() == before
    program.start(config)
    program.command(
        config,
        "image-delete",
        "--provider",
        "fake-provider",
        "--image",
        IMAGE,
        "--build-id",
        upload.build_id,
        "--upload-id",
        upload.id,
    )
    again = wait_for(
        lambda: next((u for u in builders.uploads() if u.id != upload.id), None),
        what="uploaded again",
    )
    assert (again.build_id, again.id) == (upload.build_id, "0000000003")
    builders.zk.submitBuildRequest(IMAGE)
    assert builders.wait_build(besides=(upload.build_id,)).id != upload.build_id


# -- with other parts


@pytest.mark.spec(
    "CFG-17: An env-var given only in the secure file appears in that image's env_vars, and the "
    "image still "
    "builds and uploads with user zuul"
)
def test_secure_env_var(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    secure, record = tmp_path / "secure.conf", tmp_path / "calls"
    secure.write_text(
        yaml.safe_dump(
            {
                "diskimages": [
                    {
                        "name": IMAGE,
                        "env-vars": {"REG_PASSWORD": "secret", "CREATE_RECORD": str(record)},
                    }
                ]
            }
        )
    )
    builders.start(builders.config([builders.image()], [builders.provider()]), secure=str(secure))
    assert builders.wait_upload().username == "zuul"
    (call,) = builders.records(record)
    assert call["environment"]["REG_PASSWORD"] == "secret"


@pytest.mark.spec(
    "DRV-14.27: Removing an image from a provider's configuration deletes its uploads there and "
    "then the build"
)
def test_image_leaves_a_provider(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    cloud = BalkyCloud(tmp_path)
    top = {"drivers-path": [DRIVERS]}
    both = [builders.image(), builders.image("other")]
    builders.start(builders.config(both, [cloud.provider([IMAGE, "other"])], **top))
    upload = builders.wait_upload(provider="balky")
    builders.wait_upload("other", "balky")
    builders.config(both[1:], [cloud.provider(["other"])], **top)
    builders.wait_gone(IMAGE, upload.build_id)
    wait_for(
        lambda: [i["name"].rsplit("-", 1)[0] for i in cloud.images()] == ["other"],
        what="only the other image",
    )
    assert builders.uploads("other", "balky", state=READY)


@pytest.mark.spec(
    "DRV-14.3: the builder uploads only to the one with image management, and does not touch the "
    "former"
)
def test_driver_without_images_is_not_touched(builders: BuilderBench) -> None:
    static = {"name": "static", "driver": "static", "pools": [{"name": "main", "nodes": []}]}
    builder = builders.start(builders.config([builders.image()], [static, builders.provider()]))
    build = builders.wait_upload().build_id
    assert builders.zk.getBuildProviders(IMAGE, build) == ["fake-provider"]
    assert "static" not in builder._config.provider_managers


@pytest.mark.spec(
    "BLD-21: With a driver whose uploads always fail for one provider, nodes still come from the "
    "other"
)
def test_nodes_while_uploads_fail(
    builders: BuilderBench, tmp_path: pathlib.Path, zk_chroot: Chroot
) -> None:
    broken = BalkyCloud(tmp_path, "broken")
    broken.do("upload-fails")
    labels = [{"name": "small", "diskimage": IMAGE, "min-ram": 1}]
    pools = [
        {
            "name": "main",
            "max-servers": 9,
            "availability-zones": ["az1"],
            "networks": ["net-name"],
            "labels": labels,
        }
    ]
    providers = [broken.provider(pools=pools), builders.provider("fake-good", pools=pools)]
    config = builders.config(
        [builders.image()],
        providers,
        labels=[{"name": "small"}],
        webapp={"port": 0},
        **{"drivers-path": [DRIVERS]},
    )
    builders.start(config, cleanup_interval=0)
    builders.wait_upload(provider="fake-good")
    wait_for(lambda: builders.uploads(provider="broken", state=FAILED), what="failed upload")
    zuul = Zuul(zk_chroot.connect().client)
    launcher = NodePool(None, config)
    launcher.start()
    try:
        request = zuul.submit("small")
        wait_for(lambda: (zuul.request(request) or {}).get("state") == "fulfilled", 30, "node")
        node = builders.zk.getNode((zuul.request(request) or {})["nodes"][0])
        assert node.provider == "fake-good"
    finally:
        launcher.stop()
    assert not builders.uploads(provider="broken", state=READY)
    assert not builders.uploads(provider="broken", state=DELETING)


@pytest.mark.spec(
    "CLI-7.1: values of duration (ms) and last_build (UNIX time); 9: builder states 0 at rest"
)
def test_metrics_at_rest(builders: BuilderBench, statsd: StatsdReceiver) -> None:
    started = time.time()
    builder = builders.start(builders.config([builders.image()], [builders.provider()]))
    builders.wait_upload()
    prefix, image = (
        f"nodepool.builder.{builder.state.fqdn}",
        "nodepool.dib_image_build.fake-image.status",
    )
    for name in (
        f"{prefix}.image.fake-image.build.state",
        f"{prefix}.image.fake-image.provider.fake-provider.upload.state",
        f"{prefix}.current_builds",
        f"{prefix}.current_uploads",
        "nodepool.image_build_requests",
        "nodepool.image.fake-image.image_build_requests",
    ):
        statsd.wait(name, "0|g")
    last_build, kind = statsd.wait_any(f"{image}.last_build").split("|")
    assert kind == "g" and int(started) <= int(last_build) <= time.time()
    duration, kind = statsd.wait_any(f"{image}.duration").split("|")
    assert kind == "ms" and 0 < float(duration) < (time.time() - started) * 1000


@pytest.mark.spec("BLD-1: names and defaults that tools rely on")
def test_builder_has_names_and_defaults_that_tools_use() -> None:
    from nodepool import builder as module

    builder = NodePoolBuilder("nodepool.yaml")
    assert (builder.build_interval, builder.upload_interval, builder.cleanup_interval) == (
        10,
        10,
        60,
    )
    assert (
        builder._build_workers == [] and builder._upload_workers == [] and builder._janitor is None
    )
    for name in (
        "DibImageFile",
        "CleanupWorker",
        "BUILD_PROCESS_POLL_TIMEOUT",
        "SUSPEND_WAIT_TIME",
        "removeDibItem",
    ):
        assert hasattr(module, name), name
    assert callable(module.CleanupWorker.deleteLocalBuild)
