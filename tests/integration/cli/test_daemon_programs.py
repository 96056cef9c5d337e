"""nodepool-launcher as a process, with a stand-in for the launcher object itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.ports import reserve

# What nodepool.cmd.launcher needs of the launcher, with switches for what goes wrong.
STAND_IN = """
import concurrent.futures, os, sys, threading, types
from nodepool.exceptions import ConfigurationError

class NodePool:
    def __init__(self, securefile, configfile, watermark_sleep=1, *, all_read=None):
        self.args = (securefile, configfile)
        self.ready = False
        self.config = self.feed = self.watchdog = None
        self._stop = threading.Event()
    def loadConfig(self):
        if not os.path.exists(self.args[1]):
            raise ConfigurationError(f"no such file: {self.args[1]}")
        return types.SimpleNamespace(
            webapp={"port": int(os.environ["WEB_PORT"]), "listen_address": "127.0.0.1"},
            web_pages="loopback",
            access=types.SimpleNamespace(socket=None),
            zookeeper_servers="localhost:1",
            zookeeper_timeout=10, zookeeper_tls_cert=None, zookeeper_tls_key=None,
            zookeeper_tls_ca=None, zookeeper_insecure=True)
    def getZK(self):
        return None
    def getReadiness(self):
        return self.ready, []
    def start(self):
        threading.Thread(target=self._stop.wait, name="NodePool").start()
        self.ready = True
    def stop(self):
        if os.environ.get("HANG"):
            threading.Event().wait()
        if os.environ.get("ANSWER"):
            # As a driver's: started by a daemon thread, so daemons themselves.
            pool = concurrent.futures.ThreadPoolExecutor(1, "waits-for-an-answer")
            pool.submit(threading.Event().wait)
            pool.shutdown(wait=False)
        self._stop.set()

module = types.ModuleType("nodepool.launcher")
module.NodePool = NodePool
sys.modules["nodepool.launcher"] = module
if os.environ.get("LOGS"):
    import nodepool.logconfig
    nodepool.logconfig.LOG_DIRECTORY = os.environ["LOGS"]
from nodepool.process import service
service.run_daemon.__defaults__ = (float(os.environ.get("LIMIT", "1")), False)
from nodepool.cmd.launcher import main
sys.exit(main())
"""


class Launcher:
    def __init__(self, tmp):
        self.tmp = tmp
        self.port = reserve()
        self.script = tmp / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.config = tmp / "nodepool.yaml"
        self.config.write_text("{}")
        self.pid_file = tmp / "x.pid"
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "WEB_PORT": str(self.port),
            "LOGS": str(tmp),
        }

    def command(self, *args):
        return [
            sys.executable,
            str(self.script),
            "-c",
            str(self.config),
            "-p",
            str(self.pid_file),
            *args,
        ]

    def start(self, *args, stdin=subprocess.DEVNULL, **env):
        return subprocess.Popen(
            self.command(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.env, **env},
            stdin=stdin,
        )

    def run(self, *args, **env):
        return subprocess.run(
            self.command(*args),
            capture_output=True,
            text=True,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )

    def ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as reply:
                return reply.read() == b"OK"
        except OSError:
            return False


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


@pytest.mark.spec("CLI-2.3: INT: orderly stop, status 0; USR1 as INT; TERM within seconds")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_stop_a_foreground_daemon_in_order(launcher, number):
    with launcher.start("-f") as process:
        wait_for(launcher.ready)
        assert not launcher.pid_file.exists()
        process.send_signal(number)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 0, out
    assert "INFO nodepool.daemon: Stopped" in out and "WARNING" not in out


@pytest.mark.spec("CLI-8: active in any mode, always visible")
@pytest.mark.parametrize("option", ["-f", "-d"])
def test_stack_dump_is_always_visible(launcher, option):
    with launcher.start(option) as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGUSR2)
        lines = []
        while not lines or "End debug handler" not in lines[-1]:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert any(
        " nodepool.stack_dump:   Thread: " in line and " NodePool d: False" in line
        for line in lines
    )


def test_stop_is_time_limited(launcher):
    with launcher.start("-f", HANG="1") as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "These threads have not ended within 1 s: " in out and "NodePool" in out


@pytest.mark.spec("CLI-2: an orderly stop takes about a second")
def test_threads_that_wait_for_answers_end_with_the_process(launcher):
    with launcher.start("-f", ANSWER="1", LIMIT="60") as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert (
        process.returncode == 0 and "waits-for-an-answer_0" in out and "have not ended" not in out
    )


def test_second_signal_exits_immediately(launcher):
    with launcher.start("-f", HANG="1", LIMIT="60") as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGTERM)
        while "Stopping" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 0 and "have not ended" not in out


@pytest.mark.spec("CLI-2.2: background: pid file, log file; pid file removed on orderly exit")
def test_background_daemon_writes_pid_and_log_file(launcher):
    reply = launcher.run()
    assert (reply.returncode, reply.stdout, reply.stderr) == (0, "", "")
    pid = int(launcher.pid_file.read_text())
    try:
        assert launcher.ready()
        again = launcher.run(WEB_PORT=str(reserve()))
        assert again.returncode == 1
        expected = (
            f"nodepool-launcher: error: pid file {launcher.pid_file} is held by the running "
            f"process {pid}\n"
        )
        assert again.stderr == expected
    finally:
        os.kill(pid, signal.SIGINT)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
    assert not launcher.pid_file.exists()
    log = (launcher.tmp / "nodepool.log").read_text()
    assert f"is running, process {pid}" in log and "Stopped" in log


@pytest.mark.spec("CLI-1: one clear line on standard error, status 1")
@pytest.mark.parametrize("options", [("-f",), ()])
def test_broken_configuration_is_one_line_and_status_1(launcher, options):
    launcher.config.unlink()
    reply = launcher.run(*options)
    assert reply.returncode == 1 and reply.stdout == ""
    assert reply.stderr == f"nodepool-launcher: error: no such file: {launcher.config}\n"
    assert not launcher.pid_file.exists()


@pytest.mark.parametrize("options", [("-f",), ()])
def test_port_in_use(launcher, options):
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        reply = launcher.run(*options, WEB_PORT=port)
        assert reply.returncode == 1
        assert reply.stderr.startswith(
            f"nodepool-launcher: error: web server cannot listen on 127.0.0.1 port {port}: "
        )
        with launcher.start("-f", "--no-webapp", WEB_PORT=port) as process:
            while "is running" not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)
    assert process.returncode == 0


def test_missing_directories_are_reported_at_start(launcher):
    reply = launcher.run("-p", "/no/such/dir/x.pid")
    assert reply.returncode == 1
    assert reply.stderr.startswith(
        "nodepool-launcher: error: cannot write pid file /no/such/dir/x.pid: "
    )
    reply = launcher.run(LOGS="/no/such/dir")
    assert reply.returncode == 1 and "/no/such/dir/nodepool.log" in reply.stderr
    reply = launcher.run("-f", "-l", "/no/such/file")
    assert reply.returncode == 1
    assert (
        reply.stderr
        == "nodepool-launcher: error: Unable to read logging config file at /no/such/file\n"
    )


def test_systemd_is_notified_of_changes(launcher, tmp_path):
    import socket

    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.settimeout(20)
        with launcher.start("-f", NOTIFY_SOCKET=path) as process:
            assert sock.recv(100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert sock.recv(100) == b"STOPPING=1"
            process.communicate(timeout=10)


def test_sighup_is_logged_and_ignored(launcher):
    with launcher.start("-f") as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGHUP)
        seen = next(line for line in process.stdout if "SIGHUP" in line)
        assert "Ignoring SIGHUP: changed configuration files are applied without a signal" in seen
        assert launcher.ready()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 0


def test_lost_terminal_stops_a_daemon_in_the_foreground(launcher):
    ours, theirs = os.openpty()
    try:
        with launcher.start("-f", stdin=theirs) as process:
            wait_for(launcher.ready)
            process.send_signal(signal.SIGHUP)
            out, _ = process.communicate(timeout=10)
        assert process.returncode == 0 and "Stopped" in out
    finally:
        os.close(ours)
        os.close(theirs)


def test_version_is_printed(launcher):
    reply = launcher.run("--version")
    assert reply.returncode == 0 and reply.stdout.startswith("Nodepool version: ")
    assert launcher.run("--fake").returncode == 2


def test_logging_configuration_file(launcher, tmp_path):
    path = tmp_path / "logging.json"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "handlers": {
                    "file": {"class": "logging.FileHandler", "filename": str(tmp_path / "own.log")}
                },
                "root": {"handlers": ["file"], "level": "INFO"},
            }
        )
    )
    with launcher.start("-f", "-l", str(path)) as process:
        wait_for(launcher.ready)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
    assert out == "" and "is running" in (tmp_path / "own.log").read_text()
