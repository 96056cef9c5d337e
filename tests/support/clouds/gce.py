"""Google's Compute Engine and Cloud Storage, as far as the driver needs them.

Requests are checked by Google's own description of the API (the discovery document of its client
library): paths, methods, parameters and bodies. What is not in it is refused, and noted as a
mistake.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import re
import tarfile
import time
import urllib.parse
from functools import cache
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.clouds.stand_in import Machine, Refusal, StandIn
from tests.support.fault_proxy import Reply, Request

PROJECT, REGION, ZONES = "proj", "us-central1", ("us-central1-a", "us-central1-b")
FAMILY = "debian-12"
TYPES = {"n1-standard-1": (1, 3840), "n1-standard-4": (4, 15360)}
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


@cache
def description() -> dict[str, Any]:
    import googleapiclient

    folder = pathlib.Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
    return dict(json.loads((folder / "compute.v1.json").read_text()))


@cache
def methods() -> list[tuple[str, re.Pattern[str], str, dict[str, Any]]]:
    """HTTP method, pattern of the path, name and description of each."""
    found = []
    for collection, resource in description()["resources"].items():
        for name, method in resource.get("methods", {}).items():
            path = method.get("flatPath") or method["path"]
            pattern = re.escape(path).replace(r"\{", "{").replace(r"\}", "}")
            pattern = re.sub(r"{\+?(\w+)}", r"(?P<\1>[^/]+)", pattern)
            found.append(
                (method["httpMethod"], re.compile(pattern + r"\Z"), f"{collection}_{name}", method)
            )
    return found


def wrong_in(value: Any, schema: dict[str, Any], where: str) -> str | None:
    """What of a body is not in Google's description."""
    if "$ref" in schema:
        schema = description()["schemas"][schema["$ref"]]
    kind = schema.get("type")
    if kind and not isinstance(value, _KINDS.get(kind, (object,))):
        return f"{where} is {value!r}, not a {kind}"
    if kind == "array":
        return next(
            (
                w
                for i, each in enumerate(value)
                if (w := wrong_in(each, schema["items"], f"{where}[{i}]"))
            ),
            None,
        )
    if kind != "object":
        return None
    for key, each in value.items():
        inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
        if inner is None:
            return f"{where} has no {key}"
        if wrong := wrong_in(each, inner, f"{where}.{key}"):
            return wrong
    return None


def refusal(
    status: int, reason: str, message: str, headers: list[tuple[str, str]] | None = None
) -> Refusal:
    error = {
        "code": status,
        "message": message,
        "errors": [{"reason": reason, "message": message, "domain": "global"}],
    }
    return Refusal(status, {"error": error}, headers)


class GoogleCloud(StandIn):
    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.tokens: set[str] = set()
        self.token_life = 3600
        self.operations: dict[str, dict[str, Any]] = {}
        self.requests_seen: dict[str, str] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.family_image = f"projects/images/global/images/{FAMILY}-1"
        self.quotas: dict[str, float] = {"CPUS": 1000, "INSTANCES": 1000}
        self.types = dict(TYPES)
        #: Instances in one answer to a list.
        self.page = 500
        #: Error of the next import of an image.
        self.import_error: tuple[str, str] | None = None
        self.console = "the kernel's last words"
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.account = folder / "account.json"
        self.account.write_text(
            json.dumps(
                {
                    "type": "service_account",
                    "project_id": PROJECT,
                    "private_key_id": "k",
                    "private_key": key.private_bytes(
                        serialization.Encoding.PEM,
                        serialization.PrivateFormat.PKCS8,
                        serialization.NoEncryption(),
                    ).decode(),
                    "client_email": "launcher@proj.iam.gserviceaccount.com",
                    "client_id": "1",
                    "token_uri": f"{self.url}/token",
                }
            )
        )
        self.account.chmod(0o600)

    def environment(self) -> dict[str, str]:
        return {
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.account),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{self.url}/",
            "REQUESTS_CA_BUNDLE": self.ca,
        }

    # -- requests

    def handle(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        if path == "/token":
            return self._token(request)
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise refusal(401, "authError", "Invalid Credentials")
        if path.startswith("/compute/v1/"):
            return self._compute(method, path.removeprefix("/compute/v1/"), query, request)
        return self._storage(method, path, query, request)

    def _token(self, request: Request) -> Reply:
        form = request.params
        if (
            form.get("grant_type") != "urn:ietf:params:oauth:grant-type:jwt-bearer"
            or form.get("assertion", "").count(".") != 2
        ):
            raise Refusal(400, {"error": "invalid_grant", "error_description": "Invalid JWT"})
        token = f"token-{next(self.numbers)}"
        self.tokens.add(token)
        return self.json(
            {"access_token": token, "expires_in": self.token_life, "token_type": "Bearer"}
        )

    def _compute(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        for verb, pattern, name, told in methods():
            match = pattern.match(path) if verb == method else None
            if match is None:
                continue
            known = {**description()["parameters"], **told.get("parameters", {})}
            body = json.loads(request.body) if request.body else {}
            schema = told.get("request")
            wrong = next((f"no parameter {key}" for key in query if key not in known), None)
            if wrong is None and schema:
                wrong = wrong_in(body, schema, "body")
            handler = getattr(self, name, None)
            if wrong or handler is None:
                self.mistakes.append(f"{name}: {wrong or 'not here'}")
                raise refusal(400, "invalid", wrong or f"{name} is not here")
            return self.json(handler(query=query, body=body, **match.groupdict()))
        self.mistakes.append(f"{method} {path} is not in the description")
        raise refusal(404, "notFound", f"{method} {path}")

    # -- operations

    def _operation(
        self, target: str, place: str, took: float, error: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        name = f"operation-{next(self.numbers)}"
        made = {
            "kind": "compute#operation",
            "name": name,
            "targetLink": target,
            "zone": place,
            "status": "RUNNING",
        }
        self.operations[name] = {**made, "_done": time.monotonic() + took, "_error": error}
        return made

    def _told(self, name: str) -> dict[str, Any]:
        found = self.operations.get(name)
        if found is None:
            raise refusal(404, "notFound", f"operation {name}")
        told = {key: value for key, value in found.items() if not key.startswith("_")}
        if time.monotonic() >= found["_done"]:
            told["status"] = "DONE"
            if found["_error"]:
                code, message = found["_error"]
                told["error"] = {"errors": [{"code": code, "message": message}]}
        return told

    def zoneOperations_list(self, query: dict[str, str], **_more: Any) -> dict[str, Any]:
        found = [self._told(name) for name in self.operations if _chosen(name, query)]
        return {"kind": "compute#operationList", "items": found}

    def zoneOperations_get(self, operation: str, **_more: Any) -> dict[str, Any]:
        return self._told(operation)

    def globalOperations_get(self, operation: str, **_more: Any) -> dict[str, Any]:
        return self._told(operation)

    # -- instances

    def _shown(self, machine: Machine) -> dict[str, Any]:
        status = (
            "STOPPING"
            if machine.ending
            else "TERMINATED"
            if machine.halted
            else "RUNNING"
            if self.runs(machine)
            else "STAGING"
        )
        interface = dict(machine.body["networkInterfaces"][0])
        interface["networkIP"] = machine.facts["ip"]
        if "accessConfigs" in interface and status == "RUNNING":
            interface["accessConfigs"] = [
                {
                    **interface["accessConfigs"][0],
                    "natIP": machine.facts.get("public", machine.facts["ip"]),
                }
            ]
        return {
            **machine.body,
            "kind": "compute#instance",
            "id": machine.id,
            "status": status,
            "zone": f"{self.url}/compute/v1/projects/{PROJECT}/zones/{machine.place}",
            "networkInterfaces": [interface],
        }

    def instances_insert(
        self, zone: str, query: dict[str, str], body: dict[str, Any], **_more: Any
    ) -> dict[str, Any]:
        known = self.requests_seen.get(query.get("requestId", ""))
        if known:
            return self._told(known)
        if self.find(body["name"], zone):
            raise refusal(
                409, "alreadyExists", f"The resource 'instances/{body['name']}' already exists"
            )
        if len([each for each in self.now() if not each.ending]) >= min(
            self.allowed, self.quotas.get("INSTANCES", math.inf)
        ):
            raise refusal(403, "quotaExceeded", "Quota 'INSTANCES' exceeded.")
        size = body["machineType"].rpartition("/")[2]
        link = f"projects/{PROJECT}/zones/{zone}/instances/{body['name']}"
        if self.sold_out or f"{size}/{zone}" in self.sold_out_sizes or size in self.sold_out_sizes:
            made = self._operation(
                link,
                zone,
                0.05,
                ("ZONE_RESOURCE_POOL_EXHAUSTED", f"The zone {zone} has not enough resources"),
            )
        else:
            self.new_machine(body["name"], body, zone)
            made = self._operation(link, zone, self.boot)
        if "requestId" in query:
            self.requests_seen[query["requestId"]] = made["name"]
        return made

    def instances_list(self, zone: str, query: dict[str, str], **_more: Any) -> dict[str, Any]:
        found = [each for each in self.now() if each.place == zone and _chosen(each.name, query)]
        start = int(query.get("pageToken") or 0)
        page = min(self.page, int(query.get("maxResults") or 500))
        answer: dict[str, Any] = {"kind": "compute#instanceList"}
        if found:
            answer["items"] = [self._shown(each) for each in found[start : start + page]]
        if start + page < len(found):
            answer["nextPageToken"] = str(start + page)
        return answer

    def instances_get(self, zone: str, instance: str, **_more: Any) -> dict[str, Any]:
        return self._shown(self._there(instance, zone))

    def _there(self, name: str, zone: str) -> Machine:
        machine = self.find(name, zone)
        if machine is None:
            raise refusal(
                404,
                "notFound",
                f"The resource 'projects/{PROJECT}/zones/{zone}/instances/{name}' was not found",
            )
        return machine

    def instances_delete(self, zone: str, instance: str, **_more: Any) -> dict[str, Any]:
        self.end(self._there(instance, zone))
        return self._operation(instance, zone, self.ending)

    def instances_stop(self, zone: str, instance: str, **_more: Any) -> dict[str, Any]:
        self._there(instance, zone).halted = True
        return self._operation(instance, zone, 0)

    def instances_getSerialPortOutput(
        self, zone: str, instance: str, **_more: Any
    ) -> dict[str, Any]:
        self._there(instance, zone)
        return {"contents": self.console}

    # -- facts

    def machineTypes_get(self, zone: str, machineType: str, **_more: Any) -> dict[str, Any]:
        if machineType not in self.types or zone not in ZONES:
            raise refusal(404, "notFound", f"machine type {machineType} of zone {zone}")
        cpus, memory = self.types[machineType]
        return {
            "name": machineType,
            "guestCpus": cpus,
            "memoryMb": memory,
            "selfLink": f"zones/{zone}/machineTypes/{machineType}",
        }

    def regions_get(self, region: str, **_more: Any) -> dict[str, Any]:
        return {
            "name": region,
            "quotas": [
                {"metric": key, "limit": value, "usage": 0} for key, value in self.quotas.items()
            ],
        }

    # -- images

    def images_getFromFamily(self, project: str, family: str, **_more: Any) -> dict[str, Any]:
        if family != FAMILY:
            raise refusal(404, "notFound", f"family {family} of {project}")
        return {"name": self.family_image.rpartition("/")[2], "selfLink": self.family_image}

    def images_insert(self, body: dict[str, Any], **_more: Any) -> dict[str, Any]:
        source = (
            urllib.parse.unquote(body["rawDisk"]["source"])
            .removeprefix("https://storage.googleapis.com/")
            .partition("/")[2]
        )
        if source not in self.objects:
            raise refusal(400, "invalid", f"no object {source}")
        if body["name"] in self.images:
            raise refusal(409, "alreadyExists", body["name"])
        if self.import_error is None:
            self.images[body["name"]] = {
                **body,
                "_data": self.objects[source]["data"],
                "status": "READY",
            }
        return self._operation(body["name"], "", 0.2, self.import_error)

    def images_list(self, **_more: Any) -> dict[str, Any]:
        shown = [
            {key: value for key, value in each.items() if key != "_data"}
            for each in self.images.values()
        ]
        return {"kind": "compute#imageList", "items": shown}

    def images_delete(self, image: str, **_more: Any) -> dict[str, Any]:
        if self.images.pop(image, None) is None:
            raise refusal(404, "notFound", f"image {image}")
        return self._operation(image, "", 0)

    @staticmethod
    def disk_of(archive: bytes) -> bytes:
        """The disk in an archive, without the zeros at its end."""
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as found:
            (entry,) = found.getmembers()
            assert entry.name == "disk.raw" and entry.size % (1 << 30) == 0 and entry.size
            content = found.extractfile(entry)
            assert content is not None
            data = content.read(64 << 20)
            while rest := content.read(64 << 20):
                assert not rest.strip(b"\0")
            return data.rstrip(b"\0")

    # -- storage

    def _storage(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        if path.startswith("/upload/storage/v1/b/"):
            return self._upload(method, query, request)
        if method == "GET" and path.endswith("/o"):
            shown = [
                {"name": name, "metadata": each["metadata"]} for name, each in self.objects.items()
            ]
            return self.json({"items": shown} if shown else {})
        if method == "DELETE":
            if self.objects.pop(path.partition("/o/")[2], None) is None:
                raise refusal(404, "notFound", path)
            return Reply(204)
        raise refusal(404, "notFound", f"{method} {path}")

    def _upload(self, method: str, query: dict[str, str], request: Request) -> Reply:
        if method == "POST":
            about = json.loads(request.body)
            session = f"s{next(self.numbers)}"
            self.uploads[session] = {**about, "data": bytearray()}
            return Reply(
                200,
                b"",
                [("Location", f"{self.url}/upload/storage/v1/b/bucket/o?upload_id={session}")],
            )
        upload = self.uploads.get(query.get("upload_id", ""))
        if upload is None:
            raise refusal(410, "gone", "no such upload")
        match = re.fullmatch(
            r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers.get("content-range", "")
        )
        assert match, request.headers
        data: bytearray = upload["data"]
        if match[1] is not None:
            assert int(match[1]) == len(data), "a piece at the wrong place"
            assert match[3] != "*" or len(request.body) % (256 << 10) == 0
            data += request.body
        if match[3] != "*" and len(data) == int(match[3]):
            self.objects[upload["name"]] = {
                "data": bytes(data),
                "metadata": upload.get("metadata") or {},
            }
            return self.json({"name": upload["name"]})
        headers = [("Range", f"bytes=0-{len(data) - 1}")] if data else []
        return Reply(308, b"", headers)


def _chosen(name: str, query: dict[str, str]) -> bool:
    wanted = query.get("filter")
    if not wanted:
        return True
    names = re.findall(r'\(name = "([^"]*)"\)', wanted)
    assert " OR ".join(f'(name = "{each}")' for each in names) == wanted, wanted
    return name in names
