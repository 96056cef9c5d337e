"""The API of OpenShift that the drivers use, as an aggregated server of a real Kubernetes: projects
are namespaces.

No OpenShift can be had here. What its manual says of projects, project requests and role bindings
holds: labels of a request are not copied, who asks for a project administers it, a user sees his
own projects only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import pathlib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import wait_for
from tests.support.kubernetes.cluster import Server

REQUESTER = "openshift.io/requester"
PROJECTS, AUTHORIZATION = "project.openshift.io", "authorization.openshift.io"
RBAC = "rbac.authorization.k8s.io"
RESOURCES = {
    PROJECTS: [
        ("projects", "Project", False, ["get", "list", "watch", "delete"]),
        ("projectrequests", "ProjectRequest", False, ["create"]),
    ],
    AUTHORIZATION: [("rolebindings", "RoleBinding", True, ["create"])],
}


def as_project(namespace: dict[str, Any]) -> dict[str, Any]:
    return {**namespace, "apiVersion": f"{PROJECTS}/v1", "kind": "Project"}


class OpenShiftApi:
    """Serves until closed. The certificate of the test's cluster is used for TLS.

    A cluster has one at a time, whichever processes run tests with it.
    """

    def __init__(self, admin: Server, folder: pathlib.Path) -> None:
        self._alone = (folder / "openshift.lock").open("w")
        fcntl.flock(self._alone, fcntl.LOCK_EX)  # the timeout of the test bounds it
        self.admin = admin
        api = self

        class Handler(_Handler):
            owner = api

        self.connections: set[socket.socket] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(folder / "server.crt"), str(folder / "server.key"))
        # Only the API server comes, with the certificate of its proxy: the user it names is right.
        context.load_verify_locations(str(folder / "ca.crt"))
        context.verify_mode = ssl.CERT_REQUIRED
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.closed = threading.Event()
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="openshift-api",
            daemon=True,
        )
        self._thread.start()
        self._register()

    def _register(self) -> None:
        """As part of the cluster's API."""
        port = self._server.server_address[1]
        name = f"openshift-{port}"
        self._name = name
        service = {
            "metadata": {"name": name},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        self.admin.call("POST", "/api/v1/namespaces/default/services", service)
        for group in RESOURCES:
            path = "/apis/apiregistration.k8s.io/v1/apiservices"
            self.admin.status("DELETE", f"{path}/v1.{group}")
            spec = {
                "group": group,
                "version": "v1",
                "groupPriorityMinimum": 100,
                "versionPriority": 10,
                "insecureSkipTLSVerify": True,
                "service": {"name": name, "namespace": "default", "port": port},
            }
            self.admin.call("POST", path, {"metadata": {"name": f"v1.{group}"}, "spec": spec})
            wait_for(
                lambda each=group: self.admin.status("GET", f"/apis/{each}/v1") == 200,
                30,
                f"the API of {group}",
            )
        wait_for(
            lambda: self.admin.status("GET", f"/apis/{PROJECTS}/v1/projects") == 200, 30, "projects"
        )

    def close(self) -> None:
        self.closed.set()
        for group in RESOURCES:
            self.admin.status("DELETE", f"/apis/apiregistration.k8s.io/v1/apiservices/v1.{group}")
        self.admin.status("DELETE", f"/api/v1/namespaces/default/services/{self._name}")
        self._server.shutdown()
        self._server.server_close()
        for each in list(self.connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._alone.close()

    # -- what it does

    def projects(self, user: str) -> list[dict[str, Any]]:
        found = self.admin.call("GET", "/api/v1/namespaces")["items"]
        return [
            as_project(each)
            for each in found
            if (each["metadata"].get("annotations") or {}).get(REQUESTER) == user
        ]

    def request(self, body: dict[str, Any], user: str) -> dict[str, Any]:
        name = body["metadata"]["name"]
        made = self.admin.call(
            "POST",
            "/api/v1/namespaces",
            {"metadata": {"name": name, "annotations": {REQUESTER: user}}},
        )
        self.bind(name, "admin", {"apiGroup": RBAC, "kind": "User", "name": user}, "admin")
        return as_project(made)

    def bind(self, namespace: str, role: str, subject: dict[str, Any], name: str) -> dict[str, Any]:
        body = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [subject],
        }
        found: dict[str, Any] = self.admin.call(
            "POST", f"/apis/{RBAC}/v1/namespaces/{namespace}/rolebindings", body
        )
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: OpenShiftApi

    def setup(self) -> None:
        super().setup()
        self.owner.connections.add(self.connection)

    def finish(self) -> None:
        self.owner.connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_args: Any) -> None:
        pass

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        try:
            self._answer(body)
        except urllib.error.HTTPError as error:
            self._send(error.code, json.loads(error.read()))

    def _answer(self, body: dict[str, Any]) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parts.query)
        words = parts.path.strip("/").split("/")
        user, api = self.headers.get("X-Remote-User", ""), self.owner
        if len(words) == 3 and words[1] in RESOURCES:
            resources = [
                {
                    "name": name,
                    "kind": kind,
                    "namespaced": inside,
                    "singularName": "",
                    "verbs": verbs,
                }
                for name, kind, inside, verbs in RESOURCES[words[1]]
            ]
            version = f"{words[1]}/v1"
            self._send(
                200,
                {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": version,
                    "resources": resources,
                },
            )
        elif self.command == "POST" and words[-1] == "projectrequests":
            self._send(201, api.request(body, user))
        elif self.command == "POST" and words[-1] == "rolebindings":
            self._send(
                201,
                api.bind(
                    words[4], body["roleRef"]["name"], body["subjects"][0], body["metadata"]["name"]
                ),
            )
        elif words[-1] == "projects" and "watch" in query:
            self._watch(user)
        elif words[-1] == "projects":
            version = str(time.time_ns())
            self._send(
                200,
                {
                    "kind": "ProjectList",
                    "metadata": {"resourceVersion": version},
                    "items": api.projects(user),
                },
            )
        elif len(words) == 5 and words[3] == "projects":
            self._one(words[4], user)
        else:
            self._send(
                404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": self.path}
            )

    def _one(self, name: str, user: str) -> None:
        admin = self.owner.admin
        found = admin.get(f"/api/v1/namespaces/{name}")
        # A user has rights in projects that are there; others are hidden from him.
        if found is None or (found["metadata"].get("annotations") or {}).get(REQUESTER) != user:
            message = f'projects.project.openshift.io "{name}" is forbidden'
            self._send(
                403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}
            )
        elif self.command == "DELETE":
            admin.call("DELETE", f"/api/v1/namespaces/{name}")
            self._send(200, {"kind": "Status", "status": "Success"})
        else:
            self._send(200, as_project(found))

    def _watch(self, user: str) -> None:
        """What has changed between two lists; nobody else needs it faster."""
        self.send_response_only(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        known = {each["metadata"]["name"]: each for each in self.owner.projects(user)}
        while not self.owner.closed.wait(0.1):
            now = {each["metadata"]["name"]: each for each in self.owner.projects(user)}
            events = [("DELETED", known[name]) for name in known.keys() - now.keys()]
            events += [
                ("MODIFIED" if name in known else "ADDED", each)
                for name, each in now.items()
                if known.get(name) != each
            ]
            known = now
            try:
                for what, each in events:
                    line = json.dumps({"type": what, "object": each}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()
            except OSError:
                return

    do_GET = do_POST = do_DELETE = _serve
