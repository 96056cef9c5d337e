"""The services of tools/openstack: settings, start, stop."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ports
from cloud import settings

TOOLS = pathlib.Path(__file__).resolve().parent.parent
HERE = TOOLS / "cloud"
VENV = pathlib.Path(os.environ.get("NODEPOOL_OPENSTACK_VENV") or TOOLS.parent / ".openstack-venv")
PACKAGES = {
    "mariadb-server": "/usr/sbin/mariadbd",
    "rabbitmq-server": "/usr/lib/rabbitmq/bin/rabbitmq-server",
    "qemu-utils": "/usr/bin/qemu-img",
}
START_TIMEOUT = 180.0
STOP_TIMEOUT = 15.0
SYNC_TIMEOUT = 300.0
SERVICES = ("keystone", "glance", "placement", "nova", "neutron", "cinder")


class CloudError(Exception):
    """A service does not start; the text names it and its log."""


def install() -> None:
    """Install Debian's packages and the venv if they are missing. Raises CloudError."""
    missing = [name for name, program in PACKAGES.items() if not os.path.exists(program)]
    if missing:
        if os.geteuid() != 0:
            raise CloudError(f"install first, as root: apt-get install {' '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        with _no_service_starts():
            for words in (
                ["apt-get", "update", "-qq"],
                ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
            ):
                subprocess.run(words, check=True, env=environment, stdout=sys.stderr, timeout=900)
    constraints = HERE / "constraints.txt"
    done = VENV / "installed.txt"
    if not done.exists() or done.read_text() != constraints.read_text():
        pip = str(VENV / "bin" / "pip")
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            check=True,
            stdout=sys.stderr,
            timeout=300,
        )
        for what in (
            ["setuptools<81", "wheel"],
            [*settings.PROJECTS, "pymysql", "gunicorn", "setuptools<81"],
        ):
            subprocess.run(
                [
                    pip,
                    "install",
                    "-qq",
                    "--disable-pip-version-check",
                    "-c",
                    str(constraints),
                    *what,
                ],
                check=True,
                stdout=sys.stderr,
                timeout=1800,
            )
        done.write_text(constraints.read_text())


@contextlib.contextmanager
def _no_service_starts() -> Any:
    """Keep Debian's packages from starting their servers; ours are private."""
    policy = pathlib.Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


class Cloud:
    """One cloud below a directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.dir = directory
        self.state = directory / "state.json"
        self._saving = threading.Lock()
        self.values: dict[str, Any] = (
            json.loads(self.state.read_text()) if self.state.exists() else {}
        )

    # --- what is there

    def running(self) -> bool:
        pids = self.values.get("pids", {})
        return bool(pids) and all(_start_time(pid) == began for pid, began in pids.values())

    def _save(self, **pids: list[Any]) -> None:
        new = self.state.with_suffix(".new")
        with self._saving:
            self.values.setdefault("pids", {}).update(pids)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self.values, file, indent=1)
            new.replace(self.state)

    # --- up

    def up(self) -> dict[str, Any]:
        """Start everything. Raises CloudError; then nothing of it runs."""
        if self.running():
            return self._settings()
        self.down()
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.dir / "logs").mkdir(exist_ok=True)
        self._choose()
        began = time.monotonic()
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="start") as pool:
                for future in [pool.submit(self._start_database), pool.submit(self._start_rabbit)]:
                    future.result()
            self._start_services()
        except BaseException:
            self.down()
            raise
        print(f"OpenStack is up after {time.monotonic() - began:.0f} s", file=sys.stderr)
        return self._settings()

    def _settings(self) -> dict[str, Any]:
        return {
            "dir": str(self.dir),
            "clouds": str(self.dir / "clouds.yaml"),
            "ports": self.values["ports"],
        }

    def _choose(self) -> None:
        if "password" not in self.values:
            self.values["password"] = secrets.token_hex(16)
        if "ports" not in self.values:
            # Chosen once: the catalogue has them.
            names = [*SERVICES, "amqp", "dist", "epmd"]
            self.values["ports"] = {name: ports.reserve() for name in names}
        self.values["pids"] = {}
        self._save()
        settings.write(self.dir, VENV, self.values)

    def _environment(self, **more: str) -> dict[str, str]:
        base = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OS_", "RABBITMQ_", "PYTHON"))
        }
        path = f"{VENV}/bin:{base.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        return {
            **base,
            "PATH": path,
            "HOME": str(self.dir),
            "LC_ALL": "C.UTF-8",
            "PYTHONWARNINGS": "ignore",
            **more,
        }

    def _spawn(self, name: str, words: list[str], **environment: str) -> None:
        with (self.dir / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.dir,
                env=self._environment(**environment),
            )
        self._save(**{name: [process.pid, _start_time(process.pid)]})

    def _run(self, name: str, *words: str, input: str | None = None, **environment: str) -> str:
        program = str(VENV / "bin" / words[0]) if (VENV / "bin" / words[0]).exists() else words[0]
        log = self.dir / "logs" / f"{name}.log"
        with log.open("a") as file:
            done = subprocess.run(
                [program, *words[1:]],
                cwd=self.dir,
                env=self._environment(**environment),
                stderr=file,
                stdout=subprocess.PIPE,
                text=True,
                timeout=SYNC_TIMEOUT,
                check=False,
                input=input,
            )
            file.write(done.stdout)
        if done.returncode:
            raise CloudError(
                f"{words[0]} {words[1] if len(words) > 1 else ''} failed with status "
                f"{done.returncode}: see {log}"
            )
        return done.stdout

    def _wait(self, name: str, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        pid, began = self.values["pids"][name]
        while not answers():
            if _start_time(pid) != began:
                raise CloudError(f"{name} ended: see {self.dir}/logs/{name}.log")
            if time.monotonic() > deadline:
                raise CloudError(
                    f"{name} does not answer within {START_TIMEOUT:g} s: see "
                    f"{self.dir}/logs/{name}.log"
                )
            time.sleep(0.1)

    def _start_database(self) -> None:
        data, sock = self.dir / "mysql", self.dir / "mysql.sock"
        if not (data / "ready").exists():
            shutil.rmtree(data, ignore_errors=True)
            self._run(
                "mysql",
                "mariadb-install-db",
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            )
        self._spawn(
            "mysql",
            [
                PACKAGES["mariadb-server"],
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                f"--socket={sock}",
                f"--pid-file={self.dir}/mysql.pid",
                "--skip-networking",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-buffer-pool-size=192M",
                "--max-connections=500",
                "--sync-binlog=0",
                "--innodb-flush-method=nosync",
            ],
        )
        self._wait("mysql", lambda: _answers(socket.AF_UNIX, str(sock)))
        if not (data / "ready").exists():
            statements = "".join(
                f"CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET utf8mb3;\n"
                for name in settings.DATABASES
            )
            password = self.values["password"]
            statements += f"CREATE OR REPLACE USER os@localhost IDENTIFIED BY '{password}';\n"
            statements += "GRANT ALL ON *.* TO os@localhost;\n"
            self._run(
                "mysql", "mariadb", "--no-defaults", f"--socket={sock}", "-uroot", input=statements
            )
            (data / "ready").touch()

    def _start_rabbit(self) -> None:
        ports, home = self.values["ports"], self.dir / "rabbit"
        home.mkdir(exist_ok=True)
        (home / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{ports['amqp']}\nlog.file.level = warning\n"
            "vm_memory_high_watermark.relative = 0.8\ndisk_free_limit.absolute = 10MB\n"
        )
        (home / "plugins").write_text("[].\n")
        erlang = {"ERL_EPMD_PORT": str(ports["epmd"]), "ERL_EPMD_ADDRESS": "127.0.0.1"}
        # Else the server starts it, in a session that nobody ends.
        self._spawn("epmd", ["epmd"], **erlang)
        self._wait("epmd", lambda: _answers(socket.AF_INET, ("127.0.0.1", ports["epmd"])))
        environment = erlang | {
            "HOME": str(home),
            "RABBITMQ_NODENAME": "nodepool@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(ports["amqp"]),
            "RABBITMQ_DIST_PORT": str(ports["dist"]),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(self.dir / "logs"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S "
            "1:1",
        }
        self._spawn("rabbit", [PACKAGES["rabbitmq-server"]], **environment)
        self._wait("rabbit", lambda: _answers(socket.AF_INET, ("127.0.0.1", ports["amqp"])))

    def _start_services(self) -> None:
        """Start databases and services in an order that wastes no processor time."""
        conf, first = self.dir / "conf", not (self.dir / "ready").exists()
        with ThreadPoolExecutor(2, thread_name_prefix="sync") as pool:
            if first:
                # The longest first.
                order = ("nova", "neutron", "keystone", "cinder", "glance", "placement")
                for future in [pool.submit(self._sync, name) for name in order]:
                    future.result()
            futures = [
                pool.submit(self._serve, name) for name in ("keystone", "placement", "glance")
            ]
            for future in futures:
                future.result()
            if first:
                self._identities()
            futures = [pool.submit(self._serve, name) for name in ("neutron", "nova", "cinder")]
            for name in ("nova-conductor", "nova-scheduler", "nova-compute"):
                self._spawn(
                    name,
                    [str(VENV / "bin" / name), "--config-file", str(conf / "nova" / "nova.conf")],
                )
            for name in ("cinder-scheduler", "cinder-volume"):
                self._spawn(
                    name,
                    [
                        str(VENV / "bin" / name),
                        "--config-file",
                        str(conf / "cinder" / "cinder.conf"),
                    ],
                    PYTHONPATH=str(TOOLS),
                )
            files = (conf / "neutron" / name for name in ("neutron.conf", "ml2.ini"))
            self._spawn(
                "neutron-rpc-server",
                [
                    str(VENV / "bin" / "neutron-rpc-server"),
                    *(word for file in files for word in ("--config-file", str(file))),
                ],
            )
            self._spawn(
                "agents",
                [
                    str(VENV / "bin" / "python"),
                    "-P",
                    str(HERE / "agents.py"),
                    str(conf / "neutron" / "neutron.conf"),
                ],
            )
            for future in futures:
                future.result()
        self._content("content")
        self._discover()
        (self.dir / "ready").touch()

    def _content(self, what: str) -> None:
        self._run("content", "python", "-P", str(HERE / "content.py"), what, str(self.dir))

    def _discover(self) -> None:
        """Wait until the hypervisor has reported; without it nothing can be scheduled."""
        deadline = time.monotonic() + START_TIMEOUT
        command = (
            "nova-manage",
            "nova-manage",
            "--config-dir",
            str(self.dir / "conf" / "nova"),
            "cell_v2",
        )
        while "compute1" not in self._run(*command, "list_hosts"):
            if time.monotonic() > deadline:
                raise CloudError(
                    f"nova-compute does not report within {START_TIMEOUT:g} s: see "
                    f"{self.dir}/logs/nova-compute.log"
                )
            self._run(*command, "discover_hosts")

    def _sync(self, name: str) -> None:
        conf = self.dir / "conf" / name
        for words in settings.SYNC[name]:
            self._run(
                f"{name}-sync",
                *(word.format(conf=conf) for word in words),
                **{
                    f"OS_{name.upper()}_CONFIG_DIR": str(conf),
                    "OS_PLACEMENT_CONFIG_DIR": str(conf),
                },
            )

    def _serve(self, name: str) -> None:
        conf, port = self.dir / "conf" / name, self.values["ports"][name]
        self._spawn(
            name,
            [
                str(VENV / "bin" / "python"),
                "-P",  # other modules in its directory are not modules of the service
                str(HERE / "wsgi.py"),
                settings.WSGI[name],
                str(port),
                *(["--config-dir", str(conf)] if name == "cinder" else []),
            ],
            **{
                f"OS_{name.upper()}_CONFIG_DIR": str(conf),
                f"OS_{name.upper()}_CONFIG_FILES": settings.FILES[name],
            },
        )
        self._wait(name, lambda: _http(f"http://127.0.0.1:{port}/"))

    def _identities(self) -> None:
        """Create the administrator, the catalog and a user for the services."""
        conf = self.dir / "conf" / "keystone"
        self._run(
            "keystone-bootstrap",
            "keystone-manage",
            "--config-dir",
            str(conf),
            "bootstrap",
            "--bootstrap-region-id",
            settings.REGION,
            OS_BOOTSTRAP_PASSWORD=self.values["password"],
            OS_BOOTSTRAP_PUBLIC_URL=f"http://127.0.0.1:{self.values['ports']['keystone']}/v3",
        )
        self._content("identities")

    # --- down

    def down(self) -> None:
        """End all processes that run."""
        pids = [
            (pid, began)
            for pid, began in self.values.get("pids", {}).values()
            if _start_time(pid) == began
        ]
        sessions = {pid for pid, _began in pids}
        members = _members(sessions)
        for number, timeout in ((signal.SIGTERM, STOP_TIMEOUT), (signal.SIGKILL, STOP_TIMEOUT)):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + timeout
            while (members := _members(sessions)) and time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                time.sleep(0.05)
        if self.values.get("pids"):
            self.values["pids"] = {}
            self._save()
        if members:
            raise CloudError(f"processes {sorted(members)} do not end")


def _start_time(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _members(sessions: set[int]) -> set[int]:
    """Return the living processes of these sessions."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                fields = pathlib.Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX" and int(fields[3]) in sessions:
                    found.add(int(entry))
    return found


def _answers(family: int, address: Any) -> bool:
    with socket.socket(family) as sock:
        sock.settimeout(2)
        try:
            sock.connect(address)
            return True
        except OSError:
            return False


def _http(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
