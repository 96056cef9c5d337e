"""What launches and requests took of late."""

from __future__ import annotations

from nodepool.launcher.trends import BUCKET, BUCKETS, MOST_CAUSES, MOST_OLD, OTHER, SAMPLE_INTERVAL, Point, Trends
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import Node, NodeRequest


class Clock:
    now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


def node(state: str, created: object = 10.0, at: float = 14.0) -> Node:
    made = Node("1")
    made.state = state
    made.type, made.created_time, made.state_time = ["a"], created, at  # type: ignore[assignment]
    return made


def request(state: str, requestor: str = "zuul") -> NodeRequest:
    made = NodeRequest("100-1")
    made.state = state
    made.node_types, made.created_time, made.state_time, made.requestor = ["a", "a"], 10.0, 12.0, requestor
    return made


def test_launches_and_waits() -> None:
    clock = Clock()
    trends = Trends(clock)
    trends.node_changed("1", node("building"), node("ready"))
    trends.node_changed("2", node("building"), node("failed"))
    trends.node_changed("3", node("ready"), node("in-use"))
    trends.node_changed("4", None, node("ready"))
    trends.request_changed("r", request("pending"), request("fulfilled"))
    trends.request_changed("r", request("pending", MIN_READY), request("fulfilled", MIN_READY))
    assert trends.labels() == {"a": {"launch": 4.0, "wait": 2.0}}
    last = trends.chart()[-1]
    assert (last["ready"], last["failed"], last["launch"], last["wait"]) == (1, 1, 4.0, 2.0)
    clock.now += 60
    trends.request_changed("r", request("pending"), request("fulfilled"))
    assert trends.labels()["a"]["a_minute"] == 2.0


def test_clocks_that_are_wrong() -> None:
    trends = Trends(Clock())
    for created in (20.0, None, "x", -1e12, float("nan"), 10**400, -(10**400)):
        trends.node_changed("1", node("building", created), node("ready", created))
    assert trends.labels() == {} and trends.chart()[-1]["ready"] == 7


def test_old_buckets_go() -> None:
    clock = Clock()
    trends = Trends(clock)
    trends.node_changed("1", node("building"), node("ready"))
    clock.now += BUCKET * BUCKETS
    chart = trends.chart()
    assert len(chart) == BUCKETS and not any(row["ready"] for row in chart)


def test_clock_that_is_set_back_ends_no_chart() -> None:
    clock = Clock()
    trends = Trends(clock)
    for _ in range(BUCKETS + 1):
        clock.now += BUCKET
        trends.node_changed("1", node("building"), node("ready"))
        trends.request_changed("r", request("pending"), request("fulfilled"))
    clock.now -= 2 * BUCKET * BUCKETS
    for _ in range(2):
        clock.now += BUCKET
        trends.node_changed("1", node("building"), node("ready"))
    assert [row["ready"] for row in trends.chart()[-3:]] == [0, 1, 1]
    assert "a_minute" not in trends.labels()["a"]


def test_history_before_this_process() -> None:
    """Charts go on after a restart; what the mirror has told since counts once."""
    clock = Clock()
    then = clock.now - 2 * BUCKET
    trends = Trends(clock)
    trends.node_changed("9", node("building"), node("ready"))
    created = {"type": "node-created", "node": "1", "labels": ["a"], "time": then}
    ready = {"type": "node-changed", "node": "1", "before": "building", "state": "ready", "time": then + 8}
    asked = {"type": "request-submitted", "request": "r", "labels": ["a"], "requestor": "zuul", "time": then}
    done = {"type": "request-changed", "request": "r", "state": "fulfilled", "labels": ["a"], "time": then + 10}
    again = {**done, "request": "s", "time": then + 20}
    failed = {"type": "node-changed", "node": "2", "before": "building", "state": "failed", "time": then + 9}
    own = {**ready, "node": "9", "time": clock.now + 1}
    old = {**ready, "time": then - BUCKET * BUCKETS}
    strange = [
        {"type": "node-changed", "node": ["x"], "time": then}, {"type": "node-created", "node": "7", "labels": 7, "time": then},
        {**ready, "time": float("nan")}, {**ready, "node": None}, {"type": "x", "time": then}, {**done, "request": "unknown"},
    ]  # fmt: skip
    trends.recall([old, created, asked, ready, failed, done, own, again, *strange])
    before = {row["time"]: row for row in trends.chart()}[int(then // BUCKET * BUCKET)]
    assert (before["ready"], before["failed"], before["launch"], before["wait"]) == (1, 1, 8, 10)
    assert trends.chart()[-1]["ready"] == 1
    served = round(60 * 3 / (clock.now - then - 10), 3)
    assert trends.labels()["a"] == {"launch": 6.0, "wait": 10, "a_minute": served}


def test_samples_are_taken_once_a_minute_and_name_the_largest_causes() -> None:
    clock = Clock()
    trends = Trends(clock)
    causes = {f"cause {number}": number + 1 for number in range(MOST_CAUSES + 2)}
    trends.sample(lambda: {"ready": 2}, lambda: causes)
    assert trends.chart()[-1]["nodes"] == {"ready": 2}
    assert trends.chart()[-1]["waiting"] == {**{f"cause {number}": number + 1 for number in range(7, 1, -1)}, OTHER: 3}
    clock.now += SAMPLE_INTERVAL - 1
    trends.sample(lambda: {"ready": 3}, lambda: causes)
    assert trends.chart()[-1]["nodes"] == {"ready": 2} and trends.chart()[-2]["nodes"] is None
    clock.now += 1
    trends.sample(lambda: {"ready": 3}, dict)
    assert (trends.chart()[-1]["nodes"], trends.chart()[-1]["waiting"]) == ({"ready": 3}, {})


def test_old_points_keep_few_durations_and_their_percentiles() -> None:
    clock = Clock()
    trends = Trends(clock)
    for wait in range(1, 1001):
        done = request("fulfilled")
        done.state_time = 10.0 + wait
        trends.request_changed("r", request("pending"), done)
    assert (trends.chart()[-1]["wait"], trends.chart()[-1]["wait_p95"]) == (500.5, 950.0)
    clock.now += BUCKET
    trends.request_changed("r", request("pending"), request("fulfilled"))
    old = trends.chart()[-2]
    # Of every ten sorted waits the sixth is kept.
    assert (old["wait"], old["wait_p95"]) == (501.0, 946.0)


def test_closed_point_keeps_a_limited_number_of_durations() -> None:
    point = Point(waits=[float(number) for number in range(2000)])
    point.close()
    assert len(point.waits) == MOST_OLD
