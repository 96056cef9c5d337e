"""Helpers of the AWS tests: a launcher against moto (over HTTP, through the fault proxy)."""

from __future__ import annotations

from typing import Any

from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.launcher import LauncherBench


def start(
    bench: LauncherBench,
    aws: AwsCloud,
    *labels: dict[str, Any],
    pool: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A launcher with one provider of these labels; leaks are looked for by hand."""
    content = aws.config(aws.provider(*labels, pool=pool, **options), **(top or {}))
    return bench.start(content, cleanup_interval=600)


def one(bench: LauncherBench, label: str = "small", **fields: Any) -> tuple[str, Any]:
    request_id, (node,) = bench.fulfilled(label, **fields)
    return request_id, node


def failed(bench: LauncherBench, label: str = "small", timeout: float = 20) -> dict[str, Any]:
    return bench.wait_request(bench.submit(label), "failed", timeout=timeout)


def adapter(bench: LauncherBench) -> Any:
    return bench.adapter("ec2-us")


def all_gone(aws: AwsCloud) -> None:
    wait_for(lambda: not aws.instances(), 15, "no instance left")


def instance(aws: AwsCloud, node: Any) -> dict[str, Any]:
    found = aws.ec2.describe_instances(InstanceIds=[node.external_id["instance"]])
    return dict(found["Reservations"][0]["Instances"][0])


def tags(thing: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in thing.get("Tags") or []}


def run_params(aws: AwsCloud, operation: str = "RunInstances") -> list[dict[str, str]]:
    """Parameters of the launching calls so far."""
    return [request.params for request in aws.proxy.seen(operation)]


def cleanup(bench: LauncherBench, times: int = 1) -> None:
    """Pass of the leak cleanup, on this thread."""
    for _ in range(times):
        bench.pools[0].getProviderManager("ec2-us").cleanupLeakedResources()
