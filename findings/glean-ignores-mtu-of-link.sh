#!/bin/sh
# glean 1.25.1 (PyPI), --distro debian, rocky and networkd: the `mtu` of a link in network_data.json, which Nova writes
# for each link, is not read. An interface with a static address keeps the MTU 1500 of the kernel, also on an overlay
# network that carries 1450: small packets pass, large transfers stop. With DHCP, the server's option hides this.
# cloud-init writes the MTU.
# Seen: "mtu of the link: 1450; files of eth0 that have an mtu: debian 0 of 1, rocky 0 of 1, networkd 0 of 2".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check glean==1.25.1
cat >"$work/run.py" <<'END'
import json
import pathlib
import subprocess
import sys

root = pathlib.Path(sys.argv[1], "root")
sysfs = root / "sys/class/net/eth0"
drive = root / "mnt/config/openstack/latest"
for directory in (sysfs, drive):
    directory.mkdir(parents=True)
for name, text in (("address", "fa:16:3e:00:00:01"), ("addr_assign_type", "0"), ("carrier", "1")):
    (sysfs / name).write_text(text + "\n")
link = {"id": "tap1", "type": "ovs", "vif_id": "1", "mtu": 1450, "ethernet_mac_address": "fa:16:3e:00:00:01"}
network = {"id": "network0", "type": "ipv4", "link": "tap1", "ip_address": "192.0.2.10", "netmask": "255.255.255.0"}
network["routes"] = [{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "192.0.2.1"}]
data = {"links": [link], "networks": [network], "services": []}
(drive / "network_data.json").write_text(json.dumps(data))
seen = []
for distro in ("debian", "rocky", "networkd"):
    command = [sys.argv[1] + "/venv/bin/glean", "--noop", "--skip-dns", "--distro", distro, "--root", str(root)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = [file for file in text.split("### Write ") if "eth0" in file.partition("\n")[0]]
    assert any("192.0.2.10" in file for file in files)
    with_mtu = sum("mtu" in file.lower() or "1450" in file for file in files)
    seen.append(f"{distro} {with_mtu} of {len(files)}")
print(f"mtu of the link: {link['mtu']}; files of eth0 that have an mtu: {', '.join(seen)}")
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
grep -qx 'mtu of the link: 1450; files of eth0 that have an mtu: debian 0 of 1, rocky 0 of 1, networkd 0 of 2' "$work/seen"
