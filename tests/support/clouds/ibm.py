"""IBM Cloud: VPC, tokens, resource groups and instances. Bodies are checked by the models of IBM's
own library (ibm-vpc).

Object storage is moto's.
"""

from __future__ import annotations

import http.client
import inspect
import json
import math
import pathlib
import re
import time
from typing import Any

import jwt

from tests.support.aws.cloud import moto_port
from tests.support.clouds.stand_in import Machine, Refusal, StandIn
from tests.support.fault_proxy import HOP_BY_HOP, Reply, Request

REGION, ZONES, VPC = "us-south", ("us-south-1", "us-south-2"), "net"
PROFILES = {"cx2-2x4": (2, 4), "bx2-4x16": (4, 16)}
KEY = "the-api-key"
SIGNED_BY = "a secret of the token service, at least 32 bytes long"


def refusal(status: int, code: str, message: str) -> Refusal:
    return Refusal(status, {"errors": [{"code": code, "message": message}], "trace": "t"})


#: Models of parts of bodies, of which at least one has to fit.
PARTS = {
    "keys": ("KeyIdentityById",),
    "profile": ("InstanceProfileIdentityByName", "VolumeProfileIdentityByName"),
    "resource_group": ("ResourceGroupIdentityById",),
    "vpc": ("VPCIdentityById",),
    "image": ("ImageIdentityById", "ImageIdentityByHref"),
    "primary_network_interface": ("NetworkInterfacePrototype",),
    "subnet": ("SubnetIdentityById",),
    "zone": ("ZoneIdentityByName",),
    "boot_volume_attachment": ("VolumeAttachmentPrototypeInstanceByImageContext",),
    "volume": ("VolumePrototypeInstanceByImageContext",),
    "file": ("ImageFilePrototype",),
    "operating_system": ("OperatingSystemIdentityByName",),
}


def checked(body: dict[str, Any], *wanted: str) -> str | None:
    """What none of IBM's models of these names knows, or what they miss; parts included."""
    import ibm_vpc.vpc_v1 as models

    wrong = None
    for name in wanted:
        parameters = dict(
            list(inspect.signature(getattr(models, name).__init__).parameters.items())[1:]
        )
        missing = [
            key
            for key, each in parameters.items()
            if each.default is each.empty and key not in body
        ]
        unknown = [key for key in body if key not in parameters]
        wrong = (
            f"{name}: unknown {unknown}, missing {missing}: {body}" if missing or unknown else None
        )
        if wrong is None:
            break
    for key, value in body.items():
        for part in value if isinstance(value, list) else [value]:
            if wrong is None and isinstance(part, dict):
                wrong = checked(part, *PARTS[key])
    return wrong


class IbmCloud(StandIn):
    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.tokens: set[str] = set()
        self.groups: dict[str, str] = {"g-default": "Default"}
        self.addresses: dict[str, dict[str, Any]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.page = 50
        self.import_takes = 0.2
        self.import_error: str | None = None
        self.bucket = f"bucket-{self.proxy.port}"
        #: What images were made of, by the address of the object.
        self.imported: dict[str, bytes] = {}
        self.credentials = folder / "ibm.env"
        self.credentials.write_text(
            f"# for tests\nVPC_AUTH_TYPE=iam\nVPC_APIKEY={KEY}\nVPC_AUTH_URL={self.url}\nVPC_"
            f"URL={self.url}/v1\n"
            f"RESOURCE_MANAGER_URL={self.url}\nRESOURCE_CONTROLLER_URL={self.url}\n"
        )
        self.credentials.chmod(0o600)
        system = {
            "name": "debian-12-amd64",
            "family": "Debian",
            "version": "12",
            "architecture": "amd64",
        }
        for number, created in ((1, "2025-01-01T00:00:00Z"), (2, "2026-01-01T00:00:00Z")):
            self.images[f"i-{number}"] = {
                "id": f"i-{number}",
                "name": f"debian-{number}",
                "status": "available",
                "owner_type": "provider",
                "operating_system": system,
                "created_at": created,
                "resource_group": {"id": "g-default", "name": "Default"},
            }

    def environment(self) -> dict[str, str]:
        return {"REQUESTS_CA_BUNDLE": self.ca, "AWS_CA_BUNDLE": self.ca}

    # -- requests

    def handle(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        if path == "/identity/token":
            return self._token(request)
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise refusal(401, "not_authorized", "The token is invalid")
        if path.startswith("/cos/"):
            return self._storage(request)
        if path == "/v2/resource_groups":
            return self._resource_groups(method, request)
        if path == "/v2/resource_instances":
            found = [
                {"name": query["name"], "crn": "crn:v1:bluemix:public:kms:us-south:a/1:2::"},
                {
                    "name": query["name"],
                    "crn": "crn:v1:bluemix:public:cloud-object-storage:global:a/1:2::",
                },
            ]
            return self.json({"resources": found if query["name"] == "storage" else []})
        if not path.startswith("/v1/") or query.get("generation") != "2" or "version" not in query:
            self.mistakes.append(f"{method} {path} {query}")
            raise refusal(400, "bad_request", path)
        body = json.loads(request.body) if request.body else {}
        return self._vpc(method, path.removeprefix("/v1/").split("/"), query, body)

    def _token(self, request: Request) -> Reply:
        form = request.params
        assert form.get("grant_type") == "urn:ibm:params:oauth:grant-type:apikey", form
        if form.get("apikey") != KEY:
            raise Refusal(
                400,
                {"errorCode": "BXNIM0415E", "errorMessage": "Provided API key could not be found."},
            )
        now = int(time.time())
        token = jwt.encode(
            {"iat": now, "exp": now + 3600, "jti": next(self.numbers)}, SIGNED_BY, algorithm="HS256"
        )
        self.tokens.add(token)
        told = {
            "access_token": token,
            "refresh_token": "none",
            "token_type": "Bearer",
            "expires_in": 3600,
            "expiration": now + 3600,
        }
        return self.json(told)

    def _storage(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", moto_port(), timeout=60)
        try:
            headers = {
                key: value for key, value in request.headers.items() if key not in HOP_BY_HOP
            }
            connection.request(
                request.method, request.path.removeprefix("/cos"), request.body, headers
            )
            answer = connection.getresponse()
            kept = [
                (key, value) for key, value in answer.getheaders() if key.lower() not in HOP_BY_HOP
            ]
            body = answer.read()
            if b"<LocationConstraint" in body:
                body = (
                    b'<?xml version="1.0"?><LocationConstraint>us-south-smart</LocationConstraint>'
                )
            return Reply(answer.status, body, kept)
        finally:
            connection.close()

    def _moto(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", moto_port(), timeout=60)
        try:
            connection.request(
                method,
                path,
                headers={
                    "Authorization": "AWS4-HMAC-SHA256 "
                    "Credential=test/20250101/us-east-1/s3/aws4_request"
                },
            )
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status < 300, (answer.status, body)
            return body
        finally:
            connection.close()

    def make_bucket(self) -> None:
        self._moto("PUT", f"/{self.bucket}")
        self._has_bucket = True

    _has_bucket = False

    def objects(self) -> list[str]:
        if not self._has_bucket:
            return []
        return re.findall(r"<Key>([^<]*)</Key>", self._moto("GET", f"/{self.bucket}").decode())

    def unfinished(self) -> list[str]:
        """Objects with parts only."""
        if not self._has_bucket:
            return []
        return re.findall(
            r"<Key>([^<]*)</Key>", self._moto("GET", f"/{self.bucket}?uploads").decode()
        )

    def _resource_groups(self, method: str, request: Request) -> Reply:
        if method == "POST":
            name = json.loads(request.body)["name"]
            if name in self.groups.values():
                raise refusal(409, "conflict", f"{name} exists")
            key = f"g{next(self.numbers)}"
            self.groups[key] = name
            return self.json({"id": key}, 201)
        return self.json(
            {"resources": [{"id": key, "name": name} for key, name in self.groups.items()]}
        )

    # -- VPC

    def _vpc(
        self, method: str, parts: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> Reply:
        if len(parts) == 1 and method == "GET":
            return self._page(self._all(parts[0]), parts[0], query)
        if parts[0] == "instance" and parts[1:] == ["profiles"]:
            found = [
                {
                    "name": name,
                    "vcpu_count": {"type": "fixed", "value": cores},
                    "memory": {"type": "fixed", "value": memory},
                }
                for name, (cores, memory) in PROFILES.items()
            ]
            return self._page(found, "profiles", query)
        if parts[0] == "instances":
            return self._servers(method, parts[1:], body)
        if parts[0] == "floating_ips":
            return self._floating(method, parts[1:], body)
        if parts[0] == "images":
            return self._images(method, parts[1:], body)
        self.mistakes.append(f"{method} {parts}")
        raise refusal(404, "not_found", str(parts))

    def _all(self, kind: str) -> list[dict[str, Any]]:
        if kind == "instances":
            return [self._shown(machine) for machine in self.now()]
        if kind == "floating_ips":
            return list(self.addresses.values())
        if kind == "images":
            return [self._image(each) for each in self.images.values()]
        return {
            "vpcs": [{"id": "vpc-1", "name": VPC}],
            "keys": [{"id": "key-1", "name": "zuul"}],
            "subnets": [
                {"id": f"subnet-{zone}", "name": f"net-{zone}", "zone": {"name": zone}}
                for zone in ZONES
            ],
        }[kind]

    def _page(self, found: list[dict[str, Any]], key: str, query: dict[str, str]) -> Reply:
        if "name" in query:
            found = [each for each in found if each["name"] == query["name"]]
        start, size = int(query.get("start") or 0), min(self.page, int(query.get("limit") or 50))
        answer: dict[str, Any] = {
            key: found[start : start + size],
            "limit": size,
            "total_count": len(found),
        }
        if start + size < len(found):
            answer["next"] = {"href": f"{self.url}/v1/{key}?start={start + size}&limit={size}"}
        return self.json(answer)

    def _group(self, body: dict[str, Any]) -> dict[str, str]:
        key = body["resource_group"]["id"]
        if key not in self.groups:
            raise refusal(400, "bad_field", f"resource group {key}")
        return {"id": key, "name": self.groups[key]}

    def _shown(self, machine: Machine) -> dict[str, Any]:
        status = "deleting" if machine.ending else "stopped" if machine.halted else "pending"
        if status == "pending" and machine.up <= time.monotonic():
            status = "failed" if machine.facts.get("error") else "running"
        error = machine.facts.get("error")
        return {
            "id": machine.id,
            "name": machine.name,
            "status": status,
            "status_reasons": [{"code": error[0], "message": error[1]}]
            if error and status == "failed"
            else [],
            "profile": machine.body["profile"],
            "zone": {"name": machine.place},
            "resource_group": machine.facts["group"],
            "primary_network_interface": {
                "id": f"nic-{machine.id}",
                "name": "eth0",
                "primary_ip": {"address": machine.facts["ip"]},
            },
        }

    def _servers(self, method: str, parts: list[str], body: dict[str, Any]) -> Reply:
        if method == "POST":
            return self._create(body)
        machine = self.by_id(parts[0])
        if machine is None:
            raise refusal(404, "not_found", f"instance {parts[0]}")
        if method == "PUT" and parts[1] == "network_interfaces" and parts[3] == "floating_ips":
            if not self.runs(machine) or parts[2] != f"nic-{machine.id}":
                raise refusal(409, "invalid_state", "not running")
            address = self.addresses[parts[4]]
            address["target"] = {"id": parts[2]}
            machine.facts["address"] = parts[4]
            return self.json(address, 201)
        if method == "DELETE":
            self.end(machine)
            return Reply(204)
        return self.json(self._shown(machine))

    def _create(self, body: dict[str, Any]) -> Reply:
        wrong = checked(
            body, "InstancePrototypeInstanceByImageInstanceByImageInstanceByNetworkInterface"
        )
        if wrong:
            self.mistakes.append(wrong)
            raise refusal(400, "bad_field", wrong)
        zone, profile = body["zone"]["name"], body["profile"]["name"]
        if profile not in PROFILES:
            raise refusal(400, "instance_profile_not_found", f"there is no profile {profile}")
        if body["primary_network_interface"]["subnet"]["id"] != f"subnet-{zone}":
            raise refusal(400, "bad_field", "the subnet is in another zone")
        if len(self.living()) >= self.allowed:
            raise refusal(400, "over_quota", "The instance quota of the account is used up")
        if self.sold_out or profile in self.sold_out_sizes:
            raise refusal(503, "insufficient_capacity", "no capacity")
        machine = self.new_machine(body["name"], body, zone)
        machine.facts["group"] = self._group(body)
        if f"{profile}/{zone}" in self.sold_out_sizes:
            machine.facts["error"] = ("cannot_start_capacity", "insufficient capacity in the zone")
        return self.json(self._shown(machine), 201)

    def _floating(self, method: str, parts: list[str], body: dict[str, Any]) -> Reply:
        if method == "POST":
            if wrong := checked(body, "FloatingIPPrototypeFloatingIPByZone"):
                self.mistakes.append(wrong)
                raise refusal(400, "bad_field", wrong)
            key = f"fip-{next(self.numbers)}"
            self.addresses[key] = {
                "id": key,
                "name": body["name"],
                "status": "available",
                "zone": body["zone"],
                "address": "127.0.0.1",
                "resource_group": self._group(body),
            }
            return self.json(self.addresses[key], 201)
        if parts[0] not in self.addresses:
            raise refusal(404, "not_found", f"floating address {parts[0]}")
        if method == "DELETE":
            del self.addresses[parts[0]]
            return Reply(204)
        return self.json(self.addresses[parts[0]])

    def _image(self, image: dict[str, Any]) -> dict[str, Any]:
        shown = {key: value for key, value in image.items() if not key.startswith("_")}
        if time.monotonic() >= image.get("_done", -math.inf) and shown["status"] == "pending":
            shown["status"] = "failed" if self.import_error else "available"
            shown["status_reasons"] = (
                [{"code": "image_format", "message": self.import_error}]
                if self.import_error
                else []
            )
        return shown

    def _images(self, method: str, parts: list[str], body: dict[str, Any]) -> Reply:
        if method == "POST":
            if wrong := checked(body, "ImagePrototypeImageByFile"):
                self.mistakes.append(wrong)
                raise refusal(400, "bad_field", wrong)
            if body["name"] in [each["name"] for each in self.images.values()]:
                raise refusal(400, "duplicate", f"image {body['name']} exists")
            key = f"i-{next(self.numbers)}x"
            place, _, name = (
                body["file"]["href"].removeprefix(f"cos://us-south/{self.bucket}").partition("/")
            )
            assert not place, body["file"]
            self.imported[body["file"]["href"]] = self._moto("GET", f"/{self.bucket}/{name}")
            self.images[key] = {
                "id": key,
                "name": body["name"],
                "status": "pending",
                "owner_type": "user",
                "_file": body["file"]["href"],
                "resource_group": self._group(body),
                "operating_system": body["operating_system"],
                "created_at": "2026-02-01T00:00:00Z",
                "_done": time.monotonic() + self.import_takes,
            }
            return self.json(self._image(self.images[key]), 201)
        if parts[0] not in self.images:
            raise refusal(404, "not_found", f"image {parts[0]}")
        if method == "DELETE":
            del self.images[parts[0]]
            return Reply(202)
        return self.json(self._image(self.images[parts[0]]))
