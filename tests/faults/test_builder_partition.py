"""Builders that stand still or lose ZooKeeper during a build or an upload (BLD-17, section 5)."""

from __future__ import annotations

import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.zk.records import BUILDING, FAILED, READY
from tests.conftest import wait_for
from tests.support.faults.builder import DEADLINE, BuilderBench, BuilderProcess, bench
from tests.support.faults.launcher import SESSION, Proxy

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(180),
    # kazoo leaves the socket of a refused TLS connection to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

__all__ = ["bench"]

SHORT = SESSION / 4


@pytest.fixture
def proxy(bench: BuilderBench) -> Iterator[Proxy]:
    made = Proxy(int(bench.settings["hosts"].rsplit(":", 1)[1]))
    yield made
    made.stop()


class Cut:
    """Separates one builder from the rest: the process stands still, or its connection is closed
    or silent.
    """

    def __init__(self, bench: BuilderBench, proxy: Proxy, how: str) -> None:
        self.bench, self.proxy, self.how = bench, proxy, how
        self.builder: BuilderProcess | None = None

    def start(self, name: str = "b0") -> BuilderProcess:
        self.bench.config(name, hosts=self.proxy.host)
        self.builder = self.bench.start(name)
        return self.builder

    def begin(self) -> None:
        assert self.builder is not None
        if self.how == "stop":
            self.builder.send(signal.SIGSTOP)
        else:
            self.proxy.set(self.how)

    def end(self) -> None:
        assert self.builder is not None
        if self.how == "stop":
            self.builder.send(signal.SIGCONT)
        else:
            self.proxy.set("open")

    def wait_expired(self) -> None:
        """Until the builder's session has ended: its registration no longer exists."""
        kazoo = self.bench.client.client
        assert kazoo is not None
        directory = "/nodepool/components/builder"
        wait_for(
            lambda: not kazoo.get_children(directory), DEADLINE, "session of the builder ended"
        )


@pytest.fixture(params=["stop", "close", "hold"])
def cut(request: pytest.FixtureRequest, bench: BuilderBench, proxy: Proxy) -> Cut:
    return Cut(bench, proxy, request.param)


def lose_session(
    bench: BuilderBench, cut: Cut, when: str
) -> tuple[BuilderProcess, Any, pathlib.Path]:
    """A builder whose session ends during a build; the build continues until the file is removed,
    or its command has ended.
    """
    hold = bench.hold("before")
    builder = cut.start()
    bench.wait_begun()
    build = bench.wait_build(state=BUILDING)
    cut.begin()
    if when == "the command has ended":
        hold.unlink()
        bench.wait_begun("made")
    cut.wait_expired()
    return builder, build, hold


@pytest.mark.spec("BLD-17: Suspended and back: result counts")
def test_short_cut_during_a_build(bench: BuilderBench, cut: Cut) -> None:
    hold = bench.hold("before")
    cut.start()
    bench.wait_begun()
    build = bench.wait_build(state=BUILDING)
    cut.begin()
    time.sleep(SHORT)  # the length of the cut
    cut.end()
    hold.unlink()
    bench.wait_served()
    assert [b.id for b in bench.builds()] == [build.id]
    assert len(bench.runs()) == 1


@pytest.mark.spec(
    "a build over a lost session counts when nobody else built: the lock is taken again"
)
@pytest.mark.parametrize("when", ["the command still runs", "the command has ended"])
def test_long_cut_during_a_build(bench: BuilderBench, cut: Cut, when: str) -> None:
    builder, build, hold = lose_session(bench, cut, when)
    assert bench.builds(state=READY) == []
    cut.end()
    hold.unlink(missing_ok=True)
    bench.wait_served()
    assert [b.id for b in bench.builds()] == [build.id]
    assert len(bench.runs()) == 1 and builder.alive()


@pytest.mark.spec(
    "BLD-17: the session expired and others built: the build is failed, its local files are deleted"
)
@pytest.mark.parametrize("when", ["the command still runs", "the command has ended"])
def test_other_builder_continues_the_work(bench: BuilderBench, cut: Cut, when: str) -> None:
    first, lost, hold = lose_session(bench, cut, when)
    # The other one builds without being held.
    bench.config("b1", images=[bench.image(env={"CREATE_HOLD": str(bench.scratch.parent)})])
    bench.start("b1")
    build = bench.wait_build()
    assert build.id != lost.id
    bench.wait_upload()
    cut.end()
    hold.unlink(missing_ok=True)
    progress = bench.wait_failed(lost.id)
    bench.wait_served()
    assert [b.id for b in bench.builds(state=None)] == [build.id]
    assert progress.reason is not None
    assert not list(first.images_dir.glob("i0-*"))
    assert len(bench.uploads()) == len(bench.cloud.images()) == 1
    assert first.alive()


@pytest.mark.spec(
    "BLD-17: one stands still while the other builds: one result counts, the loser's files go"
)
def test_both_build_concurrently(bench: BuilderBench, cut: Cut) -> None:
    """The second builds still when the first comes back with its result."""
    slow = bench.hold("after", "i0")
    first = cut.start()
    bench.wait_begun("made")
    lost = bench.wait_build(state=BUILDING)
    cut.begin()
    cut.wait_expired()
    bench.config("b1")
    bench.start("b1")
    bench.wait_begun("made")
    second = bench.wait_build(state=BUILDING, besides=(lost.id,))
    cut.end()
    time.sleep(1)  # let the first one check the lock, which is not free
    slow.unlink()
    bench.wait_served()
    (build,) = bench.builds(state=None)
    assert build.id in (lost.id, second.id) and len(bench.runs()) == 2
    loser = lost.id if build.id == second.id else second.id
    assert bench.wait_failed(loser).reason
    assert first.alive()
    assert len(bench.uploads()) == len(bench.cloud.images()) == 1


@pytest.mark.spec(
    "BLD-17: same idea for uploads: the result of an upload over a lost session is not lost"
)
@pytest.mark.parametrize("seconds", [SHORT, None], ids=["short", "long"])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "two builders"])
def test_cut_during_an_upload(
    bench: BuilderBench, cut: Cut, seconds: float | None, others: bool
) -> None:
    bench.cloud.do("upload-blocks")
    first = cut.start()
    wait_for(bench.cloud.images, DEADLINE, "an image in the cloud")
    record = bench.wait_upload(state="uploading")
    if others:
        bench.config("b1")
    if others and seconds is not None:
        bench.start("b1")  # its start would make the cut longer
    cut.begin()
    if seconds is not None:
        time.sleep(seconds)  # the length of the cut
    else:
        cut.wait_expired()
        if others:
            bench.start("b1")
            wait_for(
                lambda: not bench.uploads(state="uploading"),
                DEADLINE,
                "record of the upload dropped by the other builder",
            )
    bench.cloud.stop_doing("upload-blocks")
    cut.end()
    bench.wait_served()
    assert len(bench.runs()) == 1 and first.alive()
    assert len(bench.builds()) == len(bench.uploads()) == len(bench.cloud.images()) == 1
    if not others or seconds is not None:
        assert bench.uploads()[0].id == record.id
        assert len(bench.cloud.calls("upload")) == 1


@pytest.mark.spec(
    "BLD-2: connect (waits for ZooKeeper for ever, warning every 10 s); a signal ends it"
)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name
)
def test_no_server_at_the_start(bench: BuilderBench, proxy: Proxy, number: signal.Signals) -> None:
    proxy.set("close")
    bench.config(hosts=proxy.host)
    builder = bench.start(plain=True, wait=False)
    pattern = re.compile(
        rf"^.*Waiting for ZooKeeper: no server answers at {re.escape(proxy.host)}.*$", re.MULTILINE
    )
    wait_for(lambda: pattern.search(builder.text()), 30, "a message naming the server")
    assert "Traceback" not in builder.text()
    assert builder.stop(number, 20) < 5


@pytest.mark.spec("BLD-2: the work begins when ZooKeeper appears")
def test_builder_begins_when_zookeeper_appears(bench: BuilderBench, proxy: Proxy) -> None:
    proxy.set("close")
    bench.config(hosts=proxy.host)
    builder = bench.start(wait=False)
    wait_for(lambda: "Waiting for ZooKeeper" in builder.text(), 30, "a message")
    proxy.set("open")
    bench.wait_served()
    assert "Traceback" not in builder.text()


@pytest.mark.spec("BLD-2: a builder without ZooKeeper ends in seconds, and its build with it")
def test_stop_without_server(bench: BuilderBench, proxy: Proxy) -> None:
    hold = bench.hold("before")
    bench.config(hosts=proxy.host)
    builder = bench.start()
    bench.wait_begun()
    build = bench.wait_build(state=BUILDING)
    proxy.set("close")
    assert builder.stop(timeout=20) < 18
    assert bench.processes() == []
    proxy.set("open")
    hold.unlink()
    bench.start()
    bench.wait_served()
    assert bench.wait_failed(build.id).state == FAILED
