"""The configuration file changes while requests are in flight (LAU-15)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.faults.launcher import Bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


def test_providers_added_changed_and_removed(bench: Bench) -> None:
    bench.cloud.set(create_delay=1.0, delete_delay=0.1)
    zuul = bench.zuul
    providers: dict[str, dict[str, Any]] = {
        name: bench.provider(name, ["l0", f"only-{name}"]) for name in ("p0", "p1", "p2")
    }
    labels = [{"name": n} for n in ("l0", "only-p0", "only-p1", "only-p2")]
    launcher = bench.start(bench.config(providers["p0"], providers["p1"], labels=labels))
    bench.wait_pools(2)

    def use(names: list[str]) -> None:
        launcher.rewrite(lambda content: content.update(providers=[providers[n] for n in names]))

    begun = time.monotonic()
    ids = [zuul.submit("l0") for _ in range(20)]
    own = [zuul.submit("only-p1") for _ in range(3)]
    zuul.wait_states(ids + own, lambda states: states["pending"] >= 20)
    # Added: serves its label within a second or so.
    use(["p0", "p1", "p2"])
    bench.wait_pools(3)
    new = [zuul.submit("only-p2") for _ in range(3)]
    # Changed while launches are under way: they finish, new ones use the new values.
    providers["p0"]["launch-retries"] = 5
    use(["p0", "p1", "p2"])
    ids += [zuul.submit("l0") for _ in range(10)]
    zuul.wait_fulfilled(ids + own + new)
    # Removed while launches are under way: its requests are served by the others.
    late = [zuul.submit("l0") for _ in range(15)]
    zuul.wait_states(late, lambda states: states["pending"] >= 12)
    use(["p0", "p2"])
    bench.wait_pools(2)
    zuul.wait_fulfilled(late)
    print(f"served {time.monotonic() - begun:.1f} s after the first submission")
    zuul.use(ids + own + new + late)

    # Nodes of the removed provider are kept until it is there again; those of the others go.
    def only_left() -> bool:
        return all(n["provider"] == "p1" for n in zuul.read("nodes").values())

    wait_for(only_left, 20, "only nodes of p1")
    assert all(
        n["allocated_to"] is None or n["state"] != "ready" for n in zuul.read("nodes").values()
    )
    use(["p0", "p1", "p2"])
    # Launches that finished for nobody are ready nodes now, good for the next request.
    wait_for(
        lambda: all(n["state"] == "ready" for n in zuul.read("nodes").values()),
        20,
        "only idle nodes",
    )
    again = zuul.submit("only-p1")
    zuul.wait_fulfilled([again])
    zuul.use([again])
    launcher.rewrite(
        lambda content: content.update(labels=[{**label, "max-ready-age": 1} for label in labels])
    )
    bench.wait_nothing_left(20)
    print(bench.check_counts())
    assert launcher.alive()
    bench.check_fencing()


def test_a_bad_file_is_kept_out(bench: Bench) -> None:
    bench.cloud.set(create_delay=0.5, delete_delay=0.1)
    zuul = bench.zuul
    launcher = bench.start(bench.config())
    bench.wait_pools(1)
    good = launcher.config.read_text()
    ids = [zuul.submit("l0") for _ in range(5)]
    bad = {
        "broken YAML": good + "\n  - : [",
        "empty": "",
        "a label nobody defines": good.replace("labels:\n- name: l0", "labels:\n- name: other", 1),
    }
    for what, text in bad.items():
        launcher.config.write_text(text)
        wait_for(lambda: "stale" in launcher.readiness(), 5, f"{what}: readiness tells")
        assert launcher.ready(), what
        ids.append(zuul.submit("l0"))
        assert len(zuul.pools()) == 1
        launcher.config.write_text(good)
        wait_for(lambda: "stale" not in launcher.readiness(), 5, f"{what}: good again")
    launcher.config.unlink()
    ids.append(zuul.submit("l0"))
    zuul.wait_fulfilled(ids)
    launcher.config.write_text(good)
    zuul.use(ids)
    bench.wait_nothing_left()
    bench.check_counts()
    assert "Traceback" not in launcher.text()


def test_a_driver_that_is_not_there(bench: Bench) -> None:
    """A provider whose new entry names no driver continues as it was, and is named; a new one is
    omitted and named.
    """
    bench.cloud.set(create_delay=0.5, delete_delay=0.1)
    zuul = bench.zuul
    launcher = bench.start(bench.config(bench.provider("p0"), bench.provider("p1")))
    bench.wait_pools(2)
    ids = [zuul.submit("l0") for _ in range(10)]
    zuul.wait_states(ids, lambda states: states["pending"] == 10)
    launcher.rewrite(lambda c: c["providers"][0].update(driver="nosuch"))
    wait_for(
        lambda: "provider p0: uses its last valid configuration" in launcher.readiness(),
        5,
        "readiness names the provider",
    )
    assert launcher.ready()
    zuul.wait_fulfilled(ids)
    launcher.rewrite(lambda c: c["providers"][0].update(driver="diskcloud"))
    wait_for(lambda: "p0" not in launcher.readiness(), 5, "all is well again")
    launcher.rewrite(
        lambda c: c["providers"].append({**c["providers"][0], "name": "p2", "driver": "nosuch"})
    )
    wait_for(
        lambda: "provider p2: not running" in launcher.readiness(),
        5,
        "readiness names the new provider",
    )
    bench.wait_pools(2)
    zuul.use(ids)
    # What p0 was making when it went is ready and idle now.
    launcher.rewrite(lambda c: c.update(labels=[{"name": "l0", "max-ready-age": 1}]))
    bench.wait_nothing_left()
    print(bench.check_counts())
    assert "Traceback" not in launcher.text()
