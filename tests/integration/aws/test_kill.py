"""SIGKILL of launcher and builder around each call of the aws driver; nothing stays in the account.

The proxy kills: before the call reaches AWS, or when AWS has done it and nobody knows.
"""

from __future__ import annotations

import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import cleanup, start
from tests.support.builder import BuilderBench
from tests.support.deadline import limit
from tests.support.fault_proxy import Request, hang
from tests.support.kill import Daemon, killing
from tests.support.launcher import LauncherBench

pytestmark = pytest.mark.fault


LAUNCHER_CALLS = {
    "instance": ("RunInstances", "DescribeInstances", "TerminateInstances"),
    "host": ("AllocateHosts", "RunInstances", "TerminateInstances", "ReleaseHosts"),
}


def matches(operation: str) -> Callable[[Request], bool]:
    # It polls what is waited for, not lists of the region.
    return lambda r: (
        r.operation.startswith(operation)
        and (operation != "DescribeInstances" or "Filter.1.Name" in r.params)
    )


@pytest.mark.spec(
    "issue: SIGKILL of the launcher at every step leaves nothing in the cloud after clean-up"
)
@pytest.mark.parametrize("kind", LAUNCHER_CALLS)
def test_killed_launcher_leaves_nothing_in_the_cloud(
    bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path, kind: str
) -> None:
    label = (
        aws.label(instance_type="c5.large", dedicated_host=True) if kind == "host" else aws.label()
    )
    config = bench.config(
        {
            **aws.config(aws.provider(label, pool={"availability-zone": "us-east-1a"})),
            "zookeeper-timeout": 2.0,
        }
    )
    daemons: list[Daemon] = []
    faults = [
        aws.proxy.fail(matches(operation), killing(daemons, when))
        for operation in LAUNCHER_CALLS[kind]
        for when in ("before", "after")
    ]
    daemon = Daemon(tmp_path, "serve.py", config, NODEPOOL_FAULT_CLEANUP="0.5")
    daemons.append(daemon)
    try:
        request = bench.submit("small")

        def fulfilled() -> bool:
            daemon.again()
            return bool(bench.zuul.request(request)["state"] == "fulfilled")

        wait_for(fulfilled, 60, "request fulfilled")
        bench.zuul.give_back(*bench.zuul.accept(request))

        def nothing_left() -> bool:
            daemon.again()
            return not bench.nodes() and not aws.instances() and not aws.hosts()

        wait_for(nothing_left, 60, "no node and no instance left")
        assert [fault.used for fault in faults] == [1] * len(faults)
    finally:
        daemon.stop()


@pytest.mark.spec(
    "issue: SIGKILL of the builder leaves nothing, not even parts of an object that no list shows"
)
def test_parts_of_an_upload(
    builders: BuilderBench, bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path
) -> None:
    def parts() -> list[str]:
        return [
            upload["Key"]
            for upload in aws.s3.list_multipart_uploads(Bucket="nodepool").get("Uploads") or []
        ]

    provider: dict[str, Any] = {
        **aws.provider(pool={"labels": []}, diskimages=[{"name": "fake-image"}]),
        "object-storage": {"bucket-name": "nodepool"},
    }
    image = builders.image()
    image["env-vars"]["CREATE_SIZE"] = str(20 << 20)
    config = builders.config([image], [provider], **{"zookeeper-timeout": 2.0})
    daemons: list[Daemon] = []
    aws.like.looks = 0
    killed = aws.proxy.fail(lambda r: "partNumber=2" in r.path, killing(daemons, "after"))
    daemon = Daemon(tmp_path, "serve_builder.py", config)
    daemons.append(daemon)
    try:
        wait_for(lambda: daemon.process.poll() is not None, 60, "killed")
        assert killed.used == 1
        (key,) = parts()
        # Of others: in the same second, with the same beginning of the name, of the same image.
        name = key.removesuffix(".raw")
        others = [f"{name}.raw.part", f"{name}0.raw", "fake-image-1600000000.raw", "backup"]
        for other in others:
            aws.s3.create_multipart_upload(Bucket="nodepool", Key=other)
        assert set(parts()) == {key, *others}
        daemon.again()
        wait_for(
            lambda: builders.uploads(provider="ec2-us"), 60, "it is uploaded by the next start"
        )
        wait_for(lambda: set(parts()) == set(others), 30, "the parts are removed, and only they")
        assert aws.objects() == []
    finally:
        daemon.stop()


STOP_LIMIT = 2.0
"""Seconds from SIGTERM to the end of the process while AWS does not answer."""


def stop_in_time(daemon: Daemon) -> None:
    started = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    took = time.monotonic() - started
    assert took <= limit(STOP_LIMIT), f"{took:.1f} s"


@pytest.mark.spec(
    "CLI-2: TERM is time-limited; issue: an instance whose creation is unclear is found"
)
def test_an_orderly_stop_while_amazon_hangs(
    bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path
) -> None:
    """Nothing answers: no launch ends, nor do the questions for quota and leaks. What comes
    later is removed.
    """
    config = bench.config({**aws.config(aws.provider()), "zookeeper-timeout": 2.0})
    gate = threading.Event()
    daemon = Daemon(tmp_path, "serve.py", config, NODEPOOL_FAULT_CLEANUP="0.5")
    try:
        hanging = aws.proxy.fail(
            "RunInstances", hang(gate, lambda request, forward: forward(request)), times=1
        )
        everything = aws.proxy.fail(lambda _r: hanging.used > 0, hang(gate), times=float("inf"))
        request = bench.submit("small")
        wait_for(lambda: hanging.used > 0, 20, "the launch hangs")
        wait_for(lambda: everything.used > 0, 20, "the clean-up hangs")
        stop_in_time(daemon)
        assert "These threads have not ended" not in daemon.log.read_text()
        gate.set()
        wait_for(aws.instances, 10, "the launch comes through after all")
        aws.proxy.heal()
        bench.zuul.cancel(request)
        daemon.again()
        wait_for(
            lambda: not bench.nodes() and not aws.instances(), 30, "no node and no instance left"
        )
    finally:
        gate.set()
        daemon.kill()


@pytest.mark.spec("CLI-2: TERM is time-limited")
def test_an_orderly_stop_while_a_provider_starts(
    bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path
) -> None:
    fleet = {"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}
    config = bench.config(aws.config(aws.provider(aws.label(fleet=fleet))))
    gate = threading.Event()
    hanging = aws.proxy.fail(lambda _r: True, hang(gate), times=float("inf"))
    daemon = Daemon(tmp_path, "serve.py", config)
    try:
        wait_for(lambda: hanging.used > 0, 20, "the preparation of templates hangs")
        stop_in_time(daemon)
    finally:
        gate.set()
        daemon.kill()


@pytest.mark.spec("BLD-2: uploads are not waited for; exit in seconds")
@pytest.mark.parametrize("method", ["snapshot", "ebs-direct"])
def test_an_orderly_stop_of_the_builder_while_amazon_hangs(
    builders: BuilderBench, bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path, method: str
) -> None:
    provider: dict[str, Any] = {
        **aws.provider(
            pool={"labels": []}, diskimages=[{"name": "fake-image", "import-method": method}]
        ),
        "object-storage": {"bucket-name": "nodepool"},
    }
    config = builders.config([builders.image()], [provider])
    gate = threading.Event()
    calls = {"snapshot": "PUT /nodepool", "ebs-direct": "PUT /snapshots"}
    hanging = aws.proxy.fail(matches(calls[method]), hang(gate), times=float("inf"))
    daemon = Daemon(tmp_path, "serve_builder.py", config)
    try:
        wait_for(lambda: hanging.used > 0, 60, "an upload hangs")
        stop_in_time(daemon)
        (record,) = builders.uploads(provider="ec2-us", state=None)
        assert record.state == "uploading"
        gate.set()
        aws.proxy.heal()
        aws.like.looks = 0
        daemon.again()
        wait_for(
            lambda: builders.uploads(provider="ec2-us"), 60, "it is uploaded by the next start"
        )
        wait_for(
            lambda: len(builders.uploads(provider="ec2-us", state=None)) == 1,
            20,
            "only the finished record",
        )
    finally:
        gate.set()
        daemon.kill()


BUILDER_CALLS = {
    "snapshot": ("PUT /nodepool", "ImportSnapshot", "CreateTags", "RegisterImage"),
    "image": ("ImportImage", "CreateTags"),
    "ebs-direct": ("POST /snapshots", "PUT /snapshots", "RegisterImage"),
}


@pytest.mark.spec(
    "issue: SIGKILL of the builder at every step leaves nothing in the cloud after clean-up"
)
@pytest.mark.parametrize("method", BUILDER_CALLS)
def test_killed_builder_leaves_nothing_in_the_cloud(
    builders: BuilderBench, bench: LauncherBench, aws: AwsCloud, tmp_path: pathlib.Path, method: str
) -> None:
    provider: dict[str, Any] = {
        **aws.provider(
            pool={"labels": []}, diskimages=[{"name": "fake-image", "import-method": method}]
        ),
        "object-storage": {"bucket-name": "nodepool"},
    }
    config = builders.config([builders.image()], [provider], **{"zookeeper-timeout": 2.0})
    daemons: list[Daemon] = []
    aws.like.looks = 0  # imports are completed at the first look
    faults = [
        aws.proxy.fail(matches(operation), killing(daemons, when))
        for operation in BUILDER_CALLS[method]
        for when in ("before", "after")
    ]
    daemon = Daemon(tmp_path, "serve_builder.py", config)
    daemons.append(daemon)
    try:

        def uploaded() -> list[Any]:
            daemon.again()
            return builders.uploads(provider="ec2-us")

        (upload,) = wait_for(uploaded, 100, "an upload")
        assert [fault.used for fault in faults] == [1] * len(faults)
        wait_for(
            lambda: len(builders.uploads(provider="ec2-us", state=None)) == 1,
            20,
            "only the finished record",
        )
        start(bench, aws, object_storage={"bucket-name": "nodepool"})

        def left() -> tuple[list[str], int, list[str]]:
            cleanup(bench)
            return [each["ImageId"] for each in aws.images()], len(aws.snapshots()), aws.objects()

        wait_for(
            lambda: left() == ([upload.external_id], 1, []), 20, "only the finished upload is left"
        )
    finally:
        daemon.stop()
