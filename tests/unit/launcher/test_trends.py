"""What launches and requests took of late."""

from __future__ import annotations

from nodepool.launcher.trends import (
    BUCKET,
    BUCKETS,
    MOST_CAUSES,
    MOST_OLD,
    OTHER,
    SAMPLE_INTERVAL,
    Point,
    Trends,
)
from nodepool.zk.mirror.feed import Event
from nodepool.zk.mirror.requests import MIN_READY


class Clock:
    now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


def node(at: float, state: str, before: str = "building", **fields: object) -> Event:
    return {
        "type": "node-changed",
        "time": at,
        "before": before,
        "state": state,
        "labels": ["a"],
        **fields,
    }


def request(at: float, requestor: str = "zuul", seconds: object = 2.0) -> Event:
    return {
        "type": "request-changed",
        "time": at,
        "before": "pending",
        "state": "fulfilled",
        "labels": ["a", "a"],
        "requestor": requestor,
        "seconds": seconds,
    }


def test_launches_and_waits() -> None:
    clock = Clock()
    trends = Trends(clock)
    trends.count(node(clock.now, "ready", seconds=4.0))
    trends.count(node(clock.now, "failed"))
    trends.count(node(clock.now, "in-use", before="ready"))
    trends.count({"type": "node-created", "time": clock.now, "state": "ready", "labels": ["a"]})
    trends.count(request(clock.now))
    trends.count(request(clock.now, MIN_READY))
    assert trends.labels() == {"a": {"launch": 4.0, "wait": 2.0}}
    last = trends.chart()[-1]
    assert (last["ready"], last["failed"], last["launch"], last["wait"]) == (1, 1, 4.0, 2.0)
    clock.now += 60
    trends.count(request(clock.now))
    assert trends.labels()["a"]["a_minute"] == 2.0


def test_launches_that_end_without_a_ready_node_count_as_failed_once() -> None:
    clock = Clock()
    trends = Trends(clock)
    for state in ("failed", "aborted", "deleting"):
        trends.count(node(clock.now, state))
        trends.count(node(clock.now, "deleting", before=state))
    trends.count({"type": "node-removed", "time": clock.now, "before": "building", "labels": ["a"]})
    trends.count({"type": "node-removed", "time": clock.now, "before": "deleting", "labels": ["a"]})
    assert (trends.chart()[-1]["ready"], trends.chart()[-1]["failed"]) == (0, 4)


def test_rate_of_requests_that_are_no_longer_served_is_no_estimate() -> None:
    clock = Clock()
    trends = Trends(clock)
    for _ in range(10):
        clock.now += 8
        trends.count(request(clock.now))
    clock.now += 20
    assert trends.labels()["a"]["a_minute"] == 6.522
    clock.now += 40
    assert "a_minute" not in trends.labels()["a"]


def test_durations_of_wrong_clocks_are_ignored() -> None:
    clock = Clock()
    trends = Trends(clock)
    for seconds in (None, "x", -1.0, float("nan"), 10**400):
        trends.count(node(clock.now, "ready", seconds=seconds))
    assert trends.labels() == {} and trends.chart()[-1]["ready"] == 5


def test_old_buckets_go() -> None:
    clock = Clock()
    trends = Trends(clock)
    trends.count(node(clock.now, "ready", seconds=4.0))
    clock.now += BUCKET * BUCKETS
    chart = trends.chart()
    assert len(chart) == BUCKETS and not any(row["ready"] for row in chart)


def test_clock_that_is_set_back_ends_no_chart() -> None:
    clock = Clock()
    trends = Trends(clock)
    for _ in range(BUCKETS + 1):
        clock.now += BUCKET
        trends.count(node(clock.now, "ready", seconds=4.0))
        trends.count(request(clock.now))
    clock.now -= 2 * BUCKET * BUCKETS
    for _ in range(2):
        clock.now += BUCKET
        trends.count(node(clock.now, "ready", seconds=4.0))
    assert [row["ready"] for row in trends.chart()[-3:]] == [0, 1, 1]
    assert "a_minute" not in trends.labels()["a"]


def test_history_before_this_process() -> None:
    """Charts continue after a restart; what the mirror has reported since counts once."""
    clock = Clock()
    then = clock.now - 2 * BUCKET
    trends = Trends(clock)
    trends.count(node(clock.now, "ready", seconds=4.0))
    old, own = (
        node(then - BUCKET * BUCKETS, "ready", seconds=8),
        node(clock.now + 1, "ready", seconds=8),
    )
    trends.recall(
        [
            old,
            node(then + 8, "ready", seconds=8),
            node(then + 9, "failed"),
            request(then + 10, seconds=10),
            own,
            request(then + 20, seconds=None),
            {"type": "x", "time": then},
            node(float("nan"), "ready"),
        ]
    )
    before = {row["time"]: row for row in trends.chart()}[int(then // BUCKET * BUCKET)]
    assert (before["ready"], before["failed"], before["launch"], before["wait"]) == (1, 1, 8, 10)
    assert trends.chart()[-1]["ready"] == 1
    served = round(60 * 2 / (clock.now - then - 10), 3)
    assert trends.labels()["a"] == {"launch": 6.0, "wait": 10, "a_minute": served}


def test_samples_are_taken_once_a_minute_and_name_the_largest_causes() -> None:
    clock = Clock()
    trends = Trends(clock)
    causes = {f"cause {number}": number + 1 for number in range(MOST_CAUSES + 2)}
    trends.sample(lambda: {"ready": 2}, lambda: causes)
    assert trends.chart()[-1]["nodes"] == {"ready": 2}
    assert trends.chart()[-1]["waiting"] == {
        **{f"cause {number}": number + 1 for number in range(7, 1, -1)},
        OTHER: 3,
    }
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
        trends.count(request(clock.now, seconds=float(wait)))
    assert (trends.chart()[-1]["wait"], trends.chart()[-1]["wait_p95"]) == (500.5, 950.0)
    clock.now += BUCKET
    trends.count(request(clock.now))
    old = trends.chart()[-2]
    # Of every ten sorted waits the sixth is kept.
    assert (old["wait"], old["wait_p95"]) == (501.0, 946.0)


def test_closed_point_keeps_a_limited_number_of_durations() -> None:
    point = Point(waits=[float(number) for number in range(2000)])
    point.close()
    assert len(point.waits) == MOST_OLD
