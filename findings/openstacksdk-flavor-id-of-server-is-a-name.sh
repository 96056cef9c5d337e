#!/bin/sh
# openstacksdk 4.22.0 with keystoneauth1 5.18.1 (PyPI), against a mock cloud: the id of server.flavor is the NAME of the
# flavor if Nova knows microversion 2.47 or later. The SDK asks for the latest microversion that both know, and from 2.47
# on, Nova describes the flavor of a server by its name, without its id. server.flavor is still a Flavor with an id, and
# no error or warning tells that this is another value: it equals no id of Connection.compute.flavors(), and get_flavor()
# does not find it, unless id and name are the same. compute_default_microversion "2.1" restores the id.
# Seen: "flavor 42 named small: 2.96 id small, get_flavor NotFoundException; 2.1 id 42, get_flavor finds small".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    openstacksdk==4.22.0 keystoneauth1==5.18.1 requests-mock==1.12.1
cat >"$work/run.py" <<'END'
import requests_mock
from openstack import exceptions
from openstack.connection import Connection

URL = "http://compute.test/v2.1/"
FLAVOR = {"id": "42", "name": "small", "ram": 512, "vcpus": 1, "disk": 10}
OLD = {"id": "42", "links": [{"rel": "bookmark", "href": "http://compute.test/flavors/42"}]}
NEW = {"original_name": "small", "ram": 512, "vcpus": 1, "disk": 10, "ephemeral": 0, "swap": 0, "extra_specs": {}}


def list_servers(request, _context):
    """Answer as the API reference of Nova says for each microversion."""
    asked = request.headers.get("OpenStack-API-Version", "compute 2.1").split()[1]
    new = int(asked.split(".")[1]) >= 47
    return {"servers": [{"id": "s", "name": "node", "status": "ACTIVE", "flavor": NEW if new else OLD}]}


def attempt(**options):
    with requests_mock.Mocker() as cloud:
        current = {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1"}
        cloud.get(URL, json={"version": {**current, "links": [{"rel": "self", "href": URL}]}})
        listing = cloud.get(URL + "servers/detail", json=list_servers)
        cloud.get(URL + "flavors/42", json={"flavor": FLAVOR})
        cloud.get(URL + "flavors/small", status_code=404, json={"itemNotFound": {"code": 404, "message": "no flavor"}})
        with Connection(auth_type="none", compute_endpoint_override=URL, **options) as connection:
            (server,) = connection.compute.servers()
            try:
                found = "finds " + connection.compute.get_flavor(server.flavor.id).name
            except exceptions.SDKException as error:
                found = type(error).__name__
        asked = listing.last_request.headers.get("OpenStack-API-Version", "compute 2.1").split()[1]
        return asked, f"id {server.flavor.id}, get_flavor {found}"


chosen, latest = attempt()
fixed, first = attempt(compute_default_microversion="2.1")
print(f"flavor 42 named small: {chosen} {latest}; {fixed} {first}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'flavor 42 named small: 2.96 id small, get_flavor NotFoundException; 2.1 id 42, get_flavor finds small' "$work/seen"
