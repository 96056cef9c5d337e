#!/bin/sh
# iproute2 6.1.0 (Debian): tc takes and prints rates in bits per second, 8mbit as "8Mbit". With -j, which is documented to
# "display results in JSON format", the same rate is 1000000: bytes per second, without a unit. The latency of 50 ms is 50000,
# and a peak rate is omitted. Classes, which hold the rates of htb, are printed as text in spite of -j, with status 0. A check
# that compares the limits of a host with its configuration finds an eighth of them, or no JSON.
# Seen: "text: rate 8Mbit peakrate 16Mbit lat 50ms; JSON: rate 1000000, peakrate None, lat 50000; JSON of class: class htb 1:3".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download iproute2=6.1.0-3 && dpkg-deb -x iproute2_*.deb iproute2) >log 2>&1 || { cat log; exit 1; }
PATH=$work/iproute2/sbin:$work/iproute2/bin:$PATH
tc -V
cat >read.py <<'END'
import json
import sys

options = json.load(sys.stdin)[0]["options"]
print(f"rate {options['rate']}, peakrate {options.get('peakrate')}, lat {options['lat']}")
END
cat >run.sh <<'END'
tc qdisc add dev lo root handle 1: tbf rate 8mbit burst 10k latency 50ms peakrate 16mbit mtu 2000
text=$(tc qdisc show dev lo | grep -oE '(rate|peakrate|lat) [^ ]+' | tr '\n' ' ')
seen="text: ${text% }; JSON: $(tc -j qdisc show dev lo | python3 read.py)"
tc qdisc delete dev lo root
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:3 htb rate 8mbit
echo "$seen; JSON of class: $(tc -j class show dev lo | cut -d ' ' -f 1-3)"
END
unshare --net --map-root-user sh run.sh | tee seen
first='text: rate 8Mbit peakrate 16Mbit lat 50ms; JSON: rate 1000000, peakrate None, lat 50000'
grep -qxF "$first; JSON of class: class htb 1:3" seen
