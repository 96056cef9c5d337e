"""What one sliver's worst does to another (root): python -m tests.benchmark.fairness [--rounds 40]
[--podman]

A daemon, a sliver that attacks and one that works.  For each attack: 95th percentile of the other's
login, disk write (4 MiB and fsync), creation and deletion of a third one, and GetCapacity, as
ratios to the same on the quiet machine, measured in the same run. Targets: ratios of 2, GetCapacity
50 ms.  With --podman the same for containers of rootless podman on the same machine
(login: podman exec; GetCapacity: podman ps).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.attacks.trees import make_python_tree
from tests.support.nodemanager import user
from tests.support.nodemanager.scene import NmDaemon

LIMITS = {"nm_mem_limit": 256, "nm_pids_max": 200, "nm_disk_quota": 512000}
RATIO, CAPACITY_MS = 2.0, 50.0

#: What runs in the attacking sliver, by Python; prints "on" when it is under way.
PROGRAMS = {
    "fork": """
import os, time
for _ in range(60):
    if os.fork() == 0:
        while True:
            try:
                if os.fork() == 0: os._exit(0)
                os.wait()
            except OSError: pass
print('on', flush=True); time.sleep(600)
""",
    "cpu": """
import os, time
for _ in range(100):
    if os.fork() == 0:
        while True: pass
print('on', flush=True); time.sleep(600)
""",
    "memory": """
import os, time
def hog():
    kept = []
    while True: kept.append(bytearray(os.urandom(4096) * 256))
for _ in range(4):
    if os.fork() == 0:
        while True:
            if os.fork() == 0: hog()
            os.wait()
print('on', flush=True); time.sleep(600)
""",
    "disk": """
import os
print('on', flush=True)
piece = os.urandom(1 << 20)
while True:
    try:
        with open('/root/big', 'wb', 0) as file:
            while True: file.write(piece)
    except OSError: pass
""",
    "inodes": """
import os, itertools
print('on', flush=True)
while True:
    os.makedirs('/root/i', exist_ok=True)
    try:
        for n in itertools.count(): os.close(os.open(f'/root/i/{n}', os.O_CREAT | os.O_WRONLY))
    except OSError: pass
    os.system('rm -rf /root/i')
""",
    "terminals": """
import os, time
kept = []
try:
    while True: kept.append(os.openpty())
except OSError: pass
print('on', flush=True); time.sleep(600)
""",
    "fsync": """
import os
for number in range(32):
    if os.fork() == 0:
        with open(f'/root/f{number}', 'wb', 0) as file:
            while True:
                file.seek(0); file.write(b'x' * 4096); os.fsync(file.fileno())
print('on', flush=True); os.wait()
""",
    "api": """
import os, socket, time
params = b'<param><value><int>1</int></value></param>' * 1400
body = b'<methodCall><methodName>Help</methodName><params>' + params + b'</params></methodCall>'
head = b'POST / HTTP/1.0\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body)
for _ in range(40):
    if os.fork() == 0:
        while True:
            try:
                end = socket.socket(socket.AF_UNIX); end.settimeout(5)
                end.connect('/run/nodepool/nodemanager.api'); end.sendall(head + body)
                while end.recv(65536): pass
            except OSError: pass
            finally: end.close()
print('on', flush=True); os.wait()
""",
}


class Host:
    """A node manager with its two slivers."""

    def __init__(self, work: pathlib.Path) -> None:
        self.nm = NmDaemon(work)
        self.nm.start()
        self.places: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self.nm.clean()

    def again(self, name: str) -> None:
        """A new one instead of it."""
        self.nm.client.call("Stop", name)
        self.nm.wait(name, "stopped", 60)
        self.nm.delete(name)
        self.put(name)

    def put(self, name: str) -> None:
        self.nm.put(name, rspec=LIMITS)
        self.places[name] = self.nm.client.call("GetRecord", name)

    def command(self, name: str, *words: str) -> list[str]:
        """That runs a shell's line inside."""
        return [
            "ssh",
            "-i",
            str(self.nm.key),
            "-p",
            str(self.places[name]["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            f"UserKnownHostsFile={os.devnull}",
            "-o",
            "LogLevel=ERROR",
            "root@127.0.0.1",
            *words,
        ]

    # What is measured, each in milliseconds.

    def login(self, number: int) -> float:
        begun = time.monotonic()
        subprocess.run(
            self.command("victim", "true"), check=True, stdin=subprocess.DEVNULL, timeout=120
        )
        return (time.monotonic() - begun) * 1000

    def create(self, number: int) -> float:
        begun = time.monotonic()
        self.nm.put(f"new{number % 2}", rspec=LIMITS)
        return (time.monotonic() - begun) * 1000

    def delete(self, number: int) -> float:
        begun = time.monotonic()
        self.nm.delete(f"new{number % 2}")
        return (time.monotonic() - begun) * 1000

    def capacity(self, number: int) -> float:
        begun = time.monotonic()
        self.nm.client.call("GetCapacity")
        return (time.monotonic() - begun) * 1000


class PodmanHost(Host):
    """Containers of an ordinary user's podman."""

    def __init__(self, work: pathlib.Path) -> None:
        tree = make_python_tree(work / "tree")
        assert tree is not None, "this host has no Python of its distribution"
        self.work = work
        work.chmod(0o755)
        self.home = work / "home"
        (self.home / "run").mkdir(parents=True, mode=0o700)
        user.make_home(self.home)
        os.chown(self.home / "run", user.USER_ID, user.USER_ID)

    def podman(self, *words: str) -> list[str]:
        # crun refuses hosts where cgroup v2 has controllers alongside v1; it need not see that.
        script = (
            'umount /sys/fs/cgroup/unified 2>/dev/null; mount --bind "$1/.passwd" /etc/passwd; cd '
            '"$1"; home=$1; shift; '
            f"exec setpriv --reuid={user.USER_ID} --regid={user.USER_ID} --clear-groups env -i "
            'HOME="$home" '
            f'USER={user.USER_NAME} XDG_RUNTIME_DIR="$home/run" PATH="$PATH" podman '
            "--log-level=error "
            '--cgroup-manager=cgroupfs "$@"'
        )
        return [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            script,
            "sh",
            str(self.home),
            *words,
        ]

    def _run(self, *words: str) -> float:
        begun = time.monotonic()
        subprocess.run(
            self.podman(*words),
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        return (time.monotonic() - begun) * 1000

    def close(self) -> None:
        self._run("rm", "--force", "--all", "--time", "0")
        self._run("system", "migrate")

    def put(self, name: str) -> None:
        tree = self.work / name
        subprocess.run(
            ["cp", "-a", "--reflink=auto", str(self.work / "tree"), str(tree)],
            check=True,
            timeout=60,
        )
        self._own(tree)
        self._start(name)

    @staticmethod
    def _own(tree: pathlib.Path) -> None:
        subprocess.run(
            ["chown", "-R", f"{user.USER_ID}:{user.USER_ID}", str(tree)], check=True, timeout=60
        )

    def _start(self, name: str) -> float:
        return self._run(
            "run",
            "--detach",
            "--name",
            name,
            "--cgroups=disabled",
            "--network=none",
            "--rootfs",
            str(self.work / name),
            "/bin/sleep",
            "100000",
        )

    def again(self, name: str) -> None:
        self._run("rm", "--force", "--time", "0", name)
        subprocess.run(["rm", "-rf", str(self.work / name)], check=True, timeout=120)
        self.put(name)

    def command(self, name: str, *words: str) -> list[str]:
        return self.podman("exec", "-i", name, "/bin/sh", "-c", " ".join(words))

    def create(self, number: int) -> float:
        if not (self.work / "new").exists():
            subprocess.run(
                ["cp", "-a", str(self.work / "tree"), str(self.work / "new")],
                check=True,
                timeout=60,
            )
            self._own(self.work / "new")
        return self._start("new")

    def delete(self, number: int) -> float:
        return self._run("rm", "--force", "--time", "0", "new")

    def capacity(self, number: int) -> float:
        return self._run("ps")


WRITER = """
import os, sys, time
piece = os.urandom(4 << 20)
for line in sys.stdin:
    begun = time.monotonic()
    with open('/root/work', 'wb', 0) as file:
        file.write(piece); os.fsync(file.fileno())
    print((time.monotonic() - begun) * 1000, flush=True)
"""


def measure(host: Host, rounds: int) -> dict[str, float]:
    """95th percentiles."""
    found: dict[str, list[float]] = {
        "login": [],
        "write": [],
        "create": [],
        "delete": [],
        "capacity": [],
    }
    with subprocess.Popen(
        host.command("victim", f"exec python3 -c {shlex.quote(WRITER)}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for number in range(rounds + 1):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            write = float(writer.stdout.readline())
            values = {
                "login": host.login(number),
                "write": write,
                "create": host.create(number),
                "delete": host.delete(number),
                "capacity": max(host.capacity(number) for _ in range(5)),
            }
            if number:  # the first warms up
                for key, value in values.items():
                    found[key].append(value)
        writer.stdin.close()
        writer.wait(60)
    return {key: sorted(values)[int(len(values) * 0.95)] for key, values in found.items()}


@contextlib.contextmanager
def inside(host: Host, name: str) -> Iterator[None]:
    with subprocess.Popen(
        host.command("mallory", "exec python3 -u -"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as session:
        assert session.stdin is not None and session.stdout is not None
        session.stdin.write(PROGRAMS[name])
        session.stdin.close()
        assert session.stdout.readline() == "on\n"
        try:
            yield
        finally:
            session.kill()
            host.again("mallory")


FLOOD = """
import contextlib, os, socket, sys
for _ in range(15):
    if os.fork() == 0: break
while True:
    there = ("127.0.0.1", int(sys.argv[1]))
    with contextlib.suppress(OSError), socket.create_connection(there, 5) as connection:
        connection.settimeout(1)
        connection.recv(100)
"""


@contextlib.contextmanager
def logins(host: Host) -> Iterator[None]:
    """Connections to the port of a sliver that is busy, as from other machines, as fast as they
    are taken.
    """
    with (
        inside(host, "cpu"),
        subprocess.Popen(
            [
                "nice",
                "-n",
                "19",
                sys.executable,
                "-c",
                FLOOD,
                str(host.places["mallory"]["ssh_port"]),
            ],
            start_new_session=True,
        ) as flood,
    ):
        try:
            yield
        finally:
            os.killpg(flood.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--attacks", default=",".join((*PROGRAMS, "logins")))
    parser.add_argument("--podman", action="store_true", help="measure rootless podman, too")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    kinds: dict[str, Callable[[Host], Any]] = {
        name: (lambda host, name=name: inside(host, name)) for name in PROGRAMS
    }
    kinds["logins"] = logins
    found = {"node manager": rows_of(Host, args.attacks.split(","), kinds, args.rounds)}
    if args.podman:
        # It has no API, and nobody logs in from outside.
        found["podman"] = rows_of(
            PodmanHost,
            [name for name in args.attacks.split(",") if name not in ("api", "logins")],
            kinds,
            args.rounds,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    rows = found["node manager"]
    missed = [
        f"{name} {key}"
        for name, row in rows.items()
        for key, value in row.items()
        if name != "quiet"
        and (value > CAPACITY_MS if key == "capacity" else value > RATIO * rows["quiet"][key])
    ]
    print("Targets missed: " + (", ".join(missed) or "none"))
    return 1 if missed else 0


def rows_of(
    kind: type[Host], attacks: list[str], kinds: dict[str, Callable[[Host], Any]], rounds: int
) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="nodepool-fair-") as work:
        host = kind(pathlib.Path(work))
        try:
            for name in ("mallory", "victim"):
                host.put(name)
            rows["quiet"] = measure(host, rounds)
            print(
                f"{kind.__name__ + ', ms':20}" + "".join(f"{key:>18}" for key in rows["quiet"]),
                flush=True,
            )
            print(
                f"{'quiet':20}" + "".join(f"{value:18.1f}" for value in rows["quiet"].values()),
                flush=True,
            )
            for name in attacks:
                try:
                    with kinds[name](host):
                        rows[name] = measure(host, rounds)
                except (subprocess.SubprocessError, OSError, ValueError) as error:
                    print(f"{name:20}failed: {str(error)[-200:]}", flush=True)
                    continue
                cells = "".join(
                    f"{value:11.1f} {value / rows['quiet'][key]:5.2f}x"
                    for key, value in rows[name].items()
                )
                print(f"{name:20}{cells}", flush=True)
        finally:
            host.close()
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
