"""Nodes of the drivers gce, azure and ibmvpc in a whole launcher, each against its cloud's
stand-in.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections import Counter
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.clouds.scene import Azure, CloudScene, Ibm, opened, scene  # noqa: F401
from tests.support.fault_proxy import cut_off, html, lose_answer, reply
from tests.support.launcher import LauncherBench, provider
from tests.support.sshd import ssh_server


def start(bench: LauncherBench, scene: CloudScene, *labels: dict[str, Any], **options: Any) -> Any:
    return bench.start(scene.config(*labels, **options), cleanup_interval=600)


def failed(bench: LauncherBench, label: str = "small", timeout: float = 30) -> dict[str, Any]:
    return bench.wait_request(bench.submit(label), "failed", timeout=timeout)


def problems(bench: LauncherBench) -> str:
    return "\n".join(bench.pools[0].getReadiness()[1])


#: Cloud, region, zone and resources.
EXPECTED = {
    "gce": ("Google", "us-central1", "us-central1-a", {"cores": 1, "instances": 1, "ram": 3840}),
    "azure": ("Azure", "centralus", "1", {"cores": 1, "instances": 1, "ram": 512}),
    "ibmvpc": ("IBM", "us-south", "us-south-1", {"cores": 2, "instances": 1, "ram": 4096}),
}


@pytest.mark.spec(
    "AZU-15.1: GCE-13.2: IBM-16.2: a label is fulfilled, with these fields; use and deletion work"
)
def test_label_is_fulfilled_used_and_deleted(bench: LauncherBench, scene: CloudScene) -> None:
    scene.cloud.address = "127.0.0.1"
    with ssh_server(kinds=["ed25519"]) as sshd:
        images = [
            {**each, "connection-port": sshd.port} for each in scene.options()["cloud-images"]
        ]
        options = {
            "cloud-images": images,
            "host-key-checking": True,
            "pool": {"node-attributes": {"key1": "value1"}},
        }
        start(bench, scene, **options)
        request_id, (node,) = bench.fulfilled("small")
        assert (node.cloud, node.region, node.az, node.resources) == EXPECTED[scene.driver]
        assert (node.state, node.username, node.python_path) == ("ready", "zuul", "auto")
        assert node.shell_type == ("sh" if scene.driver == "azure" else None)
        assert (node.connection_type, node.connection_port) == ("ssh", sshd.port)
        assert node.interface_ip == node.public_ipv4 == node.private_ipv4 == "127.0.0.1"
        assert node.host_keys == sshd.host_keys
        assert node.attributes == {"key1": "value1"}
        assert node.image_id == "image"
        assert node.external_id == f"np{node.id}" == scene.machines()[0].name
        bench.use_up(request_id)
        assert scene.leftovers() == []


@pytest.mark.spec("issue: use-internal-ip; nodes without a public address")
def test_use_internal_ip_makes_the_private_address_the_interface(
    bench: LauncherBench, scene: CloudScene
) -> None:
    start(bench, scene, pool={"use-internal-ip": True, "public-ipv4": False})
    _, (node,) = bench.fulfilled("small")
    assert node.interface_ip == node.private_ipv4 and node.private_ipv4.startswith("10.0.0.")
    assert node.public_ipv4 is None


@pytest.mark.spec(
    "issue: offers of sizes and zones inside one label, with a memory of sold-out offers"
)
def test_sold_out_offers_are_skipped(bench: LauncherBench, scene: CloudScene) -> None:
    offers = [
        scene.alternative(zone=scene.zones[1]),
        scene.alternative(size=scene.sizes[1], zone=scene.zones[1]),
    ]
    first, second = scene.sizes
    label = scene.label(**({"zone": "1"} if scene.driver == "azure" else {}), alternatives=offers)
    # One is reported by the call, the other after the machine was accepted.
    scene.cloud.sold_out_sizes = {f"{first}/{zone}" for zone in scene.zones}
    start(bench, scene, label)
    request_id, (node,) = bench.fulfilled("small")
    (machine,) = scene.machines()
    assert (scene.size_of(machine), scene.where(machine)) == (second, scene.zones[1])
    assert node.az == scene.zones[1]
    before = len(scene.proxy.requests)
    bench.use_up(request_id)
    scene.cloud.sold_out_sizes = set()
    _, _ = bench.fulfilled("small")
    (machine,) = scene.machines()
    assert scene.size_of(machine) == second, "those that were sold out are remembered"
    makes = [
        each
        for each in scene.proxy.requests[before:]
        if re.search(scene.launcher_calls[-3], f"{each.method} {each.path}")
    ]
    assert len(makes) <= 2


@pytest.mark.spec("issue: exhausted capacity is told where operators look")
def test_exhausted_capacity_is_reported(bench: LauncherBench, scene: CloudScene) -> None:
    scene.cloud.sold_out = True
    start(bench, scene, **{"launch-retries": 1})
    failed(bench)
    assert re.search(r"small.*(capacity|not available|enough resources)", problems(bench))
    assert scene.leftovers() == []


@pytest.mark.spec("issue: a size that does not exist")
def test_unknown_size_fails_only_its_label(bench: LauncherBench, scene: CloudScene) -> None:
    start(
        bench,
        scene,
        scene.label("bad", size="nonsense"),
        scene.label("good"),
        **{"launch-retries": 1},
    )
    failed(bench, "bad")
    assert re.search("bad.*nonsense", problems(bench))
    bench.fulfilled("good")


@pytest.mark.spec(
    "issue: wrong credentials concern their provider only, are told with the remedy, and are read "
    "again"
)
def test_bad_credentials_affect_one_provider(
    bench: LauncherBench, scene: CloudScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.break_credentials()
    content = scene.config()
    content["labels"].append({"name": "other"})
    content["providers"].append(provider("fake-other", labels=["other"]))
    pool = bench.start(content, cleanup_interval=600)
    bench.fulfilled("other")
    failed(bench)
    assert scene.broken in problems(bench)
    assert scene.machines() == []
    scene.mend_credentials()
    pool.getProviderManager(scene.name).cleanupLeakedResources()
    bench.fulfilled("small")
    # Another call may have failed at the same moment: it is made again.
    wait_for(lambda: scene.broken not in problems(bench), 30, "the problem is solved")


@pytest.mark.spec(
    "issue: tokens that are over are renewed; a clock that is wrong does not ask for one with each "
    "call"
)
def test_expired_tokens_are_renewed_once(bench: LauncherBench, scene: CloudScene) -> None:
    scene.cloud.token_life = -3000
    start(bench, scene)
    bench.fulfilled("small")
    tokens = [each for each in scene.proxy.requests if "token" in each.path]
    if scene.driver == "azure":
        assert len(tokens) == 1
    scene.cloud.tokens.clear()
    bench.fulfilled("small")


@pytest.mark.spec("issue: answers that are cut off, no JSON, or lost")
@pytest.mark.parametrize("what", ["cut", "html", "other", "lost"])
def test_unusable_answers_harm_no_launch(
    bench: LauncherBench, scene: CloudScene, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.common.adapter.ASK_AGAIN", 2.0)
    actions = {
        "cut": cut_off(),
        "html": html(200),
        "other": reply(200, '{"hello": "world"}', "application/json"),
        "lost": lose_answer(),
    }
    start(bench, scene)
    request_id, _ = bench.fulfilled("small")
    adapter, name = bench.adapter(scene.name), scene.machines()[0].name
    for _ in range(2):
        fault = scene.proxy.fail(lambda each: each.method == "GET", actions[what])
        # It is asked again, and never taken for an empty list.
        assert adapter.findMissingInstances([name]) == []
        assert fault.used == 1
    faults = [
        scene.proxy.fail(scene.matches(operation), actions[what])
        for operation in scene.launcher_calls
    ]
    other = bench.submit("small")
    bench.wait_request(other, "fulfilled", timeout=60)
    bench.use_up(request_id, other)
    wait_for(lambda: not scene.machines(), 30, "no machine left")
    assert sum(fault.used for fault in faults) >= 2


@pytest.mark.spec("AZU-13: GCE-11: IBM-14: secrets are in no log")
def test_no_secrets_in_logs(
    bench: LauncherBench, scene: CloudScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    more = {"custom-data": "custom-s3cret"} if scene.driver == "azure" else {}
    start(
        bench,
        scene,
        scene.label("small"),
        scene.label("by-id", image="by-id", **more),
        **{"launch-retries": 1},
    )
    bench.fulfilled("by-id")
    # Also not where it is said what went wrong.
    scene.proxy.fail(scene.matches(scene.launcher_calls[0]), html(500), 3)
    scene.proxy.fail(scene.matches(scene.launcher_calls[0]), lose_answer(), 1)
    bench.wait_request(bench.submit("small"), "failed", "fulfilled", timeout=60)
    told = caplog.text
    assert told
    tokens = [each for each in getattr(scene.cloud, "tokens", ()) if len(each) > 8]
    assert [secret for secret in (*scene.secrets, *tokens) if secret in told] == []


@pytest.mark.spec("GCE-9: IBM-5: AZU-2: lists are paged through")
def test_lists_are_read_page_by_page(bench: LauncherBench, scene: CloudScene) -> None:
    scene.cloud.page = 2
    start(bench, scene)
    requests = [bench.submit("small") for _ in range(5)]
    for request in requests:
        bench.wait_request(request, "fulfilled", timeout=30)
    adapter = bench.adapter(scene.name)
    assert len(list(adapter.listInstances())) == 5
    assert len([each for each in adapter.listResources() if each.type == "instance"]) == 5
    bench.use_up(*requests)
    wait_for(lambda: not scene.leftovers(), 20, "nothing left")


@pytest.mark.spec(
    "AZU-10: GCE-9: IBM-11: leaks both ways on two sightings, of every kind; what is of others "
    "stays"
)
def test_leaks_are_deleted_after_two_sightings(bench: LauncherBench, scene: CloudScene) -> None:
    if scene.driver == "ibmvpc":
        scene.cloud.make_bucket()
    pool = start(bench, scene)
    ours = {
        "nodepool_build_id": "0" * 32,
        "nodepool_upload_id": "0000000001",
        "nodepool_provider_name": scene.name,
    }
    leaked = scene.stray_image(ours)
    foreign = scene.stray_image(
        {**ours, "nodepool_provider_name": "of-others", "nodepool_build_id": "1" * 32}
    )
    manager = pool.getProviderManager(scene.name)
    manager.cleanupLeakedResources()
    assert {leaked, foreign} <= set(scene.leftovers())
    manager.cleanupLeakedResources()
    wait_for(lambda: leaked not in scene.leftovers(), 20, "the leak is gone")
    assert foreign in scene.leftovers()


@pytest.mark.spec("AZU-9: calls per node and at rest")
def test_calls_per_node_stay_within_their_limit(bench: LauncherBench, scene: CloudScene) -> None:
    start(bench, scene)
    first, _ = bench.fulfilled("small")
    before = len(scene.proxy.requests)
    second, _ = bench.fulfilled("small")
    bench.use_up(second)
    made = Counter(
        f"{each.method} {each.path.partition('?')[0]}" for each in scene.proxy.requests[before:]
    )
    assert sum(made.values()) <= {"gce": 9, "azure": 10, "ibmvpc": 13}[scene.driver], made
    bench.use_up(first)


@pytest.mark.spec(
    "AZU-3: IBM-3: credentials that are refused are read again; until then requests are declined "
    "with the reason"
)
@pytest.mark.parametrize("kind", [Azure, Ibm], ids=lambda kind: kind.driver)
def test_refused_credentials_are_read_again(
    bench: LauncherBench,
    kind: type[CloudScene],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    for cloud in opened(kind, monkeypatch, tmp_path):
        start(bench, cloud)
        bench.fulfilled("small")
        adapter = bench.adapter(cloud.name)
        cloud.break_credentials()
        cloud.cloud.tokens.clear()
        assert list(adapter.listResources()) == []
        assert cloud.broken in adapter.problem
        failed(bench)
        cloud.mend_credentials()
        assert list(adapter.listResources()) != []
        assert adapter.problem is None
        bench.fulfilled("small")
        bench.close()
