"""Plays the manager of GitLab Runner for the custom executor: order of stages, attempts,
environment, signals.

The real one cannot be built here: its modules are not public. What this does is what its source and
its manual say.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ATTEMPTS = 3
#: Today's values are 1 and 2; programs have to read them.
BUILD_FAILURE, SYSTEM_FAILURE = 41, 42
AFTERWARDS = ("after_script",)
PROGRAM = (sys.executable, "-m", "nodepool.adapters.gitlab")


def response(number: int = 7, **more: Any) -> dict[str, Any]:
    """Return the description of a job."""
    info = {
        "name": "check",
        "stage": "test",
        "project_id": 1,
        "project_full_path": "acme/tools/widget",
    }
    repo = "https://gitlab-ci-token:secret-of-job@gitlab.example.org/acme/tools/widget.git"
    return {
        "id": number,
        "token": "secret-of-job",
        "job_info": info,
        "git_info": {"repo_url": repo, "ref": "main"},
        "runner_info": {"timeout": 600},
        "image": {},
        "services": [],
        **more,
    }


@dataclass
class Result:
    state: str
    log: str
    #: Stage and exit status of each program, in order.
    stages: list[tuple[str, int]] = field(default_factory=list)
    exit_code: int | None = None


class Manager:
    """Runs jobs, one at a time.

    :param environment: of the manager itself.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        environment: Mapping[str, str],
        config: Sequence[str] = (),
        prepare: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.environment = dict(environment)
        self.arguments = {"config": list(config), "prepare": list(prepare)}
        self.canceled = threading.Event()
        self.current: subprocess.Popen[bytes] | None = None
        self.log = directory / "job.log"
        #: What the stage cleanup wrote, which is not in the log of the job.
        self.warnings = ""
        self.tmp = directory
        #: Unix time at which the last stage prepare began.
        self.prepared = 0.0

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def cancel(self) -> None:
        """Send SIGTERM to the process group, as when a job is canceled in GitLab."""
        self.canceled.set()
        if self.current is not None:
            os.killpg(self.current.pid, signal.SIGTERM)

    def run(self, scripts: Mapping[str, str], job: Mapping[str, Any] | None = None) -> Result:
        """Run a job: stages of ``run`` by name, in order, with their scripts."""
        result = Result("success", "")
        ready = False
        for _ in range(ATTEMPTS):
            self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="custom-executor", dir="/tmp"))
            (self.tmp / "response.json").write_text(json.dumps(dict(job or response())))
            self.own: dict[str, str] = {}
            status = self._config(result)
            self.prepared = time.time()
            status = status or self._stage(result, "prepare", *self.arguments["prepare"])
            ready = status == 0 and not self.canceled.is_set()
            if ready:
                break
            self._cleanup(result)
            result.state = "failed" if status == BUILD_FAILURE else "system failure"
            if status == BUILD_FAILURE or self.canceled.is_set():
                break
        if ready:
            result.state = "success"
            for name, text in scripts.items():
                if result.state != "success" and name not in AFTERWARDS:
                    continue
                self._script(result, name, text)
            self._cleanup(result)
        if self.canceled.is_set():
            result.state = "canceled"
        result.log = self.text()
        return result

    def _config(self, result: Result) -> int:
        process = subprocess.run(
            [*PROGRAM, "config", *self.arguments["config"]],
            env=self._env(),
            cwd=self.tmp,
            capture_output=True,
            timeout=60,
            check=False,
        )
        result.stages.append(("config", process.returncode))
        self.settings = json.loads(process.stdout)
        self.own = self.settings["job_env"]
        return process.returncode

    def _script(self, result: Result, name: str, text: str) -> None:
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.tmp))
        script = folder / "script"
        script.write_text(text)
        script.chmod(0o700)
        code_file = self.tmp / "exit_code"
        code_file.unlink(missing_ok=True)
        status = self._stage(result, "run", str(script), name, title=name)
        if status == 0 or name in AFTERWARDS:
            return
        result.state = "failed" if status == BUILD_FAILURE else "system failure"
        if status == BUILD_FAILURE and code_file.exists():
            result.exit_code = int(code_file.read_text().splitlines()[0])

    def _cleanup(self, result: Result) -> None:
        process = subprocess.run(
            [*PROGRAM, "cleanup"],
            env=self._env(),
            cwd=self.tmp,
            capture_output=True,
            timeout=60,
            check=False,
        )
        self.warnings += process.stderr.decode()
        result.stages.append(("cleanup", process.returncode))

    def _stage(self, result: Result, name: str, *args: str, title: str = "") -> int:
        with self.log.open("ab") as log:
            self.current = subprocess.Popen(
                [*PROGRAM, name, *args],
                env=self._env(),
                cwd=self.tmp,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            status = self.current.wait(120)
            self.current = None
        result.stages.append((title or name, status))
        return status

    def _env(self) -> dict[str, str]:
        return {
            **self.environment,
            "TMPDIR": str(self.tmp),
            "BUILD_FAILURE_EXIT_CODE": str(BUILD_FAILURE),
            "SYSTEM_FAILURE_EXIT_CODE": str(SYSTEM_FAILURE),
            "BUILD_EXIT_CODE_FILE": str(self.tmp / "exit_code"),
            "JOB_RESPONSE_FILE": str(self.tmp / "response.json"),
            **self.own,
            "CUSTOM_ENV_CI_JOB_ID": "666",
            "CUSTOM_ENV_CI_JOB_IMAGE": "nodepool/of-the-attacker",
        }
