"""GitHub's service for runner scale sets, by an emulator of others, and a stand-in for its runner.

The real runner cannot be had as a package. The stand-in takes the emulator's secret from where the
runner takes GitHub's, looks for a job, runs a worker process, and ends with a status of choice.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import select
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests import REPOSITORY
from tests.support.deadline import limit

TOOL = REPOSITORY / "tools" / "scaleset"
TOKEN = "ghp_emulator"

LISTENER = f"""#!{sys.executable} -IS
import base64, json, os, pathlib, subprocess, sys, time, urllib.error, urllib.request

def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(emulator + "/_emulator" + path, data, headers, method=method)
    return json.loads(urllib.request.urlopen(request, timeout=20).read() or b"null")

assert sys.argv[1:] == ["run"], sys.argv
root = pathlib.Path(sys.argv[0]).resolve().parent.parent
behavior = json.loads((root / "behavior.json").read_text())
config = json.loads(base64.b64decode(os.environ.pop("ACTIONS_RUNNER_INPUT_JITCONFIG")))
assert os.environ["ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE"] == "1"
emulator, name = behavior["url"], config["runnerName"]
(root / "started").open("a").write(name + "\\n")
if behavior["early"] is not None:
    print("The runner ends early")
    sys.exit(behavior["early"])
while behavior["deaf"]:
    time.sleep(3600)
job = None
while job is None:
    state = call("GET", "/state")
    if all(each["name"] != name for each in state["runners"]):
        sys.exit(0)
    for each in state["jobs"]:
        mine = each["scaleSetId"] == config["scaleSetId"]
        if each["state"] == "assigned" and mine and job is None:
            try:
                call("POST", "/jobs/%d/start" % each["id"], {{"runnerName": name}})
                job = each["id"]
            except urllib.error.HTTPError:
                pass
    time.sleep(0.1)
worker = subprocess.run([root / "bin" / "Runner.Worker", str(behavior["seconds"])])
hook = os.environ["ACTIONS_RUNNER_HOOK_JOB_COMPLETED"]
with open(root / "job.log", "ab") as log:
    subprocess.run(["bash", "-e", hook], stdout=log, stderr=log, cwd="/", check=True)
worker.check_returncode()
call("POST", "/jobs/%d/complete" % job, {{"result": "succeeded"}})
sys.exit(behavior["status"])
"""
WORKER = '#!/bin/sh\nsleep "$1"\n'


class Emulator:
    """A running emulator.

    :param options: of its program.
    """

    def __init__(self, *options: str) -> None:
        path = subprocess.run(
            [TOOL, "path"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
        if not pathlib.Path(path).exists():
            pytest.skip("the emulator of GitHub's service is not built: tools/scaleset install")
        command = [path, "--port", "0", "--long-poll-ms", "700", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], limit(30))[0], (
            "the emulator does not start"
        )
        found = json.loads(self.process.stdout.readline())
        self.url, self.config_url = found["url"].rstrip("/"), found["config_url"]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.url}/_emulator{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def state(self) -> dict[str, Any]:
        return dict(self.call("GET", "/state"))

    def set_id(self, name: str) -> int | None:
        return next((one["id"] for one in self.state()["scaleSets"] if one["name"] == name), None)

    def add_job(self, name: str) -> int:
        return int(
            self.call("POST", "/jobs", {"scaleSetId": self.set_id(name), "labels": [name]})[
                "runnerRequestId"
            ]
        )

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        return [job for job in self.state()["jobs"] if not states or job["state"] in states]

    def fail(self, endpoint: str, times: int | None = 1, **response: Any) -> None:
        self.call("POST", "/faults", {"endpoint": endpoint, "response": response, "times": times})


@contextlib.contextmanager
def emulator(*options: str) -> Iterator[Emulator]:
    made = Emulator(*options)
    try:
        yield made
    finally:
        made.stop()


class Program:
    """The stand-in for the runner, in a folder as the real one has it."""

    def __init__(self, folder: pathlib.Path, url: str) -> None:
        self.folder, self._url = folder, url
        (folder / "bin").mkdir(parents=True)
        for name, text in (("Runner.Listener", LISTENER), ("Runner.Worker", WORKER)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.behave()

    def behave(
        self, seconds: float = 0.0, status: int = 0, early: int | None = None, deaf: bool = False
    ) -> None:
        """Decide about the runners that start from now on.

        :param seconds: of each job. :param status: with which they end. :param early: with which
            they end before any job. :param deaf: they take none.
        """
        new = self.folder / "new"
        found = {"seconds": seconds, "status": status, "early": early, "deaf": deaf}
        new.write_text(json.dumps({"url": self._url, **found}))
        new.replace(self.folder / "behavior.json")

    def started(self) -> list[str]:
        path = self.folder / "started"
        return path.read_text().split() if path.exists() else []
