#!/bin/sh
# cloud-init 22.4.2 (Debian 12), run by PyYAML 6.0.2, Jinja2 3.1.6 and others from PyPI: a default route of IPv6 in a network
# configuration of version 2 ("to: ::/0") is written as a route to ::/64 by all renderers but netplan's, without a warning;
# that of IPv4 is right. Nodes with the configuration of those on Ubuntu, which has netplan, boot on Debian and CentOS with
# IPv6 addresses, but reach nothing outside of their network by them, unless a router announces itself.
# Seen: "netplan: 0.0.0.0/0 ::/0; networkd: 0.0.0.0/0 ::/64; network-manager: 0.0.0.0/0 ::/64; eni: default ::/64;
# sysconfig: ::/64" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download cloud-init=22.4.2-1+deb12u4 && dpkg-deb -x cloud-init_*.deb root) >log 2>&1 || { cat log; exit 1; }
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check PyYAML==6.0.2 Jinja2==3.1.6 jsonschema==4.23.0 jsonpatch==1.33 \
    configobj==5.0.9 oauthlib==3.2.2 requests==2.32.3
cat >network.yaml <<'END'
network:
  version: 2
  ethernets:
    eth0:
      addresses: [10.0.0.5/24, "2001:db8::5/64"]
      routes:
        - {to: 0.0.0.0/0, via: 10.0.0.1}
        - {to: "::/0", via: "2001:db8::1"}
END
# Print the destinations of the routes that a renderer writes.
routes() {
    PYTHONPATH=root/usr/lib/python3/dist-packages venv/bin/python -m cloudinit.cmd.main devel net-convert \
        --network-data network.yaml --kind yaml --output-kind "$1" --distro "$2" --directory "$1" >log 2>&1 || {
        cat log
        exit 1
    }
    [ -z "$(grep -i warn log)" ]
    routes=$(grep -rhE "$3" "$1" | grep -oE '0\.0\.0\.0/0|default|::/[0-9]+' | uniq | tr '\n' ' ')
    echo "$1: ${routes% }"
}
seen="$(routes netplan debian ' to:'); $(routes networkd debian '^Destination='); $(routes network-manager debian '^route')"
seen="$seen; $(routes eni debian 'post-up'); $(routes sysconfig centos 'via|IPV6_DEFAULTGW')"
echo "$seen"
first='netplan: 0.0.0.0/0 ::/0; networkd: 0.0.0.0/0 ::/64; network-manager: 0.0.0.0/0 ::/64'
[ "$seen" = "$first; eni: default ::/64; sysconfig: ::/64" ]
