#!/bin/sh
# OpenSSH 9.2p1 (Debian's openssh-client): ssh-keygen -R is documented to remove "all keys belonging to the specified hostname".
# It removes each line that applies to the name, also one whose pattern names all nodes (an image with one host key), and a
# line for several names. After the usual "ssh-keygen -R" for a name or address that another node has now, ssh accepts no
# other node either. Only a line with the marker @cert-authority is kept.
# Seen: "known before: node1 node2 web; removed: node1.ci.example web.ci.example; known after: none; @cert-authority kept: 1".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download 'openssh-client=1:9.2p1-2*' && dpkg-deb -x openssh-client_*.deb ssh) >log 2>&1 || { cat log; exit 1; }
tool=$work/ssh/usr/bin/ssh-keygen
"$work/ssh/usr/bin/ssh" -V
for key in shared own authority; do
    "$tool" -q -t ed25519 -N '' -C '' -f "$key"
done
cat >known_hosts <<END
@cert-authority *.ci.example $(cat authority.pub)
*.ci.example $(cat shared.pub)
web.ci.example,web.other.example $(cat own.pub)
END
# The names for which a key is known that is not that of an authority.
known() {
    found=
    for name in node1.ci.example node2.ci.example web.other.example; do
        "$tool" -F "$name" -f known_hosts | grep -qv '^[#@]' && found="$found ${name%%.*}"
    done
    echo "${found:- none}"
}
seen="known before:$(known)"
# The name of a node that has another key now, and that of the web server.
"$tool" -R node1.ci.example -f known_hosts >/dev/null 2>&1
"$tool" -R web.ci.example -f known_hosts >/dev/null 2>&1
seen="$seen; removed: node1.ci.example web.ci.example; known after:$(known)"
seen="$seen; @cert-authority kept: $(grep -c '^@cert-authority' known_hosts)"
echo "$seen"
first='known before: node1 node2 web; removed: node1.ci.example web.ci.example; known after: none'
[ "$seen" = "$first; @cert-authority kept: 1" ]
