#!/bin/sh
# netaddr 1.3.0 (PyPI): an IPNetwork keeps the address of its host and prints it, but compares and hashes without it:
# 10.0.0.5/24 and 10.0.0.9/24 are equal, and equal to 10.0.0.0/24. A set or a dictionary of the addresses of machines keeps
# one of them for each subnet, and the address of a machine is "in" the list of those in use as soon as a neighbor is.
# ip_interface() of Python, which has the same text, tells them apart.
# Seen: "netaddr: equal True, set of two hosts has 1, free address in use True; ipaddress: equal False, set of two hosts has
# 2, free address in use False" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check netaddr==1.3.0
cat >"$work/run.py" <<'END'
from ipaddress import ip_interface

from netaddr import IPNetwork

seen = []
for library, kind in (("netaddr", IPNetwork), ("ipaddress", ip_interface)):
    first, second, free = kind("10.0.0.5/24"), kind("10.0.0.9/24"), kind("10.0.0.20/24")
    assert [str(each) for each in (first, second)] == ["10.0.0.5/24", "10.0.0.9/24"]
    seen.append(
        f"{library}: equal {first == second}, set of two hosts has {len({first, second})}, "
        f"free address in use {free in [first, second]}"
    )
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='netaddr: equal True, set of two hosts has 1, free address in use True'
grep -qx "$first; ipaddress: equal False, set of two hosts has 2, free address in use False" "$work/seen"
