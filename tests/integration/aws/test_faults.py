"""The aws driver when Amazon is slow, refuses, lies or is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.base.backoff import Backoff
from nodepool.driver.aws.adapter import AwsAdapter
from nodepool.zk.mirror import notes
from nodepool.zk.sold_out import SoldOutOffers
from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, all_gone, failed, one, run_params, start
from tests.support.deadline import limit
from tests.support.fault_proxy import (
    Action,
    Request,
    cut_off,
    drop,
    ec2_error,
    hang,
    html,
    lose_answer,
)
from tests.support.launcher import LauncherBench


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("nodepool.cloud.calls.BACKOFF", Backoff(0.05, 1.0))
    monkeypatch.setattr("nodepool.cloud.deletions.BACKOFF", Backoff(0.05, 1.0))
    yield


@pytest.mark.spec("AWS, issue 3: throttling slows the provider down, it recovers by itself")
@pytest.mark.parametrize(
    "action",
    [ec2_error("RequestLimitExceeded", 503), ec2_error("Throttling"), ec2_error("SlowDown", 503)],
    ids=["limit", "throttling", "slowdown"],
)
def test_throttled_provider_slows_down_and_recovers(
    bench: LauncherBench, aws: AwsCloud, action: Action
) -> None:
    start(bench, aws, aws.label(), launch_retries=1)
    aws.proxy.fail("RunInstances", action, times=3)
    request_id, _ = one(bench)
    rate = adapter(bench).rate_limiter
    assert rate.slowed
    assert not adapter(bench).non_mutating_rate_limiter.slowed
    assert adapter(bench).calls.describe()["throttled"]
    assert adapter(bench).calls.last_error.kind.value == "throttled"
    more = [bench.submit("small") for _ in range(18)]
    for request in more:
        bench.wait_request(request, "fulfilled", timeout=30)
    assert not rate.slowed
    bench.use_up(request_id)


@pytest.mark.parametrize(
    "action",
    [html(502), html(200), drop(), lose_answer(), cut_off(), ec2_error("InternalError", 500)],
    ids=["html502", "html200", "drop", "lost", "cut", "internal"],
)
def test_one_instance_whatever_happens_to_the_answer(
    bench: LauncherBench, aws: AwsCloud, action: Action
) -> None:
    """The token of the call makes the second try the same launch."""
    start(bench, aws, aws.label(), launch_retries=1)
    fault = aws.proxy.fail("RunInstances", action)
    one(bench)
    assert fault.used == 1
    assert len(aws.instances()) == 1
    first, second = run_params(aws)
    assert first["ClientToken"] == second["ClientToken"]


@pytest.mark.parametrize(
    "action",
    [html(502), drop(), cut_off(), ec2_error("RequestLimitExceeded", 503)],
    ids=["html", "drop", "cut", "limit"],
)
@pytest.mark.spec("AWS, issue 3: a failed look never harms a healthy launch")
def test_failed_polls_harm_no_healthy_launch(
    bench: LauncherBench, aws: AwsCloud, action: Action
) -> None:
    start(bench, aws, aws.label(), launch_retries=1)
    aws.proxy.fail(
        lambda r: r.operation == "DescribeInstances" and "Filter.1.Name" in r.params,
        action,
        times=4,
    )
    request_id, _ = one(bench)
    bench.use_up(request_id)


@pytest.mark.spec(
    "AWS, issue 3: waiting for an instance asks for that instance, for all who wait at once"
)
def test_waiting_asks_for_those_waited_for(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwsAdapter, "LOOK_FLOOR", 0.5)
    aws.ec2.run_instances(
        ImageId=aws.ami, MinCount=3, MaxCount=3, InstanceType="t3.medium", SubnetId=aws.subnet
    )
    start(bench, aws, aws.label())
    requests = [bench.submit("small") for _ in range(10)]
    for request in requests:
        bench.wait_request(request, "fulfilled", timeout=30)
    nodes = [node_id for request in requests for node_id in bench.zuul.accept(request)]
    bench.zuul.give_back(*nodes)
    bench.wait_gone(*nodes)
    looks = aws.proxy.seen("DescribeInstances")
    listings = [look for look in looks if "Filter.1.Name" not in look.params]
    assert len(listings) <= 1, "one listing of the region, for the quota"
    assert all(
        look.params["Filter.1.Name"] == "instance-id" for look in looks if look not in listings
    )
    assert len(aws.proxy.seen("TerminateInstances")) <= 10
    calls = len(aws.proxy.requests)
    assert calls <= 10 * 5, f"{calls} calls for 10 nodes"


def start_ids(request: Request) -> list[str]:
    return [value for key, value in request.params.items() if key.startswith("InstanceId.")]


@pytest.mark.spec("AWS-2.5: up to 50 per call; 230 deletions are asked for within 5 s")
def test_many_deletions_are_sent_within_seconds(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), rate=2)
    made = aws.ec2.run_instances(
        ImageId=aws.ami, MinCount=230, MaxCount=230, InstanceType="t3.medium", SubnetId=aws.subnet
    )
    began = time.monotonic()
    deletes = adapter(bench).deletes
    futures = [deletes.delete("instance", each["InstanceId"]) for each in made["Instances"]]
    for future in futures:
        future.result(10)
    assert time.monotonic() - began <= limit(5)
    calls = aws.proxy.seen("TerminateInstances")
    assert len(calls) == 5
    assert max(len(start_ids(call)) for call in calls) == 50
    all_gone(aws)


@pytest.mark.spec("AWS-2.5: one bad id does not fail the batch; each is retried by itself")
def test_a_bad_id_in_a_batch(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label())
    made = aws.ec2.run_instances(
        ImageId=aws.ami, MinCount=3, MaxCount=3, InstanceType="t3.medium", SubnetId=aws.subnet
    )
    ids = [each["InstanceId"] for each in made["Instances"]]
    protected = aws.proxy.fail(
        lambda r: r.operation == "TerminateInstances" and ids[0] in start_ids(r),
        ec2_error("OperationNotPermitted"),
        times=3,
    )
    deletes = adapter(bench).deletes
    futures = [deletes.delete("instance", one_id) for one_id in [*ids, "i-0123456789abcdef0"]]
    for future in futures:
        future.result(20)
    assert protected.used == 3
    all_gone(aws)


@pytest.mark.spec("AWS-2.5: absence is confirmed by a direct look before the record goes")
def test_absence_is_confirmed(bench: LauncherBench, aws: AwsCloud) -> None:
    """EC2 shows new instances late: 'not found' right after the launch is not a proof."""
    start(bench, aws, aws.label())
    request_id, node = one(bench)
    aws.proxy.fail("TerminateInstances", ec2_error("InvalidInstanceID.NotFound"))
    (node_id,) = bench.zuul.accept(request_id)
    bench.zuul.give_back(node_id)
    wait_for(lambda: len(aws.proxy.seen("TerminateInstances")) >= 1, 10, "asked to terminate")
    wait_for(lambda: adapter(bench).watched_instances._watches, 10, "looks at it")
    (watch,) = adapter(bench).watched_instances._watches
    wait_for(lambda: watch.latest is not None, 10, "has looked")
    assert bench.zk.getNode(node_id) is not None, "it still runs, so the record stays"
    aws.ec2.terminate_instances(InstanceIds=[node.external_id["instance"]])
    bench.wait_gone(node_id)


@pytest.mark.spec("AWS-2.5: an old record's id (str) is read; what is gone is gone")
@pytest.mark.parametrize("form", ["str", "dict"])
def test_an_instance_that_never_was(bench: LauncherBench, aws: AwsCloud, form: str) -> None:
    start(bench, aws, aws.label())
    gone = "i-0123456789abcdef0"
    node = bench.ready_node(
        "ec2-us", "main", "small", external_id=gone if form == "str" else {"instance": gone}
    )
    node.state = "deleting"
    bench.zk.storeNode(node)
    bench.wait_gone(node.id)


@pytest.mark.spec("AWS, issue 3: deletions have their own lane: creations never wait behind them")
def test_hanging_deletions_do_not_delay_creations(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwsAdapter, "READ_TIMEOUT", 3)
    start(bench, aws, aws.label())
    request_id, _ = one(bench)
    gate = threading.Event()
    aws.proxy.fail("TerminateInstances", hang(gate), times=2)
    (node_id,) = bench.zuul.accept(request_id)
    bench.zuul.give_back(node_id)
    wait_for(lambda: aws.proxy.seen("TerminateInstances"), 10, "a deletion hangs")
    began = time.monotonic()
    one(bench)
    assert time.monotonic() - began < limit(3)
    gate.set()
    bench.wait_gone(node_id)


@pytest.mark.spec(
    "AWS, issue bad input: wrong credentials: a clear error, and it recovers without restart"
)
def test_wrong_credentials_are_reported_and_recovered_from(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    denied = aws.proxy.fail(
        lambda _r: True,
        ec2_error("AuthFailure", 401, "AWS was not able to validate the credentials"),
        times=float("inf"),
    )
    start(bench, aws, aws.label(), launch_retries=1)
    request = bench.submit("small")
    wait_for(lambda: denied.used > 0, 10, "refused")
    error = wait_for(lambda: adapter(bench).calls.describe()["last_error"], 10, "the error is kept")
    assert error["kind"] == "configuration"
    assert "not able to validate" in error["message"]
    _, details = bench.pools[0].getReadiness()
    assert any(
        line.startswith("provider ec2-us: ") and "not able to validate" in line for line in details
    )
    wait_for(
        lambda: bench.zuul.request(request)["state"] in ("failed", "requested"),
        20,
        "request declined or waiting",
    )
    aws.proxy.heal()
    one(bench)
    assert "run_instances" not in str(bench.pools[0].getReadiness()[1])
    assert "secret-of-test" not in caplog.text


@pytest.mark.parametrize(
    ("code", "option"),
    [("InvalidKeyPair.NotFound", "zuul"), ("InvalidSubnetID.NotFound", "subnet-1")],
)
def test_what_aws_does_not_know_is_named(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture, code: str, option: str
) -> None:
    start(bench, aws, aws.label("bad"), aws.label("good"), launch_retries=1)
    aws.proxy.fail("RunInstances", ec2_error(code, message=f"{option} does not exist"))
    failed(bench, "bad")
    assert "Provider ec2-us, pool main, label bad: the cloud refuses t3.medium" in caplog.text
    assert f"{option} does not exist" in caplog.text
    assert any(f"{option} does not exist" in line for line in bench.pools[0].getReadiness()[1])
    one(bench, "good")


def test_an_unreachable_api_harms_no_other_provider(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwsAdapter, "READ_TIMEOUT", 3)
    good = aws.provider(aws.label("good"))
    bad = {**aws.provider(aws.label("bad")), "name": "ec2-eu", "region-name": "eu-west-1"}
    gate = threading.Event()
    aws.proxy.fail(
        lambda r: "eu-west-1" in r.headers.get("authorization", ""), hang(gate), times=float("inf")
    )
    bench.start(aws.config(good, bad), cleanup_interval=600)
    bench.submit("bad")
    began = time.monotonic()
    one(bench, "good")
    assert time.monotonic() - began < limit(3)
    gate.set()


@pytest.mark.spec(
    "AWS, issue 5: a ready node whose instance is gone, stopped or reclaimed is not handed out"
)
@pytest.mark.parametrize("action", ["stop_instances", "terminate_instances"])
def test_ready_nodes_are_compared(bench: LauncherBench, aws: AwsCloud, action: str) -> None:
    pool = start(bench, aws, aws.label())
    nodes = [bench.fulfilled("small") for _ in range(2)]
    for request, _ in nodes:
        bench.zuul.cancel(request)
    lost, kept = nodes[0][1][0], nodes[1][1][0]
    wait_for(lambda: all(node.allocated_to is None for node in bench.nodes()), 10, "nodes are free")
    getattr(aws.ec2, action)(InstanceIds=[lost.external_id["instance"]])
    aws.proxy.fail("DescribeInstances", ec2_error("InternalError", 500))
    manager = pool.getProviderManager("ec2-us")
    assert [node.id for node in manager.findMissingNodes(bench.nodes())] == [lost.id]
    assert manager.adapter.findMissingInstances(["i-0123456789abcdef0"]) == ["i-0123456789abcdef0"]
    assert bench.node(kept.id).state == "ready"


# -- the offers


@pytest.mark.spec("AWS, issue 2: offers in order with a memory of what was sold out")
def test_offers_are_tried_in_order_without_sold_out_ones(
    bench: LauncherBench, aws: AwsCloud
) -> None:
    other = aws.new_subnet("10.0.2.0/24", "b")
    start(
        bench,
        aws,
        aws.label(
            use_spot=True,
            alternatives=[
                {"subnet-ids": [other]},
                {"instance-types": ["t3.large"], "use-spot": False},
            ],
        ),
        launch_retries=1,
    )
    aws.proxy.fail(
        lambda r: r.operation == "RunInstances" and "InstanceMarketOptions.MarketType" in r.params,
        ec2_error("InsufficientInstanceCapacity", 500),
        times=float("inf"),
    )
    _, node = one(bench)
    tried = [
        (
            p["InstanceType"],
            p["NetworkInterface.1.SubnetId"],
            "InstanceMarketOptions.MarketType" in p,
        )
        for p in run_params(aws)
    ]
    assert tried == [
        ("t3.medium", aws.subnet, True),
        ("t3.medium", other, True),
        ("t3.large", aws.subnet, False),
    ]
    assert node.node_properties == {"spot": False, "fleet": False}
    assert node.resources["L-1216C47A"] == 2
    one(bench)
    assert len(run_params(aws)) == 4, "what was sold out is remembered"
    (note,) = bench.zk.readNotes(SoldOutOffers)
    assert len(note.until) == 2
    notes.remove(bench.zk.kazoo_client, note)
    wait_for(lambda: not adapter(bench).sold_out.left(), what="the launcher has heard of it")
    aws.proxy.heal()
    _, node = one(bench)
    assert node.node_properties["spot"] is True
    assert node.az == "us-east-1a"


def test_ladder_without_any_capacity(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(alternatives=[{"instance-type": "t3.large"}]), launch_retries=1)
    aws.proxy.fail("RunInstances", ec2_error("InsufficientInstanceCapacity", 500), times=2)
    failed(bench)
    assert len(run_params(aws)) == 2
    one(bench)
    assert run_params(aws)[-1]["InstanceType"] == "t3.medium", (
        "all are sold out: the one refused first is tried"
    )


def test_ladder_with_types_that_the_zone_does_not_have(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(alternatives=[{"instance-type": "t3.large"}]), launch_retries=1)

    def absent(instance_type: str, times: float) -> None:
        aws.proxy.fail(
            lambda r: r.operation == "RunInstances" and r.params["InstanceType"] == instance_type,
            ec2_error("Unsupported"),
            times=times,
        )

    absent("t3.medium", float("inf"))
    one(bench)
    one(bench)
    tried = [params["InstanceType"] for params in run_params(aws)]
    assert tried == ["t3.medium", "t3.large", "t3.large"], "and it is remembered"
    absent("t3.large", 1)
    failed(bench)
    assert len(run_params(aws)) == 4, "the only way left that was not refused before"


def test_a_type_that_the_zone_does_not_have(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Without another way it is what somebody has to mend."""
    start(bench, aws, aws.label(), launch_retries=1)
    aws.proxy.fail("RunInstances", ec2_error("Unsupported"))
    failed(bench)
    assert "the cloud refuses t3.medium" in caplog.text


def test_console_log_of_a_failed_scan(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    import base64

    from tests.support.fault_proxy import reply

    caplog.set_level("INFO")
    output = base64.b64encode(b"kernel panic\nsecond line").decode()
    aws.proxy.fail(
        "GetConsoleOutput",
        reply(
            200,
            (
                "<GetConsoleOutputResponse "
                'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
                f"<instanceId>i</instanceId><output>{output}</output></GetConsoleOutputResponse>"
            ),
        ),
        times=5,
    )
    start(
        bench,
        aws,
        aws.label(console_log=True),
        pool={"host-key-checking": True},
        boot_timeout=1,
        launch_retries=1,
    )
    failed(bench)
    assert "kernel panic" in caplog.text
    assert "second line" in caplog.text
