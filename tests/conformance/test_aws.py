"""The driver ``aws`` in the conformance suite, against moto."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.support.aws.cloud import AwsCloud
from tests.support.fault_proxy import Fault, Forward, Reply, Request, ec2_error, html

#: Of the instance type that the label asks for.
CORES = 2
QUOTA = "L-1216C47A"


class Amazon(CloudUnderTest):
    outside = True

    def __init__(self, aws: AwsCloud) -> None:
        self.aws = aws
        self._throttling: Fault | None = None
        self._allowed = math.inf
        self._paused = False
        # moto has no limits, and its instances run immediately.
        aws.proxy.fail(
            lambda request: (
                request.operation == "RunInstances" and len(self.instances()) >= self._allowed
            ),
            ec2_error("VcpuLimitExceeded"),
            math.inf,
        )
        aws.proxy.fail(
            lambda request: request.operation == "DescribeInstances" and self._paused,
            self._pending,
            math.inf,
        )

    @staticmethod
    def _pending(request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        answer.body = re.sub(
            rb"<code>16</code>\s*<name>running</name>",
            b"<code>0</code><name>pending</name>",
            answer.body,
        )
        return answer

    def provider(self) -> dict[str, Any]:
        return self.aws.provider(self.aws.label(LABEL), name=PROVIDER)

    def environment(self) -> dict[str, str]:
        return self.aws.environment()

    def instances(self) -> set[str]:
        return {instance["InstanceId"] for instance in self.aws.instances()}

    @staticmethod
    def instance_of(external_id: Any) -> str:
        return str(external_id["instance"])

    def metadata(self, instance: str) -> dict[str, str]:
        found = self.aws.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0][
            "Instances"
        ][0]
        return {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}

    def remove(self, instance: str) -> None:
        self.aws.ec2.terminate_instances(InstanceIds=[instance])

    def halt(self, instance: str) -> None:
        self.aws.ec2.stop_instances(InstanceIds=[instance])

    def limit(self, instances: int | None) -> None:
        self._allowed = math.inf if instances is None else instances
        self.aws.like.quotas["ec2"][QUOTA] = 1000 if instances is None else instances * CORES

    def sold_out(self, yes: bool) -> None:
        if yes:
            self._sold_out = self.aws.proxy.fail(
                "RunInstances", ec2_error("InsufficientInstanceCapacity", 500), math.inf
            )
        else:
            self._sold_out.left = 0

    def down(self, yes: bool) -> None:
        if yes:
            self._down = self.aws.proxy.fail(lambda _request: True, html(502), math.inf)
        else:
            self._down.left = 0

    def unanswered(self) -> int:
        return self._down.used

    def throttle(self, calls: int) -> int:
        self._throttling = self.aws.proxy.fail(
            lambda _request: True, ec2_error("RequestLimitExceeded", 503), calls
        )
        return calls

    def throttled(self) -> int:
        return self._throttling.used if self._throttling is not None else 0

    def pause(self, yes: bool) -> None:
        self._paused = yes

    def stray(self, metadata: dict[str, str]) -> str:
        tags = [{"Key": key, "Value": value} for key, value in metadata.items()]
        made = self.aws.ec2.run_instances(
            ImageId=self.aws.ami,
            MinCount=1,
            MaxCount=1,
            InstanceType="t3.medium",
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        return str(made["Instances"][0]["InstanceId"])


@pytest.fixture
def amazon(aws: AwsCloud) -> Iterator[Amazon]:
    yield Amazon(aws)


class TestAws(DriverConformance):
    @pytest.fixture
    def cloud(self, amazon: Amazon) -> Amazon:
        return amazon


class TestAwsCrashes(CrashConformance):
    @pytest.fixture
    def cloud(self, amazon: Amazon) -> Amazon:
        return amazon
