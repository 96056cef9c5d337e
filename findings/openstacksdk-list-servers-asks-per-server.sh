#!/bin/sh
# openstacksdk 4.22.0 with keystoneauth1 5.18.1 (PyPI), against a mock cloud: Connection.list_servers() sends a request
# for the ports of each ACTIVE server, and one for the floating IPs of each of its ports, although detailed=False is the
# default. Whether Nova lists addresses of the server does not matter, except that an IPv4 address of type "floating"
# ends the search. bare=True, floating_ip_source "none" and Connection.compute.servers() send no such requests; the
# servers have the addresses from Nova anyway.
# Seen, for 20 servers: "ACTIVE 42, no addresses 42, two ports 62, floating 2, BUILD 2, bare 1, source none 2, proxy 1".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    openstacksdk==4.22.0 keystoneauth1==5.18.1 requests-mock==1.12.1
cat >"$work/run.py" <<'END'
import re

import requests_mock
from openstack.connection import Connection

COUNT = 20
FIXED = {"version": 4, "addr": "10.0.0.5", "OS-EXT-IPS:type": "fixed", "OS-EXT-IPS-MAC:mac_addr": "00:00:00:00:00:01"}
FLOATING = {**FIXED, "addr": "192.0.2.5", "OS-EXT-IPS:type": "floating"}
CATALOG = [
    {
        "type": kind,
        "name": kind,
        "id": kind,
        "endpoints": [{"id": kind, "interface": "public", "region": "R", "region_id": "R", "url": f"http://{kind}.test/"}],
    }
    for kind in ("compute", "network")
]
TOKEN = {
    "methods": ["password"],
    "expires_at": "2099-01-01T00:00:00Z",
    "issued_at": "2026-01-01T00:00:00Z",
    "project": {"id": "p", "name": "p", "domain": {"id": "default", "name": "Default"}},
    "user": {"id": "u", "name": "u", "domain": {"id": "default", "name": "Default"}},
    "catalog": CATALOG,
}
LOGIN = {"username": "u", "password": "x", "project_name": "p", "user_domain_id": "default", "project_domain_id": "default"}


def version(name, url):
    return {"id": name, "status": "CURRENT", "links": [{"rel": "self", "href": url}]}


def requests_of(call, addresses=(FIXED,), status="ACTIVE", ports=1, **options):
    server = {"name": "node", "status": status, "addresses": {"internal": list(addresses)} if addresses else {}}
    servers = [{**server, "id": f"server-{number}"} for number in range(COUNT)]
    with requests_mock.Mocker() as cloud:
        identity = version("v3.14", "http://identity.test/v3/")
        cloud.get("http://identity.test/v3", json={"version": identity})
        cloud.post("http://identity.test/v3/auth/tokens", json={"token": TOKEN}, headers={"X-Subject-Token": "t"})
        cloud.get("http://compute.test/", json={"versions": [version("v2.1", "http://compute.test/v2.1/")]})
        cloud.get(re.compile("http://network.test/(v2.0)?$"), json={"versions": [version("v2.0", "http://network.test/v2.0/")]})
        cloud.get("http://compute.test/v2.1/servers/detail", json={"servers": servers})

        def list_ports(request, _context):
            (device,) = request.qs["device_id"]
            return {"ports": [{"id": f"{device}-{number}", "device_id": device} for number in range(ports)]}

        cloud.get(re.compile("/v2.0/ports"), json=list_ports)
        cloud.get(re.compile("/v2.0/floatingips"), json={"floatingips": []})
        cloud.get(re.compile("/v2.0/networks"), json={"networks": []})
        with Connection(auth={"auth_url": "http://identity.test/v3", **LOGIN}, region_name="R", **options) as connection:
            assert len(list(call(connection))) == COUNT
        lists = re.compile("/(servers|ports|floatingips|networks)")
        return sum(1 for request in cloud.request_history if lists.search(request.path))


def layer(connection):
    return connection.list_servers()


seen = {
    "ACTIVE": requests_of(layer),
    "no addresses": requests_of(layer, addresses=()),
    "two ports": requests_of(layer, ports=2),
    "floating": requests_of(layer, addresses=(FIXED, FLOATING)),
    "BUILD": requests_of(layer, status="BUILD"),
    "bare": requests_of(lambda connection: connection.list_servers(bare=True)),
    "source none": requests_of(layer, floating_ip_source="none"),
    "proxy": requests_of(lambda connection: connection.compute.servers()),
}
print(", ".join(f"{name} {count}" for name, count in seen.items()))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'ACTIVE 42, no addresses 42, two ports 62, floating 2, BUILD 2, bare 1, source none 2, proxy 1' "$work/seen"
