#!/bin/sh
# iptables 1.8.9 (Debian): iptables-restore --noflush, documented as "don't flush the previous contents of the table", does
# flush each chain of the user that its input declares (":DOCKER-USER - [0:0]"): rules of others in it are deleted, with
# status 0 and no message. Rules of built-in chains are kept, although they are declared alike, and so are those of chains
# that have rules in the input, but no declaration. iptables-legacy-restore does the same. A file that adds a rule for nodes
# to the chain of Docker, or that is a part of the output of iptables-save, removes the protection that was there.
# Seen: "declared: INPUT 2 rules, DOCKER-USER 1 rule; not declared: INPUT 2 rules, DOCKER-USER 2 rules".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
packages='iptables=1.8.9-2 libip4tc2=1.8.9-2 libip6tc2=1.8.9-2 libxtables12=1.8.9-2'
# shellcheck disable=SC2086
(apt-get -q download $packages && for each in *.deb; do dpkg-deb -x "$each" root; done) >log 2>&1 || { cat log; exit 1; }
library=$(dirname "$(find root -name 'libxtables.so.12')")
export PATH="$work/root/usr/sbin:$PATH" LD_LIBRARY_PATH="$work/$library" XTABLES_LIBDIR="$work/$library/xtables"
iptables-nft -V
cat >run.sh <<'END'
# Count the rules of both chains after a file that adds one to each, with or without declarations.
count() {
    iptables-nft -F
    iptables-nft -N DOCKER-USER 2>/dev/null || :
    iptables-nft -A DOCKER-USER -s 10.0.0.1 -j DROP
    iptables-nft -A INPUT -s 10.0.0.1 -j DROP
    printf "*filter\n$1-A INPUT -s 10.0.0.2 -j DROP\n-A DOCKER-USER -s 10.0.0.2 -j DROP\nCOMMIT\n" |
        iptables-nft-restore --noflush
    input=$(iptables-nft -S INPUT | grep -c '^-A')
    user=$(iptables-nft -S DOCKER-USER | grep -c '^-A')
    echo "INPUT $input rules, DOCKER-USER $user rule$([ "$user" = 1 ] || echo s)"
}
declared=$(count ':INPUT ACCEPT [0:0]\n:DOCKER-USER - [0:0]\n')
echo "declared: $declared; not declared: $(count '')"
END
unshare --net --map-root-user sh run.sh | tee seen
grep -qx 'declared: INPUT 2 rules, DOCKER-USER 1 rule; not declared: INPUT 2 rules, DOCKER-USER 2 rules' seen
