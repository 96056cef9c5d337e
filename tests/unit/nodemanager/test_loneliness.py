"""When a pushed node manager ends for lack of launchers, whatever happens to the clock."""

from __future__ import annotations

import os
import pathlib
import types

import pytest

from nodepool.nodemanager.pushed import service

HOUR = 3600.0


class Machine:
    """A machine whose clocks advance while the daemon waits.

    :param connected: seconds after its start until which a launcher is connected.
    :param step: by how much its wall clock is set after 10 minutes.
    """

    def __init__(self, folder: pathlib.Path, connected: float, step: float) -> None:
        self.uptime, self._connected, self._step = 0.0, connected, step
        self._contact = folder / "contact"
        self._contact.touch()
        self._beat()

    def time(self) -> float:
        return 100 * HOUR + self.uptime + (self._step if self.uptime > 600 else 0.0)

    def monotonic(self) -> float:
        return self.uptime

    def wait(self, seconds: float) -> bool:
        """Let time pass; return whether the daemon is stopped, which is after two hours."""
        self.uptime += seconds
        if self.uptime <= self._connected:
            self._beat()
        return self.uptime > 2 * HOUR

    def _beat(self) -> None:
        os.utime(self._contact, (self.time(), self.time()))


@pytest.mark.parametrize("step", [0.0, 24 * HOUR, -24 * HOUR])
@pytest.mark.parametrize("connected", [600.0, HOUR])
def test_daemon_ends_after_its_time_without_launchers_although_the_clock_is_set(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: float, connected: float
) -> None:
    (tmp_path / "idle").write_text("900")
    machine = Machine(tmp_path, connected, step)
    ended: list[float] = []
    monkeypatch.setattr(service, "time", machine)
    kill = types.SimpleNamespace(kill=lambda *_: ended.append(machine.uptime), getpid=os.getpid)
    monkeypatch.setattr(service, "os", kill)
    lonely = service.Loneliness(tmp_path, lambda: True)
    monkeypatch.setattr(lonely, "_stop", machine)
    lonely._run()
    assert len(ended) == 1 and lonely.ended
    assert connected + 900 < ended[0] <= connected + 900 + service.LONELY_CHECK
