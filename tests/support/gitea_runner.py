"""Plays ``gitea-runner daemon``: the protocol of runners in JSON over HTTP, and the ``run:`` steps
of a job with bash.

The real one cannot be built here: its modules are not public. What this does is what its source and
its manual say. It needs no Docker, no Node.js and no network, and runs ``uses:`` steps as if they
were empty.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import yaml

#: Seconds between two questions for a task, between two reports while one runs, and of one call.
FETCH, REPORT, CALL = 0.3, 0.5, 20.0
#: Seconds without an answer after which it gives up. The real one never does, but tests may leave
#: one behind.
PATIENCE = 60.0
SUCCESS, FAILURE, CANCELLED, SKIPPED = (
    "RESULT_SUCCESS",
    "RESULT_FAILURE",
    "RESULT_CANCELLED",
    "RESULT_SKIPPED",
)


class Refused(Exception):
    """The server knows this runner no longer, or not yet."""


class Connection:
    """The service of one instance, called as one runner."""

    def __init__(self, runner: dict[str, Any]) -> None:
        self._url = f"{runner['address'].rstrip('/')}/api/actions/runner.v1.RunnerService/"
        self._headers = {
            "Content-Type": "application/json",
            "Connect-Protocol-Version": "1",
            "x-runner-uuid": runner["uuid"],
            "x-runner-token": runner["token"],
        }

    def call(self, method: str, **message: Any) -> dict[str, Any]:
        """Return the answer.

        :raises Refused: the runner is not registered. :raises OSError: no answer, or an error.
        """
        request = urllib.request.Request(
            self._url + method, json.dumps(message).encode(), self._headers
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if "nauthenticated" in text or "has been removed" in text:
                raise Refused(text) from error
            raise OSError(f"{method}: {error.code}: {text}") from error


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Task:
    """One job: its steps in order, its log, and its state."""

    def __init__(self, connection: Connection, task: dict[str, Any]) -> None:
        self._connection, self._id = connection, task["id"]
        workflow = yaml.safe_load(base64.b64decode(task["workflowPayload"]))
        [self._job] = workflow["jobs"].values()
        self._env = {**workflow.get("env", {}), **self._job.get("env", {})}
        self._secrets, self._context = task.get("secrets", {}), task.get("context", {})
        self._rows: list[dict[str, str]] = []
        self._sent = 0
        self._steps: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._ended, self.canceled = threading.Event(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._began = now()

    def run(self) -> str:
        """Run it and report its end; return the result."""
        reporter = threading.Thread(target=self._report, name="reporter")
        reporter.start()
        result = SUCCESS
        with tempfile.TemporaryDirectory() as folder:
            for number, step in enumerate(self._job.get("steps", [])):
                state = {
                    "id": str(number),
                    "startedAt": now(),
                    "logIndex": str(len(self._rows)),
                    "logLength": "0",
                }
                with self._lock:
                    self._steps.append(state)
                found = self._step(step, folder) if result == SUCCESS else SKIPPED
                state.update(
                    stoppedAt=now(),
                    result=found,
                    logLength=str(len(self._rows) - int(state["logIndex"])),
                )
                if result == SUCCESS and found != SUCCESS:
                    result = found
        self._ended.set()
        reporter.join()
        # The server forgets a runner for one job when the job ends, so the log goes first.
        limit = time.monotonic() + PATIENCE
        while True:
            try:
                if self._send_log(no_more=True) >= len(self._rows):
                    self._send_state(result)
                    return result
            except Refused:
                return result  # the answer to the last report was lost
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(REPORT)

    def _step(self, step: dict[str, Any], folder: str) -> str:
        if self.canceled:
            return CANCELLED
        text = str(step.get("run", ""))
        for name, value in self._secrets.items():
            text = text.replace("${{ secrets." + name + " }}", value)
        self._log(f"Run {text.splitlines()[0] if text else step.get('uses', '')}")
        environment = {
            **os.environ,
            "CI": "true",
            "GITHUB_REPOSITORY": str(self._context.get("repository", "")),
        }
        environment |= {
            name: str(value) for name, value in {**self._env, **step.get("env", {})}.items()
        }
        self._process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log(line.decode(errors="replace").rstrip("\n"))
        status = self._process.wait()
        return CANCELLED if self.canceled else FAILURE if status else SUCCESS

    def _log(self, text: str) -> None:
        for value in self._secrets.values():
            text = text.replace(value, "***")
        with self._lock:
            self._rows.append({"time": now(), "content": text})

    def _report(self) -> None:
        while not self._ended.wait(REPORT):
            with contextlib.suppress(OSError):  # the server may be away for a while
                self._send_log()
                if self._send_state() == CANCELLED:
                    self.canceled = True
                    if self._process is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(self._process.pid, signal.SIGKILL)

    def _send_log(self, no_more: bool = False) -> int:
        with self._lock:
            rows = self._rows[self._sent :]
        answer = self._connection.call(
            "UpdateLog", taskId=self._id, index=str(self._sent), rows=rows, noMore=no_more
        )
        self._sent = int(answer.get("ackIndex", 0))
        return self._sent

    def _send_state(self, result: str = "RESULT_UNSPECIFIED") -> str:
        with self._lock:
            state: dict[str, Any] = {
                "id": self._id,
                "startedAt": self._began,
                "result": result,
                "steps": list(self._steps),
            }
        if result != "RESULT_UNSPECIFIED":
            state["stoppedAt"] = now()
        answer = self._connection.call("UpdateTask", state=state)
        return str(answer.get("state", {}).get("result", ""))


def main() -> int:
    parser = argparse.ArgumentParser("gitea-runner")
    parser.add_argument("-c", "--config")
    parser.add_argument("command", choices=["daemon"])
    parser.parse_args()
    path = pathlib.Path(".runner")
    if not path.exists():
        print("registration file not found, please register the runner first", file=sys.stderr)
        return 1
    runner = json.loads(path.read_text())
    connection = Connection(runner)
    try:
        connection.call(
            "Declare",
            version="v3.3.0",
            labels=[label.partition(":")[0] for label in runner["labels"]],
        )
    except (Refused, OSError) as error:
        print(f"fail to invoke Declare: {error}", file=sys.stderr)
        return 1
    print(f"runner {runner['name']} declared", flush=True)
    version, heard = "0", time.monotonic()
    while time.monotonic() - heard < PATIENCE:
        try:
            answer = connection.call("FetchTask", tasksVersion=version)
        except Refused as error:
            print(f"unregistered runner: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"failed to fetch task: {error}", file=sys.stderr, flush=True)
            time.sleep(FETCH)
            continue
        heard = time.monotonic()
        if "task" in answer:
            print(f"task {answer['task']['id']} began", flush=True)
            print(f"task ended: {Task(connection, answer['task']).run()}", flush=True)
            if runner.get("ephemeral"):
                return 0
            version, heard = "0", time.monotonic()
        else:
            version = answer.get("tasksVersion", "0")
            time.sleep(FETCH)
    return 1


if __name__ == "__main__":
    sys.exit(main())
