"""One launcher with its web server, and what an operator reads of it: commands, pages, API and
``/ready``.
"""

from __future__ import annotations

import json
import pathlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.web.server import WebApp
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench


class Desk:
    """The operator's desk: each method returns what one surface shows."""

    def __init__(
        self, bench: LauncherBench, capsys: pytest.CaptureFixture[str], tmp: pathlib.Path
    ) -> None:
        self.bench = bench
        self._capsys = capsys
        self._tmp = tmp
        self._apps: list[WebApp] = []

    def start(self, config: dict[str, Any]) -> Any:
        """Start a launcher with this configuration and a web server."""
        pool = self.bench.start(config)
        app = WebApp(pool, port=0, listen_address="127.0.0.1")
        app.start()
        self._apps.append(app)
        return pool

    def stop(self) -> None:
        for app in self._apps:
            app.stop()

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command: its status, standard output and standard error."""
        self._capsys.readouterr()
        status = nodepoolcmd.main(["-c", str(self._tmp / "nodepool.yaml"), *arguments])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._apps[0].server.socket.getsockname()[1]}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return str(answer.read().decode())

    def explain(self, kind: str, name: str) -> dict[str, Any]:
        """What the API says."""
        return dict(
            json.loads(
                wait_for(lambda: self._explain(kind, name), what=f"{kind} {name} in the mirror")
            )
        )

    def _explain(self, kind: str, name: str) -> str | None:
        """None while the launcher has not read it yet."""
        try:
            return self.get(f"/api/v1/explain/{kind}/{name}")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                raise
            return None

    def explained(self, kind: str, name: str) -> str:
        return self.run("explain", kind, name)[1]

    def table(self, name: str) -> list[dict[str, Any]]:
        found = json.loads(self.get(f"/api/v1/{name}"))
        return list(found["rows"] if isinstance(found, dict) else found)

    def problems(self) -> list[str]:
        return [
            row["problem"] for row in json.loads(self.run("problem-list", "--format", "json")[1])
        ]

    def ready(self) -> str:
        return self.get("/ready?verbose")

    def reported(self, *wanted: str) -> None:
        """Wait until ``problem-list``, the page of problems and ``/ready?verbose`` have a line
        with all these words.
        """

        def everywhere() -> bool:
            lists = (
                self.problems(),
                [row["problem"] for row in self.table("problems")],
                self.ready().splitlines()[1:],
            )
            return all(
                any(all(word in line for word in wanted) for line in lines) for lines in lists
            )

        wait_for(everywhere, 15, f"{wanted} as a problem everywhere")


def answer(desk: Desk, kind: str, name: str, *wanted: str) -> dict[str, Any]:
    """Wait until the API's explanation has all the words; check that every other surface gives
    the same answer.
    """
    seen: list[Any] = [None]

    def found() -> bool:
        seen[0] = desk.explain(kind, name)
        return all(word in seen[0]["answer"] for word in wanted)

    try:
        wait_for(found, 15, f"{wanted} in the explanation of {kind} {name}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen[0]}") from None
    text, suggestion = desk.explained(kind, name), seen[0]["suggestion"]
    for word in wanted:
        assert word in text.splitlines()[0]
    if suggestion:
        assert f"  suggestion: {suggestion}" in text
    if kind == "request":
        _agree(desk, name, [word.removeprefix("failed: ") for word in wanted], suggestion)
    return dict(seen[0])


def _agree(desk: Desk, request: str, wanted: list[str], suggestion: str) -> None:
    """The commands and tables that show the cause of a request have the words and the
    suggestion, too.
    """
    shown = desk.run("request", "show", request)[1]
    assert all(word in shown for word in (*wanted, suggestion)), shown
    if desk.explain("request", request)["facts"]["state"].startswith("failed"):
        return
    # A request behind another one is counted under what the other one lacks.
    wanted = [word for word in wanted if "comes first" not in word]
    for rows in (
        json.loads(desk.run("status", "--json")[1])["waiting_requests"],
        desk.table("waiting"),
    ):
        (row,) = [row for row in rows if request in row["ids"]]
        assert all(word in row["reason"] for word in wanted) and row["suggestion"] == suggestion, (
            row
        )


def created(desk: Desk, label: str, *options: str) -> str:
    """What ``request create --wait`` prints while it waits."""
    return desk.run("request", "create", label, "--wait", "1.5", *options)[2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish problems and reports more often than in production."""
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)
    monkeypatch.setattr("nodepool.launcher.statistics.INTERVAL", 0.2)
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", 0.2)


@pytest.fixture
def desk(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> Iterator[Desk]:
    made = Desk(bench, capsys, tmp_path)
    try:
        yield made
    finally:
        made.stop()
