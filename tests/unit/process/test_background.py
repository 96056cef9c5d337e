from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from nodepool.process import background
from tests import REPOSITORY
from tests.conftest import wait_for


@pytest.mark.spec("CLI-2.2: pid file: decimal process id and a newline")
def test_pid_file_contains_the_pid_and_is_deleted_at_the_end(tmp_path):
    path = tmp_path / "x.pid"
    with background.PidFile(str(path)):
        assert path.read_text() == f"{os.getpid()}\n"
        assert path.stat().st_mode & 0o777 == 0o644
    assert not path.exists()


@pytest.mark.spec("CLI-2.2: pid file of a process that is gone is taken over")
@pytest.mark.parametrize("longer", ["", "000000000"])
def test_stale_pid_file(tmp_path, longer):
    process = subprocess.Popen(["true"])
    process.wait()
    path = tmp_path / "x.pid"
    path.write_text(f"{longer}{process.pid}\n")
    with background.PidFile(str(path)):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("content", ["", "\n", "\0" * 6])
def test_unfinished_pid_file_is_replaced(tmp_path, content):
    path = tmp_path / "x.pid"
    path.write_text(content)
    with background.PidFile(str(path)):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("content", ["root:x:0:0:root:/root:/bin/bash\n", "nonsense", "7 8\n"])
def test_file_that_is_no_pid_file_is_neither_changed_nor_deleted(tmp_path, content):
    path = tmp_path / "passwd"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(background.PidFileError, match=f"{path} exists and is not a pid file"):
        background.PidFile(str(path), timeout=0).acquire()
    assert path.read_text() == content
    assert path.stat().st_mode & 0o777 == 0o600


def test_device_is_no_pid_file(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o666)
    path.chmod(0o666)
    with pytest.raises(background.PidFileError, match=f"{path} exists and is not a pid file"):
        background.PidFile(str(path), timeout=0).acquire()
    assert path.stat().st_mode & 0o777 == 0o666


def test_pid_file_with_the_number_of_another_process_is_replaced(tmp_path):
    path = tmp_path / "x.pid"
    path.write_text("1\n")
    with background.PidFile(str(path), timeout=0):
        assert path.read_text() == f"{os.getpid()}\n"


def test_two_in_one_process(tmp_path):
    path = str(tmp_path / "x.pid")
    with (
        background.PidFile(path),
        pytest.raises(background.PidFileError, match=f"running process {os.getpid()}"),
    ):
        background.PidFile(path, timeout=0.2).acquire()
    background.PidFile(path).release()


def test_missing_directory_of_the_pid_file_is_reported(tmp_path):
    path = str(tmp_path / "no" / "x.pid")
    with pytest.raises(
        background.PidFileError, match=f"cannot write pid file {path}: No such file or directory"
    ):
        background.PidFile(path).acquire()


def test_child_of_process_1_does_not_detach(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not background.must_detach()
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    assert background.must_detach() in (True, False)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def test_detached_daemon_has_left_its_terminal(tmp_path):
    reply = script(
        tmp_path,
        """
        import json, os, signal, sys
        os.umask(0o077)
        leak = open("/dev/null")
        from nodepool.process import background as daemon
        assert daemon.must_detach()
        pid = os.getpid()
        report = daemon.detach("prog")
        facts = {"cwd": os.getcwd(), "umask": os.umask(0), "sid": os.getsid(0),
                 "pid": os.getpid(), "parent": pid,
                 "fds": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
                 "tstp": signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN,
                 "leaked": os.path.exists(f"/proc/self/fd/{leak.fileno()}") and leak.fileno() != 3}
        with open(sys.argv[1] + "/facts.new", "w") as stream:
            json.dump(facts, stream)
        os.rename(sys.argv[1] + "/facts.new", sys.argv[1] + "/facts")
        print("invisible")
        report.running()
        os._exit(0)
    """,
    )
    assert (reply.returncode, reply.stdout, reply.stderr) == (0, "", "")
    import json

    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["cwd"] == "/" and facts["umask"] == 0o022 and facts["fds"] == ["/dev/null"] * 3
    assert facts["pid"] != facts["parent"] and facts["sid"] not in (facts["pid"], os.getsid(0))
    assert facts["tstp"] and not facts["leaked"]


def test_detach_reports_failures(tmp_path):
    reply = script(
        tmp_path,
        """
        import os
        from nodepool.process import background as daemon
        daemon.detach("prog").failed("port is taken")
        os._exit(1)
    """,
    )
    assert (reply.returncode, reply.stderr) == (1, "prog: error: port is taken\n")
    reply = script(
        tmp_path,
        """
        import os
        from nodepool.process import background as daemon
        report = daemon.detach("prog")
        os._exit(1)
    """,
    )
    assert (reply.returncode, reply.stderr) == (1, "prog: error: the daemon ended while starting\n")


def test_systemd_is_notified(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not background.notify("READY=1")
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    assert not background.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.settimeout(5)
        assert background.notify("READY=1", "STATUS=here")
        assert sock.recv(100) == b"READY=1\nSTATUS=here"


def test_killed_holder_is_adopted(tmp_path):
    path = tmp_path / "x.pid"
    code = (
        "import sys, signal\nfrom nodepool.process.background import "
        "PidFile\nPidFile(sys.argv[1]).acquire()\nsignal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment)
    try:
        wait_for(lambda: path.exists() and path.read_text() == f"{process.pid}\n")
        with pytest.raises(background.PidFileError):
            background.PidFile(str(path), timeout=0.1).acquire()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with background.PidFile(str(path)):
        assert path.read_text() == f"{os.getpid()}\n"
