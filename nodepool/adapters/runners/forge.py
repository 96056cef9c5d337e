"""What a fleet of runners has to know of its forge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

#: File in the folder of a runner on its node: a line for each process that was killed for memory.
KILLS = "kills"
#: Seconds without calls after a refusal for their number: if the forge does not say how long, and
#: at most.
REST, LONGEST_REST = 60.0, 3600.0


class ForgeError(Exception):
    """The forge refuses a call, or does not answer."""


class Forge(Protocol):
    """What differs between forges.

    :ivar script: shell text that starts the runner, in a folder with the file ``secret``; its exit
        status is the runner's.
    :ivar worker: extended regular expression for the name of the process that exists while a job
        runs; empty: only the forge knows, and `Runner.works` is called.
    :ivar shows_kills: the script puts the lines of the file `KILLS` into the log of the job.
    """

    script: str
    worker: str
    shows_kills: bool

    def register(self, name: str) -> bytes:
        """Register a runner of this name, again if there is one; return its secret.

        :raises ForgeError: it cannot be registered now.
        """

    def remove(self, name: str) -> bool:
        """Remove a runner, if it exists; False: it runs a job.

        :raises ForgeError: that is not known.
        """

    def presence(self, name: str) -> bool | None:
        """Return whether a runner is online; None: the forge does not know it.

        :raises ForgeError: that is not known.
        """

    def failure(self, status: int | None) -> tuple[str, float] | None:
        """Return what is wrong with a program that has ended, and the least pause in seconds.

        :param status: None: the program was killed.
        :return: None: nothing is wrong.
        """


@dataclass(frozen=True)
class Kind:
    """Which runners a fleet has.

    :param home: URL of what the runners belong to: with the name, it identifies the fleet among
        those of the token's owner.
    :param most: number of runners.
    :param job_time: seconds that a lease lasts from the start of its runner; it is renewed while
        the runner is alive.
    :param idle: seconds after which an idle runner above `least` is removed.
    """

    name: str
    label: str
    most: int
    least: int = 0
    tenant: str | None = None
    job_time: float = 6 * 3600.0
    idle: float = 900.0
    home: str = ""

    @property
    def mark(self) -> str:
        """Return what the notes of its leases contain."""
        return f"{self.home} {self.name}"
