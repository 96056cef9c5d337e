#!/bin/sh
# iproute2 6.1.0 (Debian): "ip -j link show type vlan" and "ip -j link show up" print an empty object for each link that does not
# match, where "ip link" prints nothing for it. A count of the list, or a test whether it is empty, finds VLANs on a host that
# has none, and reading the name of each entry ends with KeyError. "ip -j route show table 1000", a table without routes, prints
# "[", which is not JSON.
# Seen: "5 links: type vlan: text 0, JSON 5 (5 empty); up: text 2, JSON 5 (3 empty); routes of no table: [".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download iproute2=6.1.0-3 && dpkg-deb -x iproute2_*.deb iproute2) >log 2>&1 || { cat log; exit 1; }
PATH=$work/iproute2/sbin:$work/iproute2/bin:$PATH
ip -V
cat >count.py <<'END'
import json
import sys

links = json.load(sys.stdin)
print(f"JSON {len(links)} ({links.count({})} empty)")
END
cat >run.sh <<'END'
# Devices that the kernel adds to each namespace, such as sit0, are none of ours.
for name in $(ip -o link show | sed -n 's/^[0-9]*: \([^:@]*\).*/\1/p'); do
    [ "$name" = lo ] || ip link delete "$name" 2>/dev/null || :
done
ip link add v0 type veth peer name v1
ip link add v2 type veth peer name v3
ip link set v0 up
ip link set lo up
count() {
    echo "text $(ip -o "$@" | grep -c .), $(ip -j "$@" | python3 count.py)"
}
seen="$(ip -o link show | grep -c .) links: type vlan: $(count link show type vlan); up: $(count link show up)"
echo "$seen; routes of no table: $(ip -j route show table 1000 2>/dev/null)"
END
unshare --net --map-root-user sh run.sh | tee seen
grep -qxF '5 links: type vlan: text 0, JSON 5 (5 empty); up: text 2, JSON 5 (3 empty); routes of no table: [' seen
