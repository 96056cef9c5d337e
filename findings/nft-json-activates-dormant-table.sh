#!/bin/sh
# nftables 1.0.6 (Debian): the JSON of a ruleset (nft -j list ruleset) omits the flags of tables, among them "dormant", the
# "auto-merge" of sets, and the comments of tables and chains. "nft -j -f" loads such a ruleset with status 0. A table that
# was switched off is active after the ruleset has been saved and restored as JSON: here it drops all packets, and ssh
# sessions to the host end. The text of the same ruleset (nft list ruleset) restores everything.
# Seen: "text: dormant, comments 2, packets pass; JSON: active, comments 0, packets are dropped".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
packages='nftables=1.0.6-2+deb12u2 libnftables1=1.0.6-2+deb12u2'
# shellcheck disable=SC2086
(apt-get -q download $packages && for each in *.deb; do dpkg-deb -x "$each" root; done) >log 2>&1 || { cat log; exit 1; }
export PATH="$work/root/usr/sbin:$PATH"
LD_LIBRARY_PATH="$work/$(dirname "$(find root -name 'libnftables.so.1')")"
export LD_LIBRARY_PATH
nft -v
cat >rules <<'END'
table inet quarantine {
    comment "switched on by an operator only"
    flags dormant
    chain input {
        comment "of the operators"
        type filter hook input priority 0; policy drop;
    }
}
END
cat >send.py <<'END'
import socket

receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
receiver.bind(("127.0.0.1", 0))
receiver.settimeout(2)
sender.sendto(b"x", receiver.getsockname())
try:
    receiver.recv(1)
    print("pass")
except TimeoutError:
    print("are dropped")
END
cat >run.sh <<'END'
ip link set lo up
nft -f rules
nft list ruleset >saved.text
nft -j list ruleset >saved.json
# Restore the ruleset, and print what applies then.
restore() {
    nft flush ruleset
    "$@"
    nft list ruleset >now
    state=active; grep -q dormant now && state=dormant
    echo "$state, comments $(grep -c comment now), packets $(python3 send.py)"
}
text=$(restore nft -f saved.text)
echo "text: $text; JSON: $(restore nft -j -f saved.json)"
END
unshare --net --map-root-user sh run.sh | tee seen
grep -qx 'text: dormant, comments 2, packets pass; JSON: active, comments 0, packets are dropped' seen
