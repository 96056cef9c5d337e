"""Running the command: real processes, some of them hostile."""

from __future__ import annotations

import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.builder.building.process import (
    BuildProcess,
    LineSplitter,
    ProcessResult,
    Redactor,
    run_hook,
)
from nodepool.builder.machine import image_files, processes
from tests.conftest import wait_for
from tests.support.deadline import limit

log = logging.getLogger("test")


class Bench:
    """Runs shell scripts as builds, and checks what is left of them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.marker = f"test/{os.urandom(8).hex()}"
        self.lines: list[str] = []
        self.log_path = directory / "build.log"
        self.process: BuildProcess | None = None

    def make(self, script: str, log_file: BinaryIO | None = None, **options: Any) -> BuildProcess:
        environment = {
            "PATH": os.environ["PATH"],
            processes.MARKER_VARIABLE: self.marker,
            "D": str(self.directory),
        }
        args = ["bash", "-c", script]
        self.log_file = log_file or image_files.open_log(str(self.log_path))
        process = BuildProcess(
            args,
            {**environment, **options.pop("environment", {})},
            self.log_file,
            options.pop("on_line", self.lines.append),
            **options,
        )
        process.grace = 0.5
        return process

    def run(self, script: str, timeout: float = 20.0, **options: Any) -> ProcessResult:
        process = self.make(script, **options)
        process.start()
        try:
            return process.wait(time.monotonic() + timeout)
        finally:
            self.log_file.close()

    @property
    def log(self) -> bytes:
        return self.log_path.read_bytes()

    def alive(self) -> list[int]:
        return [process.pid for process in processes.find(processes.Origin(self.marker))]


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    value = Bench(tmp_path)
    yield value
    left = value.alive()
    processes.end(processes.Origin(value.marker), time.monotonic() + 5, grace=0)
    assert not left, f"processes left over: {left}"


@pytest.fixture(autouse=True)
def no_descriptor_survives() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.spec(
    "BLD-7.4, BLD-7.5: output and error together into the log, in binary; then the line Exit code: "
    "N"
)
def test_output_and_status(bench: Bench) -> None:
    ending = bench.run(r"printf 'one\xff\n'; echo two >&2; printf three; exit 7")
    assert (ending.returncode, ending.timed_out, ending.terminated) == (7, False, None)
    assert 0 < ending.duration < limit(20)
    assert bench.log == b"one\xff\ntwo\nthree\nExit code: 7\n"
    assert bench.lines == ["one\N{REPLACEMENT CHARACTER}", "two", "three"]


@pytest.mark.spec("BLD-7.4: output is flushed as it comes; standard input is the null device")
def test_output_is_there_while_it_runs(bench: Bench) -> None:
    process = bench.make(
        "cat; umask; readlink /proc/$$/fd/0; ps -o sid= -p $$ | tr -d ' '; printf waiting; "
        "while ! test -e $D/go; do sleep 0.01; done"
    )
    process.start()
    results: list[ProcessResult] = []
    thread = threading.Thread(target=lambda: results.append(process.wait(time.monotonic() + 20)))
    thread.start()
    wait_for(lambda: b"waiting" in bench.log, what="a line without its end in the log")
    (bench.directory / "go").touch()
    thread.join(20)
    bench.log_file.close()
    assert results[0].returncode == 0
    assert bench.lines[:3] == ["0022", "/dev/null", str(process.pid)]


@pytest.mark.spec(
    "BLD-7.6: exact timer, whole process group, a last log line saying so; no line Exit code"
)
def test_timeout_ends_the_whole_process_group(bench: Bench) -> None:
    started = time.monotonic()
    ending = bench.run("echo begun; sleep 1000 & wait", timeout=1.0)
    assert ending.timed_out
    assert ending.terminated is None
    assert ending.returncode == -signal.SIGTERM
    assert 0.9 < time.monotonic() - started < limit(3)
    assert bench.log == b"begun\nBuild timeout of 1 seconds exceeded\n"


@pytest.mark.parametrize(
    "script",
    [
        "yes",
        "trap '' TERM INT HUP; while :; do :; done",
        "trap '' TERM; yes",
        "trap '' TERM; setsid bash -c \"trap '' TERM; while :; do sleep 1; done\" & sleep 1000",
        "( setsid bash -c '( setsid sleep 1000 & )' & ) ; exec sleep 1000",
        "while :; do setsid sleep 1000 & sleep 0.05; done",
        "kill -STOP $$",
    ],
    ids=[
        "prints for ever",
        "ignores TERM",
        "both",
        "child in a session of its own",
        "double fork",
        "forks on and on",
        "stopped",
    ],
)
@pytest.mark.spec("BLD-7.6: nothing of a command survives its time-out")
def test_hostile_commands_end(bench: Bench, script: str) -> None:
    started = time.monotonic()
    ending = bench.run(script, timeout=1.0)
    assert ending.timed_out
    # 137, 143: a shell that saw its child being killed and had the time to say so.
    assert ending.returncode in (-signal.SIGTERM, -signal.SIGKILL, 137, 143)
    assert time.monotonic() - started < limit(10)
    assert bench.alive() == []
    assert bench.log.endswith(b"\nBuild timeout of 1 seconds exceeded\n") or bench.log.startswith(
        b"Build timeout"
    )


@pytest.mark.spec(
    "BLD-7.7: exit of the command ends the build, though a background child keeps the pipe open"
)
def test_build_ends_although_a_child_keeps_the_pipe_open(bench: Bench) -> None:
    process = bench.make("sleep 1000 & setsid sleep 1000 & echo done; exit 3")
    process.drain = 0.3
    process.start()
    ending = process.wait(time.monotonic() + 60)
    bench.log_file.close()
    assert ending.returncode == 3
    assert ending.duration < limit(10)
    assert bench.alive() == []
    assert bench.log == b"done\nExit code: 3\n"


def test_filter_may_write_after_the_end(bench: Bench) -> None:
    """As the standard tool does: its output goes through another process."""
    bench.run("exec > >(sleep 0.2; cat); echo last words")
    assert bench.log == b"last words\nExit code: 0\n"


@pytest.mark.spec(
    "BLD-2: terminate the child's whole process group (TERM, then KILL after a grace period)"
)
def test_terminate_sends_term_to_the_process_group(bench: Bench) -> None:
    process = bench.make(
        "trap 'echo cleaning; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    )
    process.start()
    results: list[ProcessResult] = []
    thread = threading.Thread(target=lambda: results.append(process.wait(time.monotonic() + 60)))
    thread.start()
    wait_for(lambda: bench.lines == ["ready"], what="the command to run")
    process.terminate("the builder stops")
    process.terminate("another reason")
    thread.join(10)
    bench.log_file.close()
    assert results[0].terminated == "the builder stops"
    assert (results[0].returncode, results[0].timed_out) == (9, False)
    assert bench.log.endswith(b"cleaning\nBuild terminated: the builder stops\n")
    process.terminate("too late")


def test_group_that_may_not_be_signalled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with processes of another user: each is signalled by its own number, positive and
    checked.
    """

    def refuse(group: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    ending = bench.run("sleep 1000 & wait", timeout=0.3)
    assert (ending.timed_out, ending.returncode) == (True, -signal.SIGTERM)


def test_terminate_before_start(bench: Bench) -> None:
    process = bench.make("sleep 1000")
    process.terminate("at once")
    process.start()
    assert process.wait(time.monotonic() + 60).terminated == "at once"
    bench.log_file.close()


def test_command_that_closes_its_output_is_waited_for(bench: Bench) -> None:
    ending = bench.run("exec >&- 2>&-; sleep 0.5; exit 6")
    assert (ending.returncode, ending.timed_out) == (6, False)
    assert bench.run("exec >&- 2>&-; sleep 1000", timeout=0.5).timed_out


@pytest.mark.spec("BLD-7.10: a command that cannot be started is an error of the system")
def test_cannot_be_started(bench: Bench) -> None:
    (bench.directory / "text").write_text("text")
    with image_files.open_log(str(bench.log_path)) as log_file:
        with pytest.raises(FileNotFoundError):
            BuildProcess(["/no/such/command"], {}, log_file, bench.lines.append).start()
        with pytest.raises(PermissionError):
            BuildProcess([str(bench.directory / "text")], {}, log_file, bench.lines.append).start()


def test_program_is_found_in_the_path_of_the_command(bench: Bench) -> None:
    program = bench.directory / "my-dib"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    with image_files.open_log(str(bench.log_path)) as log_file:
        process = BuildProcess(
            ["my-dib"], {"PATH": f"{bench.directory}:/bin"}, log_file, bench.lines.append
        )
        process.start()
        assert process.wait(time.monotonic() + 20).returncode == 0
    assert bench.lines == ["mine"]


def test_popen_may_be_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Recording(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Recording)
    assert bench.run("exit 127").returncode == 127
    args, kwargs = calls[0]
    assert args[0] == ["bash", "-c", "exit 127"]
    assert kwargs["env"]["D"] == str(bench.directory)


def test_full_disk_stops_no_build(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        process = bench.make("head -c 1000000 /dev/zero; echo; echo end; exit 4", log_file=full)
        process.start()
        assert process.wait(time.monotonic() + 20).returncode == 4
    assert process.log_error == "[Errno 28] No space left on device"
    assert "Cannot write build log /dev/full" in caplog.text
    assert bench.lines[-1] == "end"


def test_failing_listener_stops_no_build(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def on_line(text: str) -> None:
        raise RuntimeError("listener")

    assert bench.run("seq 1000", on_line=on_line).returncode == 0
    assert caplog.text.count("Cannot evaluate the build's output") == 1
    assert len(bench.log.splitlines()) == 1001


def test_long_lines_are_cut_for_the_listener_only(bench: Bench) -> None:
    bench.run("head -c 3000000 /dev/zero | tr '\\0' x; echo; printf 'a\\rb\\r\\nc'")
    assert bench.lines == ["x" * 500, "a", "b", "c"]
    assert len(bench.log) == 3000000 + 1 + len("a\rb\r\nc\nExit code: 0\n")


@pytest.mark.spec("BLD-20: no secrets in logs")
def test_secrets_are_not_shown(bench: Bench) -> None:
    values = ["hunter22", 'it\'s "my" $ecret', "line one\nline two", "no", "", "true"]
    script = (
        'printf hun; sleep 0.2; echo ter22; echo "$SECRET"; set -x; : "$SECRET"; set +x; declare '
        "-p SECRET; "
        'echo "$LINES2"; echo no true; printf hunter2'
    )
    bench.run(script, secrets=values, environment={"SECRET": values[1], "LINES2": values[2]})
    for shown in (bench.log.decode(), "\n".join(bench.lines)):
        assert not re.search("hunter22|ecret|line one|line two", shown)
    assert b"***\n***\n" in bench.log
    assert b"no true\nhunter2\nExit code: 0\n" in bench.log


@given(
    st.binary(max_size=60),
    st.lists(st.text("abc", min_size=4, max_size=8), max_size=3),
    st.randoms(),
)
def test_redactor_does_not_depend_on_chunks(
    data: bytes, secrets: list[str], chooser: random.Random
) -> None:
    text = b"".join(secret.encode() + data[:5] for secret in secrets) + data

    def shown(pieces: list[bytes]) -> bytes:
        redactor = Redactor(secrets)
        return b"".join(redactor.feed(piece) for piece in pieces) + redactor.feed(b"", last=True)

    cuts = sorted(chooser.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for secret in secrets:
        assert secret.encode() not in shown(pieces)
    assert shown(pieces) == shown([text])
    if not secrets:
        assert shown(pieces) == text


@given(st.binary(max_size=200), st.integers(1, 50))
def test_lines_do_not_depend_on_chunks(data: bytes, size: int) -> None:
    def lines(pieces: list[bytes]) -> list[str]:
        found: list[str] = []
        splitter = LineSplitter(found.append)
        for piece in pieces:
            splitter.feed(piece)
        splitter.feed(b"", last=True)
        return found

    assert lines([data[i : i + size] for i in range(0, len(data), size)]) == lines([data])


# The hook


@pytest.mark.spec(
    "BLD-9: post-upload hook: arguments, no shell, inherited environment, output captured"
)
def test_hook_runs_without_shell_and_its_output_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    code = 'printf "%s|" "$@" $INHERITED; echo; echo problem >&2; exit 5'
    assert run_hook(["bash", "-c", code, "hook", "provider one", "id;x"], 20) == (
        5,
        "provider one|id;x|yes|\nproblem",
    )
    with pytest.raises(FileNotFoundError):
        run_hook(["/no/such/hook"], 20)


def test_hook_output_is_bounded() -> None:
    script = "yes 1 | head -n 9999; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo end"
    status, output = run_hook(["bash", "-c", script], 20)
    assert status == 0
    assert output == "\n".join(["1"] * 198 + ["x" * 500, "end"])


@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; yes", "setsid sleep 1000 & sleep 1000", "yes >&2", "trap 'exit 0' TERM; yes"],
)
def test_hook_ends_in_time(bench: Bench, script: str) -> None:
    started = time.monotonic()
    status, output = run_hook(["bash", "-c", f"echo $$ > {bench.directory}/pid; {script}"], 0.5)
    assert status == -signal.SIGKILL
    assert output.endswith("Killed: it took more than 0.5 seconds")
    assert time.monotonic() - started < limit(5)
    session = int((bench.directory / "pid").read_text())
    assert not [process for process in processes.processes() if process.session == session]


def test_script_whose_program_is_killed_first_does_not_continue(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = bench.make("sleep 600; touch $D/went-on; sleep 600")
    process.start()
    wait_for(lambda: len(bench.alive()) == 2, what="script and program")
    find, send, script = processes.find, processes._send, min(bench.alive())
    monkeypatch.setattr(processes, "find", lambda origin: find(origin)[::-1])

    def slowly(handle: int, pid: int, number: signal.Signals) -> None:
        send(handle, pid, number)
        if number == signal.SIGKILL and len(killed) == 0:
            killed.append(pid)
            # The script sees the end of its program, unless it is stopped.
            wait_for(lambda: went_on.exists() or is_stopped(), what="what the script does")

    def is_stopped() -> bool:
        found = processes.read_process(script)
        return found is not None and found.state in "tT"

    killed: list[int] = []
    went_on = bench.directory / "went-on"
    monkeypatch.setattr(processes, "_send", slowly)
    processes.end(processes.Origin(bench.marker), time.monotonic() + 10, grace=0)
    process.wait(time.monotonic() + 10)
    bench.log_file.close()
    assert killed and not went_on.exists()


def test_hook_with_a_background_child() -> None:
    started = time.monotonic()
    assert run_hook(["bash", "-c", "sleep 1000 & echo ok"], 60) == (0, "ok")
    assert time.monotonic() - started < limit(10)
