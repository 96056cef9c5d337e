"""The node manager of tools/quickstart: real slivers on this machine, and their limits."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import ports
import yaml
from demo import image

from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault

#: Seconds on a machine that is slow and busy.
START_TIMEOUT = 300.0
#: What nodes made of the host get: part of one core, MiB, GiB.
CPU_LIMIT, MEMORY, DISK = 0.5, 256, 2
PLACES = 20


def say(text: str) -> None:
    print(text, flush=True)


class SliverDemo:
    """A node manager with its directories in the working directory of the demonstration."""

    def __init__(self, work: pathlib.Path) -> None:
        self.work = work
        self.backend = "native" if os.geteuid() == 0 else "rootless"
        self.username = "root" if self.backend == "native" else "zuul"
        self.url = f"unix:{work}/run/nodemanager.api"
        self.key = work / "key"
        self.limits: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(self.url)

    def start(self) -> None:
        """Start the node manager and wait until it answers.

        :raises SystemExit: it does not answer.
        """
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)],
            check=True,
            timeout=START_TIMEOUT,
        )
        first = ports.reserve(PLACES)
        config = self.work / "nodemanager.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "state-dir": str(self.work / "slivers"),
                    "run-dir": str(self.work / "run"),
                    "backend": self.backend,
                    "max-slivers": PLACES,
                    "ssh": {"ports": f"{first}-{first + PLACES - 1}"},
                    "api": {"tcp": False},
                }
            )
        )
        self._launch()
        for problem in self._wait_ready()["problems"]:
            say(f"  missing on this machine: {problem}")

    def _launch(self) -> None:
        with open(self.work / "nodemanager.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    str(pathlib.Path(sys.executable).with_name("nodepool-nodemanager")),
                    "-f",
                    "-c",
                    str(self.work / "nodemanager.yaml"),
                    "-p",
                    str(self.work / "nodemanager.pid"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # a signal for all of us, such as Ctrl-C, must not end it before its slivers are
                # removed
                start_new_session=True,
            )

    def _wait_ready(self) -> dict[str, Any]:
        """Wait until the node manager answers; show what the machine has.

        :raises SystemExit: it does not answer.
        """
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                capacity = self.client.call("GetCapacity", timeout=5)
                if capacity["prepared"]:
                    return dict(capacity)
                time.sleep(0.02)
            except (RpcError, RpcFault):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        f"nodepool-nodemanager did not start; read {self.work}/nodemanager.log"
                    ) from None
                time.sleep(0.02)

    def provider(self, images: list[str]) -> dict[str, Any]:
        """Return the provider for nodepool.yaml."""
        cores = os.cpu_count() or 1
        limits: dict[str, Any] = {}
        # There is no root in slivers of an ordinary user.
        user = {"username": self.username} if self.username != "root" else {}
        if self.backend == "native":
            limits = {
                "cpus": 0.05 * cores,
                "cpu-limit": CPU_LIMIT,
                "ram": MEMORY,
                "disk": DISK,
                "pids": 200,
            }
        else:
            limits = {"ram": MEMORY, "pids": 200}
        return {
            "name": "here",
            "driver": "nodemanager",
            "ssh-keys": self.key.with_suffix(".pub").read_text(),
            "hosts": [{"name": "this-machine", "url": self.url}],
            "cloud-images": [{"name": "host", **user}],
            "diskimages": [{"name": name} for name in images],
            "pools": [
                {
                    "name": "main",
                    "max-servers": PLACES,
                    "labels": [
                        {"name": "host", "cloud-image": "host", **limits},
                        *({"name": name, "diskimage": name, **limits} for name in images),
                    ],
                }
            ],
        }

    def _ssh(
        self, node: Any, command: str, timeout: float = START_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                "ssh",
                "-i",
                str(self.key),
                "-p",
                str(node.connection_port),
                "-o",
                "BatchMode=yes",
                "-o",
                f"UserKnownHostsFile={self.work}/known_hosts-{node.id}",
                "-o",
                "StrictHostKeyChecking=yes",
                f"{node.username}@{node.interface_ip}",
                command,
            ],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def show_limits(self, nodes: list[Any]) -> None:
        """Show that a burner stays below its cap, and that only the memory hog is killed."""
        if self.backend != "native":
            self._show_rlimits(nodes)
            return
        cores = os.cpu_count() or 1
        say(f"\nLimits: {CPU_LIMIT:g} of {cores} cores, {MEMORY} MiB")
        name = nodes[0].external_id["sliver"]
        before, started = self.client.call("GetUsage", name)["cpu_usec"], time.monotonic()
        self._ssh(
            nodes[0], "timeout 3 sh -c 'while :; do :; done & while :; do :; done & wait'; true"
        )
        seconds = time.monotonic() - started
        used = (self.client.call("GetUsage", name)["cpu_usec"] - before) / 1e6 / seconds
        say(f"  two endless loops for 3 s used {used:.2f} cores")
        hog = self._ssh(nodes[1], "tail /dev/zero; echo status $?")
        killed = "status 137" in hog.stdout
        alive = (
            self._ssh(nodes[2], "echo alive").stdout.strip() == "alive"
            and self._ssh(nodes[1], "true").returncode == 0
        )
        say(
            f"  a program that takes all memory was {'killed' if killed else 'NOT killed'}; its "
            "node and the others "
            f"{'keep running' if alive else 'do NOT keep running'}"
        )
        self.limits = {
            "cpu_limit_cores": CPU_LIMIT,
            "cpu_used_cores": round(used, 3),
            "memory_hog_killed": killed,
            "others_alive": alive,
        }

    def _show_rlimits(self, nodes: list[Any]) -> None:
        """Show the limits without root: of each process, and of their number."""
        say(
            f"\nLimits: {MEMORY} MiB for each process, 200 processes; those of CPU, disk and "
            "network need root"
        )
        hog = self._ssh(nodes[1], "tail /dev/zero 2>&1; echo status $?")
        forks = self._ssh(
            nodes[2],
            "for i in $(seq 300); do sleep 3 & done 2>&1 | grep -c 'Cannot fork\\|fork: retry'",
        )
        refused = "status 1" in hog.stdout
        held = forks.stdout.strip() not in ("", "0")
        alive = all(self._ssh(node, "echo alive").stdout.strip() == "alive" for node in nodes[:2])
        say(
            "  a program that takes all memory was "
            f"{'refused more' if refused else 'NOT refused'}; the 201st process was "
            f"{'refused' if held else 'NOT refused'}; the others "
            f"{'keep running' if alive else 'do NOT keep running'}"
        )
        self.limits = {
            "memory_hog_killed": refused,
            "process_limit_held": held,
            "others_alive": alive,
        }

    def _delete_slivers(self) -> bool:
        try:
            names = [s["name"] for s in self.client.call("ListSlivers")]
            for name in names:
                self.client.call("DeleteSliver", name)
            for name in names:
                self.client.call("WaitSliver", name, "gone", 60, timeout=90)
        except (RpcError, RpcFault):
            return False
        return True

    def stop(self) -> list[str]:
        """Remove all slivers and stop; return what is left behind."""
        if self.process is None:
            return []
        left: list[str] = []
        if self.process.poll() is not None or not self._delete_slivers():
            # It knows best what belongs to its slivers: mounts, loop devices, cgroups, interfaces.
            # Was it just ending?
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            if self.process.poll() is not None:
                self._launch()
                with contextlib.suppress(SystemExit):
                    self._wait_ready()
            self._delete_slivers()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
                left.append("nodepool-nodemanager had to be killed; nothing to do")
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        left += [
            f"mount: umount {line.split()[4]}"
            for line in reversed(mounts)
            if str(self.work) in line
        ]
        left += image.loop_devices(self.work)
        if not left:
            shutil.rmtree(self.work / "slivers", ignore_errors=True)
        return left
