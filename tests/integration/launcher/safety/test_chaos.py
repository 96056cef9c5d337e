"""Everything together, from a seed: nothing is lost, handed out twice or left behind."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, expire_session, provider

pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")


class Users:
    """Submit, cancel, revise, take, return, hold and lose nodes at random."""

    def __init__(self, bench: LauncherBench, seed: int) -> None:
        self.bench = bench
        self.zuul = bench.zuul
        self.random = random.Random(seed)
        self.open: list[str] = []
        self.using: dict[str, str] = {}
        self.failed: list[dict[str, Any]] = []

    def submit(self) -> None:
        labels = [self.random.choice("ab") for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
        self.open.append(
            self.zuul.submit(
                *labels,
                priority=self.random.choice(["100", "200", "300"]),
                relative_priority=self.random.randrange(4),
                tenant_name=self.random.choice([None, "limited"]),
            )
        )

    def cancel(self) -> None:
        if self.open:
            self.zuul.cancel(self.open.pop(self.random.randrange(len(self.open))))

    def revise(self) -> None:
        """As Zuul: under the request's lock, giving up when a launcher holds it."""
        if not self.open:
            return
        request_id = self.random.choice(self.open)
        lock = self.zuul.client.Lock(f"/nodepool/requests-lock/{request_id}")
        if not lock.acquire(blocking=False):
            return
        try:
            data, stat = self.zuul.client.get(f"/nodepool/requests/{request_id}")
            record = json.loads(data)
            if record["state"] == "requested":
                record["relative_priority"] = self.random.randrange(4)
                self.zuul.client.set(
                    f"/nodepool/requests/{request_id}", json.dumps(record).encode(), stat.version
                )
        except (NoNodeError, BadVersionError):
            pass
        finally:
            lock.release()

    def collect(self) -> None:
        for request_id in list(self.open):
            record = self.zuul.request(request_id)
            assert record is not None, f"request {request_id} has vanished"
            if record["state"] == "failed":
                self.failed.append(record)
                self.open.remove(request_id)
                self.zuul.cancel(request_id)
            elif record["state"] == "fulfilled":
                assert len(record["nodes"]) == len(record["node_types"])
                for node_id, label in zip(record["nodes"], record["node_types"], strict=True):
                    node = self.zuul.node(node_id)
                    assert node["allocated_to"] == request_id and label in node["type"], (
                        record,
                        node,
                    )
                    assert node_id not in self.using, "handed out twice"
                self.open.remove(request_id)
                for node_id in self.zuul.accept(request_id):
                    assert len(self.zuul.contenders(node_id)) == 1, "somebody else has it, too"
                    self.using[node_id] = request_id

    def finish(self) -> None:
        if not self.using:
            return
        node_id = self.random.choice(list(self.using))
        node = self.zuul.node(node_id)
        assert node["state"] == "in-use" and node["allocated_to"] == self.using.pop(node_id), node
        how = self.random.randrange(4)
        if how == 0:  # the executor died
            self.zuul.unlock(node_id)
        elif how == 1:
            self.zuul.write_node(node_id, state="hold", hold_expiration=1)
            self.zuul.unlock(node_id)
        else:
            self.zuul.give_back(node_id)

    def step(self) -> None:
        self.collect()
        self.random.choice(
            [
                self.submit,
                self.submit,
                self.submit,
                self.cancel,
                self.revise,
                self.finish,
                self.finish,
            ]
        )()


@pytest.mark.spec("issue: 0 requests lost, 0 nodes handed out twice, 0 resources leaked; ZK-10")
@pytest.mark.parametrize("seed", range(int(os.environ.get("NODEPOOL_CHAOS_SEEDS", "4"))))
def test_many_things_concurrently(bench: LauncherBench, seed: int) -> None:
    content = config(
        provider(labels=["a", "b"], pool={"max-servers": 7}),
        labels={"a": {"min-ready": 1}},
        **{"tenant-resource-limits": [{"tenant-name": "limited", "max-servers": 4}]},
    )
    launchers = [bench.start(content, name="one.yaml")]
    cloud = bench.cloud("fake-provider")
    bench.use_cloud(lambda: cloud)
    launchers.append(bench.start(content, name="two.yaml"))
    users = Users(bench, seed)
    for number in range(120):
        users.step()
        if number == 60 and seed % 2:
            bench.stop(launchers.pop(0))
        if number == 80 and seed % 2:
            launchers.append(bench.start(content, name="three.yaml"))
        if number % 20 == 10:
            bench.adapter("fake-provider", launchers[-1]).createServer_fails = 1
        if number == 50 and seed % 4 >= 2:
            expire_session(launchers[-1])
        if number == 40 and seed % 3 == 0:
            bench.config(
                config(
                    provider(labels=["a", "b"], pool={"max-servers": 6}, **{"boot-timeout": 50}),
                    labels={"a": {"min-ready": 1}},
                ),
                name="two.yaml",
            )

    # Everybody gets what they still want.
    def served() -> bool:
        users.collect()
        while users.using:
            users.finish()
        return not users.open

    wait_for(served, 20, f"{users.open} served")
    assert not users.failed, "nothing was unservable"
    # Only the idle node is left, here and in the cloud, and nobody holds anything.
    wait_for(
        lambda: (
            [(n.state, n.allocated_to, n.type) for n in bench.nodes()] == [("ready", None, ["a"])]
            or all(n.state == "ready" and n.allocated_to is None for n in bench.nodes())
        ),
        20,
        "quiet",
    )
    wait_for(
        lambda: {s.id for s in cloud._server_list} == {n.external_id for n in bench.nodes()},
        10,
        "no server left",
    )
    wait_for(lambda: not bench.zk.getNodeRequests(), what="no request left")
    for lock_id in bench.zk.getNodeRequestLockIDs():
        wait_for(
            lambda i=lock_id: (
                not bench.zuul.client.get_children(  # type: ignore[misc]
                    f"/nodepool/requests-lock/{i}"
                )
            ),
            what="request locks released",
        )
    for node in bench.nodes():
        wait_for(lambda n=node: not bench.zuul.contenders(n.id), what="node locks released")  # type: ignore[misc]
    for launcher in launchers:
        for worker in launcher.getPoolWorkers("fake-provider"):
            wait_for(
                lambda w=worker: (
                    not w.request_handlers and not w.paused_handlers and not w.backlog.ids
                )
            )  # type: ignore[misc]
        assert not any(launcher.zk.reservations.provider("fake-provider").values())
        assert not any(launcher.zk.reservations.tenant("limited").values())
        assert not launcher.assignment.waiting() and not launcher.assignment.queue.claims
