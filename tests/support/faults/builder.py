"""Real builder processes, clouds on disk that outlive them, and the counting of what is left."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kazoo.exceptions import NoNodeError

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.progress import BuildProgress, ProgressStore
from nodepool.zk.records import BUILDING, FAILED, READY
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.conftest import wait_for, zookeeper_server
from tests.support.faults.launcher import SESSION, DaemonProcess
from tests.support.launcher import CLOUDS
from tests.support.openstack.balky_cloud import DRIVERS, BalkyCloud

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = pathlib.Path(sys.executable).with_name("nodepool-builder")
#: Marks all processes of one bench.
MARK = "NODEPOOL_FAULT_BENCH"
#: Seconds within which everything must be as it should be, on a loaded machine.
DEADLINE = 40.0


class BuilderProcess(DaemonProcess):
    """The nodepool-builder program in the foreground, with a separate image directory."""

    def __init__(
        self,
        bench: BuilderBench,
        name: str,
        config: pathlib.Path,
        images_dir: pathlib.Path,
        *options: str,
        crash_at: str = "",
        plain: bool = False,
        **environment: str,
    ) -> None:
        self.name = name
        self.images_dir = images_dir
        self.log = bench.tmp / f"{name}.log"
        self.start_of_log = self.log.stat().st_size if self.log.exists() else 0
        command = [str(PROGRAM)] if plain else [sys.executable, str(HERE / "serve_builder.py")]
        env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "NODEPOOL_CRASH_AT": crash_at,
            MARK: bench.mark,
            "OS_CLIENT_CONFIG_FILE": str(bench.clouds),
            "TMPDIR": str(bench.scratch),
            **environment,
        }
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [*command, "-f", "-c", str(config), "-p", str(bench.tmp / f"{name}.pid"), *options],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=env,
            )

    def text(self) -> str:
        """What this process has logged."""
        with open(self.log, errors="replace") as file:
            file.seek(self.start_of_log)
            return file.read()

    def end(self, timeout: float) -> float:
        """Wait for the end; seconds it took."""
        began = time.monotonic()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} has not ended within {timeout:g} s:\n{self.text()[-3000:]}"
            ) from None
        return time.monotonic() - began

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 20.0) -> float:
        self.send(number)
        return self.end(timeout)


class BuilderBench:
    """One test: its chroot, its clouds, its builders; all that they start carries a mark."""

    def __init__(self, settings: dict[str, Any], tmp: pathlib.Path) -> None:
        self.settings = settings
        self.tmp = tmp
        tmp.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.chroot = f"/fault-{self.mark[:16]}"
        self.scratch = self._directory("scratch")
        self.hold_dir = self._directory("hold")
        self.records = tmp / "records"
        self.drivers = self._directory("drivers")
        (self.drivers / "balky").symlink_to(pathlib.Path(DRIVERS) / "balky")
        self.clouds = tmp / "clouds.yaml"
        self.clouds.write_text(yaml.safe_dump(CLOUDS))
        self.cloud = BalkyCloud(tmp, "p0")
        self.all_clouds = {"p0": self.cloud}
        self.builders: list[BuilderProcess] = []
        self.directories: set[pathlib.Path] = set()
        self.mounted: list[pathlib.Path] = []
        # This session outlives all that the builders go through.
        self.client = ZooKeeperClient(
            f"{settings['hosts']}{self.chroot}",
            timeout=60,
            tls_cert=settings["cert"],
            tls_key=settings["key"],
            tls_ca=settings["ca"],
        )
        self.client.connect(timeout=30)
        assert self.client.client is not None
        self.client.client.ensure_path("/")
        self.zk: Any = ZooKeeper(self.client, enable_cache=False)

    def _directory(self, name: str) -> pathlib.Path:
        path = self.tmp / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    # -- configuration

    def image(
        self, name: str = "i0", env: dict[str, str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """An entry of ``diskimages``; ``env`` for the stand-in, see image-create."""
        env = {"CREATE_HOLD": str(self.hold_dir), "CREATE_RECORD": str(self.records), **(env or {})}
        return {
            "name": name,
            "elements": ["fedora", "vm"],
            "dib-cmd": str(HERE / "image-create"),
            "env-vars": env,
            **options,
        }

    def config(
        self,
        name: str = "b0",
        images: list[dict[str, Any]] | None = None,
        providers: list[dict[str, Any]] | None = None,
        hosts: str | None = None,
        session: float = SESSION,
        images_dir: pathlib.Path | None = None,
        top: dict[str, Any] | None = None,
    ) -> pathlib.Path:
        """A configuration for the builder ``name``; its image directory is named after it."""
        images = [self.image()] if images is None else images
        host, port = (hosts or self.settings["hosts"]).rsplit(":", 1)
        if providers is None:
            providers = [self.cloud.provider([i["name"] for i in images])]
        values = {
            "zookeeper-servers": [{"host": host, "port": int(port), "chroot": self.chroot}],
            "zookeeper-tls": {k: self.settings[k] for k in ("ca", "cert", "key")},
            "zookeeper-timeout": session,
            "images-dir": str(images_dir or self._directory(f"images-{name}")),
            "elements-dir": ".",
            "build-log-dir": str(self.tmp / f"logs-{name}"),
            "build-log-retention": 50,
            "drivers-path": [str(self.drivers)],
            "diskimages": images,
            "providers": providers,
            **(top or {}),
        }
        path = self.tmp / f"{name}.yaml"
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump(values))
        new.replace(path)
        return path

    # -- builders

    def start(
        self,
        name: str = "b0",
        *options: str,
        wait: bool = True,
        config: pathlib.Path | None = None,
        crash_at: str = "",
        plain: bool = False,
        **environment: str,
    ) -> BuilderProcess:
        config = config or self.tmp / f"{name}.yaml"
        if not config.exists():
            self.config(name)
        images_dir = pathlib.Path(yaml.safe_load(config.read_text())["images-dir"])
        self.directories.add(images_dir)
        builder = BuilderProcess(
            self, name, config, images_dir, *options, crash_at=crash_at, plain=plain, **environment
        )
        self.builders.append(builder)
        if wait:

            def running() -> bool:
                assert builder.alive(), builder.text()[-3000:]
                return " is running, process " in builder.text()

            wait_for(running, DEADLINE, f"builder {name} runs")
        return builder

    def hold(self, where: str, image: str = "i0") -> pathlib.Path:
        """Let the next builds of the image wait ``before`` it is made or ``after``; remove the
        file to let them continue.
        """
        path = self.hold_dir / f"{image}.{where}"
        path.touch()
        return path

    def wait_begun(self, what: str = "begun", image: str = "i0") -> None:
        """Until the command is at work (``begun``) or has written its files (``made``)."""
        path = self.hold_dir / f"{image}.{what}"
        wait_for(path.exists, DEADLINE, f"command for {image} has {what}")
        path.unlink()

    def runs(self) -> list[dict[str, Any]]:
        """What the commands that came so far wrote about their calls.

        A kill can cut off a line in the middle, and the next one then follows it: what begins no
        line is not read.
        """
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.records.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line[max(line.rfind('{"arguments"'), 0) :]))
        return found

    # -- what is there

    def builds(self, image: str = "i0", state: str | None = READY) -> list[Any]:
        return list(self.zk.getMostRecentBuilds(99, image, state))

    def uploads(
        self, image: str = "i0", provider: str = "p0", state: str | None = READY
    ) -> list[Any]:
        found = []
        for build in self.zk.getBuildIds(image):
            found += self.zk.getUploads(image, build, provider, None if state is None else [state])
        return found

    def wait_build(
        self, image: str = "i0", state: str = READY, besides: tuple[str, ...] = ()
    ) -> Any:
        return wait_for(
            lambda: next((b for b in self.builds(image, state) if b.id not in besides), None),
            DEADLINE,
            f"a {state} build of {image}",
        )

    def wait_upload(self, image: str = "i0", provider: str = "p0", state: str = READY) -> Any:
        return wait_for(
            lambda: next(iter(self.uploads(image, provider, state)), None),
            DEADLINE,
            f"a {state} upload of {image} at {provider}",
        )

    def progress(self, build_id: str) -> BuildProgress | None:
        return ProgressStore(self.client.client).read_build(build_id)

    def wait_failed(self, build_id: str) -> BuildProgress:
        """What is published about a failed build."""

        def failed() -> BuildProgress | None:
            progress = self.progress(build_id)
            return progress if progress is not None and progress.state == FAILED else None

        found: BuildProgress = wait_for(failed, DEADLINE, f"build {build_id} listed as failed")
        return found

    # -- counting

    def processes(self) -> list[str]:
        """Processes of builds: with our mark, or at work in our directories; not the builders
        themselves.
        """
        own = {builder.process.pid for builder in self.builders} | {os.getpid()}
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) in own:
                continue
            try:
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
                ours = ours or any(
                    os.readlink(entry / link).startswith(str(self.scratch))
                    for link in ("cwd", "root")
                )
                if ours:
                    found.append(
                        f"{entry.name} "
                        f"{(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                    )
            except OSError:
                continue
        return found

    def mounts(self) -> list[str]:
        paths = [
            line.split()[4]
            for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        return [
            p for p in paths if p.startswith(f"{self.tmp}/") and pathlib.Path(p) not in self.mounted
        ]

    def loop_devices(self) -> list[str]:
        found = []
        for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                backing = path.read_text()
                if backing.startswith(f"{self.tmp}/"):
                    found.append(f"{path.parts[3]} {backing.strip()}")
        return found

    def left(self) -> list[str]:
        """Everything that is there without a meaning, when no work is under way."""
        found = [f"process {p}" for p in self.processes()] + [f"mount {m}" for m in self.mounts()]
        found += [f"loop device {d}" for d in self.loop_devices()]
        found += [f"temporary {p.name}" for p in self.scratch.iterdir()]
        data = self.zk.readImages(cached=False)
        builds = {f"{b.image_name}-{b.id}": b for b in data.builds}
        found += [f"build {key} is {b.state}" for key, b in builds.items() if b.state != READY]
        found += self._locks()
        for path in self.directories:
            found += [f"file {path.name}/{name}" for name in self._stray_files(path, builds)]
        known: Counter[str] = Counter()
        for upload in data.uploads:
            if upload.state != READY:
                found.append(
                    f"upload {upload.build_id} {upload.provider_name} {upload.id} is {upload.state}"
                )
            else:
                known[upload.external_id or ""] += 1
        found += [f"record of image {i} twice" for i, count in known.items() if count > 1]
        images = {i["id"] for cloud in self.all_clouds.values() for i in cloud.images()}
        found += [f"cloud image {i} without record" for i in images - set(known)]
        found += [f"upload {i} without image" for i in set(known) - images]
        progress = self.zk.readProgress(cached=False)
        found += [
            f"progress: {b.build} is being built"
            for b in progress.builds.values()
            if b.state == BUILDING
        ]
        found += [f"progress: upload of {u.build}" for u in progress.uploads.values()]
        return found

    def _locks(self) -> list[str]:
        kazoo = self.client.client
        assert kazoo is not None
        found = []
        for image in self.zk.getImageNames():
            directories = [f"/nodepool/images/{image}/builds/lock"]
            for build in self.zk.getBuildIds(image):
                directories += [f"/nodepool/images/{image}/builds/{build}/lock"]
                for provider in self.zk.getBuildProviders(image, build):
                    base = f"/nodepool/images/{image}/builds/{build}/providers/{provider}/images"
                    directories += [
                        f"{base}/lock",
                        *(
                            f"{base}/{n}/lock"
                            for n in self.zk.getImageUploadNumbers(image, build, provider)
                        ),
                    ]
            for directory in directories:
                with contextlib.suppress(NoNodeError):
                    found += [f"lock {directory}/{c}" for c in kazoo.get_children(directory)]
        return found

    def _stray_files(self, directory: pathlib.Path, builds: dict[str, Any]) -> list[str]:
        """What belongs to no ready build, and what a ready build should have and has not."""
        strays = []
        for path in directory.iterdir():
            if path.name in ("builder_id.txt", ".builds", ".uploads"):
                continue
            base = path.name.partition(".")[0]
            if base not in builds:
                strays.append(path.name)
            elif path.suffix == ".qcow2" and "part" in path.read_text()[:5]:
                strays.append(f"{path.name} (half-written)")
        strays += [
            f".builds/{p.name}" for p in (directory / ".builds").glob("*") if p.name != "lock"
        ]
        strays += [f".uploads/{p.name}" for p in (directory / ".uploads").glob("*")]
        identity = directory / "builder_id.txt"
        owner = identity.read_text() if identity.exists() else ""
        for base, build in builds.items():
            if build.builder_id == owner:
                wanted = {
                    f"{base}.{f}{end}" for f in build.formats for end in ("", ".md5", ".sha256")
                }
                strays += [
                    f"{name} is missing" for name in wanted if not (directory / name).exists()
                ]
        return strays

    def wait_clean(self, timeout: float = DEADLINE) -> None:
        """Until nothing is left that has no meaning."""
        left: list[str] = []

        def clean() -> bool:
            left[:] = self.left()
            return not left

        try:
            wait_for(clean, timeout, "everything cleaned")
        except AssertionError:
            logs = "\n".join(f"--- {b.name}\n{b.text()[-2500:]}" for b in self.builders)
            raise AssertionError(f"left after {timeout:g} s: {left}\n{logs}") from None

    def wait_served(self, *images: str, provider: str = "p0") -> None:
        """Until each image has a build and an upload, and nothing else is there."""
        for image in images or ("i0",):
            self.wait_upload(image, provider)
        self.wait_clean()

    # -- end

    def close(self) -> None:
        for builder in self.builders:
            with contextlib.suppress(ProcessLookupError):
                builder.send(signal.SIGCONT)
            builder.kill()
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        for path in [*reversed(self.mounts()), *map(str, self.mounted)]:
            subprocess.run(["umount", "-l", path], check=False, timeout=20, capture_output=True)
        for device in self.loop_devices():
            subprocess.run(
                ["losetup", "-d", f"/dev/{device.split()[0]}"],
                check=False,
                timeout=20,
                capture_output=True,
            )
        kazoo = self.client.client
        assert kazoo is not None
        for child in list(kazoo.get_children("/")):
            kazoo.delete(f"/{child}", recursive=True)
        self.client.disconnect()


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[BuilderBench]:
    made = BuilderBench(zookeeper_server(), tmp_path)
    try:
        yield made
    finally:
        made.close()


__all__ = ["DEADLINE", "BuilderBench", "BuilderProcess", "bench"]
