"""Whoever waits sees why: declined requests, misspelt labels, no launcher, broken drivers,
static hosts, failing builds.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.reasons import Declined, because
from nodepool.zk import declines
from nodepool.zk.records.progress import BuildProgress, UploadFailure
from tests.conftest import Chroot, wait_for
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)


class Command:
    """``nodepool`` with the configuration of the launcher."""

    def __init__(self, bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> None:
        self.bench, self.capsys = bench, capsys

    def __call__(self, *args: str, status: int = 0) -> tuple[str, str]:
        self.capsys.readouterr()
        assert nodepoolcmd.main(["-c", str(self.bench.tmp / "nodepool.yaml"), *args]) == status
        output = self.capsys.readouterr()
        return output.out, output.err


@pytest.fixture
def command(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(bench, capsys)


def messages(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [text for record in caplog.records if (text := record.getMessage()).startswith(start)]


# -- users 4: a failed request says why


def test_users_4_a_misspelt_label(
    bench: LauncherBench, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.start(
        config(provider("fake-one", labels=["host"]), provider("fake-two", labels=["other"]))
    )
    out, err = command("request", "create", "hsot", "--wait", status=1)
    assert "no launcher offers hsot; did you mean host?" in err
    request_id = out.split()[0]
    line = out.splitlines()[-1]
    assert line.endswith("declined by 2 pools do not offer it")
    (logged,) = wait_for(
        lambda: messages(caplog, f"Failed request {request_id}"), what="the line in the log"
    )
    assert "no pool offers hsot" in logged
    shown, _err = command("request", "show", request_id)
    assert "Why: no launcher offers hsot; did you mean host?" in shown
    assert "Declined by: 2 pools do not offer it" in shown
    (row,) = json.loads(command("request-list", "--format", "json")[0])
    assert sorted(row["reasons"]) == [
        "fake-one-main: does not offer hsot",
        "fake-two-main: does not offer hsot",
    ]
    assert "fake-one-main: does not offer hsot" in command("request-list", "--detail")[0]


def test_users_4_without_wait_the_command_reports_as_well(
    bench: LauncherBench, command: Command
) -> None:
    bench.start(config(provider(labels=["host"])))
    out, err = command("request", "create", "nosuch")
    assert out.startswith("100-")
    assert "no launcher offers nosuch" in err and "did you mean" not in err
    assert command("request", "create", "host")[1] == ""


def test_users_4_more_than_the_pool_may_have(
    bench: LauncherBench, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.start(config(provider(pool={"max-servers": 2})))
    out, err = command("request", "create", *["fake-label"] * 3, "--wait", status=1)
    assert "fake-provider-main: it would exceed quota" in out and "offer" not in err
    assert not any("no pool offers" in text for text in messages(caplog, "Fail"))
    request_id = out.split()[0]
    (record,) = json.loads(command("request", "wait", request_id, "--json", status=1)[0])
    assert [reason.split(":")[0] for reason in record["reasons"]] == ["fake-provider-main"]


def test_users_4_labels_of_different_pools(
    bench: LauncherBench, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.start(config(provider("fake-one", labels=["a"]), provider("fake-two", labels=["b"])))
    out, err = command("request", "create", "a", "b", "--wait", status=1)
    assert "no pool offers a and b together" in err
    assert "declined by 2 pools do not offer it" in out
    logged = wait_for(lambda: messages(caplog, "Failed request"), what="the line in the log")
    assert any("no pool offers a and b together" in text for text in logged)


def test_labels_of_failed_requests_cannot_forge_the_log(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.start(config(provider("fake-one", labels=["a"])))
    bench.wait_request(bench.zuul.submit("\x1b[2J\u202e" + "x" * 50_000), "failed")
    (text,) = wait_for(lambda: messages(caplog, "Failed request"), what="the log line")
    assert text.isprintable() and len(text) < 500 and "no pool offers" in text


def test_users_4_a_missing_image(bench: LauncherBench, command: Command) -> None:
    bench.start(
        config(
            provider(
                diskimages=[{"name": "img"}],
                pools=[
                    {
                        "name": "main",
                        "labels": [{"name": "fake-label", "diskimage": "img", "min-ram": 1}],
                    }
                ],
            ),
            diskimages=[{"name": "img", "elements": ["x"]}],
            **{"elements-dir": ".", "images-dir": str(bench.tmp)},
        )
    )
    assert (
        "fake-provider-main: images are not available"
        in command("request", "create", "fake-label", "--wait", status=1)[0]
    )


def test_users_4_a_node_that_cannot_be_made(
    bench: LauncherBench, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(config(provider(**{"launch-retries": 1})))

    def refuse(*args: Any, **kw: Any) -> Any:
        raise RuntimeError("no more blue paint")

    monkeypatch.setattr(bench.adapter("fake-provider"), "_createServer", refuse)
    out, _err = command("request", "create", "fake-label", "--wait", status=1)
    assert "fake-provider-main: launch of node" in out and "no more blue paint" in out


def test_users_4_no_launcher_at_all(zk_chroot: Chroot, capsys: pytest.CaptureFixture[str]) -> None:
    path = zk_chroot.config({"labels": [], "providers": []})
    assert nodepoolcmd.main(["-c", path, "request", "create", "x", "--wait", "0.1"]) == 3
    assert "no launcher is alive" in capsys.readouterr().err
    assert nodepoolcmd.main(["-c", path, "request", "create", "x"]) == 0
    assert "no launcher is alive" in capsys.readouterr().err


def test_users_4_what_it_waits_for(bench: LauncherBench, command: Command) -> None:
    """The command names the limit of the pool that could serve the request."""
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    wait_for(
        lambda: any(p.paused for p in bench.zk.getRegisteredPools()), what="the pool is paused"
    )
    assert pool.ready
    text = "pool main, instances: 1 needed, 0 of 1 left"
    wait_for(lambda: text in command("request", "show", waiting)[0], what="the reason is published")
    _out, err = command("request", "wait", waiting, "--timeout", "1.5", status=3)
    assert text in err and "raise `max-servers` of pool main" in err


# -- the records


def test_reasons_end_with_the_request(bench: LauncherBench, command: Command) -> None:
    """Nothing is left in ZooKeeper: not when the owner removes the request, nor when the
    launcher no longer exists.
    """
    pool = bench.start(config(provider()))
    kazoo = bench.zuul.client
    gone, kept = bench.submit("nosuch"), bench.submit("nosuch")
    for request_id in (gone, kept):
        bench.wait_request(request_id, "failed")
    assert len(kazoo.get_children(declines.ROOT)) == 2
    assert "reason" not in (bench.zuul.request(kept) or {}) and not kazoo.get_children(
        f"/nodepool/requests/{kept}"
    )
    command("request", "cancel", gone)
    wait_for(
        lambda: len(kazoo.get_children(declines.ROOT)) == 1, what="the reason goes with the request"
    )
    bench.stop(pool)
    wait_for(
        lambda: kazoo.get_children(declines.ROOT) == [], what="the rest goes with the launcher"
    )
    assert "Declined by: fake-provider-main on " in command("request", "show", kept)[0]


def test_a_reason_for_a_request_that_was_deleted_meanwhile_is_removed(bench: LauncherBench) -> None:
    from nodepool.zk.records import NodeRequest

    pool = bench.start(config(provider()))
    kept = bench.submit("nosuch")
    bench.wait_request(kept, "failed")
    gone = NodeRequest("100-0000000099")
    pool.state.declines.note(gone, "launcher", "pool", [because(Declined.NO_IMAGE)])
    # What is sent on one connection is done in order: when the last one is there, the others have
    # been dealt with.
    pool.state.declines.note(
        pool.zk.request_tree.get(kept), "another", "pool", [because(Declined.NO_IMAGE)]
    )
    wait_for(
        lambda: bench.zuul.client.exists(declines.path(kept, "another")), what="the last is written"
    )
    assert not [
        name for name in bench.zuul.client.get_children(declines.ROOT) if "0000000099" in name
    ]


def test_no_more_reasons_are_published_than_one_session_should_own(
    bench: LauncherBench, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.requests.declines.MOST", 2)
    bench.start(config(provider()))
    client = bench.zuul.client
    ids = []
    for count in (1, 2, 2):
        ids.append(bench.submit("nosuch"))
        bench.wait_request(ids[-1], "failed")
        wait_for(
            lambda count=count: len(client.get_children(declines.ROOT)) == count, what="the reasons"
        )
    command("request", "cancel", ids[0])
    wait_for(lambda: len(client.get_children(declines.ROOT)) == 1, what="room for one")
    bench.wait_request(bench.submit("nosuch"), "failed")
    wait_for(lambda: len(client.get_children(declines.ROOT)) == 2, what="the reason of the next")


def test_users_12_another_provider_serves(bench: LauncherBench, command: Command) -> None:
    bench.start(config(provider("fake-one", labels=["a"]), provider("fake-two", labels=["b"])))
    err = command("request", "create", "a", "--provider", "fake-two", "--wait")[1]
    assert "provider fake-two does not offer a; another one serves: fake-one" in err
    assert command("request", "create", "b", "--provider", "fake-two", "--wait")[1] == ""


def test_broken_reasons_disturb_nobody(bench: LauncherBench, command: Command) -> None:
    bench.start(config(provider()))
    kazoo = bench.zuul.client
    kazoo.ensure_path(declines.ROOT)
    request_id = bench.submit("nosuch")
    record = bench.wait_request(request_id, "failed")
    for data in (b"", b"{", b"[1]", b'{"reason": 3}'):
        kazoo.set(declines.path(request_id, record["declined_by"][0]), data)
        assert "Declined by: fake-provider-main" in command("request", "show", request_id)[0]
    for name in ("x", "@", "a@b@c", "%zz"):
        kazoo.create(f"{declines.ROOT}/{name}", b"{}")
    command("request-list", "--detail")


# -- problem-list and /ready


def test_users_5_a_driver_whose_handler_raises(
    bench: LauncherBench, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.statemachine.handler import StateMachineHandler

    pool = bench.start(config(provider()))
    working = StateMachineHandler.imagesAvailable

    def broken(self: Any) -> bool:
        raise AttributeError("no attribute 'colour'")

    monkeypatch.setattr(StateMachineHandler, "imagesAvailable", broken)
    out, _err = command("request", "create", "fake-label", "--wait", status=1)
    assert "fake-provider-main: error: no attribute 'colour'" in out
    ready, lines = pool.getReadiness()
    assert ready
    assert any("label fake-label" in line and "no attribute 'colour'" in line for line in lines)
    rows = wait_for(
        lambda: json.loads(command("problem-list", "--format", "json")[0]), what="published"
    )
    assert (rows[0]["provider"], rows[0]["label"]) == ("fake-provider", "fake-label")
    monkeypatch.setattr(StateMachineHandler, "imagesAvailable", working)
    bench.fulfilled("fake-label")
    wait_for(lambda: pool.getReadiness() == (True, []), what="the problem goes when it works")


def test_users_5_a_driver_that_makes_no_handler(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    manager = pool.getProviderManager("fake-provider")

    def broken(*args: Any) -> Any:
        raise TypeError("three arguments wanted")

    monkeypatch.setattr(manager, "getRequestHandler", broken)
    bench.submit("fake-label")
    wait_for(
        lambda: any("three arguments wanted" in line for line in pool.getReadiness()[1]),
        what="it is told",
    )


def test_users_5_failing_images(bench: LauncherBench, command: Command) -> None:
    pool = bench.start(config(provider()))
    now = time.time()
    store = bench.zk.progress
    store.write(
        BuildProgress(
            "img", "1" * 32, builder="b1", state="ready", started=now - 90, ended=now - 80
        )
    )
    store.write(
        BuildProgress(
            "img",
            "2" * 32,
            builder="b1",
            state="failed",
            started=now - 30,
            ended=now - 20,
            reason="no space left",
            next_try=now + 300,
        )
    )
    store.write(
        BuildProgress(
            "fine", "3" * 32, builder="b1", state="failed", started=now - 90, ended=now - 80
        )
    )
    store.write(
        BuildProgress(
            "fine", "4" * 32, builder="b1", state="ready", started=now - 30, ended=now - 20
        )
    )
    store.write(
        UploadFailure(
            "img", "fake-provider", build="1" * 32, upload="1", reason="cloud is full", time=now
        )
    )

    def told() -> list[str]:
        return [
            f"{row['launcher']} {row['provider']} {row['problem']}"
            for row in json.loads(command("problem-list", "--format", "json")[0])
        ]

    store.write(
        BuildProgress(
            "removed",
            "6" * 32,
            builder="b1",
            state="failed",
            started=now - 9999,
            ended=now - 9990,
            next_try=now - 4000,
        )
    )
    lines = told()
    assert len(lines) == 2
    assert any(
        line.startswith("b1 None image img: the last build failed: no space left") for line in lines
    )
    assert any(
        line.startswith("None fake-provider image img: the last upload failed: cloud is full")
        for line in lines
    )
    wait_for(lambda: len(pool.getReadiness()[1]) == 2, what="/ready tells")
    assert pool.getReadiness()[0] is True
    with pytest.MonkeyPatch.context() as patch:  # ZooKeeper is away: nobody is asked
        patch.setattr("nodepool.zk.facade.base.FacadeBase._complete", lambda *_args: 1 / 0)
        pool.zk.progress_tree.synced.clear()
        assert len(pool.getReadiness()[1]) >= 2
        pool.zk.progress_tree.synced.set()
    store.delete(UploadFailure("img", "fake-provider"))
    store.write(
        BuildProgress("img", "5" * 32, builder="b1", state="ready", started=now - 5, ended=now)
    )
    wait_for(lambda: told() == [] and pool.getReadiness() == (True, []), what="all is well again")


# -- users 15: what a command leaves behind


def interrupt_when_asked(monkeypatch: pytest.MonkeyPatch, *wanted: str) -> None:
    """Ctrl-C as soon as a request has reached one of these states."""
    from nodepool.cmd.commands.requests.follow import Follower

    look = Follower._poll

    def interrupted(self: Any, request_id: str, states: dict[str, Any], report: Any) -> None:
        look(self, request_id, states, report)
        if states[request_id] in wanted:
            raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "_poll", interrupted)


def test_users_15_an_interrupted_create_withdraws(
    bench: LauncherBench,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.start(config(provider(pool={"max-servers": 1})))
    bench.fulfilled("fake-label")
    interrupt_when_asked(monkeypatch, "requested", "pending")
    with pytest.raises(KeyboardInterrupt):
        command("request", "create", "fake-label", "--wait")
    output = capsys.readouterr()
    request_id = output.out.split()[0]
    assert f"request {request_id} has been withdrawn" in output.err
    assert bench.zuul.request(request_id) is None
    other = bench.submit("fake-label")
    with pytest.raises(KeyboardInterrupt):
        command("request", "wait", other)
    assert f"`nodepool request cancel {other}`" in capsys.readouterr().err
    assert bench.zuul.request(other) is not None


def test_users_15_fulfilled_ones_are_named(
    bench: LauncherBench,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.start(config(provider()))
    interrupt_when_asked(monkeypatch, "fulfilled")
    with pytest.raises(KeyboardInterrupt):
        command("request", "create", "fake-label", "--wait")
    output = capsys.readouterr()
    request_id = output.out.split()[0]
    assert f"request {request_id} is fulfilled and keeps its nodes" in output.err
    assert bench.zuul.request(request_id) is not None


def test_users_15_failed_ones_can_be_removed(bench: LauncherBench, command: Command) -> None:
    bench.start(config(provider()))
    failed = bench.submit("nosuch")
    ours = command("request", "create", "nosuch", "--wait", status=1)[0].split()[0]
    bench.wait_request(failed, "failed")
    command("request", "cancel", "--failed")
    assert bench.zuul.request(ours) is None
    assert bench.zuul.request(failed) is not None, "requests of others are theirs"
