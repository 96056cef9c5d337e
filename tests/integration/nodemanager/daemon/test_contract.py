"""Lines of the contract that only the real daemon can show: start, log, clock, tickets,
identity, floods, bad hosts.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sqlite3
import stat
import statistics
import subprocess
import sys
import tarfile
import time
import xmlrpc.client
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.api.methods import METHODS
from nodepool.nodemanager.client.rpc import RpcFault
from nodepool.nodemanager.host import group_name
from nodepool.nodemanager.sources import tickets
from tests.conftest import wait_for
from tests.support.nodemanager.scene import PROGRAM, NmDaemon, make_daemon, run_daemon

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]


running = contextlib.contextmanager(run_daemon)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


# --- A.1, A.2, A.13: process, pid file, log
# ----------------------------------------------------------------------------


@pytest.mark.spec(
    "NM-A.13, NM-C.1: log in the seed's line format, mode 0600; commands with their arguments"
)
def test_log_file_has_mode_0600_and_the_line_format(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "own.log"
    path.write_text("")
    path.chmod(0o644)
    daemon = NmDaemon(tmp_path, **{"log-file": str(path)})
    daemon.arguments = ["-d"]
    with running(daemon) as nm:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        nm.put("alpha", rspec={"nm_disk_quota": 50000})
        lines = path.read_text().splitlines()
        form = re.compile(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}: \S?")
        assert [line for line in lines if not form.match(line)] == []
        assert abs(time.time() - _utc(lines[-1][:24])) < 60
        assert any(re.search(r": Run: /\S+/mke2fs -q .*50000", line) for line in lines)
        # Moved away, as logrotate does: the next line makes a new file, for root only again.
        path.rename(tmp_path / "own.log.1")
        nm.delete("alpha")
        wait_for(path.exists, what="the next log file")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _utc(text: str) -> float:
    import calendar

    return calendar.timegm(time.strptime(text, "%a %b %d %H:%M:%S %Y"))


@pytest.mark.parametrize("path", ["/does/not/exist/log", "/"])
def test_log_file_that_cannot_be(tmp_path: pathlib.Path, path: str) -> None:
    nm = NmDaemon(tmp_path, **{"log-file": path})
    nm.start(wait=False)
    assert nm.process is not None
    assert nm.process.wait(20) == 1
    assert f"nodepool-nodemanager: error: log-file: cannot write {path}: " in nm.log


@pytest.mark.spec("NM-A.2: in the background; a stale pid file is overwritten; SIGUSR2 dumps")
def test_stale_pid_file_is_overwritten_in_the_background(tmp_path: pathlib.Path) -> None:
    nm = NmDaemon(tmp_path)
    logging_yaml = tmp_path / "logging.yaml"
    logging_yaml.write_text(f"""
version: 1
disable_existing_loggers: false
formatters: {{line: {{class: nodepool.nodemanager.log_format.LineFormatter}}}}
handlers:
  file: {{class: logging.FileHandler, filename: {tmp_path}/configured.log, formatter: line}}
root: {{handlers: [file], level: INFO}}
""")
    command = [PROGRAM, "-c", str(nm.config), "-p", str(nm.tmp / "pid"), "-l", str(logging_yaml)]
    (nm.tmp / "pid").write_text("99999999\n")
    assert (
        subprocess.run(
            command, timeout=60, check=False, capture_output=True, stdin=subprocess.DEVNULL
        ).stderr
        == b""
    )
    pid = int((nm.tmp / "pid").read_text())
    try:
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
        assert os.getsid(pid) != os.getsid(0)
        nm.put("alpha")
        assert nm.ssh("alpha", "echo in") == "in\n"
        os.kill(pid, signal.SIGUSR2)
        wait_for(
            lambda: "Thread: " in (tmp_path / "configured.log").read_text(),
            what="the dump of all threads",
        )
    finally:
        for sliver in nm.client.call("ListSlivers"):
            nm.delete(sliver["name"])
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 20, "the daemon to end")
    assert not (nm.tmp / "pid").exists()
    assert nm.left() == []
    assert re.match(
        r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}: ", (tmp_path / "configured.log").read_text()
    )


@pytest.mark.spec("NM issue: port 812 in use: a clear message; nothing lost")
def test_port_in_use(nm: NmDaemon) -> None:
    nm.put("alpha")
    session = nm.session("alpha")
    nm.stop(signal.SIGKILL)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        nm.write_config(api={"tcp": port})
        nm.start(wait=False)
        assert nm.process is not None
        assert nm.process.wait(20) == 1
        assert (
            f"api.tcp: cannot listen on 127.0.0.1 port {port}: Address already in use; choose "
            "another port, or false for none" in nm.log
        )
    nm.start()
    assert nm.wait("alpha")["state"] == "ready"
    assert session.communicate("hello\n", timeout=20)[0] == "got hello\n"


# --- A.8: Help
# --------------------------------------------------------------------------------------------------


@pytest.mark.spec("NM-A.8: Help explains every call, on both sockets and inside")
def test_help_explains_every_call_on_all_sockets(nm: NmDaemon) -> None:
    nm.put("alpha")
    text = nm.client.call("Help")
    lines = text.splitlines()
    assert len(lines) == len(METHODS) == len({line.partition("(")[0] for line in lines})
    assert [line for line in lines if not re.fullmatch(r"\w+\([\w, ]*\): \S.{8,}", line)] == []
    inside = nm.ssh(
        "alpha",
        'python3 -c "import xmlrpc.client; '
        "print(xmlrpc.client.ServerProxy('http://127.0.0.1:812/').Help(), end='')\"",
    )
    assert inside == text
    with pytest.raises(RpcFault) as refused:
        nm.client.call("NoSuchCall")
    valid = str(refused.value).partition("Valid choices are ")[2]
    assert set(re.findall(r"\w+", valid)) == {line.partition("(")[0] for line in lines}
    for name in METHODS:
        with pytest.raises(RpcFault, match="Invalid argument count: got 7"):
            nm.client.call(name, *["x"] * 7)


# --- A.6 e, C.9.5: clock steps
# -----------------------------------------------------------------------------------------

CLOCK = """
import os, time
_real, _path = time.time, os.environ['NM_TEST_CLOCK']
def _time():
    with open(_path) as file:
        return _real() + float(file.read() or 0)
time.time = _time
time.time_ns = lambda: int(_time() * 1e9)
"""


@pytest.mark.spec(
    "NM-A.6 e, C.9.5: clock steps freeze no updates, end no sliver early, and forget no expiry"
)
def test_clock_steps_end_no_sliver_early(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("NM_TEST_CLOCK", str(clock))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")

    def step(seconds: float) -> None:
        (tmp_path / "clock.new").write_text(str(seconds))
        (tmp_path / "clock.new").rename(clock)

    step(0)
    slices = tmp_path / "slices.xml"
    text = (
        '<slices><slice id="{id}" name="listed"><node id="host0"/><resource '
        'name="nm_disk_quota"><value>102400</value>'
        "</resource></slice></slices>"
    )
    slices.write_text(text.format(id=1))
    with running(
        NmDaemon(tmp_path, sources=[{"slices-xml": {"file": str(slices), "interval": 0.2}}])
    ) as nm:
        monkeypatch.delenv("PYTHONPATH")
        nm.put("short", expiry=int(time.time()) + 3000)
        nm.put("long", expiry=int(time.time()) + 90000)
        wait_for(
            lambda: "listed" in [s["name"] for s in nm.client.call("ListSlivers")],
            what="the listed sliver",
        )
        nm.wait("listed")
        # Back by a year: updates of the list, records of launchers and leases continue.
        step(-366 * 86400)
        slices.write_text(text.format(id=2))
        wait_for(
            lambda: '"id": 2' in nm.client.call("DumpDatabase"),
            what="an update after the clock was set back",
        )
        nm.put("another")
        nm.client.call("SetLoans", "another", ["long", "nm_cpu_share", 1])
        nm.client.call("RenewSliver", "short", int(time.time()) + 3000)
        states = {s["name"]: s["state"] for s in nm.client.call("ListSlivers")}
        assert states == dict.fromkeys(("short", "long", "listed", "another"), "ready")
        # Forward past the lease: whatever is delivered next wakes the timer, and what is due goes.
        step(4000)
        nm.put("third")
        nm.wait("short", "gone")
        assert {s["name"] for s in nm.client.call("ListSlivers")} == {
            "long",
            "listed",
            "another",
            "third",
        }
        step(-100000)
        # And over a restart.
        nm.stop(signal.SIGKILL)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}")
        nm.start()
        slices.write_text(text.format(id=3))
        wait_for(
            lambda: '"id": 3' in nm.client.call("DumpDatabase"), what="an update after the restart"
        )
        slices.write_text("<slices/>")
        nm.wait("listed", "gone")


# --- C.6, C.9.8: tickets
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: pathlib.Path) -> pathlib.Path:
    for command in (
        ["genpkey", "-algorithm", "ed25519", "-out", "key"],
        ["pkey", "-in", "key", "-pubout", "-out", "key.pub"],
        [
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            "xml.key",
            "-out",
            "xml.pem",
            "-subj",
            "/CN=authority",
            "-days",
            "2",
        ],
    ):
        subprocess.run(
            ["openssl", *command], cwd=tmp_path, check=True, capture_output=True, timeout=30
        )
    return tmp_path


@pytest.mark.spec(
    "NM-C.9.8: tampered, replayed (after a restart, too), expired, wrong host, wrapped XML -> "
    "refused"
)
def test_invalid_and_replayed_tickets_are_refused(
    tmp_path: pathlib.Path, keys: pathlib.Path
) -> None:
    key, xml_key, certificate = (
        (keys / name).read_bytes() for name in ("key", "xml.key", "xml.pem")
    )
    record = {"account_type": "sliver", "name": "guest", "rspec": {"nm_disk_quota": 102400}}
    evil = {**record, "name": "evil"}
    with running(
        NmDaemon(
            tmp_path,
            tickets={
                "keys": [str(keys / "key.pub")],
                "issuers": ["authority"],
                "xml-keys": [str(keys / "xml.pem")],
            },
        )
    ) as nm:

        def refused(ticket: str, text: str) -> None:
            with pytest.raises(RpcFault, match=text):
                nm.client.call("Ticket", ticket)

        good = tickets.sign([record], key, "authority", "host0")
        head, claims, signature = good.split(".")
        body = base64.urlsafe_b64decode(claims + "==").replace(b'"guest"', b'"evil1"')
        refused(
            f"{head}.{base64.urlsafe_b64encode(body).decode().rstrip('=')}.{signature}",
            "ticket refused",
        )
        none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
        refused(f"{none}.{claims}.", "ticket refused")
        refused(tickets.sign([evil], key, "authority", "another"), "ticket refused")
        refused(tickets.sign([evil], key, "somebody", "host0"), "ticket refused")
        signed = tickets.sign_xml([evil], xml_key, certificate, "authority", "host0")
        wrapped = (
            "<e:envelope "
            f'xmlns:e="urn:envelope"><e:Data>{{}}</e:Data>{signed.partition("?>")[2] or signed}</'
            "e:envelope>"
        )
        refused(wrapped, "ticket refused")
        refused(signed.replace("evil", "bad0"), "ticket refused")
        assert nm.client.call("ListSlivers") == []
        assert nm.client.call("Ticket", good) == ["guest"]
        nm.wait("guest")
        refused(good, "used before")
        for number in (signal.SIGKILL, signal.SIGTERM):
            nm.stop(number)
            nm.start()
            refused(good, "used before")
        nm.delete("guest")
        refused(good, "used before")
        assert nm.client.call("ListSlivers") == []


# --- identity
# --------------------------------------------------------------------------------------------------

ASK = """
import socket, sys, os
os.chdir(sys.argv[1]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
s = socket.socket(socket.AF_UNIX); s.connect('nodemanager.api')
body = sys.argv[3].encode()
head = b'POST / HTTP/1.0\\r\\nContent-Type: text/xml\\r\\nContent-Length: %d\\r\\n\\r\\n'
s.sendall(head % len(body) + body[:10])
print('asking', flush=True)
sys.stdin.readline()
try:
    s.sendall(body[10:])
    out = b''
    while piece := s.recv(65536): out += piece
    print(out.decode().partition('\\r\\n\\r\\n')[2])
except OSError as error:
    print('cut off', error)
"""


@pytest.mark.spec(
    "issue 4 security: forged SO_PEERCRED by uid reuse: an old connection is not the sliver that "
    "has the ids now"
)
@pytest.mark.parametrize("heir", ["beta", "alpha"])
def test_ids_used_again(nm: NmDaemon, heir: str) -> None:
    """A process of the host keeps the ids of a deleted sliver, which no process of a sliver can."""
    nm.put("alpha", rspec={"nm_cpu_share": 10})
    nm.put("mate")
    first = nm.client.call("GetXIDs")["alpha"]
    question = xmlrpc.client.dumps((heir, ["mate", "nm_cpu_share", 5]), "SetLoans")
    with subprocess.Popen(
        [sys.executable, "-c", ASK, f"{nm.tmp}/run", str(first), question],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "asking\n"
        nm.delete("alpha")
        nm.put(heir, rspec={"nm_cpu_share": 10})
        assert nm.client.call("GetXIDs")[heir] == first
        answer, _ = old.communicate("go\n", timeout=30)
    assert "cut off" in answer or "Permission denied" in answer or answer.strip() == "", answer
    assert nm.client.call("GetLoans", heir) == []


@pytest.mark.spec(
    "issue 4 security: SSH connection floods are billed to their sliver and leave others alone"
)
def test_flood_of_logins(tmp_path: pathlib.Path) -> None:
    daemon = NmDaemon(tmp_path)
    daemon.write_config(ssh={**daemon.options["ssh"], "connections": 4})
    with running(daemon) as nm:
        target, _ = nm.put("alpha"), nm.put("beta")
        with contextlib.ExitStack() as stack:
            flood = [
                stack.enter_context(
                    socket.create_connection((target["ssh_address"], target["ssh_port"]), 10)
                )
                for _ in range(30)
            ]
            wait_for(lambda: "refused: 4 sessions" in nm.log, what="the limit")
            assert nm.ssh("beta", "echo in") == "in\n"
            banners = []
            for connection in flood:
                connection.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    banners.append(connection.recv(100)[:4])
            assert banners.count(b"SSH-") == 4
            assert nm.client.call("GetRecord", "alpha")["sessions"] == 4
        wait_for(
            lambda: nm.client.call("GetRecord", "alpha")["sessions"] == 0,
            what="the servers of the flood to end",
        )
        assert nm.ssh("alpha", "echo in") == "in\n"


# --- bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.spec(
    "issue 4 security: names with slashes or newlines; bad input: wrong RSpec, unknown slice"
)
def test_bad_names_and_values(nm: NmDaemon) -> None:
    nm.put("alpha")
    for name in (
        "a/b",
        "../x",
        "a\nb",
        "a\n",
        "\n",
        "",
        "a\x00b",
        "a b",
        "-a",
        ".",
        "..",
        "a" * 300,
        "ä",
        7,
        None,
        ["alpha"],
    ):
        for call in ("PutRecord", "DeleteSliver", "Start", "GetConsole", "SetLoans"):
            arguments: list[Any] = [name]
            if call == "PutRecord":
                arguments = [{"account_type": "sliver", "name": name}]
            elif call == "SetLoans":
                arguments = [name, []]
            with pytest.raises(Exception) as refused:
                nm.client.call(call, *arguments)
            if isinstance(refused.value, RpcFault):
                assert "internal error" not in str(refused.value), (name, call)
    for rspec in (
        {"nm_cpu_share": "much"},
        {"nm_cpu_share": -1},
        {"nm_mem_limit": 1 << 70},
        {"no\nsuch": 1},
        "text",
        [1],
    ):
        with pytest.raises(Exception) as refused:
            nm.client.call("PutRecord", {"account_type": "sliver", "name": "beta", "rspec": rspec})
        assert "internal error" not in str(refused.value), rspec
    with pytest.raises(RpcFault, match="must be a sliver name"):
        nm.client.call("GetRSpec", "unknown")
    assert [s["name"] for s in nm.client.call("ListSlivers")] == ["alpha"]
    assert nm.ssh("alpha", "echo in") == "in\n"
    assert "Traceback" not in nm.log
    assert sorted(os.listdir(nm.tmp / "state" / "slivers")) == ["alpha"]


@pytest.mark.spec("NM-C.9.7: no-namespace host: clear message that names what is missing")
def test_host_without_namespaces(tmp_path: pathlib.Path) -> None:
    nm = NmDaemon(tmp_path)
    done = subprocess.run(
        [
            "setpriv",
            "--bounding-set",
            "-sys_admin",
            "--inh-caps",
            "-sys_admin",
            PROGRAM,
            "-f",
            "-c",
            str(nm.config),
            "-p",
            str(nm.tmp / "pid"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("nodepool-nodemanager: error: backend native cannot work here: "), (
        done.stderr
    )
    assert re.search("namespace|mount", last), last
    assert "Traceback" not in done.stderr + done.stdout
    assert nm.left() == []


@pytest.mark.spec("issue 4 bad input: missing kernel feature (name it, and what still works)")
def test_host_without_cgroups_and_tools(tmp_path: pathlib.Path) -> None:
    nm = NmDaemon(tmp_path)
    nm.start(wait=False)
    nm.stop(signal.SIGKILL)
    # The same daemon in a mount namespace without cgroups and without nft.
    script = (
        f"umount -R -l /sys/fs/cgroup; mount -t tmpfs none /sys/fs/cgroup; mkdir /tmp/nm-none-$$; "
        f"p=$(command -v nft) && mount --bind {os.devnull} $p; rmdir /tmp/nm-none-$$; "
        f"exec {PROGRAM} -f -c {nm.config} -p {nm.tmp}/pid"
    )
    with open(nm.tmp / "log", "ab") as log:
        nm.process = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_for(nm.answers, 30, "the node manager to answer")
        problems = nm.client.call("GetCapacity")["problems"]
        assert any("have no effect; enable it in the kernel" in problem for problem in problems), (
            problems
        )
        if pathlib.Path("/usr/sbin/nft").exists():
            assert any(
                "networks nat" in problem and "network none works without" in problem
                for problem in problems
            ), problems
        for problem in problems:
            assert problem in nm.log or problem.partition(": ")[2] in nm.log
        nm.put("alpha", rspec={"nm_mem_limit": 128})
        assert nm.ssh("alpha", "echo in") == "in\n"
    finally:
        nm.clean()
    wait_for(lambda: nm.left() == [], 20, "nothing left")


# --- what belongs to a sliver and is touched by root
# -------------------------------------------------------------------


@pytest.mark.spec(
    "issue 4 security: what a sliver writes to its console cannot lead out, nor fill the host"
)
def test_console_output_cannot_fill_or_reach_the_host(nm: NmDaemon) -> None:
    script = b"""#!/bin/sh
echo begun
readlink /proc/self/fd/1
ln -sf /etc/shadow /proc/self/fd/1; mv /proc/self/fd/1 /tmp/x
ls -l $(readlink /proc/self/fd/1) $(readlink /proc/self/fd/1)/..
head -c 100M /dev/zero
dd if=/dev/zero of=/proc/self/fd/1 bs=1 count=1 seek=5000000000
echo -n done > /root/done
sleep 1000
"""
    nm.put("alpha", initscript=base64.b64encode(script).decode(), rspec={"nm_disk_quota": 40960})
    wait_for(lambda: nm.ssh("alpha", "ls /root/done 2>/dev/null", check=False), 30, "the script")
    state = nm.tmp / "state"
    used = sum(
        path.lstat().st_blocks * 512
        for path in state.rglob("*")
        if path.is_file() and "templates" not in path.parts
    )
    assert used < 120 << 20, f"{used >> 20} MiB on the host"
    text = nm.client.call("GetConsole", "alpha")
    assert text and len(text) < 1 << 20 and "root:" not in text
    assert (state / "slivers" / "alpha").is_dir()


@pytest.mark.spec("NM-A.6, NM-A.8: without plc_instantiated only CreateSliver makes a sliver")
def test_made_by_call_only(nm: NmDaemon) -> None:
    nm.put("lazy", wait=False, plc_instantiated=False)
    nm.put("alpha")
    assert nm.client.call("GetRecord", "lazy")["state"] == "absent"
    with pytest.raises(RpcFault, match="kept by its authority"):
        nm.client.call("CreateSliver", "alpha")
    nm.client.call("CreateSliver", "lazy")
    nm.wait("lazy")
    assert nm.ssh("lazy", "echo in") == "in\n"
    nm.stop(signal.SIGKILL)
    nm.start()
    assert nm.wait("lazy")["state"] == "ready"
    nm.delete("lazy")


@pytest.mark.spec(
    "NM-A.11, NM-C.9.5: a reboot without the authority: slivers, keys, loans, limits are back"
)
def test_slivers_return_after_a_reboot_without_the_authority(nm: NmDaemon) -> None:
    """What a reboot takes: processes, mounts, loop devices, cgroups, the run directory, the boot
    id.
    """
    nm.put("alpha", rspec={"nm_cpu_share": 20})
    before = nm.put("beta", rspec={"nm_mem_limit": 128})
    nm.client.call("SetLoans", "alpha", ["beta", "nm_cpu_share", 5])
    nm.ssh("beta", "echo kept > /root/file; echo gone > /dev/shm/file; sync")
    dump = json.loads(nm.client.call("DumpDatabase"))
    nm.stop(signal.SIGKILL)
    for name in ("alpha", "beta"):
        os.kill(dump["local"][f"sliver_{name}"]["handle"]["pid"], signal.SIGKILL)
    wait_for(
        lambda: not [line for line in nm.left() if line.startswith("process")],
        what="all processes to end",
    )
    for place in [line for line in reversed(nm.left()) if line.startswith(str(nm.tmp))]:
        subprocess.run(["umount", "-l", place], check=False, timeout=20, capture_output=True)
    for root in pathlib.Path("/sys/fs/cgroup").glob(f"*/{group_name(str(nm.tmp / 'state'))}"):
        for path in sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True):
            path.rmdir()
        root.rmdir()
    shutil.rmtree(nm.tmp / "run")
    with contextlib.closing(sqlite3.connect(nm.tmp / "state" / "nodemanager.sqlite")) as database:
        database.execute(
            "UPDATE local SET json = replace(json, ?, ?)",
            (
                dump["local"]["sliver_beta"]["handle"]["boot_id"],
                "00000000-0000-0000-0000-000000000000",
            ),
        )
        database.commit()
    nm.start()
    nm.wait("alpha")
    after = nm.wait("beta")
    for field in ("ssh_port", "host_keys", "source", "index"):
        assert after[field] == before[field], field
    assert after["effective"]["nm_cpu_share"] == before["effective"]["nm_cpu_share"] + 5
    assert nm.ssh("beta", "cat /root/file; ls /dev/shm") == "kept\n"
    assert nm.client.call("GetLoans", "alpha") == [["beta", "nm_cpu_share", 5]]


@pytest.mark.spec(
    "issue 4 security: tar images with absolute paths, '..', devices and hard links to outside, "
    "sent to the daemon"
)
def test_hostile_tar_images_are_refused(nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    kinds: dict[str, list[tuple[str, bytes, str]]] = {
        "absolute": [(str(outside), tarfile.REGTYPE, "")],
        "dots": [("../../../../../../../../.." + str(outside), tarfile.REGTYPE, "")],
        "device": [("disk", tarfile.BLKTYPE, "")],
        "hardlink": [("x", tarfile.LNKTYPE, str(outside))],
        "through": [("a", tarfile.SYMTYPE, str(tmp_path)), ("a/outside", tarfile.REGTYPE, "")],
    }
    for kind, members in kinds.items():
        with open(tmp_path / f"{kind}.tar", "w+b") as stream:
            with tarfile.open(fileobj=stream, mode="w") as tar:
                for name, form, target in members:
                    member = tarfile.TarInfo(name)
                    member.type, member.linkname, member.size = (
                        form,
                        target,
                        4 if form == tarfile.REGTYPE else 0,
                    )
                    tar.addfile(member, io.BytesIO(b"evil") if member.size else None)
            stream.seek(0)
            with pytest.raises(
                RpcFault, match=f"cannot create a root tree from image evil-{kind}: .*member"
            ):
                nm.client.put_image(f"evil-{kind}", stream)
        assert nm.client.images() == []
        with pytest.raises(RpcFault, match=f"no image evil-{kind}"):
            nm.put("alpha", image=f"image:evil-{kind}")
        assert outside.read_text() == "untouched"
        assert outside.stat().st_nlink == 1
    nm.put("beta")
    assert nm.ssh("beta", "echo in") == "in\n"


@pytest.mark.slow
@pytest.mark.spec("NM-C.9.6: 100 slivers, each idle under 2 MiB; nothing left of them")
def test_hundred_slivers_need_little_memory_and_leave_nothing(
    nm: NmDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    nm.put("first")
    began = time.monotonic()
    for number in range(100):
        nm.put(f"s{number}", wait=False)
    for number in range(100):
        nm.wait(f"s{number}")
    took = time.monotonic() - began
    used = [
        nm.client.call("GetUsage", f"s{number}").get("memory_bytes", 0) for number in range(100)
    ]
    with capsys.disabled():
        print(f"\n100 slivers in {took:.2f} s, idle {statistics.median(used) / 1024:.0f} KiB each")
    assert statistics.median(used) < 2 << 20
    assert took < 30  # 3 s on a quiet machine (tests/benchmark); tests run alongside others
