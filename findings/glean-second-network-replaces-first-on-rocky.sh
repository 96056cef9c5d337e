#!/bin/sh
# glean 1.25.1 (PyPI), --distro rocky (also centos, fedora): of two IPv4 networks of one link in network_data.json (a port
# with a fixed IP of each of two subnets), only the last is configured: each one writes the whole file of the interface.
# Here that loses the first address and, with it, the default route. There is no message. debian and networkd have both.
# Seen: "debian: 192.0.2.10, 198.51.100.10, gateway; rocky: 198.51.100.10; networkd: 192.0.2.10, 198.51.100.10, gateway".
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
link = {"id": "tap1", "type": "ovs", "vif_id": "1", "mtu": 1500, "ethernet_mac_address": "fa:16:3e:00:00:01"}
common = {"type": "ipv4", "link": "tap1", "netmask": "255.255.255.0"}
default = {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "192.0.2.1"}
networks = [
    {**common, "id": "network0", "ip_address": "192.0.2.10", "routes": [default]},
    {**common, "id": "network1", "ip_address": "198.51.100.10", "routes": []},
]
data = {"links": [link], "networks": networks, "services": []}
(drive / "network_data.json").write_text(json.dumps(data))
seen = []
for distro in ("debian", "rocky", "networkd"):
    command = [sys.argv[1] + "/venv/bin/glean", "--noop", "--skip-dns", "--distro", distro, "--root", str(root)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.lower()
    parts = {"192.0.2.10": "192.0.2.10", "198.51.100.10": "198.51.100.10", "gateway": "192.0.2.1\n"}
    seen.append(f"{distro}: {', '.join(name for name, part in parts.items() if part in text)}")
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
both='192.0.2.10, 198.51.100.10, gateway'
grep -qx "debian: $both; rocky: 198.51.100.10; networkd: $both" "$work/seen"
