#!/bin/sh
# glean 1.25.1 (PyPI), --distro debian and rocky: an interface whose only network in network_data.json is of one of
# Nova's types ipv6_dhcpv6-stateful and ipv6_dhcpv6-stateless (on debian also ipv6_slaac) gets no configuration at all,
# with status 0; debian has no message. An interface that the data do not mention gets DHCP, this one does not.
# networkd has code for DHCPv6, under a name that Nova does not use (ipv6_dhcpv6_stateful).
# Seen: "debian: files of eth1 (slaac), eth1 (stateful), eth1 (stateless); rocky: files of eth1 (stateful), eth1 (stateless);
# eth0 has the network, eth1 is not mentioned" (on one line).
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
for number in (0, 1):
    sysfs = root / f"sys/class/net/eth{number}"
    sysfs.mkdir(parents=True)
    for name, text in (("address", f"fa:16:3e:00:00:0{number}"), ("addr_assign_type", "0"), ("carrier", "1")):
        (sysfs / name).write_text(text + "\n")
link = {"id": "tap0", "type": "ovs", "vif_id": "1", "mtu": 1500, "ethernet_mac_address": "fa:16:3e:00:00:00"}
network = {"id": "network0", "link": "tap0", "ip_address": "2001:db8::10", "netmask": "ffff:ffff:ffff:ffff::", "routes": []}


def files(distro, kind):
    data = {"links": [link], "networks": [{**network, "type": kind}], "services": []}
    (drive / "network_data.json").write_text(json.dumps(data))
    command = [sys.argv[1] + "/venv/bin/glean", "--noop", "--skip-dns", "--distro", distro, "--root", str(root)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    written = [name for name in ("eth0", "eth1") if any(name in line for line in lines if line[:3] == "###")]
    return f"{'+'.join(written)} ({kind.rpartition('_')[2].removeprefix('dhcpv6-')})"


kinds = ["ipv6_slaac", "ipv6_dhcpv6-stateful", "ipv6_dhcpv6-stateless"]
debian, rocky = [files("debian", kind) for kind in kinds], [files("rocky", kind) for kind in kinds[1:]]
print(f"debian: files of {', '.join(debian)}; rocky: files of {', '.join(rocky)}; eth0 has the network, eth1 is not mentioned")
END
"$work/venv/bin/python" "$work/run.py" "$work" 2>/dev/null | tee "$work/seen"
expected='debian: files of eth1 (slaac), eth1 (stateful), eth1 (stateless); rocky: files of eth1 (stateful), eth1 (stateless)'
grep -qx "$expected; eth0 has the network, eth1 is not mentioned" "$work/seen"
