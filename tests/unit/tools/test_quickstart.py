"""tools/quickstart and what it installs with (users 16, 17, 18): a line per step, a sentence per
obstacle, and both together.
"""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import load_tool
from tests.support.deadline import limit

TOOLS = REPOSITORY / "tools"


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return load_tool("bootstrap.py")


@pytest.fixture
def fresh(tmp_path: pathlib.Path) -> pathlib.Path:
    """A clone in which nothing has been prepared."""
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copytree(TOOLS, clone / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return clone


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--help"], 0, "--no-image"),
        (["--keep", "-h"], 0, "usage: tools/quickstart"),
        (["--no-imgae"], 2, "unrecognized arguments: --no-imgae"),
        (["--json", "/nonexist/x"], 2, "--json /nonexist/x: there is no directory /nonexist"),
        (["--json", "/tmp"], 2, "--json /tmp: this is a directory"),
    ],
)
def test_users_16_answers_immediately(
    fresh: pathlib.Path, options: list[str], status: int, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(fresh / "tools" / "quickstart"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(fresh.parent)},
    )
    assert (done.returncode, words in done.stdout + done.stderr) == (status, True), done
    assert sorted(path.name for path in fresh.iterdir()) == ["tools"], "nothing was prepared"
    assert [path.name for path in fresh.parent.iterdir()] == ["clone"]


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"json": None, "no_image": True, "keep": False, "work": None, **values}
    )


def test_users_17_no_capacity(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    import quickstart_options  # type: ignore[import-not-found]

    monkeypatch.setattr(
        quickstart_options.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 28)
    )
    text = quickstart_options.obstacle(options())
    assert "has 0.2 GiB free and 0.7 GiB are needed" in text and "--no-image" not in text
    monkeypatch.setattr(quickstart_options.os, "geteuid", lambda: 0)
    assert "skip the image with --no-image" in quickstart_options.obstacle(options(no_image=False))
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / "venv")
    with pytest.raises(
        SystemExit, match=r"has 256 MiB free; the virtual environment in \.venv takes 400 MiB"
    ):
        bootstrap.virtual_environment()


def test_users_17_no_root(bootstrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    with pytest.raises(
        SystemExit, match="These packages are missing; install them first: apt-get install nosuch"
    ):
        bootstrap.install({"no-such-program": "nosuch"})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="There is no apt-get here"):
        bootstrap.install({"no-such-program": "nosuch"})


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (
            "E: Temporary failure resolving 'deb.debian.org'\nE: more",
            "The Debian mirror cannot be reached",
        ),
        (
            "E: Unable to locate package zookeeper",
            "The Debian mirror cannot be reached, or does not have what is needed",
        ),
        ("dpkg: error: cannot copy: No space left on device\n", "There is not enough disk space"),
        (
            "E: You don't have enough free space in /var/cache/apt/archives/.",
            "There is not enough disk space",
        ),
        (
            "E: Could not get lock /var/lib/dpkg/lock-frontend.",
            "Another program is installing packages",
        ),
        ("a\nE: something else\n\n", "It failed: E: something else"),
        ("", "It failed: nothing was printed"),
    ],
)
def test_users_17_one_sentence(bootstrap: Any, printed: str, words: str) -> None:
    text = bootstrap.explain(printed, "the Debian mirror")
    assert text.startswith(words) and "\n" not in text


def test_users_17_pypi_cannot_be_reached(
    bootstrap: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real pip, sent to a port where nobody listens."""
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / "venv")
    for name, value in (
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_NO_CACHE_DIR", "1"),
        ("PIP_EXTRA_INDEX_URL", ""),
        ("PIP_RETRIES", "0"),
    ):
        monkeypatch.setenv(name, value)
    log = tmp_path / "setup.log"
    with pytest.raises(SystemExit, match=f"PyPI cannot be reached.* All that was printed: {log}"):
        bootstrap.virtual_environment(log=log)
    err = capsys.readouterr().err
    assert "Traceback" not in err and len(err.splitlines()) == 2, err


PLAN = """Reading package lists...
The following NEW packages will be installed:
  openssh-server zookeeper
0 upgraded, 31 newly installed, 0 to remove and 3 not upgraded.
Need to get 48.3 MB of archives.
After this operation, 211 MB of additional disk space will be used.
Do you want to continue? [Y/n] N
"""


def test_quickstart_installs_neither_containers_nor_java(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda program: None)
    monkeypatch.setattr(bootstrap.os.path, "exists", lambda path: False)
    assert not {"default-jre-headless", "zookeeper"} & set(
        bootstrap.missing_packages(True, zookeeper=False)
    )
    assert {"default-jre-headless", "zookeeper"} <= set(bootstrap.missing_packages(True))
    assert not {"podman", "crun"} & set(bootstrap.missing_packages(True, containers=False))
    assert {"podman", "crun"} <= set(bootstrap.missing_packages(True))
    text = (TOOLS / "quickstart").read_text()
    assert "containers=False" in text and "zookeeper=zookeeper" in text


def test_interrupt_during_imports_leaves_nothing(tmp_path: pathlib.Path) -> None:
    work = tmp_path / "work"
    work.mkdir()

    def interrupted() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, str(TOOLS / "demo"), "--no-image", "--work", str(work)]
    done = subprocess.run(
        command, preexec_fn=interrupted, capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in done.stderr and "interrupted" in done.stdout, done
    assert done.returncode == 1 and not work.exists()


def test_users_18_what_will_be_installed(bootstrap: Any) -> None:
    assert (
        bootstrap._extent(PLAN)
        == " With what they need 31 packages, 48.3 MB to fetch, 211 MB on disk."
    )
    assert bootstrap._extent("") == ""


# -- one line per step


def test_users_18_a_quiet_line_per_step(
    bootstrap: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import progress  # type: ignore[import-not-found]

    log = tmp_path / "log"
    printed = progress.run_step(
        "Working", [["sh", "-c", "echo one; echo two >&2"], ["echo", "three"]], log
    )
    assert "one\ntwo\n" in printed and printed.endswith("three\n") and log.read_text() == printed
    assert capsys.readouterr().err == "Working ... done (0 s)\n"
    for command in (["sh", "-c", "echo why; exit 3"], ["/no/such/program"]):
        with pytest.raises(progress.StepFailed) as failure:
            progress.run_step("Working", [command], log)
        assert capsys.readouterr().err == "Working ... FAILED (0 s)\n"
        assert "why" in failure.value.output or "No such file" in failure.value.output
    with pytest.raises(progress.StepFailed) as failure:
        progress.run_step("Working", [["sleep", "60"]], log, timeout=0.1)
    assert "no end within" in failure.value.output


@pytest.mark.parametrize(("terminal", "sign"), [(True, "Working  0 s"), (False, ".")])
def test_users_18_a_sign_of_life(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool, sign: str
) -> None:
    import progress

    monkeypatch.setattr(progress, "TURN", 0.01)
    monkeypatch.setattr(progress, "DOT", 0.01)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    with progress.step("Working", stream):
        before = len(stream.getvalue())
        deadline = time.monotonic() + 20
        while stream.getvalue()[before:].count(sign) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert stream.getvalue().endswith("done (0 s)\n")


# -- services


def test_users_18_no_service_is_enabled(bootstrap: Any, tmp_path: pathlib.Path) -> None:
    import system_services  # type: ignore[import-not-found]

    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    runlevel = tmp_path / "etc/rc2.d"
    policy = tmp_path / "usr/sbin/policy-rc.d"
    for directory in (wants, runlevel):
        directory.mkdir(parents=True)
    (wants / "cron.service").symlink_to("/lib/systemd/system/cron.service")
    (runlevel / "S01cron").symlink_to("../init.d/cron")
    with system_services.left_as_they_are(tmp_path):
        assert subprocess.run([str(policy), "ssh", "start"], check=False).returncode == 101
        (wants / "ssh.service").symlink_to("/lib/systemd/system/ssh.service")
        (wants.parent / "sshd.service").symlink_to("/lib/systemd/system/ssh.service")
        (runlevel / "S02ssh").symlink_to("../init.d/ssh")
    assert sorted(path.name for path in wants.iterdir()) == ["cron.service"]
    assert not (wants.parent / "sshd.service").is_symlink()
    assert sorted(path.name for path in runlevel.iterdir()) == ["K01ssh", "S01cron"]
    assert not policy.exists()


def test_users_18_what_others_made_stays(bootstrap: Any, tmp_path: pathlib.Path) -> None:
    import system_services

    policy = tmp_path / "usr/sbin/policy-rc.d"
    policy.parent.mkdir(parents=True)
    policy.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(KeyboardInterrupt), system_services.left_as_they_are(tmp_path):
        raise KeyboardInterrupt
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"
    # One of ours that a killed run has left goes with the next.
    policy.write_text(f"#!/bin/sh\n# {system_services.MARK}\nexit 101\n")
    with system_services.left_as_they_are(tmp_path):
        assert policy.exists()
    assert not policy.exists()


def test_interrupt_during_imports_leaves_no_traceback_and_no_folder(fresh: pathlib.Path) -> None:
    # An import that takes as long as the test wants.
    pipe = fresh.parent / "pipe"
    os.mkfifo(pipe)
    options = fresh / "tools" / "quickstart_options.py"
    options.write_text(f"{options.read_text()}\nopen({str(pipe)!r}).read()\n")
    process = subprocess.Popen(
        [sys.executable, "-S", "-P", str(fresh / "tools" / "quickstart"), "--no-image"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(fresh.parent)},
    )
    with pipe.open("w"):  # returns when the import has got so far
        process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 130 and err.strip().endswith("interrupted"), err
    assert "Traceback" not in err
    assert sorted(path.name for path in fresh.parent.iterdir()) == ["clone", "pipe"]
