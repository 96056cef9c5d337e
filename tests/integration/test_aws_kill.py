"""SIGKILL of launcher and builder around each call of the aws driver; nothing stays in the account.

The proxy kills: before the call reaches AWS, or when AWS has done it and nobody knows.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.aws_cloud import AwsCloud
from tests.conftest import REPOSITORY, wait_for
from tests.fault_proxy import Action, Forward, Reply, Request
from tests.integration.aws_bench import cleanup, start
from tests.integration.builder_bench import BuilderBench
from tests.integration.launcher_bench import LauncherBench

pytestmark = pytest.mark.fault


class Daemon:
    """A real program; started again whenever the proxy has killed it."""

    def __init__(self, tmp: pathlib.Path, script: str, config: str, **environment: str) -> None:
        self.log = tmp / "daemon.log"
        faults = REPOSITORY / "tests" / "faults"
        self._command = [sys.executable, str(faults / script), "-f", "-c", config, "-p", str(tmp / "daemon.pid")]
        self._environment = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "NODEPOOL_FAULT_DRIVERS": str(faults / "drivers"), **environment}
        self._lock = threading.Lock()
        self.process = self._run()

    def _run(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=out, env=self._environment, cwd="/")

    def kill(self) -> None:
        with self._lock:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def again(self) -> None:
        with self._lock:
            if self.process.poll() is not None:
                self.process = self._run()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def killing(daemon: list[Daemon], when: str) -> Action:
    def act(request: Request, forward: Forward) -> Reply | None:
        if when == "after":
            forward(request)
        daemon[0].kill()
        return None

    return act


LAUNCHER_CASES = [
    *((operation, when) for operation in ("RunInstances", "TerminateInstances", "AllocateHosts", "ReleaseHosts")
      for when in ("before", "after")),
    ("DescribeInstances", "after"),
]  # fmt: skip


@pytest.mark.spec("issue: SIGKILL of the launcher at every step leaves nothing in the cloud after clean-up")
@pytest.mark.parametrize(("operation", "when"), LAUNCHER_CASES)
def test_launcher(bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path, operation: str, when: str) -> None:
    hosts = "Hosts" in operation
    label = aws.label(instance_type="c5.large", dedicated_host=True) if hosts else aws.label()
    config = bench.config({**aws.config(aws.provider(label, pool={"availability-zone": "us-east-1a"})), "zookeeper-timeout": 2.0})
    daemons: list[Daemon] = []
    fault = aws.proxy.fail(
        lambda r: r.operation == operation and ("Filter.1.Name" in r.params or operation != "DescribeInstances"),
        killing(daemons, when))
    daemon = Daemon(tmp_path, "serve.py", config, NODEPOOL_FAULT_CLEANUP="0.5")
    daemons.append(daemon)
    try:
        request = bench.submit("small")

        def fulfilled() -> bool:
            daemon.again()
            return bool(bench.zuul.request(request)["state"] == "fulfilled")

        wait_for(fulfilled, 40, "request fulfilled")
        bench.zuul.give_back(*bench.zuul.accept(request))

        def nothing_left() -> bool:
            daemon.again()
            return not bench.nodes() and not aws.instances() and not aws.hosts()

        wait_for(nothing_left, 40, "no node and no instance left")
        assert fault.used == 1
    finally:
        daemon.stop()


BUILDER_CASES = [
    *((method, operation, when)
      for method, operations in (
          ("snapshot", ("PUT /nodepool", "ImportSnapshot", "CreateTags", "RegisterImage")),
          ("image", ("ImportImage", "CreateTags")),
          ("ebs-direct", ("POST /snapshots", "PUT /snapshots", "RegisterImage")))
      for operation in operations for when in ("before", "after")),
]


@pytest.mark.slow
@pytest.mark.spec("issue: SIGKILL of the builder at every step leaves nothing in the cloud after clean-up")
@pytest.mark.parametrize(("method", "operation", "when"), BUILDER_CASES)
def test_builder(builders: BuilderBench, bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path, method: str,
                 operation: str, when: str) -> None:  # fmt: skip
    provider: dict[str, Any] = {
        **aws.provider(pool={"labels": []}, diskimages=[{"name": "fake-image", "import-method": method}]),
        "object-storage": {"bucket-name": "nodepool"}}
    config = builders.config([builders.image()], [provider], **{"zookeeper-timeout": 2.0})
    daemons: list[Daemon] = []
    aws.like.looks = 0  # imports are completed at the first look
    fault = aws.proxy.fail(lambda r: r.operation.startswith(operation), killing(daemons, when))
    daemon = Daemon(tmp_path, "serve_builder.py", config)
    daemons.append(daemon)
    try:
        def uploaded() -> list[Any]:
            daemon.again()
            return builders.uploads(provider="ec2-us") if fault.used else []

        (upload,) = wait_for(uploaded, 60, "an upload")
        wait_for(lambda: len(builders.uploads(provider="ec2-us", state=None)) == 1, 20, "only the finished record")
        start(bench, aws, object_storage={"bucket-name": "nodepool"})

        def left() -> tuple[list[str], int, list[str]]:
            cleanup(bench)
            return [each["ImageId"] for each in aws.images()], len(aws.snapshots()), aws.objects()

        wait_for(lambda: left() == ([upload.external_id], 1, []), 20, "only the finished upload is left")
    finally:
        daemon.stop()
