"""Three real ZooKeeper servers, and what can be done to them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from tests.conftest import load_tool
from tests.ensemble import network
from tests.ensemble.clock import Clock

NUMBERS = (1, 2, 3)
#: Session time-out of all clients, in seconds. As with ZooKeeper's defaults, a follower gives up
#: a silent leader after the same time (``syncLimit`` ticks).
SESSION = 4.0
TICKS = 10
PORT, PLAIN = 2281, 2181
#: Seconds within which the ensemble must have a leader after a start.
ELECTION = 60.0
#: Write operations per second of a slow disk: each synchronization waits for at least one.
SLOW_WRITES = 10


class Server:
    """One server in its namespace; ``root`` contains its data, its log and its configuration."""

    def __init__(
        self, number: int, folder: pathlib.Path, classpath: str, clock: pathlib.Path | None
    ) -> None:
        self.number = number
        self.root = folder / f"zk{number}"
        self.data = self.root / "data"
        self.data.mkdir(parents=True)
        self.clock = Clock(clock, self.root / "clock")
        self._classpath = classpath
        self._process: subprocess.Popen[bytes] | None = None
        self._write_id()
        peers = "\n".join(f"server.{n}={network.address(n)}:2888:3888" for n in NUMBERS)
        tls = folder / "tls"
        (self.root / "zoo.cfg").write_text(f"""\
dataDir={self.data}
tickTime={SESSION * 1000 / TICKS:.0f}
initLimit=20
syncLimit={TICKS}
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
clientPort={PLAIN}
secureClientPort={PORT}
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
ssl.keyStore.location={tls}/server-keystore.pem
ssl.keyStore.type=PEM
ssl.trustStore.location={tls}/ca.pem
ssl.trustStore.type=PEM
ssl.clientAuth=need
admin.enableServer=false
4lw.commands.whitelist=srvr
snapCount=5000
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
{peers}
""")

    def _write_id(self) -> None:
        self.data.mkdir(exist_ok=True)
        (self.data / "myid").write_text(f"{self.number}\n")

    @property
    def host(self) -> str:
        return f"{network.address(self.number)}:{PORT}"

    def start(self) -> None:
        self.clock.step(0)
        with open(self.root / "log", "ab") as log:
            self._process = subprocess.Popen(
                network.inside(
                    self.number,
                    "java",
                    "-Xmx128m",
                    "-XX:+UseSerialGC",
                    "-XX:TieredStopAtLevel=1",
                    "-cp",
                    self._classpath,
                    "-Dzookeeper.extendedTypesEnabled=true",
                    "-Dzookeeper.jmx.log4j.disable=true",
                    "-Dzookeeper.preAllocSize=1024",
                    "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                    str(self.root / "zoo.cfg"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.clock.environment()},
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"server {self.number} was not started"
        return self._process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """Stop in good order."""
        self.process.terminate()
        self.process.wait(30)

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def mode(self) -> str:
        """Return ``leader`` or ``follower``, or an empty string while it does not serve."""
        try:
            with socket.create_connection((network.address(self.number), PLAIN), 1) as sock:
                sock.sendall(b"srvr")
                sock.settimeout(1)
                text = b"".join(iter(lambda: sock.recv(4096), b"")).decode()
        except OSError:
            return ""
        return next((line[6:] for line in text.splitlines() if line.startswith("Mode: ")), "")

    def copy(self, target: pathlib.Path) -> None:
        """Copy the data as they are on the disk; what the server writes meanwhile may be missing
        or torn, as after a crash.
        """
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.data, target)

    def replace(self, source: pathlib.Path | None) -> None:
        """Replace the data of a stopped server by a copy, or by nothing."""
        shutil.rmtree(self.data)
        if source is not None:
            shutil.copytree(source, self.data)
        self._write_id()


class Ensemble:
    """The three servers."""

    def __init__(
        self, folder: pathlib.Path, throttle: pathlib.Path | None, clock: pathlib.Path | None
    ) -> None:
        tool = load_tool("zookeeper")
        tool.install()
        self.tls = folder / "tls"
        tool.make_certificates(self.tls)
        self.servers = [Server(n, folder, tool.classpath(), clock) for n in NUMBERS]
        self._throttle = throttle
        self._disk = os.stat(folder).st_dev

    @property
    def hosts(self) -> str:
        return ",".join(server.host for server in self.servers)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        self.wait_served()

    def leader(self) -> Server:
        self.wait_served()
        return next(server for server in self.servers if server.mode() == "leader")

    def follower(self) -> Server:
        self.wait_served()
        return next(server for server in self.servers if server.mode() == "follower")

    def wait_served(self) -> None:
        """Wait until all three servers serve.

        :raises AssertionError: they do not within `ELECTION` seconds.
        """
        wait(
            lambda: sorted(s.mode() for s in self.servers) == ["follower", "follower", "leader"],
            ELECTION,
            lambda: f"no ensemble of three: {[s.mode() for s in self.servers]}",
        )

    @property
    def can_slow_disk(self) -> bool:
        return self._throttle is not None

    def slow_disk(self, server: Server) -> None:
        """Let the kernel limit the writes of a server to `SLOW_WRITES` per second."""
        assert self._throttle is not None
        disk = f"{os.major(self._disk)}:{os.minor(self._disk)}"
        limit = self._throttle / "blkio.throttle.write_iops_device"
        if limit.exists():
            limit.write_text(f"{disk} {SLOW_WRITES}")
        else:
            (self._throttle / "io.max").write_text(f"{disk} wiops={SLOW_WRITES}")
        (self._throttle / "cgroup.procs").write_text(str(server.process.pid))

    def normal_disk(self, server: Server) -> None:
        assert self._throttle is not None
        (self._throttle.parent / "cgroup.procs").write_text(str(server.process.pid))

    def close(self) -> None:
        for server in self.servers:
            with contextlib.suppress(AssertionError):
                server.kill()


class Monitor(threading.Thread):
    """Notes when the servers had a leader with a follower, as the clients' network sees them."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__(name="monitor", daemon=True)
        self._ensemble = ensemble
        #: Times of the monotonic clock.
        self.served: list[float] = []

    def run(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(NUMBERS)) as pool:
            while True:
                began = time.monotonic()
                modes = list(pool.map(Server.mode, self._ensemble.servers))
                if "leader" in modes and "follower" in modes:
                    self.served.append(began)
                time.sleep(0.1)


def wait(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Poll until the condition holds; :raises AssertionError: it does not in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s: {what()}")
        time.sleep(0.05)
