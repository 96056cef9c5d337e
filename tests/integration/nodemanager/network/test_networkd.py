"""A configuration of systemd-networkd that matches all devices does not concern slivers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import wait_for

NETWORKD = "/lib/systemd/systemd-networkd"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of slivers need root"),
    pytest.mark.skipif(
        not (os.path.exists(NETWORKD) and shutil.which("networkctl")),
        reason="systemd-networkd is not installed (Debian package systemd)",
    ),
    pytest.mark.skipif(
        shutil.which("dbus-daemon") is None,
        reason="dbus-daemon is not installed (Debian package dbus-daemon)",
    ),
]

BUS = """
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/>
  </policy>
</busconfig>
"""
#: $1: configuration of the bus; $2: interpreter; $3: where the log goes. With a read-only /sys,
#: networkd does not wait for udev.
SCENE = f"""
set -e
mount -t sysfs -o ro none /sys
for each in /run /etc/systemd/network; do mount -t tmpfs none $each; done
mkdir -p /run/dbus /run/systemd/system /run/systemd/netif/links /run/systemd/netif/leases
mkdir /run/systemd/netif/lldp
chown -R systemd-network /run/systemd/netif
printf '[Match]\\nName=*\\n[Network]\\nDHCP=yes\\n' > /etc/systemd/network/50-all.network
dbus-daemon --config-file="$1" --nofork --nopidfile > "$3.bus" 2>&1 &
bus=$!
until [ -S /run/dbus/system_bus_socket ]; do sleep 0.05; done
{NETWORKD} > "$3" 2>&1 &
networkd=$!
trap 'kill $bus $networkd' EXIT
until networkctl list > "$3.list" 2>&1; do sleep 0.05; done
umask 077
"$2" -c '
from nodepool.nodemanager.config import parse
from nodepool.nodemanager.network.veth import Network
Network(parse({{}}, "test"))._share("bridge")'
ip link add nm5-1a2b type veth peer name other
ip link set nm5-1a2b up
ip link set other up
until grep -q ' configur' "$3.list" && grep -q 'nm5.*carrier' "$3.list"; do
    networkctl --no-legend list other nm5-1a2b > "$3.list" || true
    sleep 0.05
done
"""


def test_networkd_asks_no_dhcp_server_in_slivers(tmp_path: pathlib.Path) -> None:
    bus, log = tmp_path / "bus.conf", tmp_path / "log"
    bus.write_text(BUS)
    command = ["unshare", "--mount", "--net", "--propagation", "private", "--pid", "--fork"]
    arguments = [str(bus), sys.executable, str(log)]
    with subprocess.Popen([*command, "--kill-child", "sh", "-c", SCENE, "sh", *arguments]) as scene:
        try:
            wait_for(lambda: scene.poll() is not None, 60, "networkd")
        finally:
            scene.kill()
    listed = (tmp_path / "log.list").read_text().splitlines()
    states = {line.split()[1]: line.split()[-1] for line in listed}
    assert states.pop("other").startswith("configur"), log.read_text()
    assert states == {"nm5-1a2b": "unmanaged"}, log.read_text()
