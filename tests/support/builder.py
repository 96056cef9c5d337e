"""A bench around whole builders: a stand-in for disk-image-create, fake clouds, real ZooKeeper."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests import REPOSITORY
from tests.conftest import Chroot, wait_for
from tests.support.launcher import CLOUDS

CREATE = REPOSITORY / "tests" / "fixtures" / "builder" / "image-create"
PERIOD = 0.2


class BuilderBench:
    """Configuration, builders and what they leave, of one test."""

    def __init__(
        self, chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        from nodepool.zk.zookeeper import ZooKeeper

        self.chroot = chroot
        self.monkeypatch = monkeypatch
        self.tmp = tmp_path
        self.images_dir = tmp_path / "images"
        self.images_dir.mkdir()
        self.log_dir = tmp_path / "build-logs"
        self.builders: list[Any] = []
        self.zk: Any = ZooKeeper(chroot.connect(), enable_cache=False)
        clouds = tmp_path / "clouds.yaml"
        clouds.write_text(yaml.safe_dump(CLOUDS))
        monkeypatch.delenv("OS_CLIENT_CONFIG_FILE", raising=False)
        monkeypatch.setattr("openstack.config.loader.CONFIG_FILES", [str(clouds)])

    # -- configuration

    def image(self, name: str = "fake-image", **options: Any) -> dict[str, Any]:
        """An entry of ``diskimages``."""
        return {
            "name": name,
            "elements": ["fedora", "vm"],
            "release": 21,
            "dib-cmd": str(CREATE),
            "env-vars": {"TMPDIR": str(self.tmp)},
            **options,
        }

    @staticmethod
    def provider(
        name: str = "fake-provider",
        images: list[Any] | tuple[Any, ...] = ("fake-image",),
        cloud: str = "fake",
        **options: Any,
    ) -> dict[str, Any]:
        """An entry of ``providers``: a fake cloud with these images."""
        return {
            "name": name,
            "cloud": cloud,
            "driver": "fake",
            "region-name": "fake-region",
            "rate": 0.0001,
            "diskimages": [
                i if isinstance(i, dict) else {"name": i, "meta": {"key": "value"}} for i in images
            ],
            "pools": [
                {
                    "name": "main",
                    "max-servers": 9,
                    "availability-zones": ["az1"],
                    "networks": ["net-name"],
                    "labels": [],
                }
            ],
            **options,
        }

    def config(
        self,
        images: list[dict[str, Any]],
        providers: list[dict[str, Any]] | tuple[Any, ...] = (),
        name: str = "nodepool.yaml",
        **top: Any,
    ) -> str:
        """Write a configuration file; returns its path."""
        values = {
            "images-dir": str(self.images_dir),
            "build-log-dir": str(self.log_dir),
            "build-log-retention": 1,
            "elements-dir": ".",
            "diskimages": images,
            "providers": list(providers),
            **top,
        }
        return self.chroot.config(values, name)

    # -- builders

    def make(
        self,
        config: str,
        secure: str | None = None,
        cleanup_interval: float = PERIOD,
        **options: Any,
    ) -> Any:
        from nodepool.builder import NodePoolBuilder

        builder = NodePoolBuilder(config, secure, **options)
        builder.build_interval = builder.upload_interval = PERIOD
        builder.cleanup_interval = cleanup_interval
        self.builders.append(builder)
        return builder

    def start(self, config: str, **options: Any) -> Any:
        builder = self.make(config, **options)
        builder.start()
        return builder

    def stop(self, builder: Any, finish: bool = False) -> None:
        self.builders.remove(builder)
        for worker in builder._upload_workers:
            worker.shutdown()
        for worker in builder._upload_workers:
            worker.join(20)
        builder.stop(finish)

    # -- what is there

    def builds(self, image: str = "fake-image", state: str | None = "ready") -> list[Any]:
        """Newest first."""
        return list(self.zk.getMostRecentBuilds(99, image, state))

    def uploads(
        self,
        image: str = "fake-image",
        provider: str = "fake-provider",
        state: str | None = "ready",
    ) -> list[Any]:
        found = []
        for build in self.zk.getBuildIds(image):
            found += self.zk.getUploads(image, build, provider, None if state is None else [state])
        return found

    def wait_builds(
        self,
        count: int,
        image: str = "fake-image",
        state: str | None = "ready",
        timeout: float = 20,
    ) -> list[Any]:
        wait_for(
            lambda: len(self.builds(image, state)) == count,
            timeout,
            f"{count} builds of {image} in state {state}",
        )
        return self.builds(image, state)

    def wait_build(
        self,
        image: str = "fake-image",
        besides: tuple[str, ...] = (),
        state: str = "ready",
        timeout: float = 20,
    ) -> Any:
        """A build that is none of these."""
        return wait_for(
            lambda: next((b for b in self.builds(image, state) if b.id not in besides), None),
            timeout,
            f"another build of {image} in state {state}",
        )

    def wait_upload(
        self,
        image: str = "fake-image",
        provider: str = "fake-provider",
        build: str | None = None,
        timeout: float = 20,
    ) -> Any:
        def found() -> Any:
            return next(
                (u for u in self.uploads(image, provider) if build in (None, u.build_id)), None
            )

        return wait_for(found, timeout, f"an upload of {image} to {provider}")

    def wait_gone(self, image: str, build_id: str, timeout: float = 20) -> None:
        """Record and files of a build."""
        wait_for(
            lambda: build_id not in self.zk.getBuildIds(image),
            timeout,
            f"record of build {build_id} gone",
        )
        wait_for(
            lambda: not self.files(image, build_id), timeout, f"files of build {build_id} gone"
        )

    def files(self, image: str = "fake-image", build_id: str = "") -> set[str]:
        """What of the image is in images-dir, without the common beginning ``<image>-``."""
        return {p.name[len(image) + 1 :] for p in self.images_dir.glob(f"{image}-{build_id}*")}

    def formats(self, image: str, build_id: str) -> set[str]:
        """Extensions of the image files of a build."""
        from nodepool.builder import DibImageFile

        return {
            f.extension
            for f in DibImageFile.from_image_id(str(self.images_dir), f"{image}-{build_id}")
        }

    def logs(self, image: str = "fake-image") -> set[str]:
        return {p.name[len(image) + 1 : -4] for p in self.log_dir.glob(f"{image}-*.log")}

    def log_text(self, image: str, build_id: str) -> str:
        return (self.log_dir / f"{image}-{build_id}.log").read_text()

    def progress(self, build_id: str) -> Any:
        from nodepool.zk.mirror.progress import ProgressStore

        return ProgressStore(self.zk.kazoo_client).read_build(build_id)

    def wait_progress(self, build_id: str, state: str) -> Any:
        """What is published about a build, once it says this state."""
        wait_for(
            lambda: (p := self.progress(build_id)) is not None and p.state == state,
            what=f"progress says {state}",
        )
        return self.progress(build_id)

    def cloud(self, builder: Any, provider: str = "fake-provider") -> Any:
        return builder._config.provider_managers[provider].adapter._getClient()

    def records(self, path: pathlib.Path) -> list[dict[str, Any]]:
        """What the stand-in wrote about its calls."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in path.read_text().splitlines()]
        return []


def make_bench(
    chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[BuilderBench]:
    bench = BuilderBench(chroot, monkeypatch, tmp_path)
    try:
        yield bench
    finally:
        for builder in list(bench.builders):
            bench.stop(builder)


def alive(pid: int) -> bool:
    """Whether a process lives and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


__all__ = ["CREATE", "PERIOD", "BuilderBench", "alive", "make_bench"]
