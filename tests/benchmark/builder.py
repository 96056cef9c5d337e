"""Builder scenarios: the program of either release, with the fake driver and a stand-in for
disk-image-create.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import yaml

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import CHANGED, CREATED
from nodepool.zk.connection.reply import Reply
from tests.benchmark.counting_proxy import PING, READS, CountingProxy
from tests.benchmark.harness import TICKS, Bench

Figures = dict[str, float]

IMAGES_ROOT = "/nodepool/images"
CREATE = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "builder" / "image-create"
RECORD = re.compile(
    r"^/nodepool/images/([^/]+)/builds/([0-9a-f]{32})(?:/providers/([^/]+)/images/(\d{10}))?$"
)
#: Build or upload: image, build id, provider, number.
Key = tuple[str, str, str | None, str | None]
#: Seconds that both releases get to come to rest, a cleanup pass and more.
SETTLE = 75.0


class ImageWatch:
    """Notes when the records of builds and uploads first had which state."""

    def __init__(self, settings: dict[str, Any], chroot: str) -> None:
        self.client = ZooKeeperClient(
            f"127.0.0.1:{settings['port']}{chroot}",
            timeout=30,
            tls_cert=settings["cert"],
            tls_key=settings["key"],
            tls_ca=settings["ca"],
        )
        self.client.connect(timeout=30)
        assert self.client.client is not None
        self.kazoo = self.client.client
        self.condition = threading.Condition()
        self.seen: dict[tuple[Key, str], float] = {}
        self.kazoo.ensure_path(IMAGES_ROOT)
        self.kazoo.add_persistent_watch(IMAGES_ROOT, self._event)
        armed = threading.Event()
        self.kazoo.arm_persistent_watch(IMAGES_ROOT, Reply(lambda *_a: armed.set()))
        if not armed.wait(10):
            raise TimeoutError("the watch is not set")

    def _event(self, kind: int, path: str) -> None:
        match = RECORD.match(path)
        if match is None or kind not in (CREATED, CHANGED):
            return
        now = time.monotonic()
        key: Key = (match[1], match[2], match[3], match[4])
        # Records begin as building or uploading, which the next write may hide from a read.
        if kind == CREATED:
            self._note(key, "uploading" if match[3] else "building", now)
        else:
            self.kazoo.get_async(path).rawlink(lambda answer: self._read(answer, key, now))

    def _read(self, answer: Any, key: Key, seen: float) -> None:
        if answer.successful() and answer.value[0]:
            self._note(key, json.loads(answer.value[0])["state"], seen)

    def _note(self, key: Key, state: str, seen: float) -> None:
        with self.condition:
            self.seen.setdefault((key, state), seen)
            self.condition.notify_all()

    def find(self, state: str, uploads: bool, known: set[str]) -> list[tuple[Key, float]]:
        """What had this state, without builds already known."""
        return [
            (key, seen)
            for (key, s), seen in list(self.seen.items())
            if s == state and (key[2] is not None) == uploads and key[1] not in known
        ]

    def wait(
        self,
        count: int,
        state: str,
        uploads: bool,
        known: set[str] | None = None,
        timeout: float = 300.0,
    ) -> list[tuple[Key, float]]:
        deadline = time.monotonic() + timeout
        with self.condition:
            while len(found := self.find(state, uploads, known or set())) < count:
                if not self.condition.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(
                        f"{len(found)} of {count} {'uploads' if uploads else 'builds'} are {state}"
                    )
        return found

    def builds(self) -> set[str]:
        with self.condition:
            return {key[1] for key, _ in self.seen}

    def close(self) -> None:
        self.client.disconnect()


class BuilderRun:
    """One chroot, one images-dir, the builder processes of one run."""

    def __init__(self, bench: Bench, images: int, providers: int, port: int | None = None) -> None:
        self.bench = bench
        self.program = pathlib.Path(bench.python).with_name("nodepool-builder")
        work, settings = bench.work, bench.server.settings
        (work / "images").mkdir()
        names = [f"image-{i}" for i in range(images)]
        self.config = work / "nodepool.yaml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "zookeeper-servers": [
                        {
                            "host": "127.0.0.1",
                            "port": port or settings["port"],
                            "chroot": bench.chroot,
                        }
                    ],
                    "zookeeper-tls": {
                        "ca": settings["ca"],
                        "cert": settings["cert"],
                        "key": settings["key"],
                    },
                    "images-dir": str(work / "images"),
                    "build-log-dir": str(work / "build-log"),
                    "labels": [],
                    "diskimages": [
                        {
                            "name": name,
                            "elements": ["vm"],
                            "formats": ["qcow2"],
                            "dib-cmd": str(CREATE),
                            "env-vars": {"TMPDIR": str(work)},
                        }
                        for name in names
                    ],
                    "providers": [
                        {
                            "name": f"fake-{i}",
                            "driver": "fake",
                            "cloud": "fake",
                            "region-name": "fake-region",
                            "rate": 0.0001,
                            "diskimages": [{"name": name} for name in names],
                            "pools": [
                                {
                                    "name": "main",
                                    "max-servers": 9,
                                    "availability-zones": ["az1"],
                                    "networks": ["net-name"],
                                    "labels": [],
                                }
                            ],
                        }
                        for i in range(providers)
                    ],
                }
            )
        )
        self.watch = ImageWatch(settings, bench.chroot)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """The program in the foreground, with the intervals it comes with."""
        with open(self.bench.work / "log" / "builder.log", "ab") as out:
            self.process = subprocess.Popen(
                [
                    str(self.program),
                    "-f",
                    "-c",
                    str(self.config),
                    "-p",
                    str(self.bench.work / "builder.pid"),
                    *options,
                ],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, **self.bench.environment},
            )

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        assert self.process is not None
        fields = (
            pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        )
        return (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(25)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def close(self) -> None:
        self.stop()
        self.watch.close()


def rest(bench: Bench, images: int = 20, providers: int = 5, seconds: float = 120.0) -> Figures:
    """Everything built and uploaded: operations and processor time of a builder that has nothing
    to do.
    """
    proxy = CountingProxy(bench.server.settings)
    run = BuilderRun(bench, images, providers, proxy.port)
    try:
        # Many workers get there sooner; what is measured are the usual numbers.
        run.start("--build-workers", "4", "--upload-workers", "20")
        run.watch.wait(images * providers, "ready", uploads=True, timeout=600)
        run.stop()
        run.start()
        time.sleep(SETTLE)
        builds = run.watch.builds()
        before, cpu, start = proxy.counts.copy(), run.cpu(), time.monotonic()
        time.sleep(seconds)
        taken = time.monotonic() - start
        counts, used = proxy.counts - before, run.cpu() - cpu
        if run.watch.builds() != builds or len(builds) != images:
            raise RuntimeError("it was not at rest: there are new builds")
    finally:
        run.close()
        proxy.close()
    minutes = taken / 60
    return {
        "builder at rest: ZooKeeper operations/min": sum(n for k, n in counts.items() if k != PING)
        / minutes,
        "builder at rest: reads/min": sum(n for k, n in counts.items() if k in READS) / minutes,
        "builder at rest: pings/min": counts[PING] / minutes,
        "builder at rest: CPU %": used / taken * 100,
    }


def request(bench: Bench, samples: int = 10) -> Figures:
    """One image, one provider: from a manual request to the build, its upload, and the image in
    the cloud.
    """
    run = BuilderRun(bench, 1, 1)
    started, uploading, done = [], [], []
    try:
        run.start()
        run.watch.wait(1, "ready", uploads=True)
        for _ in range(samples):
            # Anywhere in the periods of a program that polls every ten seconds.
            time.sleep(random.uniform(1.0, 11.0))
            known = run.watch.builds()
            asked = time.monotonic()
            run.watch.kazoo.create(f"{IMAGES_ROOT}/image-0/request-build")
            ((_, building),) = run.watch.wait(1, "building", False, known)
            ((_, built),) = run.watch.wait(1, "ready", False, known)
            ((_, sending),) = run.watch.wait(1, "uploading", True, known)
            ((_, ready),) = run.watch.wait(1, "ready", True, known)
            started.append(building - asked)
            uploading.append(sending - built)
            done.append(ready - asked)
    finally:
        run.close()
    return {
        **spread("builder: request to building", started),
        **spread("builder: built to uploading", uploading),
        **spread("builder: request to uploaded", done),
    }


def spread(name: str, seconds: list[float]) -> Figures:
    """Milliseconds."""
    return {
        f"{name}: {what} ms": value * 1000
        for what, value in (
            ("median", median(seconds)),
            ("min", min(seconds)),
            ("max", max(seconds)),
        )
    }


BUILDER_SCENARIOS: dict[str, Callable[[Bench], Figures]] = {
    "builder-rest": rest,
    "builder-request": request,
}
BUILDER_TARGETS: dict[str, tuple[float, bool]] = {
    "builder at rest: ZooKeeper operations/min": (60, True),
    "builder at rest: CPU %": (1, True),
    "builder: request to building: median ms": (200, True),
    "builder: built to uploading: median ms": (200, True),
}
