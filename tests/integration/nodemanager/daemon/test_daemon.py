"""The whole node manager: slivers from records to logins, recovery, loans (NM A, C)."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client.rpc import RpcFault
from nodepool.nodemanager.host import group_name
from tests.conftest import wait_for
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def test_certificate_of_a_lease_opens_the_slivers_that_it_names(nm: NmDaemon) -> None:
    """The scene's own key is signed; the slivers know only the CA."""
    ca = nm.tmp / "ca"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(ca)],
        check=True,
        timeout=30,
    )
    public = ca.with_suffix(".pub").read_text().strip()
    for name in ("np1", "np2"):
        nm.put(name, hostname=name, ssh_keys=f'cert-authority,principals="{name}" {public}')
    subprocess.run(
        [
            "ssh-keygen",
            "-q",
            "-s",
            str(ca),
            "-I",
            "lease",
            "-n",
            "np1",
            "-V",
            "-5m:+1h",
            f"{nm.key}.pub",
        ],
        check=True,
        timeout=30,
    )  # ssh finds the certificate next to the key
    assert nm.ssh("np1", "hostname").strip() == "np1"
    assert nm.ssh("np2", "hostname", check=False) == ""


@pytest.mark.spec("NM-C.4: SSH into every sliver, host keys from the API, key-only")
def test_login_needs_a_key_and_host_keys_are_reported(nm: NmDaemon) -> None:
    found = nm.put("alpha", hostname="alpha")
    assert nm.ssh("alpha", "id -u; hostname").split() == ["0", "alpha"]
    assert found["host_keys"][0].startswith("ssh-ed25519 ")
    scan = subprocess.run(
        ["ssh-keyscan", "-p", str(found["ssh_port"]), "127.0.0.1"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert found["host_keys"][0].split()[1] in scan.stdout
    refused = subprocess.run(
        [
            "ssh",
            "-p",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            f"UserKnownHostsFile={os.devnull}",
            "-o",
            "IdentitiesOnly=yes",
            "-i",
            os.devnull,
            "root@127.0.0.1",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr


def test_emptied_cgroup_tree_is_made_again(nm: NmDaemon) -> None:
    """Service managers remove empty groups."""
    nm.put("alpha")
    nm.delete("alpha")
    for root in pathlib.Path("/sys/fs/cgroup").glob(f"*/{group_name(str(nm.tmp / 'state'))}"):
        for path in [*(p for p in root.iterdir() if p.is_dir()), root]:
            path.rmdir()
    nm.put("beta", rspec={"nm_mem_limit": 128})
    assert nm.ssh("beta", "echo fine") == "fine\n"


def test_a_taken_port_is_skipped(nm: NmDaemon) -> None:
    with socket.create_server(("127.0.0.1", nm.first_port)):
        assert nm.put("alpha")["ssh_port"] == nm.first_port + 1
        assert nm.ssh("alpha", "echo fine") == "fine\n"
        assert f"port {nm.first_port} of 127.0.0.1 is in use" in nm.log
    assert nm.put("beta")["ssh_port"] == nm.first_port


def test_two_slivers_do_not_see_each_other(nm: NmDaemon) -> None:
    nm.put("alpha")
    nm.put("beta")
    nm.ssh("alpha", "echo secret > /root/file; chmod 600 /root/file")
    assert nm.ssh("beta", "ls /root/file", check=False) == ""
    pids = nm.ssh("beta", "ls /proc | grep -c '^[0-9]'")
    assert int(pids) < 12


@pytest.mark.spec("NM-C.7: killing the daemon kills no sliver; open SSH sessions go on; adoption")
def test_sessions_survive_sigkill_of_the_daemon(nm: NmDaemon) -> None:
    for name in ("alpha", "beta", "gamma"):
        nm.put(name)
    record = nm.client.call("GetRecord", "alpha")
    session = nm.session("alpha")
    before = {
        name: nm.ssh(name, "cat /proc/1/stat").split()[21] for name in ("alpha", "beta", "gamma")
    }
    nm.stop(signal.SIGKILL)
    nm.start()
    after = nm.client.call("GetRecord", "alpha")
    assert (
        after["state"] == "ready"
        and after["ssh_port"] == record["ssh_port"]
        and after["host_keys"] == record["host_keys"]
    )
    assert {name: nm.ssh(name, "cat /proc/1/stat").split()[21] for name in before} == before, (
        "process 1 is the same"
    )
    out, _ = session.communicate("hello\n", timeout=20)
    assert out == "got hello\n" and session.returncode == 0


@pytest.mark.spec("NM-C.7: record without sliver -> recreate; sliver without record -> destroy")
def test_what_died_is_made_again(nm: NmDaemon) -> None:
    nm.put("alpha")
    dump = json.loads(nm.client.call("DumpDatabase"))
    pid = dump["local"]["sliver_alpha"]["handle"]["pid"]
    nm.stop(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    nm.start()
    nm.wait("alpha")
    assert nm.ssh("alpha", "echo again") == "again\n"


@pytest.mark.spec("NM-A.11, NM-C.9.1: a broken database is rebuilt; living slivers are adopted")
def test_corrupt_database_with_copies(nm: NmDaemon) -> None:
    before = nm.put(
        "alpha", metadata={"nodepool_node_id": "0000000007"}, expiry=int(time.time()) + 3600
    )
    started = nm.ssh("alpha", "cat /proc/1/stat").split()[21]
    nm.stop(signal.SIGKILL)
    for path in (nm.tmp / "state").glob("nodemanager.sqlite*"):
        path.write_bytes(b"this is no database" * 100)
    nm.start()
    after = nm.wait("alpha")
    for field in ("metadata", "expiry", "ssh_port", "host_keys", "source", "effective"):
        assert after[field] == before[field], field
    assert nm.ssh("alpha", "cat /proc/1/stat").split()[21] == started


@pytest.mark.spec("NM-C.7: sliver without record -> destroy")
def test_corrupt_database_without_copies(nm: NmDaemon) -> None:
    nm.put("alpha")
    nm.stop(signal.SIGKILL)
    for path in (nm.tmp / "state" / "records").iterdir():
        path.unlink()
    for path in (nm.tmp / "state").glob("nodemanager.sqlite*"):
        path.write_bytes(b"this is no database" * 100)
    nm.start()
    assert "cannot be used" in nm.log and list((nm.tmp / "state").glob("*.corrupt-*"))
    wait_for(
        lambda: all("cgroup" in place for place in nm.left()),
        20,
        "the sliver without a record to go",
    )
    nm.put("beta")
    assert nm.ssh("beta", "echo fine") == "fine\n"


@pytest.mark.spec("NM-A.8: Stop kills all processes, Start runs it again; the tree stays")
def test_stop_and_start(nm: NmDaemon) -> None:
    nm.put("alpha")
    nm.ssh("alpha", "echo kept > /root/file")
    nm.client.call("Stop", "alpha")
    stopped = nm.wait("alpha", "stopped")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", stopped["ssh_port"]), timeout=2)
    nm.client.call("Start", "alpha")
    nm.wait("alpha")
    assert nm.ssh("alpha", "cat /root/file") == "kept\n"


@pytest.mark.spec("NM-C.6: leases: a sliver goes at its expiry, a renewed one stays")
def test_sliver_is_deleted_at_its_expiry_unless_renewed(nm: NmDaemon) -> None:
    nm.put("long", expiry=int(time.time()) + 8)
    nm.put("short", expiry=int(time.time()) + 8)
    nm.client.call("RenewSliver", "long", int(time.time()) + 3600)
    nm.wait("short", "gone")
    assert nm.client.call("GetRecord", "long")["state"] == "ready"


@pytest.mark.spec("NM-C.3: admission: the sum of guarantees must fit")
def test_over_committed_guarantee(nm: NmDaemon) -> None:
    nm.put("alpha", rspec={"nm_cpu_guaranteed_share": 600})
    with pytest.raises(RpcFault, match="quota: guaranteed CPU of 1000 per mille is more than 950"):
        nm.put("beta", rspec={"nm_cpu_guaranteed_share": 400})
    assert [s["name"] for s in nm.client.call("ListSlivers")] == ["alpha"]


@pytest.mark.parametrize(
    "record,text",
    [
        ({"rspec": {"nm_cpu": 1}}, "unknown resource 'nm_cpu'"),
        ({"image": "dir:/does/not/exist"}, "no directory /does/not/exist"),
        ({"image": "image:absent"}, "no image absent"),
        ({"name": "../x"}, "is not a name"),
        ({"network": "x y"}, "network"),
        ({"initscript": "%%"}, "not base64"),
        ({"ssh_keys": 'command="x" ssh-rsa AAAA'}, "is not a public key"),
    ],
)
def test_invalid_records_are_refused(nm: NmDaemon, record: dict[str, object], text: str) -> None:
    with pytest.raises(RpcFault, match=text):
        nm.client.call("PutRecord", {"account_type": "sliver", "name": "alpha", **record})
    assert nm.client.call("ListSlivers") == []


@pytest.mark.spec(
    "NM-A.7, NM-A.8: the README's loan: own name omitted, a bare triple; limits move at once"
)
def test_loan_from_inside(nm: NmDaemon) -> None:
    nm.put("princeton_sirius", rspec={"nm_cpu_guaranteed_share": 300})
    nm.put("princeton_eisentest")
    call = (
        "import xmlrpc.client, http.client, socket, sys\n"
        "class C(http.client.HTTPConnection):\n"
        "    def connect(self):\n"
        "        self.sock = socket.socket(socket.AF_UNIX); "
        "self.sock.connect('/run/nodepool/nodemanager.api')\n"
        "class T(xmlrpc.client.Transport):\n"
        "    def make_connection(self, host): return C('x')\n"
        "s = xmlrpc.client.ServerProxy('http://x/', transport=T())\n"
    )
    out = nm.ssh(
        "princeton_sirius",
        f"python3 -c \"{call}print(s.SetLoans(['princeton_eisentest', "
        "'nm_cpu_guaranteed_share', 200]), s.GetLoans('princeton_sirius'))\"",
    )
    assert out.strip() == "1 [['princeton_eisentest', 'nm_cpu_guaranteed_share', 200]]"
    assert (
        nm.client.call("GetEffectiveRSpec", "princeton_eisentest")["nm_cpu_guaranteed_share"] == 200
    )
    assert nm.client.call("GetEffectiveRSpec", "princeton_sirius")["nm_cpu_guaranteed_share"] == 100
    denied = nm.ssh(
        "princeton_eisentest",
        f"python3 -c \"{call}s.GetLoans('princeton_sirius')\" 2>&1",
        check=False,
    )
    assert "Permission denied" in denied


def test_client_program_calls_the_api(nm: NmDaemon) -> None:
    program = str(pathlib.Path(nm.client.url).name)
    assert program == "nodemanager.api"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [
                str(pathlib.Path(sys.executable).with_name("nodepool-nm")),
                "--url",
                nm.client.url,
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run(
        "create",
        "alpha",
        "--key",
        str(nm.key.with_suffix(".pub")),
        "--rspec",
        "nm_mem_limit=128",
        "nm_disk_quota=102400",
    )
    assert out.startswith("alpha is ready: ssh -p ")
    assert (
        "alpha" in run("list") and json.loads(run("list", "--format", "json"))[0]["memory"] == 128
    )
    assert json.loads(run("show", "alpha"))["state"] == "ready"
    assert "GetEffectiveRSpec(sliver)" in run("help")
    assert "alpha" in run("top", "--once")
    run("stop", "alpha")
    nm.wait("alpha", "stopped")
    run("delete", "alpha")
    nm.wait("alpha", "gone")


SLICES = (
    '<slices><slice id="1" name="listed"><node id="host0"/><resource '
    'name="nm_disk_quota"><value>102400</value></resource>'
    "</slice></slices>"
)


@pytest.fixture
def listed(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    """With a list of slices in the directory."""
    path = tmp_path / "slices.xml"
    path.write_text(SLICES)
    for daemon in make_daemon(
        tmp_path, sources=[{"slices-xml": {"file": str(path), "interval": 0.2}}]
    ):
        try:
            yield daemon
        finally:
            path.write_text("<slices/>")
            daemon.wait("listed", "gone")


@pytest.mark.spec(
    "NM A: --startup starts every enabled sliver once after the first successful sync"
)
def test_startup_option_starts_every_enabled_sliver_once(
    listed: NmDaemon, tmp_path: pathlib.Path
) -> None:
    nm, path = listed, tmp_path / "slices.xml"
    script = base64.b64encode(b"#!/bin/sh\necho started >> /root/starts\n").decode()

    def state(name: str) -> str:
        return str(nm.client.call("GetRecord", name)["state"])

    for name in ("own", "runs", "off"):
        nm.put(name, initscript=script)
    wait_for(lambda: state("listed") == "ready", what="the listed sliver")
    for name in ("own", "off", "listed"):
        nm.client.call("Stop", name)
        nm.wait(name, "stopped")
    nm.put("off", wait=False, rspec={"nm_enabled": 0})
    wait_for(lambda: state("off") == "disabled", what="the disabled sliver")
    path.unlink()  # the authority is away
    nm.stop(signal.SIGKILL)
    nm.arguments = ["--startup"]
    nm.start()
    nm.wait("own")
    wait_for(
        lambda: nm.ssh("own", "cat /root/starts") == "started\n" * 2,
        what="the init script of the one that was stopped",
    )
    assert nm.ssh("runs", "cat /root/starts") == "started\n", "it was running all the time"
    wait_for(lambda: "keeping slivers unchanged" in nm.log, what="the source is looked at")
    assert (state("listed"), state("off")) == ("stopped", "disabled")
    path.write_text(SLICES)
    wait_for(
        lambda: state("listed") == "ready", what="the listed sliver after the first complete update"
    )
    # Once only.
    for name in ("own", "listed"):
        nm.client.call("Stop", name)
        nm.wait(name, "stopped")
    path.write_text(SLICES.replace('id="1"', 'id="2"'))
    wait_for(
        lambda: (
            json.loads(nm.client.call("DumpDatabase"))["records"]["sliver_listed"]["record"]["id"]
            == 2
        ),
        what="the next update",
    )
    assert (state("own"), state("listed")) == ("stopped", "stopped")


def test_second_daemon_on_the_same_state_directory_is_refused(
    nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    """It would adopt the slivers of the first one and promise the disk twice."""
    other = NmDaemon(tmp_path, 1, **{"state-dir": nm.options["state-dir"]})
    other.start(wait=False)
    assert other.process is not None and other.process.wait(60) != 0
    assert f"state-dir: another node manager uses {nm.options['state-dir']}" in other.log
    # Neither the helper of a daemon that was killed nor its slivers keep the directory locked.
    nm.put("alpha")
    nm.stop(signal.SIGKILL)
    nm.start()
    assert nm.wait("alpha")["state"] == "ready"


def test_socket_directories_of_cut_off_deletions_are_removed(nm: NmDaemon) -> None:
    index = nm.put("alpha")["index"]
    nm.stop(signal.SIGKILL)
    sockets = nm.tmp / "run/slivers"
    (sockets / "99").mkdir()
    (sockets / "99/nodemanager.api").touch()
    nm.start()
    assert [entry.name for entry in sockets.iterdir()] == [str(index)]
    nm.delete("alpha")
