"""What it is worth that polls of a cloud learn how long changes take: delay and questions, compared
with a plain growing pause.

  python -m tests.benchmark.polling

Time is stepped, so the figures do not depend on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean, median

from nodepool.cloud.polling import Poller, Subscription
from tests.support.clock import HandClock, HandExecutor, HandTimers

#: What changes: (seconds that it takes, spread, objects at a time, rounds, learns from early looks
#: as well).
CHANGES = {
    "boot of one machine, 30 s": (30.0, 0.1, 1, 40, False),
    "boot of 100 machines at once, 30 s": (30.0, 0.1, 100, 10, False),
    "deletion of one machine, 4 s": (4.0, 0.2, 1, 40, False),
    "creation of a volume, always 6 s": (6.0, 0.0, 1, 40, True),
    "import of an image, 15 minutes": (900.0, 0.1, 1, 10, False),
}


class Plain(Poller[str]):
    """A pause that grows with the wait, and remembers nothing."""

    def expected(self, kind: object) -> float | None:
        return None


class World:
    def __init__(self, poller: type[Poller[str]], narrow: bool) -> None:
        self.clock = HandClock()
        self.timers = HandTimers(self.clock)
        self.done: dict[str, float] = {}
        self.questions = 0
        self.delays: list[float] = []
        self.poller = poller("things", self.fetch, HandExecutor(), self.timers, narrow=narrow)

    def fetch(self, ids: Sequence[str]) -> dict[str, str]:
        self.questions += 1
        return {key: "done" for key in ids if self.done[key] <= self.clock.now}

    def start(self, key: str, seconds: float) -> None:
        self.done[key] = self.clock.now + seconds
        watch: list[Subscription[str]] = []

        def told() -> None:
            look = watch[0].latest
            if look is not None and look.value and not watch[0].ended:
                self.delays.append(self.clock.now - self.done[key])
                watch[0].end()

        watch.append(self.poller.watch(key, told, "change"))


def measure(
    poller: type[Poller[str]], change: tuple[float, float, int, int, bool]
) -> tuple[float, float]:
    """Median delay in seconds after the change, and questions per object."""
    seconds, spread, together, rounds, narrow = change
    chance = random.Random(1)
    world = World(poller, narrow)
    for number in range(rounds):
        for which in range(together):
            world.start(f"{number}-{which}", seconds * chance.uniform(1 - spread, 1 + spread))
        while len(world.delays) < (number + 1) * together:
            world.timers.pass_time(0.1)
    half = len(world.delays) // 2  # when it has learned
    return median(world.delays[half:]), world.questions / len(world.delays)


def main() -> None:
    print(f"{'':36}{'learning':>22}{'plain':>22}{'ratio':>14}")
    ratios = []
    for name, change in CHANGES.items():
        (delay, asked), (plain_delay, plain_asked) = measure(Poller, change), measure(Plain, change)
        ratios.append((delay / plain_delay, asked / plain_asked))
        print(
            f"{name:36}{delay:8.2f} s {asked:6.2f} asked{plain_delay:8.2f} s {plain_asked:6.2f} "
            "asked"
            f"{delay / plain_delay:6.2f} {asked / plain_asked:6.2f}"
        )
    print(f"{'mean ratio':80}{mean(r[0] for r in ratios):6.2f} {mean(r[1] for r in ratios):6.2f}")


if __name__ == "__main__":
    main()
