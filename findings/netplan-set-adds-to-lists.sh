#!/bin/sh
# netplan 0.106 (Debian 12): "netplan set" replaces a value, but adds the items of a list to those that are configured. Its
# manual page says that it "writes a given key/value pair", with a list of addresses as its example. A machine that gets
# another address by addresses=[10.0.0.9/24] keeps the old one, too, which the next machine will get. To replace a list, it
# must be set to NULL before. (The modules dbus and netifaces, which "set" does not use, are replaced by empty ones.)
# Seen: "set mtu=1450: 1450; set addresses=[10.0.0.9/24]: 10.0.0.5/24 10.0.0.9/24; after addresses=NULL: 10.0.0.9/24".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
packages='netplan.io=0.106-2+deb12u1 libnetplan0=0.106-2+deb12u1'
# shellcheck disable=SC2086
(apt-get -q download $packages && for each in *.deb; do dpkg-deb -x "$each" root; done) >log 2>&1 || { cat log; exit 1; }
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check PyYAML==6.0.2 rich==13.9.4
cat >netplan.py <<'END'
import ctypes.util
import glob
import sys
import types

library = glob.glob("root/usr/lib/*/libnetplan.so.0.0")[0]
ctypes.util.find_library = lambda name: library if name == "netplan" else None
sys.modules.update({name: types.ModuleType(name) for name in ("dbus", "netifaces")})
sys.path[0] = "root/usr/share/netplan"
sys.argv[2:2] = ["--root-dir", "machine"]

from netplan import Netplan

Netplan().main()
END
mkdir -p machine/etc/netplan
cat >machine/etc/netplan/50-cloud-init.yaml <<'END'
network:
  version: 2
  ethernets:
    eth0:
      mtu: 1500
      addresses: [10.0.0.5/24]
END
chmod 600 machine/etc/netplan/50-cloud-init.yaml
# netplan set|get KEY[=VALUE]
netplan() {
    venv/bin/python netplan.py "$1" "ethernets.eth0.$2" 2>log || { cat log >&2; exit 1; }
}
netplan set mtu=1450
netplan set 'addresses=[10.0.0.9/24]'
seen="set mtu=1450: $(netplan get mtu); set addresses=[10.0.0.9/24]: $(netplan get addresses | tr -d '" -' | tr '\n' ' ')"
netplan set addresses=NULL
netplan set 'addresses=[10.0.0.9/24]'
seen="${seen% }; after addresses=NULL: $(netplan get addresses | tr -d '" -')"
echo "$seen"
first='set mtu=1450: 1450; set addresses=[10.0.0.9/24]: 10.0.0.5/24 10.0.0.9/24'
[ "$seen" = "$first; after addresses=NULL: 10.0.0.9/24" ]
