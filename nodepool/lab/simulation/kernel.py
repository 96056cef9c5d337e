"""Tasks, simulated processes, the scheduler and the clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, NoReturn

import greenlet

#: Readings of the clock by a task without a pause, after which it counts as a busy loop and has to
#: wait.
MOST_READINGS = 1000
#: Switches without any progress of the clock, after which the run is given up.
MOST_SWITCHES = 2_000_000
#: Unix time at which simulated clocks start.
EPOCH = 1_800_000_000.0


class SimulationError(Exception):
    """The run cannot continue."""


class Process:
    """A simulated operating system process: its tasks and sockets can be paused and killed."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.paused = False
        #: Seconds by which its wall clock is wrong.
        self.skew = 0.0
        #: Called when the process is killed, such as the ends of its connections.
        self.at_exit: dict[Any, None] = {}
        #: Tasks that are ready to run, but not while the process is paused.
        self.held: list[Task] = []
        #: What modules of the program keep once per process, by name.
        self.globals: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.pid}>"


class Task:
    """One simulated thread."""

    __slots__ = (
        "awaited",
        "foreign",
        "greenlet",
        "ident",
        "parked",
        "process",
        "readings",
        "sentinels",
        "ticket",
        "woken",
    )

    def __init__(
        self, ident: int, process: Process, run: Callable[[], None], hub: greenlet.greenlet
    ) -> None:
        self.ident = ident
        self.process = process
        self.greenlet = greenlet.greenlet(run, parent=hub)
        self.parked = False
        #: Distinguishes one wait from the next, for timers that are no longer needed.
        self.ticket = 0
        self.woken = False
        self.readings = 0
        #: The lock that it waits for.
        self.awaited: Any = None
        #: How many locks it holds that other processes use, too.
        self.foreign = 0
        #: Called at its end.
        self.sentinels: list[Callable[[], None]] = []


class Kernel:
    """The scheduler. There is one at a time; see :func:`current`.

    :param seed: decides every choice.
    :param preemption: probability that a task is preempted at a lock, a wait or a message.
    :param lines: mean number of statements between two preemptions; 0: none between statements.
    :param delay: mean time in seconds that a preempted task loses now and then, as on a busy
        machine.
    """

    def __init__(
        self, seed: int, preemption: float = 0.05, lines: int = 0, delay: float = 0.002
    ) -> None:
        self.random = random.Random(seed)
        self.preemption = preemption
        self.lines = lines
        self.delay = delay
        #: Seconds since the start of the run.
        self.now = 0.0
        self.switches = 0
        #: A checksum of all decisions so far.
        self.trace = seed & 0xFFFFFFFF
        self.ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | None, Any]] = []
        self._sequence = itertools.count(1)
        self._pids = itertools.count(101)
        self._hub = greenlet.getcurrent()
        self.task: Task | None = None
        #: While above 0, tasks are not preempted.
        self.quiet = 0
        #: Called by a task that is in a busy loop.
        self.on_busy_loop: Callable[[], object] = lambda: None
        self._since_progress = 0
        #: Greenlets of killed processes: collecting them would run their ``finally`` blocks.
        self._graveyard: list[Task] = []
        self.tasks: dict[Task, None] = {}
        self.outside = self.process("outside")

    # -- processes and tasks

    def process(self, name: str) -> Process:
        return Process(name, next(self._pids))

    @property
    def running_process(self) -> Process:
        return self.outside if self.task is None else self.task.process

    def spawn(
        self,
        function: Callable[..., Any],
        *args: object,
        process: Process | None = None,
        **kwargs: object,
    ) -> Task:
        """Start a task, in the process of the caller unless another is given."""

        def run() -> None:
            try:
                function(*args, **kwargs)
            except SystemExit:
                pass
            finally:
                if task.process.alive:
                    for sentinel in task.sentinels:
                        sentinel()
                    self.tasks.pop(task, None)

        task = Task(next(self._sequence), process or self.running_process, run, self._hub)
        self.tasks[task] = None
        self.ready.append(task)
        return task

    # -- waiting

    def park(self, deadline: float | None = None) -> bool:
        """Wait until `wake` is called for this task, or until the deadline.

        Return whether it was woken.
        """
        task = self.task
        if task is None:
            raise SimulationError("something that runs outside of tasks has to wait")
        task.ticket += 1
        task.parked, task.woken, task.readings = True, False, 0
        if deadline is not None:
            heapq.heappush(
                self._timers, (max(deadline, self.now), next(self._sequence), task, task.ticket)
            )
        self._switch_away()
        return task.woken

    def wake(self, task: Task) -> None:
        if task.parked and task.process.alive:
            task.parked, task.woken = False, True
            self.ready.append(task)

    def sleep(self, seconds: float) -> None:
        self.park(self.now + max(0.0, seconds))

    def call_at(self, when: float, function: Callable[[], Any]) -> None:
        """Call a function at that time. It must not wait."""
        heapq.heappush(self._timers, (max(when, self.now), next(self._sequence), None, function))

    def _switch_away(self) -> None:
        self._hub.switch()

    def preempt(self) -> None:
        """Let others run, perhaps for a while."""
        if self.task is None or self.quiet:
            return
        if self.delay and self.random.random() < 0.1:
            self.sleep(self.random.expovariate(1 / self.delay))
        else:
            self.ready.append(self.task)
            self._switch_away()

    def point(self) -> None:
        """Mark a point at which a task may be preempted."""
        if self.preemption and self.random.random() < self.preemption:
            self.preempt()

    # -- clocks

    def monotonic(self) -> float:
        task = self.task
        if task is not None:
            task.readings += 1
            if task.readings > MOST_READINGS and not self.quiet:
                self.on_busy_loop()
                self.sleep(0.001)
        return self.now

    def time(self) -> float:
        return EPOCH + self.monotonic() + self.running_process.skew

    # -- the loop

    def run(self, main: Callable[[], Any], until: float = float("inf")) -> Any:
        """Run a function as a task, with all that it starts; return its result.

        :param until: virtual seconds after which the run is given up.
        :raises SimulationError: it did not end in time, or all tasks wait for each other.
        """
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(main())
            except greenlet.GreenletExit:
                raise
            except BaseException as error:
                failure.append(error)

        self.spawn(run, process=self.outside)
        while not outcome and not failure:
            self._step(until)
        if failure:
            raise failure[0]
        return outcome[0]

    def _step(self, until: float) -> None:
        ready = self.ready
        if not ready:
            self._advance(until)
            return
        index = int(self.random.random() * len(ready))
        task = ready[index]
        last = ready.pop()
        if last is not task:
            ready[index] = last
        if task.process.paused and not task.foreign:
            task.process.held.append(task)
            return
        self.trace = (self.trace * 1_000_003 ^ task.ident) & 0xFFFFFFFFFFFFFFFF
        self.switches += 1
        self._since_progress += 1
        if self._since_progress > MOST_SWITCHES:
            raise SimulationError(f"no progress at {self.now:.3f} s after {MOST_SWITCHES} switches")
        self.task = task
        try:
            task.greenlet.switch()
        finally:
            self.task = None

    def _advance(self, until: float) -> None:
        if not self._timers:
            self._stuck("all tasks wait, and nothing will wake them")
        when, _sequence, task, what = heapq.heappop(self._timers)
        if task is not None and (not task.parked or task.ticket != what or not task.process.alive):
            return
        if when > until:
            self._stuck(f"not finished after {until:.0f} s")
        if when > self.now:
            self.now, self._since_progress = when, 0
        if task is None:
            what()
        else:
            task.parked = False
            self.ready.append(task)

    def _stuck(self, why: str) -> NoReturn:
        raise SimulationError(f"{why} (at {self.now:.3f} s, {len(self.tasks)} tasks)")


running: Kernel | None = None


def current() -> Kernel:
    """Return the kernel that runs.

    :raises SimulationError: there is none.
    """
    if running is None:
        raise SimulationError("no simulation is running")
    return running


def use(kernel: Kernel) -> None:
    """Use this kernel for the replaced functions of the standard library."""
    global running
    running = kernel
