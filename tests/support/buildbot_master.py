"""A real master of Buildbot with one builder for each worker."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import signal
import subprocess
import urllib.error
import urllib.request
from typing import Any

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.ci_programs import program
from tests.support.ports import reserve

SUCCESS, EXCEPTION, RETRY, CANCELLED = 0, 4, 5, 6
CONFIG = """
from buildbot.plugins import schedulers, steps, util
from nodepool.adapters.buildbot import NodepoolLatentWorker

workers = {workers!r}
scripts = {scripts!r}
c = BuildmasterConfig = {{
    "workers": [NodepoolLatentWorker(name, **options) for name, options in workers.items()],
    "builders": [
        util.BuilderConfig(
            name, workernames=[name],
            factory=util.BuildFactory([
                steps.ShellCommand(name="script", command=["sh", "-c", scripts.get(name, "true")])
            ]),
        )
        for name in workers
    ],
    "schedulers": [schedulers.ForceScheduler(name="force", builderNames=list(workers))],
    "protocols": {{"pb": {{"port": "tcp:{port}:interface=127.0.0.1"}}}},
    "www": {{"port": "tcp:{www}:interface=127.0.0.1"}},
    "buildbotNetUsageData": None,
    "db_url": "sqlite:///state.sqlite",
}}
"""


class Master:
    """:param workers: name -> options of its latent worker; each has a builder of the same name.

    :param scripts: name -> what its builds run.
    """

    def __init__(
        self, folder: pathlib.Path, workers: dict[str, dict[str, Any]], scripts: dict[str, str]
    ) -> None:
        self.folder = folder
        self.port, self.www = reserve(), reserve()
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        common = {"master": f"127.0.0.1:{self.port}", "program": program("buildbot-worker")}
        given = {name: {**common, **options} for name, options in workers.items()}
        self._run("create-master", str(folder))
        (folder / "master.cfg").write_text(
            CONFIG.format(workers=given, scripts=scripts, port=self.port, www=self.www)
        )

    def _run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program("buildbot"), *args],
            env=self.environment,
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )

    def check_config(self) -> str:
        done = self._run("checkconfig", str(self.folder))
        return done.stdout + done.stderr

    def log(self) -> str:
        path = self.folder / "twistd.log"
        return path.read_text() if path.exists() else ""

    def start(self) -> None:
        argv = [program("buildbot"), "start", "--nodaemon", str(self.folder)]
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                argv, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        wait_for(lambda: self._answers(), 60, "a master that answers")

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (
            self.folder / "output"
        ).read_text() + self.log()
        try:
            return bool(self.get("forceschedulers"))
        except OSError:
            return False

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            try:
                self.process.wait(60)
            finally:
                self.process.kill()
                self.process = None
        (self.folder / "twistd.pid").unlink(missing_ok=True)

    def get(self, path: str, timeout: float = 10) -> list[dict[str, Any]]:
        """Return the objects of a path of the REST API; none if it does not exist yet."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.www}/api/v2/{path}", timeout=timeout
            ) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            return []
        except (
            http.client.IncompleteRead
        ):  # seen once: Buildbot closed the connection after the headers
            return []
        content.pop("meta", None)
        [found] = content.values()
        return list(found)

    def post(self, path: str, method: str, **parameters: str) -> None:
        body = json.dumps(
            {"id": 1, "jsonrpc": "2.0", "method": method, "params": parameters}
        ).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.www}/api/v2/{path}", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def force(self, builder: str) -> None:
        """Ask for a build."""
        [one] = self.get(f"builders?name={builder}")
        self.post("forceschedulers/force", "force", builderid=str(one["builderid"]))

    def builds(self, builder: str) -> list[dict[str, Any]]:
        return sorted(
            self.get(f"builders/{builder}/builds"), key=lambda build: int(build["number"])
        )

    def finished(self, builder: str, count: int = 1, timeout: float = 60) -> list[int]:
        """Wait until this many builds have ended; return their results."""

        def results() -> list[int]:
            return [build["results"] for build in self.builds(builder) if build["complete"]]

        wait_for(lambda: len(results()) >= count, timeout, f"{count} builds of {builder} ended")
        return results()

    def step(self, builder: str, number: int = 1, name: str = "worker_preparation") -> str:
        """Return what is shown for a step of a build."""
        steps = self.get(f"builders/{builder}/builds/{number}/steps")
        return next((str(step["state_string"]) for step in steps if step["name"] == name), "")

    def text(self, builder: str, number: int = 1, name: str = "script") -> str:
        """Return the content of all logs of a step."""
        found = ""
        for one in self.get(f"builders/{builder}/builds/{number}/steps/{name}/logs"):
            found += "".join(
                str(chunk["content"]) for chunk in self.get(f"logs/{one['logid']}/contents")
            )
        return found
