"""Backing nodes for tests: real SSH servers on loopback addresses, hosts of the driver
``static``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.client.rpc import Client
from tests.conftest import wait_for
from tests.support.ports import ID_SPAN, id_base, reserve
from tests.support.sshd import SSHServer

LABEL = "big"


class BackingHosts:
    """This many machines, all of which are this one; each has a separate address."""

    def __init__(self, tmp_path: pathlib.Path, count: int = 2) -> None:
        self.tmp = tmp_path
        self.key = tmp_path / "job_key"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)],
            check=True,
            timeout=30,
        )
        # Paths of Unix sockets are short.
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="np-b-", dir="/tmp")) / "d"
        self.ports = reserve(60)
        self.id_base = id_base(9)
        self.servers: list[SSHServer] = []
        with contextlib.ExitStack() as stack:
            for number in range(count):
                server = SSHServer(
                    kinds=["ed25519"], address=f"127.77.{os.getpid() % 250}.{number + 1}"
                )
                stack.callback(server.stop)
                self.servers.append(server)
            stack.pop_all()

    def static(self) -> dict[str, Any]:
        nodes = [
            {
                "name": server.address,
                "labels": LABEL,
                "username": "root",
                "connection-port": server.port,
                "python-path": sys.executable,
            }
            for server in self.servers
        ]
        return {"name": "racks", "driver": "static", "pools": [{"name": "main", "nodes": nodes}]}

    def provider(self, **options: Any) -> dict[str, Any]:
        label = {
            "name": "small",
            "cloud-image": "host",
            "ram": 128,
            "cpus": 0.1,
            "disk": 1,
            **options.pop("label", {}),
        }
        config = {
            "max-slivers": 40,
            "id-base": self.id_base,
            "ssh": {"ports": f"{self.ports}-{self.ports + 59}"},
            **options.pop("config", {}),
        }
        return {
            "name": "metal",
            "driver": "nodemanager",
            "backing-label": LABEL,
            "grace-time": 1,
            "backing-ssh-key": str(self.servers[0].client_key),
            "backing-directory": str(self.directory),
            "backing-config": config,
            "ssh-keys": self.key.with_suffix(".pub").read_text(),
            "cloud-images": [{"name": "host"}],
            "pools": [{"name": "main", "labels": [label]}],
            **options,
        }

    def config(self, **options: Any) -> dict[str, Any]:
        return {
            "labels": [{"name": LABEL}, {"name": "small"}],
            "providers": [self.static(), self.provider(**options)],
        }

    def clear(self, address: str) -> None:
        """Remove what a machine that was lost has kept, as the next push would."""
        for place in self.places():
            if address in (place / "nodemanager.yaml").read_text():
                client = Client(f"unix:{place}/run/nodemanager.api")
                for sliver in client.call("ListSlivers"):
                    client.call("DeleteSliver", sliver["name"])
                    client.call("WaitSliver", sliver["name"], "gone", 10, timeout=15)
                os.kill(int((place / "pid").read_text()), signal.SIGTERM)
                wait_for(lambda place=place: not (place / "pid").exists())  # type: ignore[misc]
                shutil.rmtree(place)

    # -- what is there

    def places(self) -> list[pathlib.Path]:
        """Directories of daemons."""
        try:
            return sorted(
                path
                for path in self.directory.iterdir()
                if path.name != "code" and not path.name.startswith(".")
            )
        except FileNotFoundError:
            return []

    def client(self, node_id: str) -> Client:
        """The API of the daemon on a backing node."""
        (place,) = [place for place in self.places() if (place / "owner").read_text() == node_id]
        return Client(f"unix:{place}/run/nodemanager.api")

    def pid(self, node_id: str) -> int | None:
        """Of the daemon on a backing node."""
        (place,) = [place for place in self.places() if (place / "owner").read_text() == node_id]
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((place / "pid").read_text())
        return None

    def slivers(self) -> list[str]:
        found = []
        for place in self.places():
            found += [
                s["name"] for s in Client(f"unix:{place}/run/nodemanager.api").call("ListSlivers")
            ]
        return sorted(found)

    def processes(self) -> list[str]:
        """Of daemons, of SSH servers' children, and of the launchers' connections."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    keys = [str(server.client_key) for server in self.servers]
                    if any(str(self.directory) in word for word in words) or (
                        words[0] == "ssh" and set(keys) & set(words)
                    ):
                        found.append(f"{entry.name}: {' '.join(words)[:200]}")
                    elif self.id_base <= entry.stat().st_uid < self.id_base + ID_SPAN:
                        found.append(f"{entry.name}: of a sliver")
        return found

    def connections(self, number: int) -> list[int]:
        """Processes of SSH clients that are connected to a machine."""
        server = self.servers[number]
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if words[0] == "ssh" and server.address in words:
                        found.append(int(entry.name))
        return found

    def cut(self, number: int) -> None:
        """Break the connections to a machine."""
        for pid in self.connections(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose(self, number: int) -> None:
        """The machine cannot be reached any more."""
        self.servers[number].pause()
        self.cut(number)

    def number(self, address: str) -> int:
        return [server.address for server in self.servers].index(address)

    def left(self) -> list[str]:
        mounts = [
            line
            for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
            if str(self.directory) in line
        ]
        return [*mounts, *self.processes(), *map(str, self.places())]

    def log_in(self, node: dict[str, Any], *command: str) -> str:
        known = self.tmp / "known"
        known.write_text(
            "".join(
                f"[{node['interface_ip']}]:{node['connection_port']} {key}\n"
                for key in node["host_keys"]
            )
        )
        done = subprocess.run(
            [
                "ssh",
                "-F",
                "none",
                "-i",
                str(self.key),
                "-p",
                str(node["connection_port"]),
                "-o",
                "BatchMode=yes",
                "-o",
                f"UserKnownHostsFile={known}",
                "-o",
                "StrictHostKeyChecking=yes",
                f"{node['username']}@{node['interface_ip']}",
                *(command or ("hostname",)),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    def clean(self) -> None:
        """End what a failed test has left, by the daemons themselves."""
        for place in self.places():
            with contextlib.suppress(Exception):
                client = Client(f"unix:{place}/run/nodemanager.api")
                for sliver in client.call("ListSlivers", timeout=5):
                    client.call("DeleteSliver", sliver["name"])
                    client.call("WaitSliver", sliver["name"], "gone", 10, timeout=15)
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((place / "pid").read_text()), 15)
        for server in self.servers:
            server.pause()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.processes(), 15)
        for server in self.servers:
            server.stop()
        mounts = pathlib.Path("/proc/self/mountinfo").read_text()
        if str(self.directory) not in mounts:
            shutil.rmtree(self.directory.parent, ignore_errors=True)


def make_hosts(tmp_path: pathlib.Path, count: int = 2) -> Iterator[BackingHosts]:
    if os.geteuid() != 0:
        pytest.skip("native slivers need root")
    hosts = BackingHosts(tmp_path, count)
    try:
        yield hosts
        left: list[str] = []

        def gone() -> bool:
            left[:] = hosts.left()
            return not left

        try:
            wait_for(gone, 30, "the end of all daemons")
        except AssertionError as error:
            raise AssertionError(f"{error}: {left}") from None
    finally:
        hosts.clean()
