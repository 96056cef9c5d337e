"""How long jobs of CI systems wait for a ready sliver, and what an idle daemon for GitHub costs.

    python -m tests.benchmark.adapters [--runs 5] [--jobs 200] [--places 50]

It runs ``nodepool dev`` (as root, so that nodes are slivers) and the emulator of tools/scaleset.
The launcher, the node manager, ZooKeeper and all else share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import yaml

from nodepool.client import Pool
from tests.support.github import TOKEN, Emulator, emulator
from tests.support.gitlab_runner import Manager, response
from tests.support.ports import reserve

#: Figure -> (limit, whether smaller is better).
TARGETS: dict[str, tuple[float, bool]] = {
    "GitHub: assigned job to started runner, median s": (0.5, True),
    "GitHub, 20 idle sets: CPU %": (0.2, True),
    "GitLab: prepare to first line, median s": (0.6, True),
}
#: Slivers show what the host has below /usr.
FOLDER = pathlib.Path("/usr/local/lib/nodepool-benchmark")
RUNNER = "#!/bin/sh\nexec sleep {seconds}\n"


def wait(condition: Callable[[], Any], limit: float = 120.0) -> Any:
    deadline = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing within {limit} s")
        time.sleep(0.002)
    return found


class Installation:
    """``nodepool dev`` with ready nodes of label ``small``."""

    def __init__(self, directory: pathlib.Path, ready: int, places: int) -> None:
        self.directory = directory
        self.log = directory.parent / "dev.log"
        self.pool = Pool(f"unix://{directory}/api.sock")
        argv = [
            sys.executable,
            "-m",
            "nodepool.cmd.nodepoolcmd",
            "dev",
            "--directory",
            str(directory),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait(lambda: "is ready" in self.log.read_text())
        path = directory / "nodepool.yaml"
        config = yaml.safe_load(path.read_text())
        config["labels"][0]["min-ready"] = ready
        config["providers"][0]["pools"][0]["max-servers"] = places
        config["providers"][0]["pools"][0]["labels"][0].update({"ram": 64, "pids": 100, "disk": 1})
        path.write_text(yaml.safe_dump(config))
        self.ready = ready

    def wait_ready(self) -> None:
        wait(
            lambda: (
                sum(
                    node["state"] == "ready"
                    for node in self.pool.call("GET", "/nodes?state=ready")["rows"]
                )
                >= self.ready
            )
        )
        time.sleep(0.5)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)


class Daemon:
    """``nodepool-github``."""

    def __init__(
        self,
        directory: pathlib.Path,
        installation: Installation,
        service: Emulator,
        sets: list[dict[str, Any]],
    ) -> None:
        token = directory / "github.token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        self.address = f"127.0.0.1:{reserve()}"
        config = {
            "nodepool": {"url": installation.pool.url},
            "github": {"url": service.config_url, "token-file": str(token)},
            "scale-sets": [{"label": "small", "folder": str(FOLDER), **one} for one in sets],
            "listen": self.address,
        }
        path = directory / "github.yaml"
        path.write_text(yaml.safe_dump(config))
        argv = [
            sys.executable,
            "-m",
            "nodepool.adapters.github.program",
            "--config",
            str(path),
            "run",
        ]
        with (directory / "github.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait(lambda: len(service.state()["sessions"]) == len(sets))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def behave(seconds: float) -> None:
    path = FOLDER / "bin" / "Runner.Listener"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(RUNNER.format(seconds=seconds))
    new.chmod(0o755)
    new.replace(path)


def github(
    directory: pathlib.Path, installation: Installation, runs: int, idle: bool = False
) -> dict[str, float]:
    behave(1)
    times = []
    with emulator() as service:
        daemon = Daemon(directory, installation, service, [{"name": "set"}])
        log = directory / "github.log"
        for number in range(runs):
            installation.wait_ready()
            began = time.monotonic()
            job = service.add_job("set")
            wait(lambda number=number: log.read_text().count(": started on node") > number)
            times.append(time.monotonic() - began)
            service.call("POST", f"/jobs/{job}/complete", {"result": "canceled"})
            wait(lambda: not installation.pool.leases())
        daemon.stop()
    if not idle:
        return {"GitHub: assigned job to started runner, median s": median(times)}
    with emulator("--long-poll-ms", "50000") as service:
        sets = [{"name": f"set-{number}"} for number in range(20)]
        daemon = Daemon(directory, installation, service, sets)
        time.sleep(5)
        process = psutil.Process(daemon.process.pid)
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(60)
        after = process.cpu_times()
        used = after.user + after.system - before.user - before.system
        idle = 100 * used / (time.monotonic() - began)
        daemon.stop()
    return {
        "GitHub: assigned job to started runner, median s": median(times),
        "GitHub, 20 idle sets: CPU %": idle,
    }


def many(
    directory: pathlib.Path, installation: Installation, jobs: int, places: int
) -> dict[str, float]:
    """All jobs concurrently: the emulator runs each on an idle runner; a runner whose job has ended
    no longer exists for the service.
    """
    behave(2)
    most, began = 0, time.monotonic()
    with emulator("--auto-run-ms", "200") as service:
        daemon = Daemon(directory, installation, service, [{"name": "set", "max": places}])
        for _ in range(jobs):
            service.add_job("set")

        def done() -> bool:
            nonlocal most
            state = service.state()
            most = max(most, len(installation.pool.leases(owner="me")))
            return all(job["state"] == "completed" for job in state["jobs"])

        wait(done, 900)
        took = time.monotonic() - began
        wait(lambda: not installation.pool.leases() and not service.state()["runners"], 300)
        daemon.stop()
    return {
        f"GitHub: {jobs} jobs over {places} places, s": took,
        "GitHub: most leases at once": most,
    }


def gitlab(directory: pathlib.Path, installation: Installation, runs: int) -> dict[str, float]:
    times = []
    environment = {**os.environ, "NODEPOOL_URL": installation.pool.url}
    for number in range(runs):
        installation.wait_ready()
        folder = directory / f"job-{number}"
        folder.mkdir()
        manager = Manager(
            folder,
            environment,
            ("--builds-dir", "/tmp/builds", "--cache-dir", "/tmp/cache"),
            ("--label", "small"),
        )
        result = manager.run({"build_script": "date +first-line-%s.%N"}, response(number + 100))
        assert result.state == "success", result.log
        [line] = [line for line in result.log.splitlines() if line.startswith("first-line-")]
        times.append(float(line.removeprefix("first-line-")) - manager.prepared)
        shutil.rmtree(manager.tmp, ignore_errors=True)
    return {"GitLab: prepare to first line, median s": median(times)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("runs", 5), ("jobs", 200), ("places", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="gitlab,github,many")
    args = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="nodepool-benchmark-") as name:
        directory = pathlib.Path(name)
        behave(1)
        installation = Installation(directory / "dev", 3, args.places + 5)
        try:
            if "gitlab" in args.only:
                found |= gitlab(directory, installation, args.runs)
            if "github" in args.only:
                found |= github(directory, installation, args.runs)
            if "many" in args.only:
                found |= many(directory, installation, args.jobs, args.places)
        finally:
            installation.stop()
            shutil.rmtree(FOLDER, ignore_errors=True)
            if (directory / "github.log").exists():
                print((directory / "github.log").read_text()[-9000:], file=sys.stderr)
    for figure, value in found.items():
        target = TARGETS.get(figure)
        text = (
            ""
            if target is None
            else f" (at most {target[0]:g}{'' if value <= target[0] else ': NOT met'})"
        )
        print(f"{figure}: {value:.3g}{text}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
