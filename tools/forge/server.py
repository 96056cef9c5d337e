"""Build, configure, start and stop the server of tools/gitea."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import ports
from cluster.control_plane import ClusterError, apt, go, start_time

HERE = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(os.environ.get("NODEPOOL_GITEA_CACHE") or HERE.parent.parent / ".gitea")
MODULE = "code.gitea.io/gitea"
PACKAGES = {"gcc": "gcc libc6-dev", "git": "git"}
BUILD_TIMEOUT, START_TIMEOUT, STOP_TIMEOUT, COMMAND_TIMEOUT = 3600.0, 120.0, 30.0, 120.0
#: Folders of the module that the server reads while it runs.
STATIC = ("options", "public", "templates")
USER = "operator"
CONFIG = """
APP_NAME = Test
RUN_MODE = prod
RUN_USER = {user}
WORK_PATH = {dir}
I_AM_BEING_UNSAFE_RUNNING_AS_ROOT = true
[server]
PROTOCOL = http
HTTP_ADDR = 127.0.0.1
HTTP_PORT = {port}
ROOT_URL = http://127.0.0.1:{port}/
STATIC_ROOT_PATH = {static}
DISABLE_SSH = true
OFFLINE_MODE = true
LFS_START_SERVER = false
[database]
DB_TYPE = sqlite3
PATH = {dir}/gitea.db
[repository]
ROOT = {dir}/repositories
DEFAULT_BRANCH = main
[security]
INSTALL_LOCK = true
[service]
DISABLE_REGISTRATION = true
[session]
PROVIDER = memory
[queue]
TYPE = channel
[indexer]
ISSUE_INDEXER_TYPE = db
[log]
MODE = console
LEVEL = Info
[webhook]
ALLOWED_HOST_LIST = loopback
[actions]
ENABLED = true
DEFAULT_ACTIONS_URL = self
[cron]
ENABLED = false
"""


def version() -> str:
    """Return Gitea's version, which the module file pins."""
    match = re.search(rf"{re.escape(MODULE)} v([\d.]+)", (HERE / "go.mod").read_text())
    assert match is not None
    return match[1]


def built() -> pathlib.Path:
    """Return where the server is kept: one folder for each state of the module files."""
    return (
        CACHE
        / hashlib.sha256(
            b"".join((HERE / name).read_bytes() for name in ("go.mod", "go.sum"))
        ).hexdigest()[:16]
    )


def is_installed() -> bool:
    return (built() / "gitea").exists()


def install() -> None:
    """Build the server, unless it exists.

    :raises ClusterError: it does not build.
    """
    missing = [
        name
        for program, names in PACKAGES.items()
        if shutil.which(program) is None
        for name in names.split()
    ]
    if missing:
        apt(*missing)
    if is_installed():
        return
    folder = built()
    folder.mkdir(parents=True, exist_ok=True)
    command = go()
    found = json.loads(_go([command, "list", "-m", "-json", MODULE], COMMAND_TIMEOUT))
    if "Dir" not in found:
        found = json.loads(_go([command, "mod", "download", "-json", MODULE], BUILD_TIMEOUT))
    for name in STATIC:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(
            pathlib.Path(found["Dir"], name), folder / name, copy_function=shutil.copyfile
        )
    flags = [
        "-trimpath",
        "-tags",
        "sqlite sqlite_unlock_notify",
        "-ldflags",
        f"-s -w -X main.Version={version()}",
    ]
    _go(
        [command, "build", "-mod=readonly", *flags, "-o", str(folder / "gitea.new"), MODULE],
        BUILD_TIMEOUT,
    )
    (folder / "gitea.new").rename(folder / "gitea")


def _go(words: list[str], timeout: float) -> str:
    """Return the output of the go command, which leaves the processors to tests that measure.

    :raises ClusterError: it fails.
    """
    environment = {"HOME": "/root", **os.environ, "CGO_ENABLED": "1", "GOFLAGS": ""}
    done = subprocess.run(
        ["nice", "-n", "19", *words],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


class Gitea:
    """One server below a directory.

    :ivar user: the administrator; its password serves for the pages.
    :ivar token: of the administrator, for all calls of the API.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.dir = directory
        self.user, self.password, self.token = USER, "", ""
        self.port, self.pid, self._began = 0, 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._state = directory / "state.json"
        if self._state.exists():
            found = json.loads(self._state.read_text())
            self.port, self.pid, self._began = found["port"], found["pid"], found["began"]
            self.password, self.token = found["password"], found["token"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> pathlib.Path:
        return self.dir / "gitea.log"

    def running(self) -> bool:
        return bool(self.pid) and start_time(self.pid) == self._began

    def up(self) -> None:
        """Start the server, again on the same port and with the same data after ``down``.

        :raises ClusterError: it does not start; then nothing of it runs.
        """
        if self.running():
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        if not self.token:
            self.port = ports.reserve()
            config = CONFIG.format(
                user=getpass.getuser(), dir=self.dir, port=self.port, static=built()
            )
            self._write(self.dir / "app.ini", config)
            self.command("migrate")
            self.password = self.add_user(USER, "--admin")
            self.token = self.user_token(USER, "all")
        try:
            with open(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    [*self._words(), "web"],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=self.dir,
                    env=self._environment(),
                )
            self.pid = self._process.pid
            self._began = start_time(self.pid) or ""
            self._save()
            self._wait()
        except BaseException:
            self.down()
            raise

    def add_user(self, name: str, *options: str) -> str:
        """Return the password of a new user."""
        password = secrets.token_urlsafe(20)
        self.command(
            "admin",
            "user",
            "create",
            "--username",
            name,
            "--password",
            password,
            "--email",
            f"{name}@example.com",
            "--must-change-password=false",
            *options,
        )
        return password

    def user_token(self, name: str, scopes: str) -> str:
        """Return a new token of a user for some calls, such as ``read:admin,write:repository``."""
        words = (
            "--username",
            name,
            "--token-name",
            secrets.token_hex(8),
            "--scopes",
            scopes,
            "--raw",
        )
        return self.command("admin", "user", "generate-access-token", *words).split()[-1]

    def command(self, *words: str) -> str:
        """Return the output of a command of Gitea.

        :raises ClusterError: it fails.
        """
        done = subprocess.run(
            [*self._words(), *words],
            cwd=self.dir,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(
                f"gitea {' '.join(words[:3])} failed:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout

    def _words(self) -> list[str]:
        return [
            str(built() / "gitea"),
            "--config",
            str(self.dir / "app.ini"),
            "--work-path",
            str(self.dir),
        ]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.dir), "USER": getpass.getuser(), "GOMAXPROCS": "2"}

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.running():
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self.url}/api/v1/version", timeout=5) as answer,
            ):
                answer.read()
                return
            time.sleep(0.05)
        raise ClusterError(
            "Gitea does not start, its log is "
            f"{self.log}:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    def _save(self) -> None:
        values = {
            "port": self.port,
            "pid": self.pid,
            "began": self._began,
            "password": self.password,
            "token": self.token,
        }
        self._write(self._state, json.dumps(values))

    @staticmethod
    def _write(path: pathlib.Path, text: str) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)

    def down(self) -> None:
        """Stop the server; its data stay."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            deadline = time.monotonic() + STOP_TIMEOUT / 2
            while time.monotonic() < deadline and self.running():
                time.sleep(0.02)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT)
            self._process = None
