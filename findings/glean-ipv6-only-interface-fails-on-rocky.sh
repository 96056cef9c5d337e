#!/bin/sh
# glean 1.25.1 (PyPI), --distro rocky (also centos, fedora), before release 10: an interface that has an IPv6 network and
# none of IPv4 ends glean with an AssertionError before it writes anything: the part for IPv6 extends the file that the
# part for IPv4 has written. If glean runs for all interfaces, the others stay without a configuration, too; its systemd
# service runs it per interface. With --distro debian the same data work.
# Seen: "debian: status 0, files of eth0 and eth1; rocky: status 1, AssertionError, files of none".
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
drive = root / "mnt/config/openstack/latest"
drive.mkdir(parents=True)
links = []
for number in (0, 1):
    mac, sysfs = f"fa:16:3e:00:00:0{number}", root / f"sys/class/net/eth{number}"
    sysfs.mkdir(parents=True)
    for name, text in (("address", mac), ("addr_assign_type", "0"), ("carrier", "1")):
        (sysfs / name).write_text(text + "\n")
    links.append({"id": f"tap{number}", "type": "ovs", "vif_id": "1", "mtu": 1500, "ethernet_mac_address": mac})
six = {"id": "network0", "type": "ipv6", "link": "tap0", "ip_address": "2001:db8::10", "netmask": "ffff:ffff:ffff:ffff::"}
six["routes"] = [{"network": "::", "netmask": "::", "gateway": "2001:db8::1"}]
four = {"id": "network1", "type": "ipv4", "link": "tap1", "ip_address": "192.0.2.10", "netmask": "255.255.255.0", "routes": []}
data = {"links": links, "networks": [six, four], "services": []}
(drive / "network_data.json").write_text(json.dumps(data))
seen = []
for distro in ("debian", "rocky"):
    command = [sys.argv[1] + "/venv/bin/glean", "--noop", "--skip-dns", "--distro", distro, "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    files = [name for name in ("eth0", "eth1") if any(name in line for line in done.stdout.splitlines() if line[:3] == "###")]
    error = done.stderr.split()[-1:] if done.returncode else []
    seen.append(", ".join([f"{distro}: status {done.returncode}", *error, f"files of {' and '.join(files) or 'none'}"]))
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
grep -qx 'debian: status 0, files of eth0 and eth1; rocky: status 1, AssertionError, files of none' "$work/seen"
