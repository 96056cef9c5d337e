"""Launcher processes, a node manager with real slivers, operators with commands, and jobs."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

from nodepool.nodemanager.client import programs
from tests.support.deadline import limit
from tests.support.faults.launcher import Bench, LauncherProcess
from tests.support.nodemanager.scene import NmDaemon

COMMAND = str(pathlib.Path(sys.executable).with_name("nodepool"))
LABEL = "small"
#: What can be disturbed by nothing but the end of the sliver: it waits for its input.
JOB = ["sh", "-c", "read word; echo got $word"]


class Job:
    """A program in a sliver of a node that is in use."""

    def __init__(self, nm: NmDaemon, node_id: str, record: dict[str, Any]) -> None:
        self.nm, self.node_id = nm, node_id
        self.sliver = str(record["external_id"]["sliver"])
        self._running = programs.start(nm.client, self.sliver, JOB)

    def finish(self) -> None:
        """Let the program end; it has not been disturbed."""
        with self._running as running:
            running.write(b"word\n", limit(20))
            assert running.read(limit(20)) == (programs.STDOUT, b"got word\n"), self.nm.log[-3000:]
            assert running.read(limit(20)) is None and running.status == 0


class SliverBench:
    """One node manager, and launchers whose only host it is."""

    def __init__(self, bench: Bench, nm: NmDaemon) -> None:
        self.bench, self.nm, self.zuul = bench, nm, bench.zuul

    def config(self, image: dict[str, Any] | None = None, **label: Any) -> pathlib.Path:
        """Return a configuration.

        :param image: of the slivers; it is built and uploaded. None: this host.
        """
        source = {"cloud-image": "host"} if image is None else {"diskimage": image["name"]}
        entry = {"name": LABEL, **source, "ram": 64, "cpus": 0.01, "disk": 1}
        provider = {
            "name": "metal",
            "driver": "nodemanager",
            "ssh-keys": self.nm.key.with_suffix(".pub").read_text(),
            "hosts": [{"name": "h0", "url": self.nm.client.url}],
            "cloud-images": [{"name": "host"}],
            "pools": [{"name": "main", "max-servers": 118, "labels": [entry]}],
            "diskimages": [] if image is None else [{"name": image["name"]}],
        }
        options = {
            "images-dir": str(self.bench.tmp / "images"),
            "build-log-dir": str(self.bench.tmp / "build-logs"),
            "elements-dir": ".",
            "diskimages": [] if image is None else [image],
        }
        return self.bench.config(provider, labels=[{"name": LABEL, **label}], **options)

    def start(self, config: pathlib.Path) -> LauncherProcess:
        self.path = str(config)
        return self.bench.start(config)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [COMMAND, "-c", self.path, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """Return what a command has printed; of one that fails, its error."""
        process = self.command(*arguments)
        out, err = process.communicate(timeout=limit(60))
        assert process.returncode == status, (process.returncode, out, err)
        return err if status else out

    def jobs(self, count: int) -> list[Job]:
        """Start jobs on nodes of one request each."""
        requests = [self.zuul.submit(LABEL) for _ in range(count)]
        self.zuul.wait_fulfilled(requests, timeout=limit(120))
        ids = [each for request in requests for each in self.zuul.accept(request)]
        records = self.zuul.read("nodes", ids)
        return [Job(self.nm, each, records[each]) for each in ids]

    def end(self, *jobs: Job) -> None:
        for job in jobs:
            job.finish()
            self.zuul.give_back(job.node_id)

    def slivers(self) -> set[str]:
        return {str(each["name"]) for each in self.nm.client.call("ListSlivers")}

    def ready(self) -> set[str]:
        """Return the slivers of ready nodes."""
        return {
            str(node["external_id"]["sliver"])
            for node in self.zuul.read("nodes").values()
            if node.get("state") == "ready" and node.get("allocated_to") is None
        }
