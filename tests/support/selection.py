"""Which tests run in the short set, in which order, and how far a run is.

``tests/durations.json`` has what each test took (seconds, on two idle cores). The short set is
every test that takes at most `SHORT` seconds, each unknown one, each that notices a planted defect
(``tests/world/guards``), and those marked ``core``, without those marked ``full`` or whose servers
take long to install or build. The rest runs with ``tools/run-tests --rest``: those marked ``core``,
and one variant each of a part of the others (`PART`, by their time), which the seed of the run
chooses, so that many runs have run all of them; with ``--all`` each.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import hypothesis
import pytest

from tests import REPOSITORY
from tests.world.mutations import MUTATIONS

DURATIONS = REPOSITORY / "tests" / "durations.json"
#: Seconds that a test of the short set may take.
SHORT = 0.3
#: Shorter tests are not recorded: they are many, and make no difference.
RECORDED = 0.2
#: Marks of tests whose servers or images take longer to install or build than the short set may
#: take, and of long ones.
NEVER_SHORT = ("full", "real", "openstack", "kubernetes", "gitea", "github")
#: Which part of the time of all tests of a stage the rest takes.
PART = 1 / 16
#: Seconds; longer tests, such as builds of packages, run only with all variants.
LONGEST = 60.0
#: Tests that fail when a guard is taken away.
GUARDING = {defect.found_by for defect in MUTATIONS.values()}
#: Where run-tests reads how far this run is, and what the tests took.
PROGRESS = "NODEPOOL_TEST_PROGRESS"

_EXAMPLES = {"few": 25, "many": 300}
for _name, _count in _EXAMPLES.items():
    hypothesis.settings.register_profile(
        _name,
        max_examples=_count,
        deadline=None,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )


def read_durations(path: pathlib.Path = DURATIONS) -> dict[str, float]:
    """Return the seconds of each recorded test by its node id; empty without a record."""
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("nodepool")
    group.addoption(
        "--short",
        action="store_true",
        help=f"only tests that take at most {SHORT:g} s, and those marked core",
    )
    group.addoption(
        "--rest",
        action="store_true",
        help="only what --short skips, and property tests with many examples",
    )
    group.addoption(
        "--all-variants",
        action="store_true",
        help="--rest runs all tests instead of a part, in all variants",
    )


def choose_part(seconds: Mapping[str, float], seed: object) -> set[str]:
    """Return the node ids of one variant each of some tests, which take a part of the time of all,
    and are one at least; the same for the same seed.

    :param seconds: of each test, by node id.
    """
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(seconds):
        tests[name.partition("[")[0]].append(name)
    chance = random.Random(f"{seed}")
    chosen: set[str] = set()
    left = PART * sum(seconds.values())
    for test in chance.sample(sorted(tests), len(tests)):
        variant = chance.choice(tests[test])
        if not chosen or seconds[variant] <= left:
            chosen.add(variant)
            left -= seconds[variant]
    return chosen


def _is_core(item: pytest.Item) -> bool:
    return item.get_closest_marker("core") is not None


class Selection:
    """The pytest plugin; also active in each worker of xdist, where it selects the same tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._short, self._rest = (
            bool(config.getoption("--short")),
            bool(config.getoption("--rest")),
        )
        self._sampled = self._rest and not config.getoption("--all-variants")
        self.durations = read_durations()
        hypothesis.settings.load_profile("many" if self._rest else "few")

    def is_short(self, item: pytest.Item) -> bool:
        if any(item.get_closest_marker(name) is not None for name in NEVER_SHORT):
            return False
        return self._lasts(item) <= SHORT or _is_core(item) or item.nodeid in GUARDING

    def _lasts(self, item: pytest.Item) -> float:
        return self.durations.get(item.nodeid, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._short or self._rest:
            chosen = [item for item in items if self._is_chosen(item)]
            if self._sampled:
                seconds = {
                    item.nodeid: max(self._lasts(item), RECORDED)
                    for item in chosen
                    if self._lasts(item) <= LONGEST and not _is_core(item)
                }
                names = {item.nodeid for item in chosen if _is_core(item)}
                names |= choose_part(seconds, config.getoption("randomly_seed", 0))
                chosen = [item for item in chosen if item.nodeid in names]
            config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
            items[:] = chosen
        self._longest_files_first(items)

    def _is_chosen(self, item: pytest.Item) -> bool:
        if self._short:
            return self.is_short(item)
        return not self.is_short(item) or bool(
            getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        )

    def _longest_files_first(self, items: list[pytest.Item]) -> None:
        """Workers that get their files in this order end at about the same time."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for item in items:
            seconds[item.nodeid.partition("::")[0]] += self.durations.get(item.nodeid, 0.05)
        items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


class Progress:
    """Writes how far the run is to the file that run-tests has named; only where no worker of
    xdist runs.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._expected = read_durations()
        self._left: dict[str, float] = {}
        self._count, self._total = 0, 0.0
        self._took: defaultdict[str, float] = defaultdict(float)
        self._failed: list[str] = []
        self._written = 0.0

    def expect(self, names: Iterable[str]) -> None:
        self._left = {name: self._expected.get(name, 0.05) for name in names}
        self._count, self._total = len(self._left), sum(self._left.values())
        self._write()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with xdist only its workers have any
            self.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._left:
            self.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)
        if report.when == "teardown":
            self._left.pop(report.nodeid, None)
        if time.monotonic() - self._written > 1:
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._left.clear()
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        left = sum(self._left.values())
        took = {
            name: round(seconds, 1) for name, seconds in self._took.items() if seconds >= RECORDED
        }
        new = self._path.with_suffix(".new")
        new.write_text(
            json.dumps(
                {
                    "done": self._count - len(self._left),
                    "left": len(self._left),
                    "part": 1 - left / self._total if self._total else 1.0,
                    "failed": self._failed,
                    "took": took,
                }
            )
        )
        new.replace(self._path)


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection(config), "nodepool-selection")
    # Not for runs of pytest that tests start.
    path = os.environ.pop(PROGRESS, None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(pathlib.Path(path)), "nodepool-progress")
