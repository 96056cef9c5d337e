"""The aws driver: what goes wrong with one call, thing or launch does no harm to others and leaves nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.aws_cloud import AwsCloud
from tests.conftest import wait_for
from tests.fault_proxy import Forward, Reply, Request, ec2_error, hang, reply
from tests.integration.aws_bench import adapter, all_gone, cleanup, one, run_params, start
from tests.integration.launcher_bench import LauncherBench

#: Well-formed, so that it reads as an answer without any content.
XHTML = reply(200, "<html><body><h1>Welcome, please log in</h1></body></html>", "text/html")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("nodepool.cloud.calls.BACKOFF", (0.05, 1.0))
    monkeypatch.setattr("nodepool.cloud.deletions.BACKOFF", (0.05, 1.0))
    yield


def forward(request: Request, ask: Forward) -> Reply:
    return ask(request)


def console(text: str) -> Any:
    import base64

    return reply(200, (
        '<GetConsoleOutputResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
        f"<instanceId>i</instanceId><output>{base64.b64encode(text.encode()).decode()}</output></GetConsoleOutputResponse>"))


@pytest.mark.spec("driver-aws.md, issue bad input: an answer that is a well-formed page is no empty list")
def test_a_page_is_no_empty_list(bench: LauncherBench, aws: AwsCloud) -> None:
    pool = start(bench, aws, aws.label())
    request_id, _ = one(bench)
    manager = pool.getProviderManager("ec2-us")
    fault = aws.proxy.fail("DescribeInstances", XHTML, times=2)
    assert manager.findMissingNodes(bench.nodes()) == []
    assert fault.used == 2
    # Nor has an instance gone because of it.
    terminated = aws.proxy.fail("TerminateInstances", XHTML)
    fault = aws.proxy.fail("DescribeInstances", XHTML, times=3)
    bench.use_up(request_id)
    assert (terminated.used, fault.used) == (1, 3)
    all_gone(aws)


def test_a_leaked_host_that_is_not_released(bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture) -> None:
    """Amazon reports it in an answer that is no error; it is not counted as removed."""
    start(bench, aws, aws.label())
    tags = [{"Key": "nodepool_provider_name", "Value": "ec2-us"}, {"Key": "nodepool_node_id", "Value": "0000099999"}]
    aws.ec2.allocate_hosts(AvailabilityZone="us-east-1a", InstanceType="c5.large", Quantity=1,
                           TagSpecifications=[{"ResourceType": "dedicated-host", "Tags": tags}])
    aws.proxy.fail("ReleaseHosts", reply(200, (
        '<ReleaseHostsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId><successful/>'
        "<unsuccessful><item><error><code>Client.InvalidHost.Occupied</code><message>occupied</message></error>"
        "<resourceId>h-1</resourceId></item></unsuccessful></ReleaseHostsResponse>")))
    cleanup(bench, 2)
    assert "InvalidHost.Occupied" in caplog.text
    cleanup(bench)
    assert aws.hosts() == []
    assert adapter(bench) is not None
