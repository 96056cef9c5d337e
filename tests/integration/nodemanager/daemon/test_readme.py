"""The walk through the seed's README, with the real daemon (NM-C.9.1)."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import time
import xmlrpc.client
from collections.abc import Iterator
from typing import Any

import pytest

from tests.benchmark.nodemanager import burn
from tests.conftest import wait_for
from tests.support.nodemanager.scene import NmDaemon
from tests.support.ports import reserve

SLICES = """<?xml version="1.0"?>
<slices>
 <slice id="1" name="princeton_sirius" expiry="{expiry}">
  <node id="host7"/> <user person_id="11"/>
  <resource name="nm_cpu_guaranteed_share"><value>400</value></resource>
  <resource name="nm_disk_quota"><value>102400</value></resource>
 </slice>
 <slice id="2" name="princeton_eisentest" expiry="{expiry}">
  <node id="host7"/> <user person_id="11"/>
  <resource name="nm_cpu_guaranteed_share"><value>100</value></resource>
  <resource name="nm_disk_quota"><value>102400</value></resource>
 </slice>
 <slice id="3" name="elsewhere" expiry="{expiry}"><node id="other"/><user person_id="11"/></slice>
 <key person_id="11" value="{key}"/>
</slices>
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    port = reserve()
    slices = tmp_path / "slices.xml"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "snoop")],
        check=True,
        timeout=30,
    )
    public = (tmp_path / "snoop.pub").read_text()
    daemon = NmDaemon(
        tmp_path,
        7,
        api={"tcp": port},
        sources=[{"slices-xml": {"file": str(slices), "interval": 0.5}}],
        delegates=[{"name": "del_snoop", "ssh-keys": public.strip(), "methods": ["GetRSpec"]}],
    )
    daemon.port = port  # type: ignore[attr-defined]
    daemon.slices = slices  # type: ignore[attr-defined]
    key = " ".join(daemon.key.with_suffix(".pub").read_text().split()[:2])
    slices.write_text(SLICES.format(expiry=int(time.time()) + 86400, key=key))
    daemon.start()
    try:
        yield daemon
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            slices.write_text("<slices/>")
            wait_for(
                lambda: not [p for p in daemon.left() if "cgroup" not in p],
                60,
                "slices that the authority dropped to go",
            )
        daemon.clean()
        wait_for(lambda: daemon.left() == [], 20, "nothing left")


def as_delegate(nm: NmDaemon, method: str, *arguments: Any) -> Any:
    """What sshd runs for the delegate's key, whatever it asks for (over a real sshd:
    test_nm_forward).
    """
    keys = (nm.tmp / "run" / "delegates.keys").read_text()
    command = keys.split('command="')[1].split('"')[0]
    request = xmlrpc.client.dumps(arguments, method).encode()
    done = subprocess.run(
        ["env", f"NODEPOOL_NM_SOCKET={nm.tmp}/run/nodemanager.api", *command.split()],
        input=request,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return xmlrpc.client.loads(done.stdout)[0][0]


def shares(nm: NmDaemon, wanted: float) -> None:
    """The second slice gets this part of the processor; on a busy machine not in each of the
    windows of three seconds.
    """
    seen: list[float] = []

    def measured() -> bool:
        used = burn(nm, ["princeton_sirius", "princeton_eisentest"], 4, 3)
        seen.append(used["princeton_eisentest"] / sum(used.values()))
        return seen[-1] == pytest.approx(wanted, abs=0.05)

    try:
        wait_for(measured, 45, f"part {wanted} of the processor")
    except AssertionError as error:
        raise AssertionError(f"{error}; measured: {seen}") from None


@pytest.mark.spec("NM-C.9.1: README walk")
def test_readme_works_step_by_step(nm: NmDaemon) -> None:
    # Help on both transports.
    proxy = xmlrpc.client.ServerProxy(f"http://127.0.0.1:{nm.port}/")  # type: ignore[attr-defined]
    assert "SetLoans" in str(proxy.Help()) and nm.client.call("Help") == proxy.Help()
    proxy("close")()
    # Two slices of ours become slivers; the third is another node's.
    for name in ("princeton_sirius", "princeton_eisentest"):
        wait_for(lambda: name in [s["name"] for s in nm.client.call("ListSlivers")], 20)  # noqa: B023
        nm.wait(name)
        assert nm.ssh(name, "hostname").strip() == name.replace("_", "-")
    assert len(nm.client.call("ListSlivers")) == 2
    # The delegate may read RSpecs and nothing else.
    assert as_delegate(nm, "GetRSpec", "princeton_sirius")["nm_cpu_guaranteed_share"] == 400
    with pytest.raises(xmlrpc.client.Fault, match="Permission denied"):
        as_delegate(nm, "Stop", "princeton_sirius")
    # A loan moves 200 per mille, and the processor with it.
    shares(nm, 0.2)
    nm.client.call(
        "SetLoans", "princeton_sirius", ["princeton_eisentest", "nm_cpu_guaranteed_share", 200]
    )
    wait_for(
        lambda: (
            nm.client.call("GetEffectiveRSpec", "princeton_eisentest")["nm_cpu_guaranteed_share"]
            == 300
        ),
        10,
    )
    shares(nm, 0.6)
    # A broken list changes nothing.
    nm.slices.write_text("<slices><slice")  # type: ignore[attr-defined]
    wait_for(lambda: "keeping slivers unchanged" in nm.log, 20)
    assert len(nm.client.call("ListSlivers")) == 2
    # A lost database is rebuilt, from copies and from the list.
    nm.stop(signal.SIGKILL)
    for path in (nm.tmp / "state").glob("nodemanager.sqlite*"):
        path.unlink()
    key = " ".join(nm.key.with_suffix(".pub").read_text().split()[:2])
    nm.slices.write_text(SLICES.format(expiry=int(time.time()) + 86400, key=key))  # type: ignore[attr-defined]
    nm.start()
    for name in ("princeton_sirius", "princeton_eisentest"):
        wait_for(lambda: name in [s["name"] for s in nm.client.call("ListSlivers")], 20)  # noqa: B023
        nm.wait(name)
        assert nm.ssh(name, "echo back") == "back\n"
