#!/bin/sh
# pyroute2 0.9.7 (PyPI): get_routes() is documented to read all routes, and to filter them by its arguments. With a text for
# "dst", it asks the kernel for the way to that address instead, as "ip route get" does: the length of the prefix and all
# other arguments are ignored, and a default route makes it find something for each destination. A program that adds a
# route unless get_routes(dst=...) finds it never adds it; one that looks for a route in a table is given one of another
# table. Without "dst", arguments are filters, and match={"dst": ...} finds routes only.
# Seen, with routes to default via .8, to 10.5.0.0/16 via .9, and to 10.7.0.0/16 via .9 in table 100: "dst 10.6.0.0/16:
# 10.6.0.0/32 via .8 in 254; dst 10.7.0.0/16, table 100: 10.7.0.0/32 via .8 in 254; table 100: 10.7.0.0/16 via .9 in 100;
# match 10.6.0.0/16: nothing; match 10.5.0.0/16: 10.5.0.0/16 via .9 in 254" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pyroute2==0.9.7
cat >"$work/run.py" <<'END'
from pyroute2 import IPRoute

ipr = IPRoute()
ipr.link("add", ifname="b", kind="bridge")
index = ipr.link_lookup(ifname="b")[0]
ipr.link("set", index=index, state="up")
ipr.addr("add", index=index, address="10.0.0.1", prefixlen=24)
ipr.route("add", dst="0.0.0.0/0", gateway="10.0.0.8")
ipr.route("add", dst="10.5.0.0/16", gateway="10.0.0.9")
ipr.route("add", dst="10.7.0.0/16", gateway="10.0.0.9", table=100)


def found(**arguments):
    texts = []
    for route in ipr.get_routes(**arguments):
        attributes = dict(route["attrs"])
        gateway = attributes["RTA_GATEWAY"].removeprefix("10.0.0")
        texts.append(f"{attributes['RTA_DST']}/{route['dst_len']} via {gateway} in {attributes['RTA_TABLE']}")
    return ", ".join(texts) or "nothing"


seen = (
    f"dst 10.6.0.0/16: {found(dst='10.6.0.0/16')}",
    f"dst 10.7.0.0/16, table 100: {found(dst='10.7.0.0/16', table=100)}",
    f"table 100: {found(table=100)}",
    f"match 10.6.0.0/16: {found(match={'dst': '10.6.0.0/16'})}",
    f"match 10.5.0.0/16: {found(match={'dst': '10.5.0.0/16'})}",
)
print("; ".join(seen))
ipr.close()
END
unshare --net --map-root-user "$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='dst 10.6.0.0/16: 10.6.0.0/32 via .8 in 254; dst 10.7.0.0/16, table 100: 10.7.0.0/32 via .8 in 254'
second='table 100: 10.7.0.0/16 via .9 in 100; match 10.6.0.0/16: nothing; match 10.5.0.0/16: 10.5.0.0/16 via .9 in 254'
grep -qxF "$first; $second" "$work/seen"
