"""Azure Resource Manager and the page blobs of managed disks, as far as the driver needs them.

Bodies are checked by the models of Microsoft's own client libraries (azure-mgmt-compute,
azure-mgmt-network). Changes are asynchronous: they answer with the address of an operation.
"""

from __future__ import annotations

import enum
import json
import math
import pathlib
import re
import time
import types
import typing
from typing import Any

from tests.support.clouds.stand_in import Machine, Refusal, StandIn
from tests.support.fault_proxy import Reply, Request

SUBSCRIPTION, TENANT, GROUP, LOCATION = "sub-1", "tenant-1", "nodepool", "centralus"
NETWORK = "net"
SIZES = {"Standard_B1ls": (1, 0.5), "Standard_D2s_v5": (2, 8)}
_SUBSCRIPTION = f"/subscriptions/{SUBSCRIPTION}"
_OF_GROUP = re.compile(
    rf"{_SUBSCRIPTION}/resourceGroups/([^/]+)/providers/Microsoft\.(\w+)/(\w+)(?:/([^/]*))?(?:/"
    r"(.*))?\Z"
)
VERSIONS = {
    "virtualMachines": "2023-03-01",
    "disks": "2020-06-30",
    "images": "2020-12-01",
    "networkInterfaces": "2020-11-01",
    "publicIPAddresses": "2020-11-01",
    "virtualNetworks": "2020-07-01",
}


def wrong_in(value: Any, hint: Any, where: str) -> str | None:
    """What of a body Microsoft's models do not know."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        tried = [wrong_in(value, each, where) for each in inner if each is not type(None)]
        return None if None in tried else tried[0]
    if origin is list:
        if not isinstance(value, list):
            return f"{where} is no list"
        return next(
            (w for i, each in enumerate(value) if (w := wrong_in(each, inner[0], f"{where}[{i}]"))),
            None,
        )
    if origin is dict:
        if not isinstance(value, dict):
            return f"{where} is no dictionary"
        return next(
            (w for key, each in value.items() if (w := wrong_in(each, inner[1], f"{where}.{key}"))),
            None,
        )
    if isinstance(hint, type) and hasattr(hint, "_attr_to_rest_field"):
        return _wrong_in_model(value, hint, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return (
            None
            if value in [each.value for each in hint]
            else f"{where}: {value!r} is none of {[each.value for each in hint]}"
        )
    if hint in (str, int, bool, float):
        kinds = (int, float) if hint is float else (hint,)
        good = isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))
        return None if good else f"{where} is {value!r}, not {hint.__name__}"
    return None


def _wrong_in_model(value: Any, model: Any, where: str) -> str | None:
    import sys

    if not isinstance(value, dict):
        return f"{where} is no {model.__name__}"
    model.__new__(model)
    module = vars(sys.modules[model.__module__])
    package = sys.modules[model.__module__.rpartition("._")[0]]
    hints = typing.get_type_hints(model, globalns={**module, "_models": package})
    fields = model._attr_to_rest_field.items()
    known = {field._rest_name: name for name, field in fields}
    for key, each in value.items():
        if key not in known:
            return f"{where} ({model.__name__}) has no {key}"
        if wrong := wrong_in(each, hints.get(known[key]), f"{where}.{key}"):
            return wrong
    return None


def model_of(kind: str) -> Any:
    import azure.mgmt.compute.models as compute

    return {
        "virtualMachines": compute.VirtualMachine,
        "disks": compute.Disk,
        "images": compute.Image,
    }[kind]


def refusal(
    status: int, code: str, message: str, headers: list[tuple[str, str]] | None = None
) -> Refusal:
    return Refusal(status, {"error": {"code": code, "message": message}}, headers)


class AzureCloud(StandIn):
    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.tokens: set[str] = set()
        self.token_life = 3600
        self.secret = "s3cret-of-the-principal"
        #: What tokens are asked for; None: this server.
        self.resource: str | None = None
        #: Sizes of all locations may be asked for, as 11.0.0 does.
        self.any_skus = False
        self.shouts = True
        self.things: dict[tuple[str, str], dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytearray] = {}
        self.limits: dict[str, float] = {"cores": 1000, "virtualMachines": 1000}
        self.sizes = dict(SIZES)
        self.page = 100
        self.pages_written = 0
        self.retry_after = "0.1"
        self.fail_image: tuple[str, str] | None = None
        self.auth_path = folder / "azure.json"
        self.write_account()

    def write_account(self, **changes: Any) -> None:
        told = {
            "clientId": "client-1",
            "clientSecret": self.secret,
            "subscriptionId": SUBSCRIPTION,
            "tenantId": TENANT,
            "activeDirectoryEndpointUrl": self.url,
            "resourceManagerEndpointUrl": f"{self.url}/",
            **changes,
        }
        self.auth_path.write_text(
            json.dumps({key: value for key, value in told.items() if value is not None})
        )
        self.auth_path.chmod(0o600)

    def environment(self) -> dict[str, str]:
        return {"REQUESTS_CA_BUNDLE": self.ca}

    # -- requests

    def handle(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        if path == f"/{TENANT}/oauth2/token":
            return self._token(request)
        if path.startswith("/blob/"):
            return self._blob(method, path, query, request)
        if path.startswith("/console/"):
            return Reply(200, b"the kernel's last words", [("Content-Type", "text/plain")])
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise refusal(401, "ExpiredAuthenticationToken", "The access token is invalid.")
        if path.startswith("/operations/"):
            return self._operation(path.rpartition("/")[2])
        match = _OF_GROUP.match(path)
        if match:
            group, _, kind, name, rest = match.groups()
            return self._of_group(method, group, kind, name or "", rest or "", query, request)
        if path == f"{_SUBSCRIPTION}/providers/Microsoft.Compute/skus/":
            assert self.any_skus or query == {
                "api-version": "2019-04-01",
                "$filter": f"location eq '{LOCATION}'",
            }, query
            return self.json({"value": [self._sku(name) for name in self.sizes]})
        if path == f"{_SUBSCRIPTION}/providers/Microsoft.Compute/locations/{LOCATION}/usages":
            used = len(self.living())
            shown = [
                {"name": {"value": key}, "limit": limit, "currentValue": used}
                for key, limit in self.limits.items()
            ]
            return self.json({"value": shown})
        self.mistakes.append(f"{method} {path}")
        raise refusal(404, "InvalidResourceType", path)

    def _token(self, request: Request) -> Reply:
        form = request.params
        assert form.get("grant_type") == "client_credentials" and form.get("resource") == (
            self.resource or f"{self.url}/"
        ), form
        if form.get("client_secret") != self.secret:
            raise Refusal(
                401,
                {
                    "error": "invalid_client",
                    "error_description": "AADSTS7000215: Invalid client secret.\r\nTrace",
                },
            )
        token = f"token-{next(self.numbers)}"
        self.tokens.add(token)
        return self.json(
            {
                "access_token": token,
                "expires_on": str(int(time.time() + self.token_life)),
                "token_type": "Bearer",
            }
        )

    def _sku(self, name: str) -> dict[str, Any]:
        cores, memory = self.sizes[name]
        told = [
            {"name": "vCPUs", "value": str(cores)},
            {"name": "MemoryGB", "value": str(memory)},
            {"name": "x", "value": "True"},
        ]
        return {
            "name": name,
            "resourceType": "virtualMachines",
            "locations": [LOCATION],
            "capabilities": told,
        }

    # -- operations

    def _begin(
        self, took: float, output: Any = None, error: tuple[str, str] | None = None
    ) -> list[tuple[str, str]]:
        name = f"op{next(self.numbers)}"
        self.operations[name] = {"done": time.monotonic() + took, "output": output, "error": error}
        return [
            ("Azure-AsyncOperation", f"{self.url}/operations/{name}"),
            ("Retry-After", self.retry_after),
        ]

    def _operation(self, name: str) -> Reply:
        found = self.operations[name]
        told: dict[str, Any] = {"status": "InProgress"}
        if time.monotonic() >= found["done"]:
            told = {"status": "Succeeded", "properties": {"output": found["output"]}}
            if found["error"]:
                told = {
                    "status": "Failed",
                    "error": {"code": found["error"][0], "message": found["error"][1]},
                }
        return self.json(told, headers=[("Retry-After", self.retry_after)])

    # -- things

    def _of_group(
        self,
        method: str,
        group: str,
        kind: str,
        name: str,
        rest: str,
        query: dict[str, str],
        request: Request,
    ) -> Reply:
        if query.get("api-version") != VERSIONS.get(kind):
            self.mistakes.append(f"{method} {kind} with version {query.get('api-version')}")
        if kind == "virtualNetworks":
            if name != NETWORK or rest != "subnets/default":
                raise refusal(404, "ResourceNotFound", f"subnet {rest} of {name}")
            return self.json({"id": f"{_SUBSCRIPTION}/subnet"})
        if group != GROUP:
            raise refusal(
                404, "ResourceGroupNotFound", f"Resource group '{group}' could not be found."
            )
        if method == "GET" and not name:
            return self._page(self._all(kind), query, request.path)
        body = json.loads(request.body) if request.body else {}
        if method == "PUT" and (wrong := wrong_in(body, model_of(kind), kind)):
            self.mistakes.append(wrong)
            raise refusal(400, "InvalidParameter", wrong)
        if kind == "virtualMachines":
            return self._machine(method, name, rest, body)
        return self._thing(method, kind, name, rest, body)

    def _page(self, found: list[dict[str, Any]], query: dict[str, str], path: str) -> Reply:
        start = int(query.get("start") or 0)
        answer: dict[str, Any] = {"value": found[start : start + self.page]}
        if start + self.page < len(found):
            address = path.partition("?")[0]
            answer["nextLink"] = (
                f"{self.url}{address}?api-version={query['api-version']}&start={start + self.page}"
            )
        return self.json(answer)

    def _id(self, kind: str, name: str) -> str:
        provider = "Network" if kind in ("networkInterfaces", "publicIPAddresses") else "Compute"
        return (
            f"{_SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.{provider}/{kind}/{name}"
        )

    def _all(self, kind: str) -> list[dict[str, Any]]:
        if kind == "virtualMachines":
            return [self._shown(machine) for machine in self.now()]
        if kind == "networkInterfaces":
            return [
                self._interface(machine) for machine in self.now() if self.runs(machine)
            ] + self._stored(kind)
        if kind == "publicIPAddresses":
            return [
                each
                for machine in self.now()
                if self.runs(machine)
                for each in self._addresses(machine)
            ] + self._stored(kind)
        return self._stored(kind)

    def _stored(self, kind: str) -> list[dict[str, Any]]:
        return [thing for (of, _), thing in self.things.items() if of == kind]

    def _configurations(self, machine: Machine) -> list[dict[str, Any]]:
        made = (
            machine.body["properties"]
            .get("networkProfile", {})
            .get("networkInterfaceConfigurations")
        )
        return made[0]["properties"]["ipConfigurations"] if made else []

    def _interface(self, machine: Machine) -> dict[str, Any]:
        shown = []
        for each in self._configurations(machine):
            properties = each["properties"]
            version = properties["privateIPAddressVersion"]
            told: dict[str, Any] = {"privateIPAddressVersion": version}
            told["privateIPAddress"] = machine.facts["ip"] if version == "IPv4" else "fd00::1"
            public = properties.get("publicIPAddressConfiguration")
            if public:
                address = self._id("publicIPAddresses", public["name"])
                # Ids are said in any case.
                told["publicIPAddress"] = {
                    "id": address.upper() if self.shouts else address,
                    "type": "Microsoft.Network/publicIPAddresses",
                    "properties": {"publicIPAddressVersion": version, "deleteOption": "Delete"},
                }
            shown.append({"name": each["name"], "properties": told})
        return {
            "id": self._id("networkInterfaces", f"{machine.name}-nic"),
            "name": f"{machine.name}-nic",
            "type": "Microsoft.Network/networkInterfaces",
            "properties": {"ipConfigurations": shown, "provisioningState": "Succeeded"},
        }

    def _addresses(self, machine: Machine) -> list[dict[str, Any]]:
        found = []
        for each in self._configurations(machine):
            public = each["properties"].get("publicIPAddressConfiguration")
            if public:
                address = (
                    machine.facts.get("public", machine.facts["ip"])
                    if "v4" in public["name"]
                    else "2001:db8::1"
                )
                told = {"id": self._id("publicIPAddresses", public["name"]), "name": public["name"]}
                version = "IPv4" if "v4" in public["name"] else "IPv6"
                properties = {
                    "ipAddress": address,
                    "publicIPAddressVersion": version,
                    "provisioningState": "Succeeded",
                }
                found.append(
                    {
                        **told,
                        "type": "Microsoft.Network/publicIPAddresses",
                        "properties": properties,
                    }
                )
        return found

    def _shown(self, machine: Machine) -> dict[str, Any]:
        state = "Deleting" if machine.ending else "Creating"
        if not machine.ending and machine.up <= time.monotonic():
            state = "Failed" if machine.facts.get("error") else "Succeeded"
        reference = {
            "id": self._id("networkInterfaces", f"{machine.name}-nic"),
            "properties": {"primary": True, "deleteOption": "Delete"},
        }
        properties = {
            **machine.body["properties"],
            "provisioningState": state,
            "networkProfile": {"networkInterfaces": [reference]},
        }
        properties.pop("osProfile", None)
        return {
            **machine.body,
            "id": self._id("virtualMachines", machine.name),
            "name": machine.name,
            "type": "Microsoft.Compute/virtualMachines",
            "zones": machine.body.get("zones") or ["1"],
            "properties": properties,
        }

    def _machine(self, method: str, name: str, rest: str, body: dict[str, Any]) -> Reply:
        machine = self.find(name)
        if method == "PUT":
            if machine is not None:
                return self.json(self._shown(machine), 200)
            return self._create(name, body)
        if machine is None:
            if method == "DELETE":
                return Reply(204)
            raise refusal(404, "ResourceNotFound", f"virtualMachines/{name}")
        if method == "DELETE":
            self.end(machine)
            return Reply(202, b"", self._begin(self.ending))
        if rest == "retrieveBootDiagnosticsData":
            return self.json({"serialConsoleLogBlobUri": f"{self.url}/console/{name}?sig=secret"})
        return self.json(self._shown(machine))

    def _create(self, name: str, body: dict[str, Any]) -> Reply:
        size = body["properties"]["hardwareProfile"]["vmSize"]
        zone = (body.get("zones") or [""])[0]
        if size not in self.sizes:
            raise refusal(
                400, "InvalidParameter", f"The value {size} provided for the VM size is not valid."
            )
        if len(self.living()) >= min(self.allowed, self.limits.get("virtualMachines", math.inf)):
            raise refusal(
                409,
                "OperationNotAllowed",
                "Operation could not be completed as it results in exceeding approved quota.",
            )
        if self.sold_out or size in self.sold_out_sizes:
            raise refusal(
                409,
                "SkuNotAvailable",
                f"The requested VM size {size} is currently not available in {LOCATION}.",
            )
        machine = self.new_machine(name, body)
        error = (
            ("ZonalAllocationFailed", "We do not have sufficient capacity.")
            if f"{size}/{zone}" in self.sold_out_sizes
            else None
        )
        machine.facts["error"] = error
        return self.json(self._shown(machine), 201, self._begin(self.boot, error=error))

    def _thing(self, method: str, kind: str, name: str, rest: str, body: dict[str, Any]) -> Reply:
        key = (kind, name)
        if method == "PUT":
            if kind == "images" and self.fail_image:
                return self.json({}, 201, self._begin(0.1, error=self.fail_image))
            self.things[key] = {
                **body,
                "id": self._id(kind, name),
                "name": name,
                "properties": {**body["properties"], "provisioningState": "Succeeded"},
            }
            if kind == "disks":
                self.blobs[name] = bytearray(body["properties"]["creationData"]["uploadSizeBytes"])
            return self.json(self.things[key], 201, self._begin(0.05))
        if key not in self.things:
            if method == "DELETE":
                return Reply(204)
            raise refusal(404, "ResourceNotFound", f"{kind}/{name}")
        if method == "DELETE":
            del self.things[key]
            return Reply(202, b"", self._begin(0.05))
        if rest == "beginGetAccess":
            assert body == {"access": "Write", "durationInSeconds": 86400}, body
            return Reply(
                202,
                b"",
                self._begin(
                    0.05, {"accessSAS": f"{self.url}/blob/{name}?sv=2018&sig=secret-{name}"}
                ),
            )
        if rest == "endGetAccess":
            return Reply(202, b"", self._begin(0.05))
        return self.json(self.things[key])

    # -- page blobs

    def _blob(self, method: str, path: str, query: dict[str, str], request: Request) -> Reply:
        name = path.removeprefix("/blob/")
        headers = request.headers
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        wanted = {"x-ms-blob-type": "PageBlob", "x-ms-page-write": "update"}
        good = (
            method == "PUT" and query.get("comp") == "page" and query.get("sig") == f"secret-{name}"
        )
        good = good and wanted.items() <= headers.items() and "authorization" not in headers
        if not good or match is None:
            self.mistakes.append(f"{method} {path} {headers}")
            return Reply(403)
        start, end = int(match[1]), int(match[2]) + 1
        if start % 512 or end % 512 or end - start != len(request.body) or end - start > 4 << 20:
            self.mistakes.append(f"pages {start} to {end}")
            return Reply(416)
        self.blobs[name][start:end] = request.body
        self.pages_written += 1
        return Reply(201)
