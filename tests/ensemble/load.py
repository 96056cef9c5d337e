"""What runs against the three servers: two launchers, a builder, two clients of Zuul, leases."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import yaml

from nodepool.client import NodepoolError, Pool
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.ensemble.clock import Clock
from tests.ensemble.servers import PORT, SESSION, Ensemble, wait
from tests.support import others
from tests.support.faults.launcher import DaemonProcess, DiskCloud
from tests.support.launcher import CLOUDS
from tests.support.openstack.balky_cloud import DRIVERS, BalkyCloud

FAULTS = REPOSITORY / "tests" / "support" / "faults"
LAUNCHERS = ("launcher-1", "launcher-2")
BUILDER = "builder"
CLIENTS = ("zuul-1", "zuul-2")
#: Requests per second of each client of Zuul, and seconds between two leases.
RATE, LEASE_EVERY = 5.0, 1.0
#: Seconds between two builds of the image.
REBUILD = 3
#: Seconds that a node whose request was withdrawn waits for another one.
IDLE = 2
Event = dict[str, Any]


class Daemon(DaemonProcess):
    """A launcher or builder in the foreground, with a separate wall clock."""

    def __init__(self, folder: pathlib.Path, name: str, program: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.log = folder / f"{name}.log"
        env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "NODEPOOL_FAULT_DRIVERS": str(FAULTS / "drivers"),
            "OS_CLIENT_CONFIG_FILE": str(folder / "clouds.yaml"),
            **clock.environment(),
        }
        config = folder / f"{name}.yaml"
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(FAULTS / program), "-f"]
                + ["-c", str(config), "-p", str(folder / f"{name}.pid")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                env=env,
            )

    def is_running(self) -> bool:
        """Return whether it has started."""
        assert self.alive(), f"{self.name} has ended, see its log"
        return " is running, process " in self.log.read_text(errors="replace")


class Client:
    """The process with one client of Zuul; its events go to the journal."""

    def __init__(self, python: str, load: Load, name: str) -> None:
        self._journal = load.journal
        self._seen: Counter[str] = Counter()
        ensemble = load.ensemble
        tls = [str(ensemble.tls / f"{each}") for each in ("client.pem", "client.key", "ca.pem")]
        script = pathlib.Path(__file__).with_name("zuul_client.py")
        words = [python, str(script), name, ensemble.hosts, *tls, f"{SESSION}", f"{RATE}"]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with open(load.folder / f"{name}.log", "ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        self.name = name
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self._journal.add(event)
            self._seen[event["event"]] += 1

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def do(self, command: str, answer: str, seconds: float = 120.0) -> None:
        """Send a command and wait for its answer."""
        before = self._seen[answer]
        self.tell(command)
        self.wait(answer, before, seconds)

    def wait(self, answer: str, before: int = 0, seconds: float = 60.0) -> None:
        wait(
            lambda: self._seen[answer] > before or self.process.poll() is not None,
            seconds,
            lambda: f"{self.name} does not answer {answer!r}",
        )
        assert self.process.poll() is None, f"{self.name} has ended, see its log"


class Journal:
    """Events of the present seed, in the order of their arrival."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def note(self, event: str, **values: Any) -> None:
        self.add({"event": event, "t": time.monotonic(), **values})

    def read(self) -> list[Event]:
        with self._lock:
            return list(self._events)

    def take(self) -> list[Event]:
        with self._lock:
            taken, self._events = self._events, []
        return taken


class Borrower(threading.Thread):
    """Leases a node each second until it is stopped, and keeps one all the time."""

    def __init__(self, load: Load) -> None:
        super().__init__(name="borrower", daemon=True)
        self._pools = [Pool(f"unix://{load.folder / name}.sock") for name in LAUNCHERS]
        self._journal = load.journal
        self._ending = threading.Event()
        self.kept: Any = None
        self._name = ""
        self.count = 0

    def run(self) -> None:
        while not self._ending.wait(0 if self.kept is None else LEASE_EVERY):
            self._borrow(self._pools[self.count % len(self._pools)])
            self.count += 1

    def _borrow(self, pool: Pool) -> None:
        began = time.monotonic()
        try:
            lease = pool.lease("plain", for_=600, wait=30, purpose="ensemble")
        except NodepoolError as error:
            self._journal.note("lease-refused", error=f"{error.code}: {error}")
            return
        name, nodes = f"lease-{began:.3f}-{lease.id}", [node.id for node in lease.nodes]
        self._journal.note("requested", request=name, label="lease", began=began)
        self._journal.note("fulfilled", request=name, nodes=nodes, label="lease")
        self._journal.note("locked", request=name)
        if self.kept is None:
            self.kept, self._name = lease, name
            self._journal.note("kept", request=name, node=nodes[0], address=lease.nodes[0].address)
            return
        self._give_back(lease, name)

    def _give_back(self, lease: Any, name: str) -> None:
        self._journal.note("releasing", request=name)
        try:
            lease.give_back()
        except NodepoolError as error:
            self._journal.note("expired", request=name, error=f"{error.code}: {error}")
        else:
            self._journal.note("released", request=name)

    def stop(self) -> None:
        self._ending.set()
        self.join(60)

    def end(self) -> None:
        """Return what was kept; it must still be ours."""
        if self.kept is not None:
            try:
                self.kept.refresh()
            except NodepoolError as error:
                self._journal.note("gone", request=self._name, error=f"{error.code}: {error}")
            else:
                self._give_back(self.kept, self._name)


class Load:
    """All processes but the servers."""

    def __init__(
        self, ensemble: Ensemble, folder: pathlib.Path, library: pathlib.Path | None
    ) -> None:
        self.ensemble = ensemble
        self.folder = folder
        self.journal = Journal()
        self.cloud = DiskCloud(folder / "cloud")
        self.cloud.set(create_delay=0.2, delete_delay=0.1)
        self.images = BalkyCloud(folder, "images")
        (folder / "clouds.yaml").write_text(yaml.safe_dump(CLOUDS))
        for name in LAUNCHERS:
            self._write(name, self._launcher(name))
        self._write(BUILDER, self._builder())
        self.daemons = [
            Daemon(folder, name, program, Clock(library, folder / f"{name}.clock"))
            for name, program in [
                *((name, "serve.py") for name in LAUNCHERS),
                (BUILDER, "serve_builder.py"),
            ]
        ]
        self._python = others.environment()
        self._seed = 0
        self.clients = self._make_clients()
        for daemon in self.daemons:
            wait(daemon.is_running, 60, daemon.log.read_text)
        self.borrower: Borrower | None = None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        tls = self.ensemble.tls
        servers = [
            {"host": server.host.partition(":")[0], "port": PORT}
            for server in self.ensemble.servers
        ]
        common = {
            "zookeeper-servers": servers,
            "zookeeper-tls": {
                "ca": str(tls / "ca.pem"),
                "cert": str(tls / "client.pem"),
                "key": str(tls / "client.key"),
            },
            "zookeeper-timeout": SESSION,
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **content}))

    def _launcher(self, name: str) -> dict[str, Any]:
        slot = {"name": "slot", "backing-label": "backing", "max-parallel-jobs": 4, "grace-time": 1}
        return {
            "access": {"socket": str(self.folder / f"{name}.sock")},
            "webapp": {"port": 8005 + LAUNCHERS.index(name), "listen_address": "127.0.0.1"},
            "labels": [
                {"name": label, "max-ready-age": IDLE} for label in ("plain", "backing", "slot")
            ],
            "providers": [
                {
                    "name": "disk",
                    "driver": "diskcloud",
                    "cloud-dir": str(self.cloud.directory),
                    "pools": [{"name": "main", "labels": ["plain", "backing"]}],
                },
                {
                    "name": "meta",
                    "driver": "metastatic",
                    "pools": [{"name": "main", "max-servers": 100, "labels": [slot]}],
                },
            ],
        }

    def _builder(self) -> dict[str, Any]:
        drivers = self.folder / "drivers"
        drivers.mkdir()
        (self.folder / "images").mkdir()
        (drivers / "balky").symlink_to(pathlib.Path(DRIVERS) / "balky")
        create = REPOSITORY / "tests" / "fixtures" / "builder" / "image-create"
        image = {
            "name": "image",
            "elements": ["fedora", "vm"],
            "dib-cmd": str(create),
            "rebuild-age": REBUILD,
        }
        return {
            "images-dir": str(self.folder / "images"),
            "elements-dir": ".",
            "build-log-dir": str(self.folder / "image-logs"),
            "build-log-retention": 5,
            "drivers-path": [str(drivers)],
            "diskimages": [image],
            "providers": [self.images.provider(["image"])],
        }

    # -- one seed

    def start(self, seed: int) -> None:
        self._seed = seed
        self._start_clients()
        self.borrower = Borrower(self)
        self.borrower.start()

    def wait_lease(self) -> None:
        """Wait until the lease that is kept has been handed over."""
        borrower = self.borrower
        assert borrower is not None
        wait(lambda: borrower.kept is not None, 60, lambda: "no lease was handed over")

    def renew(self) -> None:
        """Restart the clients of Zuul, as the manual says for a loss of ZooKeeper's data."""
        for client in self.clients:
            client.process.kill()
            client.process.wait(30)
        self.clients = self._make_clients()
        self._start_clients()

    def _make_clients(self) -> list[Client]:
        made = [Client(self._python, self, name) for name in CLIENTS]
        for client in made:
            client.wait("ready")
        return made

    def _start_clients(self) -> None:
        for client in self.clients:
            client.do(f"start {self._seed}", "started")

    def ended(self) -> list[str]:
        """Return the daemons that no longer run."""
        return [daemon.name for daemon in self.daemons if not daemon.alive()]

    def stop(self) -> None:
        """Submit nothing more, and wait for the end of all that was submitted."""
        assert self.borrower is not None
        for client in self.clients:
            client.do("stop", "stopped")
        self.borrower.stop()

    def end(self) -> None:
        """Return all nodes."""
        assert self.borrower is not None
        self.borrower.end()
        for client in self.clients:
            client.do("end", "ended")

    @contextlib.contextmanager
    def look(self) -> Any:
        """A connection for comparing records with clouds."""
        tls = self.ensemble.tls
        client = ZooKeeperClient(
            self.ensemble.hosts,
            timeout=30,
            tls_cert=str(tls / "client.pem"),
            tls_key=str(tls / "client.key"),
            tls_ca=str(tls / "ca.pem"),
        )
        client.connect(timeout=30)
        try:
            yield ZooKeeper(client, enable_cache=False)
        finally:
            client.disconnect()

    def image_ids(self) -> list[str]:
        """Return the images in the cloud."""
        return [image["id"] for image in self.images.images()]

    def forget_images(self, names: Iterable[str]) -> None:
        for name in names:
            (self.images.control / "images" / name).unlink(missing_ok=True)

    def recover(self) -> None:
        """Delete what ZooKeeper no longer knows, as the manual says for an emptied one."""
        done = subprocess.run(
            [sys.executable, str(FAULTS / "command.py"), "-c"]
            + [str(self.folder / f"{LAUNCHERS[0]}.yaml"), "recover", "--delete", "--all"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "NODEPOOL_FAULT_DRIVERS": str(FAULTS / "drivers"),
            },
        )
        assert done.returncode == 0, f"nodepool recover failed: {done.stdout} {done.stderr}"

    def close(self) -> None:
        for client in self.clients:
            client.process.kill()
        for daemon in self.daemons:
            daemon.kill()
