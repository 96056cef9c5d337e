"""The aws driver: what goes wrong with one call, thing or launch does no harm to others and
leaves nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.cloud import CallTimeout
from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, all_gone, cleanup, one, run_params, start
from tests.support.fault_proxy import Forward, Reply, Request, ec2_error, hang, lose_answer, reply
from tests.support.launcher import LauncherBench
from tests.support.node_ids import spend_node_ids

#: Well-formed, so that it reads as an answer without any content.
XHTML = reply(200, "<html><body><h1>Welcome, please log in</h1></body></html>", "text/html")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("nodepool.cloud.calls.BACKOFF", Backoff(0.05, 1.0))
    monkeypatch.setattr("nodepool.cloud.deletions.BACKOFF", Backoff(0.05, 1.0))
    yield


def forward(request: Request, ask: Forward) -> Reply:
    return ask(request)


def console(text: str) -> Any:
    import base64

    return reply(
        200,
        (
            "<GetConsoleOutputResponse "
            'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
            f"<instanceId>i</instanceId><output>{base64.b64encode(text.encode()).decode()}</output>"
            "</GetConsoleOutputResponse>"
        ),
    )


@pytest.mark.spec("AWS, issue bad input: an answer that is a well-formed page is no empty list")
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


@pytest.mark.spec("DRV-7.7: reading a console log that hangs holds up no other launch")
def test_console_log_holds_up_nobody(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    provider = aws.provider(
        aws.label(console_log=True),
        pool={"host-key-checking": True},
        boot_timeout=1,
        launch_retries=1,
    )
    other = {
        **provider["pools"][0],
        "name": "other",
        "host-key-checking": False,
        "labels": [aws.label("plain")],
    }
    provider["pools"].append(other)
    gate = threading.Event()
    fault = aws.proxy.fail("GetConsoleOutput", hang(gate, console("kernel panic")), times=2)
    bench.start(aws.config(provider), cleanup_interval=600)
    bad = bench.submit("small")
    try:
        wait_for(lambda: fault.used == 1, 20, "asked for the console")
        one(bench, "plain")
        assert aws.proxy.seen("TerminateInstances") == [], "its console is still being read"
    finally:
        gate.set()
    bench.wait_request(bad, "failed", timeout=20)
    assert "kernel panic" in caplog.text


def test_unknown_size_of_a_running_instance(bench: LauncherBench, aws: AwsCloud) -> None:
    """The instance runs: that its type cannot be looked up is not a reason to throw it away."""
    start(
        bench,
        aws,
        aws.label(fleet={"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}),
        launch_retries=1,
    )
    aws.proxy.fail("DescribeInstanceTypes", ec2_error("UnauthorizedOperation", 403), times=math.inf)
    _, node = one(bench)
    assert node.resources["instances"] == 1


def test_id_is_recorded_before_the_size_is_known(bench: LauncherBench, aws: AwsCloud) -> None:
    start(
        bench,
        aws,
        aws.label(fleet={"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}),
    )
    gate = threading.Event()
    aws.proxy.fail("DescribeInstanceTypes", hang(gate, forward), times=math.inf)
    request = bench.submit("small")
    try:
        wait_for(
            lambda: [node for node in bench.nodes() if node.external_id], 10, "id in the record"
        )
    finally:
        gate.set()
    bench.wait_request(request, "fulfilled", timeout=20)


def in_threads(*functions: Callable[[], Any]) -> list[Future[Any]]:
    """Each at work on a separate thread."""
    found: list[Future[Any]] = []
    for function in functions:
        future: Future[Any] = Future()

        def run(function: Callable[[], Any] = function, future: Future[Any] = future) -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="Thread-test", daemon=True).start()
        found.append(future)
    return found


@pytest.mark.spec("design: no unbounded wait: facts that another thread asks for")
def test_waiting_for_the_question_of_another(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(bench, aws, aws.label())
    cloud = adapter(bench).cloud
    gate = threading.Event()
    fault = aws.proxy.fail("DescribeInstanceTypes", hang(gate, forward))
    (first,) = in_threads(lambda: cloud.instance_type("c5.large"))
    wait_for(lambda: fault.used == 1, 10, "the question hangs")
    with monkeypatch.context() as patch:
        patch.setattr("nodepool.cloud.answer_cache.SHARED_DEADLINE", 0.2)
        (second,) = in_threads(lambda: cloud.instance_type("c5.large"))
        with pytest.raises(CallTimeout, match=r"type c5\.large"):
            second.result(5)
    (third,) = in_threads(lambda: cloud.instance_type("c5.large"))
    gate.set()
    assert first.result(10) == third.result(10)
    assert (
        len([r for r in aws.proxy.seen("DescribeInstanceTypes") if "c5.large" in r.params.values()])
        == 1
    )
    # An error is shared, too, and not kept.
    gate.clear()
    fault = aws.proxy.fail("DescribeInstanceTypes", hang(gate, ec2_error("InvalidInstanceType")))
    futures = in_threads(*[lambda: cloud.instance_type("bad.type")] * 3)
    wait_for(lambda: fault.used == 1, 10, "the question hangs")
    gate.set()
    for future in futures:
        with pytest.raises(Exception, match=r"InvalidInstanceType"):
            future.result(10)
    assert cloud._memo._asked == {}


@pytest.mark.spec("design: no unbounded wait: templates that another thread makes")
def test_waiting_for_templates_of_another(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(
        bench,
        aws,
        aws.label(fleet={"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}),
    )
    templates = adapter(bench).templates
    (name,) = templates._wanted
    templates.forget(name)
    gate = threading.Event()
    fault = aws.proxy.fail("DescribeLaunchTemplates", hang(gate, forward))
    (first,) = in_threads(templates.ensure)
    wait_for(lambda: fault.used == 1, 10, "the question hangs")
    with monkeypatch.context() as patch:
        patch.setattr("nodepool.driver.aws.launch.templates.LOCK_WAIT", 0.2)
        (second,) = in_threads(templates.ensure)
        with pytest.raises(CallTimeout, match="launch templates"):
            second.result(5)
    gate.set()
    first.result(10)


@pytest.mark.spec("AWS-2.4: a template that somebody else has removed is made again")
def test_a_lost_template(bench: LauncherBench, aws: AwsCloud) -> None:
    """Equal settings share a template, so another provider may remove it with its own
    configuration.
    """
    start(
        bench,
        aws,
        aws.label(fleet={"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}),
        launch_retries=1,
    )
    (template,) = aws.ec2.describe_launch_templates()["LaunchTemplates"]
    aws.ec2.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
    aws.proxy.fail("CreateFleet", ec2_error("InvalidLaunchTemplateName.NotFoundException"))
    one(bench)
    assert len(aws.ec2.describe_launch_templates()["LaunchTemplates"]) == 1


@pytest.mark.spec("AWS-2.2: an instance that comes after its launch was given up is terminated")
def test_an_instance_that_comes_too_late(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), launch_retries=2, launch_timeout=2)
    gate = threading.Event()
    fault = aws.proxy.fail("RunInstances", hang(gate, forward))
    try:
        _, node = one(bench)
        assert fault.used == 1
    finally:
        gate.set()
    wait_for(
        lambda: len(run_params(aws)) == 2 and len(aws.proxy.seen("TerminateInstances")) == 1,
        15,
        "late one is terminated",
    )
    wait_for(
        lambda: [each["InstanceId"] for each in aws.instances()] == [node.external_id["instance"]],
        15,
        "only the node's",
    )


def labels_for(aws: AwsCloud) -> dict[str, tuple[dict[str, Any], str]]:
    fleet = {"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}
    return {
        "RunInstances": (aws.label(), "instances"),
        "CreateFleet": (aws.label(fleet=fleet), "instances"),
        "AllocateHosts": (aws.label(instance_type="c5.large", dedicated_host=True), "hosts"),
    }


@pytest.mark.spec(
    "AWS-2.3: a call that is unclear to the end of its deadline makes no second instance"
)
@pytest.mark.parametrize("operation", ["RunInstances", "CreateFleet", "AllocateHosts"])
def test_the_next_attempt_gets_what_the_unclear_one_made(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr("nodepool.driver.aws.adapter.DEADLINE", 0.5)
    label, kind = labels_for(aws)[operation]
    start(bench, aws, label, launch_retries=3, pool={"availability-zone": "us-east-1a"})
    lost = aws.proxy.fail(operation, lose_answer(), times=2)
    one(bench)
    tokens = {params["ClientToken"] for params in run_params(aws, operation)}
    assert lost.used == 2
    assert len(tokens) == 1
    assert len(getattr(aws, kind)()) == 1
    # What is clear is not repeated.
    aws.proxy.fail(operation, ec2_error("InvalidParameterValue"))
    one(bench)
    assert len({params["ClientToken"] for params in run_params(aws, operation)}) == 3


@pytest.mark.spec("AWS-2.9: an instance of an unclear attempt is removed although its node lives")
def test_a_second_instance_of_a_node(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label())
    request, node = one(bench)
    tags = [
        {"Key": "nodepool_provider_name", "Value": "ec2-us"},
        {"Key": "nodepool_node_id", "Value": node.id},
    ]
    aws.ec2.allocate_hosts(
        AvailabilityZone="us-east-1a",
        InstanceType="c5.large",
        Quantity=1,
        TagSpecifications=[{"ResourceType": "dedicated-host", "Tags": tags}],
    )
    aws.ec2.run_instances(
        ImageId=aws.ami,
        MinCount=1,
        MaxCount=1,
        InstanceType="t3.medium",
        SubnetId=aws.subnet,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )

    def become(state: str) -> None:
        bench.zuul.write_node(node.id, state=state)
        wait_for(
            lambda: bench.pools[0].zk.getNode(node.id, cached=True).state == state, 10, "mirrored"
        )

    bench.zuul.accept(request)
    become("building")
    cleanup(bench, 3)
    assert len(aws.instances()) == 2, "while it is being made it is not clear which one is its own"
    become("in-use")
    cleanup(bench)
    assert len(aws.instances()) == 2
    cleanup(bench)
    assert [each["InstanceId"] for each in aws.instances()] == [node.external_id["instance"]]
    assert aws.hosts() == []
    bench.zuul.give_back(node.id)
    bench.wait_gone(node.id)


def test_a_leaked_host_that_is_not_released(
    bench: LauncherBench, aws: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Amazon reports it in an answer that is not an error; it is not counted as removed."""
    spend_node_ids(bench.zk)
    start(bench, aws, aws.label())
    tags = [
        {"Key": "nodepool_provider_name", "Value": "ec2-us"},
        {"Key": "nodepool_node_id", "Value": "0000000099"},
    ]
    aws.ec2.allocate_hosts(
        AvailabilityZone="us-east-1a",
        InstanceType="c5.large",
        Quantity=1,
        TagSpecifications=[{"ResourceType": "dedicated-host", "Tags": tags}],
    )
    aws.proxy.fail(
        "ReleaseHosts",
        reply(
            200,
            (
                "<ReleaseHostsResponse "
                'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
                "<successful/>"
                "<unsuccessful><item><error><code>Client.InvalidHost.Occupied</code><message>"
                "occupied</message></error>"
                "<resourceId>h-1</resourceId></item></unsuccessful></ReleaseHostsResponse>"
            ),
        ),
    )
    cleanup(bench, 2)
    assert "InvalidHost.Occupied" in caplog.text
    cleanup(bench)
    assert aws.hosts() == []
    assert adapter(bench) is not None


def test_an_orphan_that_cannot_be_deleted(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried at a decent pace, and not for ever (a provider that is replaced could not end): the
    search for leaks has it then.
    """
    from nodepool.driver.aws.launch.machines import AwsDeleteStateMachine
    from nodepool.driver.statemachine import launcher as module

    monkeypatch.setattr(module, "DELETE_LIMIT", 2.0, raising=False)
    pool = start(bench, aws, aws.label(), launch_retries=1)
    manager = pool.getProviderManager("ec2-us")
    aws.proxy.fail(
        lambda r: r.operation == "DescribeInstances" and "Filter.1.Name" in r.params,
        ec2_error("InternalError", 500),
        times=math.inf,
    )
    bench.submit("small")
    wait_for(
        lambda: manager.launchers and manager.launchers[0]._saved_external_id,
        10,
        "launch under way",
    )
    (launch,) = manager.launchers
    tries: list[float] = []

    def refuse(_machine: AwsDeleteStateMachine) -> None:
        tries.append(0.0)
        raise RuntimeError("refused")

    monkeypatch.setattr(AwsDeleteStateMachine, "advance", refuse)
    launch._saved_external_id = None  # as if its id had not reached the record
    launch.lock_lost()
    wait_for(lambda: not manager.launchers, 10, "launch ended")
    assert 2 <= len(tries) <= 8
